"""`pointsman cascade`: choosing the threshold of a cascade before, or long after, it serves anybody.

The gateway need not know of it: both models are asked as any client would ask them, through a gateway or directly.
Results go to stdout, everything said about them to stderr. What needs httpx, Rich or matplotlib is imported when a
command runs.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pointsman.cli_input import checked_key, key_option
from pointsman.cli_output import output
from pointsman.domain.scores import SCORES

if TYPE_CHECKING:
    from pointsman.domain.acceptor import Acceptor
    from pointsman.sweep.reading import Prompt
    from pointsman.sweep.running import Answers
    from pointsman.sweep.sweeping import Costs

__all__ = ["cascade_app"]

FAILED = 1

cascade_app = typer.Typer(
    help="Choose a cascade's threshold: what each would cost, and how good its answers would be.",
    no_args_is_help=True,
)


@cascade_app.command("questions")
def questions_command(
    count: Annotated[int, typer.Option(min=1, max=100_000, help="How many.")] = 150,
    seed: Annotated[int, typer.Option(help="One seed gives one set.")] = 1,
) -> None:
    """Write a set of short questions with their answers, one JSON object a line, for `sweep` to ask."""
    from pointsman.sweep.questions import questions

    for question in questions(count, seed):
        typer.echo(json.dumps(question.line()))


@cascade_app.command("sweep")
def sweep_command(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            dir_okay=False,
            help="JSON lines: questions (messages or prompt, answer or answers), or recorded requests.",
        ),
    ],
    small: Annotated[str, typer.Option(help="The model id of the small model.")],
    large: Annotated[str, typer.Option(help="The model id of the large model.")],
    url: Annotated[
        str, typer.Option(envvar="POINTSMAN_URL", help="A gateway or an engine that serves them.")
    ] = "http://127.0.0.1:8080",
    large_url: Annotated[
        str | None, typer.Option(help="Where the large model is served. [default: --url]")
    ] = None,
    key: Annotated[str, key_option("An API key.")] = "",
    large_key: Annotated[
        str | None,
        typer.Option(
            envvar="POINTSMAN_LARGE_KEY",
            show_default=False,
            help="An API key for --large-url, which never gets the other one.",
        ),
    ] = None,
    score: Annotated[
        str,
        typer.Option(help=f"{', '.join(SCORES)}, or score: what an acceptor says."),
    ] = "mean_logprob",
    acceptor: Annotated[
        Path | None, typer.Option(help="What `score` is computed with.", dir_okay=False)
    ] = None,
    match: Annotated[
        str, typer.Option(help="A right text `mentions` an answer, or `equals` one.")
    ] = "mentions",
    agreement: Annotated[
        bool,
        typer.Option("--agreement", help="Ignore answers: compare with the large model's text."),
    ] = False,
    small_cost: Annotated[
        float | None, typer.Option(min=0, help="Cost of a small answer, in any unit.")
    ] = None,
    large_cost: Annotated[
        float | None, typer.Option(min=0, help="Cost of a large answer, in the same unit.")
    ] = None,
    small_price: Annotated[
        float | None, typer.Option(min=0, help="Instead: price of a million completion tokens.")
    ] = None,
    large_price: Annotated[
        float | None, typer.Option(min=0, help="The large model's. [no price: seconds are counted]")
    ] = None,
    target_cost: Annotated[
        float | None, typer.Option(min=0, help="Name the best threshold of at most this cost.")
    ] = None,
    target_quality: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Name the cheapest threshold of at least this quality."),
    ] = None,
    answers: Annotated[
        Path | None,
        typer.Option(
            help="Keep answers here; what is there is not asked again. It has answers, not prompts.",
            dir_okay=False,
        ),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write every threshold here.", dir_okay=False)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the curve, FILE.svg or FILE.png: extra `plot`.", dir_okay=False),
    ] = None,
    train: Annotated[
        Path | None,
        typer.Option(
            help="Learn an acceptor from 70 % of the answers, tested on 30 %.", dir_okay=False
        ),
    ] = None,
    feature: Annotated[
        list[str] | None,
        typer.Option(help="A score to learn from; repeatable. [default: those of logprobs alone]"),
    ] = None,
    rows: Annotated[int, typer.Option(min=2, help="Lines of the table, about.")] = 12,
    concurrency: Annotated[
        int, typer.Option(min=1, max=1000, help="Questions at a time, per model.")
    ] = 4,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of an answer to a question that does not say.")
    ] = 64,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for a question.")] = 120.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first prompts.")] = None,
    seed: Annotated[int, typer.Option(help="Of the resamples and of the training split.")] = 1,
    resamples: Annotated[
        int, typer.Option(min=1, max=100_000, help="Of the bootstrap intervals.")
    ] = 1000,
) -> None:
    """Ask both models, and show what each threshold of a cascade of the two costs and gives."""
    from rich.console import Console

    from pointsman.domain.acceptor import FEATURES, acceptor_to_json
    from pointsman.sweep.asking import SweepError
    from pointsman.sweep.kept import Kept
    from pointsman.sweep.plot import check_plot, draw
    from pointsman.sweep.reading import PromptsError, read_prompts
    from pointsman.sweep.report import learned_lines, report, write_csv
    from pointsman.sweep.running import Model, Settings, ask_both
    from pointsman.sweep.sweeping import Judge, Match, learn, metric_of, sweep

    if match not in list(Match):
        raise typer.BadParameter(f"--match is {' or '.join(Match)}")
    small_costs, large_costs, unit = _costs(small_cost, large_cost, small_price, large_price)
    console = output()
    try:
        # All that can be wrong without asking comes before asking.
        if plot is not None:
            check_plot(plot)
        metric = metric_of(score, _acceptor(acceptor))
        prompts = read_prompts(file, max_tokens=max_tokens, limit=limit)
        judge = Judge(Match(match), by_agreement=_by_agreement(prompts, wanted=agreement))
        # A key is for the server that it was given for.
        other_key = large_key or (key if large_url is None else "")
        models = (
            Model(small, url, checked_key(key), with_logprobs=True),
            Model(large, large_url or url, checked_key(other_key), with_logprobs=False),
        )
        with Kept(answers) as kept:
            found = ask_both(
                prompts,
                models,
                Settings(concurrency, timeout),
                kept=kept,
                console=Console(stderr=True),
            )
        _say_what_is_missing(models[0].name, models[1].name, found)
        judged = [
            judge.of(prompt, found[0].found[prompt.line], found[1].found[prompt.line])
            for prompt in prompts
            if prompt.line in found[0].found and prompt.line in found[1].found
        ]
        result = sweep(
            judged,
            metric,
            small=small_costs,
            large=large_costs,
            target_cost=target_cost,
            target_quality=target_quality,
            seed=seed,
            resamples=resamples,
        )
        quality = "agreement" if judge.by_agreement else "accuracy"
        console.print(report(result, unit=unit, quality=quality, rows=rows), highlight=False)
        if csv is not None:
            with csv.open("w", encoding="utf-8", newline="") as target:
                write_csv(result, target)
        if plot is not None:
            draw(result, plot, unit=unit, quality=quality, seed=seed)
        if train is not None:
            learned = learn(judged, metric, features=feature or FEATURES, seed=seed)
            train.write_bytes(acceptor_to_json(learned.acceptor) + b"\n")
            console.print(learned_lines(learned), highlight=False, markup=False)
    except (SweepError, PromptsError) as error:
        typer.echo(f"pointsman: {error}", err=True)
        raise typer.Exit(FAILED) from None
    except OSError as error:
        typer.echo(f"pointsman: cannot write {error.filename}: {error.strerror}", err=True)
        raise typer.Exit(FAILED) from None


def _costs(
    small_flat: float | None,
    large_flat: float | None,
    small_price: float | None,
    large_price: float | None,
) -> "tuple[Costs, Costs, str]":
    """Return what an answer of each model costs, and the unit of it."""
    from pointsman.sweep.sweeping import Costs

    if (small_flat is None) != (large_flat is None):
        raise typer.BadParameter("--small-cost and --large-cost are given together")
    if (small_price is None) != (large_price is None):
        raise typer.BadParameter("--small-price and --large-price are given together")
    if small_flat is not None and small_price is not None:
        raise typer.BadParameter("give costs or prices, not both")
    unit = "given" if small_flat is not None else "price" if small_price is not None else "s"
    return Costs(small_flat, small_price), Costs(large_flat, large_price), unit


def _acceptor(path: Path | None) -> "Acceptor | None":
    from pointsman.domain.acceptor import acceptor_from_json
    from pointsman.errors import BadRule
    from pointsman.sweep.asking import SweepError

    if path is None:
        return None
    try:
        return acceptor_from_json(path.read_bytes())
    except OSError as error:
        raise SweepError(f"cannot read {path}: {error.strerror}") from None
    except BadRule as error:
        raise SweepError(f"{path}: {error}") from None


def _by_agreement(prompts: "list[Prompt]", *, wanted: bool) -> bool:
    """Tell whether quality is agreement: where that is wanted, or no prompt has answers."""
    from pointsman.sweep.asking import SweepError

    without = sum(not prompt.answers for prompt in prompts)
    if wanted or without == len(prompts):
        return True
    if without:
        raise SweepError(
            f"{without} of {len(prompts)} prompts have no answer: give them one, or ask for --agreement"
        )
    return False


def _say_what_is_missing(small: str, large: str, found: "tuple[Answers, Answers]") -> None:
    for name, answers in zip((small, large), found, strict=True):
        if answers.reused:
            typer.echo(f"{name}: {answers.reused} answers were kept from before", err=True)
        for reason, count in answers.failures.most_common():
            typer.echo(f"{name}: {count} without an answer: {reason}", err=True)
