"""An engine whose numbers are known, on a clock that does not run by itself."""

import asyncio
from collections.abc import Callable

import pytest

from pointsman.dialect.engines import DIALECTS
from pointsman.measure.asking import Answered
from pointsman.simulate.profile import EngineProfile


class Sequence:
    def __init__(self, words: list[str], tokens: int, began: Callable[[], None] | None) -> None:
        self.words = words
        self.tokens = tokens
        self.began = began
        self.left = len(words)
        self.cached = 0
        self.times: list[float] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Steps:
    """An engine by its profile, one step after the other: it takes one whenever everybody waits for it.

    It tells of cached tokens where it `tells`, and claims that it found some in every prompt where it `claims` them; an
    answer has `most` tokens.
    """

    model = "m"
    dialect = DIALECTS["openai"]

    def __init__(
        self,
        profile: EngineProfile,
        *,
        tells: bool = True,
        most: int = 10**9,
        claims: int = 0,
    ) -> None:
        self.profile = profile
        self.at = 0.0
        self.most = most
        self.claims = claims
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.kept: list[list[str]] = []
        self.tells = tells
        self.texts: list[str] = []

    def now(self) -> float:
        return self.at

    async def ask(
        self, prompt: str, tokens: int, began: Callable[[], None] | None = None
    ) -> Answered:
        self.texts.append(prompt)
        asked = self.at
        sequence = Sequence(prompt.split(), min(tokens, self.most), began)
        self.waiting.append(sequence)
        while not sequence.done.done():
            # Whoever asks later in this moment does so before the next step.
            for _ in range(10):
                await asyncio.sleep(0)
            if not sequence.done.done() and (self.running or self.waiting)[0] is sequence:
                self.step()
        return Answered(
            asked,
            tuple(sequence.times),
            len(sequence.words),
            len(sequence.times),
            sequence.cached if self.tells else -1,
        )

    def start(self, sequence: Sequence) -> None:
        self.running.append(sequence)
        busy = [each.words for each in self.running[:-1]]
        mode = self.profile.prefix_cache
        known = self.kept + (busy if mode == "paged" else [])
        if mode != "none" and sequence.words in known:
            sequence.cached = len(sequence.words) - 1
            sequence.left = 1
        sequence.cached = sequence.cached or self.claims

    def step(self) -> None:
        profile = self.profile
        decoding = [each for each in self.running if not each.left]
        seconds, budget, read = 0.0, profile.chunk_tokens, 0.0
        while self.waiting and len(self.running) < profile.sequences_max:
            self.start(self.waiting.pop(0))
            seconds += profile.start_s
        done = []
        for each in self.running:
            tokens = min(each.left, budget)
            if tokens:
                before = len(each.words) - each.left
                read += tokens * (before + tokens / 2)
                budget -= tokens
                each.left -= tokens
                if not each.left:
                    done.append(each)
        computed = profile.chunk_tokens - budget
        seconds += max(
            profile.decode_base_s,
            computed / profile.prefill_tokens_per_s + profile.prefill_context_s * read,
        )
        context = sum(len(each.words) + len(each.times) for each in decoding)
        seconds += profile.decode_per_sequence_s * len(decoding)
        seconds += profile.decode_context_s * context
        self.at += seconds
        for each in [*decoding, *done]:
            each.times.append(self.at)
            if len(each.times) == 1 and each.began is not None:
                each.began()
            if len(each.times) == each.tokens:
                self.running.remove(each)
                self.kept.append(each.words)
                each.done.set_result(None)


@pytest.fixture
def steps() -> type[Steps]:
    """Return the class, of which a test makes engines."""
    return Steps
