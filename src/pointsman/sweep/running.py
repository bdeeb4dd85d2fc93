"""Both models asked the same prompts at the same time, with a bar for each: what is kept already is not asked again."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pointsman.sweep.asking import Answer, Asker, Failure, SweepError, ask_all, client_for
from pointsman.sweep.kept import Kept
from pointsman.sweep.reading import Prompt

__all__ = ["Answers", "Model", "Settings", "ask_both"]


class Model(msgspec.Struct, frozen=True):
    """A model id, the base URL and the API key ("" for none) of its server, and whether its logprobs are wanted."""

    name: str
    url: str
    key: str
    with_logprobs: bool


class Settings(msgspec.Struct, frozen=True):
    """How to ask: questions at a time per model, and seconds per question."""

    concurrency: int
    timeout_s: float


class Answers(msgspec.Struct):
    """One model's answers by the line of the prompt; `failures` counts reasons, `reused` answers that were kept."""

    found: dict[int, Answer]
    failures: Counter[str]
    reused: int


def ask_both(
    prompts: Sequence[Prompt],
    models: tuple[Model, Model],
    settings: Settings,
    *,
    kept: Kept,
    console: Console,
) -> tuple[Answers, Answers]:
    """Return the answers of both models; a prompt that one did not answer is missing there.

    Raises:
        SweepError: a model refuses everybody, a URL is none, or answers cannot be kept.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        return asyncio.run(_ask_both(prompts, models, settings, kept, progress))


async def _ask_both(
    prompts: Sequence[Prompt],
    models: tuple[Model, Model],
    settings: Settings,
    kept: Kept,
    progress: Progress,
) -> tuple[Answers, Answers]:
    try:
        async with asyncio.TaskGroup() as tasks:
            small, large = (
                tasks.create_task(_ask(prompts, model, settings, kept, progress))
                for model in models
            )
    except* SweepError as group:
        raise group.exceptions[0] from None
    return small.result(), large.result()


async def _ask(
    prompts: Sequence[Prompt],
    model: Model,
    settings: Settings,
    kept: Kept,
    progress: Progress,
) -> Answers:
    async with client_for(model.url, model.key, concurrency=settings.concurrency) as client:
        asker = Asker(
            client, model.name, with_logprobs=model.with_logprobs, timeout_s=settings.timeout_s
        )
        known = ((prompt, kept.find(asker, prompt)) for prompt in prompts)
        found = {prompt.line: answer for prompt, answer in known if answer is not None}
        answers = Answers(found, Counter(), len(found))
        bar = progress.add_task(model.name, total=len(prompts), completed=len(found))

        def answered(prompt: Prompt, answer: Answer | Failure) -> None:
            progress.advance(bar)
            if isinstance(answer, Failure):
                answers.failures[answer.reason] += 1
            else:
                kept.add(asker, prompt, answer)
                found[prompt.line] = answer

        missing = [prompt for prompt in prompts if prompt.line not in found]
        await ask_all(asker, missing, concurrency=settings.concurrency, answered=answered)
    return answers
