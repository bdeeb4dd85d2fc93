"""Tokenizers of the gateway's own: a `tokenizer.json` and a chat template, and the threads in which they work.

A prompt of megabytes takes seconds, in which the loop must go on. So a thread encodes, and by the one call of the
library that lets go of the interpreter meanwhile. What cannot be encoded here, and what takes too long, is Lost: the
story asks a worker then.

The library and Jinja are an extra, imported where a tokenizer is made. Templates come with models, which are data of
strangers: they run in a sandbox, and reach neither attributes nor the disk.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NoReturn

from pointsman.flow.effects import Encode, Encoded, Lost, PromptText, Why
from pointsman.net.clock import Deadlines

if TYPE_CHECKING:
    from jinja2 import Template

__all__ = ["LocalTokenizer", "TemplateRefused", "TokenizerUnusable", "Tokenizing"]

THREADS = 2
"""Prompts that are encoded at a time; the others wait. It is work for cores, and the loop needs one of them."""

SHORT = 1024
"""Characters of a prompt that is encoded at once, in less time than a thread needs to be woken and heard."""


class TokenizerUnusable(Exception):
    """A file of which no tokenizer can be made; `part` says which: `file` or `chat_template`."""

    def __init__(self, part: str, why: str) -> None:
        super().__init__(why)
        self.part = part


class TemplateRefused(ValueError):
    """The template does not take these messages, such as two user turns in a row."""


class LocalTokenizer:
    """What tokens a prompt has, by a `tokenizer.json` and, for chats, a template.

    The marks of the model (`<|…|>`) count as such in a text, and what the file puts before and after a prompt is put
    there, as engines do. That the file may cut texts short or fill them up is for training, and is left out.
    Raises TokenizerUnusable.
    """

    def __init__(
        self, file: bytes, template: str | None = None, bos_token: str = "", eos_token: str = ""
    ) -> None:
        self.source = (file, template, bos_token, eos_token)
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise TokenizerUnusable("file", _extra(error)) from None
        try:
            self._tokenizer = Tokenizer.from_buffer(file)
        except ValueError as error:
            raise TokenizerUnusable("file", str(error)) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template = None if template is None else _template(template)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    @property
    def chats(self) -> bool:
        """Whether there is a template."""
        return self._template is not None

    def encode(self, prompt: PromptText) -> list[int]:
        """Return the token ids of a text, or of messages up to where the assistant is to speak.

        Raises TemplateRefused. Any thread may call it.
        """
        text = prompt if isinstance(prompt, str) else self._render(prompt)
        # `encode`, for a single text, would keep the interpreter to itself.
        ids: list[int] = self._tokenizer.encode_batch_fast([text])[0].ids
        return ids

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        from jinja2 import TemplateError

        assert self._template is not None
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, **self._tokens
            )
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise TemplateRefused(str(error)) from error


class Tokenizing:
    """The threads in which prompts are encoded. `fault` hears of what a tokenizer fails on that it should not."""

    def __init__(
        self, deadlines: Deadlines, fault: Callable[[], None], *, threads: int = THREADS
    ) -> None:
        self._deadlines = deadlines
        self._fault = fault
        self._threads = ThreadPoolExecutor(threads, "tokenizing")

    def encode(
        self, command: Encode, deadline: float, done: Callable[[Encoded | Lost], None]
    ) -> "_Encoding":
        """Encode a prompt for a request that must be over at `deadline`; `done` hears the outcome once."""
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._threads, command.tokenizer.encode, command.prompt)
        timeout_s = max(min(command.timeout_s, deadline - self._deadlines.now()), 0.0)
        return _Encoding(future, timeout_s, done, self._failed)

    def _failed(self, error: BaseException) -> Lost:
        if not isinstance(error, TemplateRefused):
            self._fault()
        # Whatever it says: it may quote the prompt.
        return Lost(Why.TOKENIZE, f"the tokenizer failed: {type(error).__name__}")

    def at_once(self, command: Encode) -> Encoded | Lost | None:
        """Encode a short prompt, for which a thread would only be a detour; None for a long one."""
        prompt = command.prompt
        size = len(prompt) if isinstance(prompt, str) else sum(map(_size, prompt))
        if size > SHORT:
            return None
        try:
            return Encoded(command.tokenizer.encode(prompt))
        except Exception as error:
            return self._failed(error)

    def close(self) -> None:
        """Take no more; what is under way ends by itself."""
        self._threads.shutdown(wait=False)


class _Encoding:
    """A prompt on its way through a thread."""

    def __init__(
        self,
        future: "asyncio.Future[list[int]]",
        timeout_s: float,
        done: Callable[[Encoded | Lost], None],
        failed: Callable[[BaseException], Lost],
    ) -> None:
        self._future = future
        self._done = done
        self._failed = failed
        future.add_done_callback(self._over)
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._late)

    def cancel(self) -> None:
        """Give it up. A thread that is at work cannot be stopped; one that has not begun never will."""
        self._timer.cancel()
        self._future.remove_done_callback(self._over)
        self._future.cancel()

    def _late(self) -> None:
        self.cancel()
        self._done(Lost(Why.TIMED_OUT, "the tokenizer took too long"))

    def _over(self, future: "asyncio.Future[list[int]]") -> None:
        self._timer.cancel()
        error = future.exception()
        self._done(Encoded(future.result()) if error is None else self._failed(error))


def _size(message: Mapping[str, str]) -> int:
    return len(message["content"])


def _template(source: str) -> "Template":
    try:
        from jinja2 import TemplateSyntaxError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise TokenizerUnusable("chat_template", _extra(error)) from None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise TokenizerUnusable("chat_template", f"line {error.lineno}: {error.message}") from None


def _refuse(message: str) -> NoReturn:
    raise TemplateRefused(message)


def _extra(error: ImportError) -> str:
    return f"{error.name} is missing: install the extra, pointsman[tokenizers]"
