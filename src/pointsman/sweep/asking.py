"""Both models asked over HTTP: a bounded number of questions at a time, with logprobs, and what failed told apart.

An answer is what a sweep needs of it: text, token logprobs with their margins, tokens and seconds. Overload and lost
connections are tried again; a question that stays without an answer is a `Failure`, not an error, but a model that
refuses everybody (401, 403, 404) ends the sweep. What this does not do: judge, or follow redirects with a key.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

import httpx
import msgspec

from pointsman.domain.cascade import tokens_of
from pointsman.domain.scores import Tokens
from pointsman.sweep.reading import Prompt
from pointsman.wire.body import with_fields
from pointsman.wire.logprobs import forced, text_of, usage_of

__all__ = ["Answer", "Asker", "Failure", "SweepError", "ask_all", "client_for"]

TRIES = 4
"""How often a question is asked in all."""
FIRST_PAUSE_S = 0.5
PAUSE_MAX_S = 30.0
BUSY = frozenset({429, 502, 503, 504})
HOPELESS = frozenset({401, 403, 404})
"""Answers that every other question would get, too."""
MESSAGE_MAX = 300


class SweepError(Exception):
    """Why the sweep cannot go on, in one line for people."""


class Answer(msgspec.Struct, frozen=True):
    """What a model answered. `logprobs` and `margins` are one per token, None where unknown; `seconds` of wall time."""

    text: str
    logprobs: tuple[float | None, ...]
    margins: tuple[float | None, ...]
    prompt_tokens: int
    completion_tokens: int
    seconds: float

    def tokens(self) -> Tokens:
        """Return what the scores of a cascade are computed from."""
        return Tokens(_unknown_as_nan(self.logprobs), _unknown_as_nan(self.margins))


class Failure(msgspec.Struct, frozen=True):
    """Why a question has no answer."""

    reason: str


class Asker:
    """One model behind one client. `now` and `sleep` are clock and pause in seconds."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        model: str,
        *,
        with_logprobs: bool,
        timeout_s: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.model = model
        self._client = client
        self._with_logprobs = with_logprobs
        self._timeout_s = timeout_s
        self._now = now
        self._sleep = sleep

    def body(self, prompt: Prompt) -> bytes:
        """Return the request's body: the prompt's, for this model."""
        plain = msgspec.json.encode({"model": self.model} | prompt.body)
        if not self._with_logprobs:
            return plain
        return with_fields(plain, forced(prompt.path, plain, margins=True))

    async def ask(self, prompt: Prompt) -> Answer | Failure:
        """Ask once, and again while the model is busy or the connection is lost.

        Raises:
            SweepError: the model refuses everybody.
        """
        body, pause = self.body(prompt), FIRST_PAUSE_S
        for left in reversed(range(TRIES)):
            began = self._now()
            try:
                async with asyncio.timeout(self._timeout_s):
                    response = await self._client.post(prompt.path, content=body)
            except (httpx.TransportError, TimeoutError) as error:
                failure = Failure(f"no answer: {str(error) or type(error).__name__}"[:MESSAGE_MAX])
                asked_for = 0.0
            else:
                if response.status_code == 200:
                    return self._read(response.content, self._now() - began)
                failure = Failure(_refusal(response))
                if response.status_code in HOPELESS:
                    raise SweepError(f"{self.model}: {failure.reason}")
                if response.status_code not in BUSY:
                    return failure
                asked_for = _retry_after(response)
            if left:
                await self._sleep(min(max(pause, asked_for), PAUSE_MAX_S))
                pause *= 2
        return failure

    def _read(self, content: bytes, seconds: float) -> Answer | Failure:
        text, usage = text_of(content), usage_of(content)
        if text is None and usage is None:
            return Failure("the answer is not a completion")
        tokens = Tokens(())
        # A cascade cannot judge a tool call, nor can a sweep: it is never kept.
        if self._with_logprobs and text is not None:
            with suppress(ValueError):
                tokens = tokens_of(content)
        prompt_tokens, completion_tokens = usage or (0, 0)
        return Answer(
            text=(text or "").strip(),
            logprobs=_nan_as_unknown(tokens.logprobs),
            margins=_nan_as_unknown(tokens.margins),
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            seconds=round(seconds, 6),
        )


def client_for(url: str, key: str, *, concurrency: int) -> httpx.AsyncClient:
    """Return a client of an OpenAI-compatible server at `url`, with or without the `/v1` at its end.

    Raises:
        SweepError: it is no URL that can be asked.
    """
    try:
        base = httpx.URL(url.rstrip("/").removesuffix("/v1"))
    except (httpx.InvalidURL, UnicodeError) as error:
        raise SweepError(f"{url!r}: {error}") from None
    if base.scheme not in ("http", "https") or not base.host:
        raise SweepError(f"{url!r} is not http://HOST or https://HOST")
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    # The limit of time is one for the whole question, and the asker's.
    return httpx.AsyncClient(
        base_url=base, headers=headers, limits=limits, timeout=None, trust_env=False
    )


async def ask_all(
    asker: Asker,
    prompts: Iterable[Prompt],
    *,
    concurrency: int,
    answered: Callable[[Prompt, Answer | Failure], None],
) -> None:
    """Ask every prompt, `concurrency` (at least 1) at a time; `answered` is called once for each, as they come.

    Raises:
        SweepError: the model refuses everybody; what was still asked is given up.
    """
    waiting = iter(prompts)

    async def work() -> None:
        for prompt in waiting:
            answered(prompt, await asker.ask(prompt))

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(concurrency):
                tasks.create_task(work())
    except* SweepError as group:
        raise group.exceptions[0] from None


def _refusal(response: httpx.Response) -> str:
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = response.reason_phrase
    line = "".join(each if each.isprintable() else " " for each in message)
    return f"status {response.status_code}: {line[:MESSAGE_MAX]}"


def _retry_after(response: httpx.Response) -> float:
    given = response.headers.get("retry-after", "")
    return float(given) if given.isascii() and given.isdecimal() else 0.0


def _unknown_as_nan(values: Iterable[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _nan_as_unknown(values: Iterable[float]) -> tuple[float | None, ...]:
    return tuple(None if math.isnan(value) else value for value in values)
