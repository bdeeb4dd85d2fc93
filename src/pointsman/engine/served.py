"""A model under its public name: what turns messages and texts into prompts that its scheduler can run."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

from pointsman.engine import scheduler as sched
from pointsman.engine.bodies import Message
from pointsman.engine.chat import CHATML, ChatTemplate, TemplateRefused
from pointsman.engine.refusals import EngineError, bad
from pointsman.engine.resume import Handles

__all__ = ["Language", "Served", "text_of"]


class Language(sched.Vocabulary, Protocol):
    """What the surface must know of a model: `pointsman.engine.llama.Model`, or a fake of it."""

    n_vocab: int
    bos: int
    eos: int
    chat_template: str | None

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """The token ids of `text`."""
        ...

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of a token; those of control tokens only when `special`."""
        ...


class Served:
    """A model under its public name, with the scheduler that runs it, and what was handed over to a decode worker."""

    def __init__(
        self,
        name: str,
        model: Language,
        scheduler: sched.Scheduler,
        handles: Handles | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.scheduler = scheduler
        self.handles = handles
        self.created = int(time.time())
        self._template = ChatTemplate(
            model.chat_template or CHATML,
            bos_token=text_of(model.piece(model.bos, special=True)) if model.bos >= 0 else "",
            eos_token=text_of(model.piece(model.eos, special=True)) if model.eos >= 0 else "",
        )

    @property
    def load(self) -> sched.Load:
        """The figures of this moment; blocks that handles hold are not free."""
        load = self.scheduler.load
        held = self.handles.pool.held_blocks if self.handles else 0
        return load._replace(kv_free_blocks=max(load.kv_free_blocks - held, 0))

    def require(self, model: str | None) -> None:
        """Raise 404 for a model that is not this one."""
        if model is not None and model != self.name:
            raise EngineError(
                404,
                f"the model {model!r} does not exist; this worker serves {self.name!r}",
                param="model",
                code="model_not_found",
            )

    def chat_tokens(self, messages: Sequence[Message]) -> list[int]:
        """The prompt of a chat."""
        plain = []
        for i, message in enumerate(messages):
            content = message.content
            if isinstance(content, list):
                for j, part in enumerate(content):
                    if part.type != "text" or part.text is None:
                        raise bad(
                            f"the model reads text, not {part.type}", f"messages[{i}].content[{j}]"
                        )
                content = "".join(part.text or "" for part in content)
            role = "system" if message.role == "developer" else message.role
            plain.append({"role": role, "content": content or ""})
        try:
            text = self._template.render(plain)
        except TemplateRefused as error:
            raise bad(f"the chat template refuses these messages: {error}", "messages") from None
        return self.model.tokenize(text, add_special=True, parse_special=True)

    def text_tokens(self, prompt: str | list[Any]) -> list[int]:
        """The prompt of a plain completion: text, token ids, or a list of just one of them."""
        if isinstance(prompt, str):
            return self.model.tokenize(prompt, add_special=True, parse_special=True)
        if prompt and isinstance(prompt[0], str | list):
            if len(prompt) > 1:
                raise bad("one prompt per request is what this engine takes", "prompt")
            prompt = prompt[0]
            if isinstance(prompt, str):
                return self.text_tokens(prompt)
        for i, token in enumerate(prompt):
            if type(token) is not int or not 0 <= token < self.model.n_vocab:
                raise bad(f"not a token id of 0 to {self.model.n_vocab - 1}", f"prompt[{i}]")
        return prompt

    def room(self, prompt: Sequence[int], param: str) -> int:
        """How many tokens the context has left after `prompt`."""
        if not prompt:
            raise bad("the prompt is empty", param)
        room = self.scheduler.context - len(prompt)
        if room < 1:
            raise bad(
                f"the prompt has {len(prompt)} tokens; with an answer it must fit into "
                f"{self.scheduler.context}",
                param,
                "context_length_exceeded",
            )
        return room


def text_of(piece: bytes) -> str:
    """The text of a token, alone: half a character becomes U+FFFD."""
    return piece.decode("utf-8", "replace")
