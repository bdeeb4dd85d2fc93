"""One request to an engine, with the moment at which each token of its answer came.

Completions are streamed, and the engine counts the tokens (`usage`); a text is never counted here. Whoever asks decides
what is asked; an engine that cannot be measured so (no stream, no usage, an error) ends it with `MeasureError`.
"""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

import httpx
import msgspec
from msgspec import Struct

from pointsman.dialect.engines import DIALECTS, Dialect, Probed, Reading, detect
from pointsman.dialect.reading import MODELS
from pointsman.wire.logprobs import usage_of
from pointsman.wire.sse import DONE, EventCut, data_of

__all__ = ["Answered", "Engine", "MeasureError", "look"]

COMPLETIONS = "/v1/completions"
SHOWN = 200
"""Characters of a refusal that are shown."""

UNDERSTAND_IGNORE_EOS = ("tl", "vllm", "sglang", "llamacpp")
"""Dialects of engines that go on to `max_tokens` if they are asked to, or ignore that they are."""


class MeasureError(Exception):
    """Why the engine cannot be measured, in one line for people."""


class Answered(NamedTuple):
    """An answer: `asked` and each of the tokens' `times` by one clock in seconds, and what the engine counted.

    `cached_tokens` is -1 where it does not say.
    """

    asked: float
    times: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int

    @property
    def first_s(self) -> float:
        """Seconds until the first token."""
        return self.times[0] - self.asked


class _Choice(Struct):
    text: str | None = None
    finish_reason: str | None = None


class _Event(Struct):
    choices: list[_Choice] = []
    error: object = None


decode_event = msgspec.json.Decoder(_Event).decode


class Engine:
    """One model of an engine, behind one client. `now` is a clock in seconds."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        model: str,
        dialect: Dialect,
        *,
        timeout_s: float,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.dialect = dialect
        self.now = now
        self._client = client
        self._timeout_s = timeout_s
        self._more = {"ignore_eos": True} if dialect.name in UNDERSTAND_IGNORE_EOS else {}

    async def ask(
        self, prompt: str, tokens: int, began: Callable[[], None] | None = None
    ) -> Answered:
        """Ask for so many tokens; `began` is called at the first one.

        Raises:
            MeasureError: it does not answer, or not in a way that can be measured.
        """
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._more,
        }
        asked = self.now()
        times: list[float] = []
        usage: tuple[int, int] | None = None
        cached = -1
        cut = EventCut()
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._client.stream("POST", COMPLETIONS, json=body) as response,
            ):
                if response.status_code != 200:
                    said = (await response.aread()).decode(errors="replace")
                    line = "".join(each for each in said if each.isprintable())
                    raise MeasureError(f"status {response.status_code}: {line[:SHOWN]}")
                async for piece in response.aiter_bytes():
                    at = self.now()
                    for event in cut.feed(piece):
                        data = data_of(event)
                        if data is None or data == DONE:
                            continue
                        if _is_token(data):
                            times.append(at)
                            if began is not None and len(times) == 1:
                                began()
                        usage = usage_of(data) or usage
                        cached = max(cached, self.dialect.cached_tokens(data))
        except TimeoutError:
            raise MeasureError(f"no whole answer within {self._timeout_s:g} s") from None
        except httpx.TransportError as error:
            raise MeasureError(f"no answer: {str(error) or type(error).__name__}") from None
        if not times:
            raise MeasureError("a stream without a token")
        if usage is None:
            raise MeasureError(
                "a stream without usage: the engine must tell how many tokens it has"
            )
        return Answered(asked, tuple(times), *usage, cached)


def _is_token(data: bytes) -> bool:
    """Tell whether an event brings a token: the one that tells why the answer ends may bring none."""
    try:
        event = decode_event(data)
    except ValueError:
        raise MeasureError("a stream with an event that is no completion") from None
    if event.error is not None:
        raise MeasureError("the stream failed in the middle")
    return any(bool(choice.text) or choice.finish_reason is None for choice in event.choices)


async def look(client: httpx.AsyncClient) -> tuple[Dialect, Reading]:
    """Return the dialect of the engine, and what it says of itself.

    Raises:
        MeasureError: it cannot be reached, or does not say which models it serves.
    """
    models = await _probe(client, MODELS)
    dialect = DIALECTS[detect(models)]
    if not models.good:
        raise MeasureError(f"{MODELS}: {models.fault}")
    answers = {MODELS: models}
    for probe in dialect.probes:
        if probe.path not in answers:
            answers[probe.path] = await _probe(client, probe.path)
    return dialect, dialect.read(answers)


async def _probe(client: httpx.AsyncClient, path: str) -> Probed:
    try:
        response = await client.get(path, timeout=10.0)
    except httpx.TransportError as error:
        return Probed(0, error=str(error) or type(error).__name__)
    return Probed(response.status_code, response.content)
