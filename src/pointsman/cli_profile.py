"""`pointsman profile`: how fast an engine is, measured from outside, as a file that `pointsman simulate` reads.

The file goes to stdout or where it is told, everything said about it to stderr. What needs httpx is imported when the
command runs.
"""

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pointsman.cli_input import checked_key, key_option

if TYPE_CHECKING:
    from pointsman.measure.profiling import Profiled

__all__ = ["profile_command"]

FAILED = 1


def profile_command(
    model: Annotated[str, typer.Option(help="The model id.")],
    url: Annotated[
        str, typer.Option(help="The engine itself, not a gateway; idle, but for this.")
    ] = "http://127.0.0.1:8000",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", dir_okay=False, help="FILE.toml. [default: stdout]"),
    ] = None,
    key: Annotated[str, key_option("An API key.")] = "",
    engine: Annotated[
        str, typer.Option(help="What the engine is, for the file. [default: its dialect]")
    ] = "",
    note: Annotated[
        str, typer.Option(help="What else the file says: the hardware, the load.")
    ] = "",
    longest: Annotated[
        int | None,
        typer.Option(min=128, help="Tokens of the longest prompt. [default: 2048, or the context]"),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Of each thing, for a median.")] = 5,
    concurrency: Annotated[int, typer.Option(min=2, help="Answers at a time, at most.")] = 64,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="key=value: a number of the profile you know.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for one answer.")] = 300.0,
) -> None:
    """Measure an engine, and write its profile for `pointsman simulate --profile`."""
    from pointsman.cli_output import check_writable
    from pointsman.measure.asking import MeasureError
    from pointsman.measure.profiling import profile_engine, written
    from pointsman.simulate.sources import profile_keys
    from pointsman.sweep.asking import SweepError, client_for

    key = checked_key(key)

    async def measured() -> "tuple[Profiled, str]":
        async with client_for(url, key, concurrency=concurrency) as client:
            return await profile_engine(
                client,
                model,
                given=given,
                longest=longest,
                repeats=repeats,
                concurrency=concurrency,
                timeout_s=timeout,
                say=lambda line: typer.echo(line, err=True),
            )

    try:
        given = profile_keys(set_ or ())
        if out is not None:
            check_writable(out)
        profiled, dialect = asyncio.run(measured())
        text = written(
            profiled,
            engine=engine or dialect,
            model=model,
            url=url,
            now=datetime.now(UTC),
            note=note,
        )
        if profiled.assumed:
            typer.echo(f"not measured, so defaults: {', '.join(profiled.assumed)}", err=True)
        if out is None:
            typer.echo(text, nl=False)
        else:
            out.write_text(text, encoding="utf-8")
    except (MeasureError, SweepError, ValueError) as error:
        typer.echo(f"pointsman: {error}", err=True)
        raise typer.Exit(FAILED) from None
    except OSError as error:
        typer.echo(f"pointsman: cannot write {error.filename}: {error.strerror}", err=True)
        raise typer.Exit(FAILED) from None
