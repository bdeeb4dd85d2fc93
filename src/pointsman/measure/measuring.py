"""What is asked of an engine, in which order, and what its answers say: samples for `pointsman.simulate.fitting`.

Prompts alone, of several lengths; answers together, more and more of them, until they queue; answers behind long
prompts; an answer beside a prompt, which shows how that is cut into chunks; and one prompt three times, which shows
what the engine keeps of it. Everything is asked several times, and medians are taken. The engine should have nothing
else to do meanwhile; nothing here can tell.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from statistics import fmean, median
from typing import Literal, NamedTuple, TypeVar

from pointsman.measure.asking import Answered, Engine, MeasureError
from pointsman.measure.prompts import Prompts
from pointsman.simulate.fitting import DecodeSample, PromptSample, chunk_of, most_at_once

__all__ = ["Measured", "Measuring", "Settings", "doubling", "lengths", "pace"]

SHORT = 16
"""Tokens of a prompt that is not what is looked at."""
SHORTEST = 32
"""Tokens of the shortest prompt whose time is looked at."""
LENGTHS = 6
ANSWER = 48
GAPS_MIN = 8
"""Of fewer gaps between tokens nothing is said."""
SLOW = 2.0
"""A gap so many times as long as that of an answer alone has a chunk of a prompt in it."""
QUICK = 0.5
"""A prompt that takes less than this part of its time had its beginning cached."""

Result = TypeVar("Result")


class Settings(NamedTuple):
    """The longest prompt in tokens, how often each thing is asked, and how many answers at most at a time."""

    longest: int = 2048
    repeats: int = 5
    concurrency: int = 64


class Measured(NamedTuple):
    """What was seen: `sequences` is how many run at a time, `chunk` what a step computes of prompts, None if unseen."""

    prompts: list[PromptSample]
    decodes: list[DecodeSample]
    sequences: int | None
    chunk: int | None
    prefix_cache: Literal["paged", "slots", "none"]


class Measuring:
    """The measurements of one engine. `say` is told what was found, a line at a time."""

    def __init__(
        self, engine: Engine, prompts: Prompts, settings: Settings, say: Callable[[str], None]
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._settings = settings
        self._say = say

    async def run(self, slots: int | None = None) -> Measured:
        """Measure everything. `slots` is how many sequences the engine says that it runs, where it says so.

        Raises:
            MeasureError: as `Engine.ask` does, and where the answers are of no use.
        """
        longest = self._settings.longest
        await self._warm_up()
        prompts = [await self._prompt(tokens) for tokens in lengths(longest)]
        decodes, sequences = await self._ramp(slots)
        for count in (1, 2):
            if count <= (sequences or count):
                decodes += await self._together(count, longest)
        alone = decodes[0].seconds
        chunk = await self._chunk(longest, alone)
        kept = await self._prefix_cache(max(longest // 2, SHORTEST))
        return Measured(prompts, decodes, sequences, chunk, kept)

    async def _warm_up(self) -> None:
        """Ask twice for nothing: the first request may start things, and both tell how long words are."""
        for _ in range(2):
            text = self._prompts.text(2 * SHORTEST)
            answered = await self._engine.ask(text, SHORT)
            self._prompts.learn(text, answered.prompt_tokens)

    async def _prompt(self, tokens: int) -> PromptSample:
        """Return the median of prompts of about so many tokens, alone."""
        seen = []
        for _ in range(self._settings.repeats):
            answered = await self._engine.ask(self._prompts.text(tokens), 1)
            if answered.cached_tokens > 0:
                raise MeasureError("a prompt that was never asked before was found in a cache")
            seen.append(answered)
        sample = PromptSample(
            round(median([each.prompt_tokens for each in seen])),
            median([each.first_s for each in seen]),
        )
        self._say(f"a prompt of {sample.tokens} tokens: {sample.seconds:.3g} s to the first token")
        return sample

    async def _ramp(self, slots: int | None) -> tuple[list[DecodeSample], int | None]:
        """Return samples of more and more answers together, and how many there were at most where they queued."""
        samples: list[DecodeSample] = []
        for count in doubling(min(self._settings.concurrency, slots or self._settings.concurrency)):
            if slots is None and count > 1:
                at_once = await self._at_once(count, ANSWER)
                if at_once < count:
                    # Answers that are over before the last one begins look like a queue: longer ones tell.
                    if await self._at_once(count, 2 * ANSWER) > at_once:
                        break
                    self._say(f"of {count} answers {at_once} ran at a time")
                    if 2 * at_once > count:
                        samples += await self._together(at_once, SHORT)
                    slots = at_once
                    break
            samples += await self._together(count, SHORT)
        if not samples or samples[0].sequences > 1:
            raise MeasureError("answers end before it can be seen how fast they are")
        return samples, slots

    async def _at_once(self, count: int, tokens: int) -> int:
        answers = await self._ask(count, SHORT, tokens)
        return most_at_once((each.times[0], each.times[-1]) for each in answers)

    async def _together(self, count: int, prompt_tokens: int) -> list[DecodeSample]:
        """Return one sample of so many answers at a time, the median of several; none where they are too short."""
        seen = []
        for _ in range(self._settings.repeats):
            sample = pace(await self._ask(count, prompt_tokens, ANSWER))
            if sample is not None:
                seen.append(sample)
        if not seen:
            return []
        sample = DecodeSample(
            count, median([each.context for each in seen]), median([each.seconds for each in seen])
        )
        self._say(
            f"{count} answers, {sample.context / count:.0f} tokens each: {sample.seconds * 1000:.3g} ms a token"
        )
        return [sample]

    async def _ask(self, count: int, prompt_tokens: int, tokens: int) -> list[Answered]:
        return await _all(
            [self._engine.ask(self._prompts.text(prompt_tokens), tokens) for _ in range(count)]
        )

    async def _chunk(self, longest: int, alone_s: float) -> int | None:
        """Return how many tokens of a prompt a step computes, by the steps of an answer beside it."""
        begun = asyncio.Event()

        async def beside() -> Answered:
            await begun.wait()
            return await self._engine.ask(self._prompts.text(longest), 1)

        answer = self._engine.ask(self._prompts.text(SHORT), 3 * ANSWER, begun.set)
        beneath, prompt = await _all([answer, beside()])
        slow = [
            end
            for start, end in zip(beneath.times, beneath.times[1:], strict=False)
            if prompt.asked < end <= prompt.times[0] and end - start > SLOW * alone_s
        ]
        self._say(
            f"a prompt of {prompt.prompt_tokens} tokens beside an answer: {prompt.first_s:.3g} s to the first token, "
            f"in {len(slow)} long steps"
        )
        return chunk_of(prompt.prompt_tokens, len(slow))

    async def _prefix_cache(self, tokens: int) -> Literal["paged", "slots", "none"]:
        """Ask for one prompt while it is in use, and again when it is not."""
        text = self._prompts.text(tokens)
        begun = asyncio.Event()

        async def beside() -> Answered:
            await begun.wait()
            return await self._engine.ask(text, 1)

        first, second = await _all([self._engine.ask(text, 2 * ANSWER, begun.set), beside()])
        third = await self._engine.ask(text, 1)
        kept: Literal["paged", "slots", "none"] = "none"
        together = second.times[0] < first.times[-1]
        if together and _reused(first, second):
            kept = "paged"
        elif _reused(first, third):
            kept = "slots"
        self._say(f"prefix cache: {kept}")
        return kept


def lengths(longest: int) -> list[int]:
    """Return the lengths of prompts to ask for: the longest, its half, and so on; the shortest first.

    >>> lengths(1000)
    [62, 125, 250, 500, 1000]
    """
    halves = [longest >> number for number in range(LENGTHS)]
    return sorted([each for each in halves if each >= SHORTEST])


def doubling(most: int) -> list[int]:
    """Return 1, 2, 4 and so on, and `most` (at least 1) at the end.

    >>> doubling(6), doubling(8)
    ([1, 2, 4, 6], [1, 2, 4, 8])
    """
    return [*(1 << number for number in range((most - 1).bit_length())), most]


def pace(answers: Sequence[Answered]) -> DecodeSample | None:
    """Return how fast answers were while all of them were there; None where that was too short to see.

    >>> times = tuple(float(at) for at in range(10))
    >>> pace([Answered(0.0, times, 100, 10, -1)])
    DecodeSample(sequences=1, context=105.0, seconds=1.0)
    """
    start = max([each.times[0] for each in answers])
    end = min([each.times[-1] for each in answers])
    seconds: list[float] = []
    context = 0.0
    for each in answers:
        within = [at for at in each.times if start <= at <= end]
        if len(within) <= GAPS_MIN:
            return None
        seconds.append((within[-1] - within[0]) / (len(within) - 1))
        before = sum([at < start for at in each.times])
        context += each.prompt_tokens + before + len(within) / 2
    return DecodeSample(len(answers), context, fmean(seconds))


def _reused(first: Answered, again: Answered) -> bool:
    if again.cached_tokens >= 0:
        return again.cached_tokens > 0
    return again.first_s < QUICK * first.first_s


async def _all(asked: Sequence[Coroutine[object, object, Result]]) -> list[Result]:
    """Return what all give, in order; the first that fails ends the others."""
    try:
        async with asyncio.TaskGroup() as tasks:
            made = [tasks.create_task(each) for each in asked]
    except* MeasureError as group:
        raise group.exceptions[0] from None
    return [each.result() for each in made]
