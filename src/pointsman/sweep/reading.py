"""Prompts out of a JSONL file: questions of one's own, or inference requests as a gateway or a client recorded them.

A line is an object with `messages` (a chat) or `prompt` (a completion), or has such an object under `request`; `answer`
or `answers` beside it says what is right. What belongs to no request (`kind`, say) stays here. A question is asked
greedily and gets `--max-tokens`; a recorded request, one that names a `model`, keeps what it says. Neither is streamed,
and each has one choice: that is what a cascade judges.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["Prompt", "PromptsError", "prompts", "read_prompts"]

_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"
_NOT_ASKED = frozenset(
    {"model", "stream", "stream_options", "n", "best_of", "echo", "logprobs", "top_logprobs"}
)
"""Members of a request that a sweep sets itself or does without."""
_NOT_OF_A_REQUEST = frozenset({"answer", "answers", "kind", "id"})
_PLACE_MAX = 200

_Object = dict[str, Any]


class PromptsError(ValueError):
    """The file cannot be used; the message says where and why, in one line."""


class Prompt(msgspec.Struct, frozen=True):
    """What both models are asked: a path, the body but for the model, and the answers that are right, if known."""

    line: int
    path: str
    body: _Object
    answers: tuple[str, ...] = ()


def read_prompts(path: Path, *, max_tokens: int, limit: int | None = None) -> list[Prompt]:
    """Return the prompts of a file, the first `limit` of them.

    Raises:
        PromptsError: it cannot be read, a line is no prompt, or there is none.
    """
    try:
        with path.open("rb") as file:
            found = list(prompts(file, max_tokens=max_tokens, limit=limit))
    except OSError as error:
        raise PromptsError(f"cannot read {path}: {error.strerror}") from None
    except PromptsError as error:
        raise PromptsError(f"{path}: {error}") from None
    if not found:
        raise PromptsError(f"{path} has no prompts")
    return found


def prompts(
    lines: Iterable[bytes], *, max_tokens: int, limit: int | None = None
) -> Iterator[Prompt]:
    """Yield the prompts of JSON lines; empty lines are skipped.

    Raises:
        PromptsError: a line is no prompt.

    >>> [prompt] = prompts([b'{"prompt": "2 + 2 =", "answer": 4}'], max_tokens=8)
    >>> prompt.path, prompt.body, prompt.answers
    ('/v1/completions', {'temperature': 0, 'max_tokens': 8, 'prompt': '2 + 2 ='}, ('4',))
    """
    count = 0
    for number, line in enumerate(lines, 1):
        if limit is not None and count >= limit:
            return
        if line.strip():
            count += 1
            try:
                yield _prompt(number, msgspec.json.decode(line, type=_Object), max_tokens)
            except (msgspec.DecodeError, RecursionError) as error:
                raise PromptsError(f"line {number}: {error}"[:_PLACE_MAX]) from None
            except PromptsError as error:
                raise PromptsError(f"line {number}: {error}") from None


def _prompt(number: int, line: _Object, max_tokens: int) -> Prompt:
    request = line.get("request", line)
    if not isinstance(request, dict):
        raise PromptsError("request is not an object")
    if ("messages" in request) == ("prompt" in request):
        raise PromptsError("a prompt has either messages or prompt")
    recorded = "request" in line or "model" in request
    settings: _Object = {} if recorded else {"temperature": 0, "max_tokens": max_tokens}
    body = {name: value for name, value in request.items() if name not in _NOT_ASKED}
    if request is line:
        body = {name: value for name, value in body.items() if name not in _NOT_OF_A_REQUEST}
    path = _CHAT if "messages" in request else _TEXT
    if path == _TEXT and _several(body["prompt"]):
        raise PromptsError("a list of prompts is several requests: give each a line")
    return Prompt(number, path, settings | body, _answers(line))


def _several(prompt: object) -> bool:
    """Tell whether a completion's prompt is a list of prompts; a list of token ids is one prompt."""
    return isinstance(prompt, list) and not all(isinstance(each, int) for each in prompt)


def _answers(line: _Object) -> tuple[str, ...]:
    given = line.get("answers", line.get("answer"))
    listed = [] if given is None else given if isinstance(given, list) else [given]
    if not all(type(each) in (str, int, float) for each in listed):
        raise PromptsError("answers are texts or numbers")
    return tuple(str(each) for each in listed)
