"""`pointsman import`: our configuration from that of another gateway."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from pointsman.migrate.documents import read_document
from pointsman.migrate.draft import Draft, Unreadable
from pointsman.migrate.flags import flag_items, words_of_script
from pointsman.migrate.litellm import from_litellm
from pointsman.migrate.page import migration_tables
from pointsman.migrate.production_stack import (
    STACK_PROGRAM,
    from_production_stack,
    settings_of_stack,
)
from pointsman.migrate.sglang_router import SGLANG_PROGRAM, from_sglang_router
from pointsman.migrate.vllm_router import VLLM_PROGRAM, from_vllm_router

__all__ = ["import_app"]

import_app = typer.Typer(
    help="Write our configuration (TOML) from that of another gateway, and say on stderr what has no counterpart.",
    no_args_is_help=True,
)

FAILED = 1

Output = Annotated[
    Path | None,
    typer.Option("--output", help="Write to this new file instead of stdout.", dir_okay=False),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Write nothing and exit 1 where there is anything to note.")
]
Model = Annotated[
    str, typer.Option("--model", help="Id of the model that prefill and decode workers serve.")
]
Said = Annotated[
    list[str],
    typer.Argument(
        help="A shell script that starts it, or its flags after `--`.", metavar="FILE | -- FLAGS..."
    ),
]


@import_app.command("litellm")
def import_litellm(
    file: Annotated[Path, typer.Argument(help="Its config.yaml.")],
    output: Output = None,
    strict: Strict = False,
) -> None:
    """From LiteLLM's config.yaml."""
    _write(lambda: from_litellm(read_document(file)), output, strict=strict)


@import_app.command("vllm-router")
def import_vllm_router(
    said: Said, model: Model = "", output: Output = None, strict: Strict = False
) -> None:
    """From the flags of vllm-router."""

    def draft() -> Draft:
        words = said if _flags(said) else words_of_script(_file(said), VLLM_PROGRAM)
        return from_vllm_router(flag_items(words), model=model)

    _write(draft, output, strict=strict)


@import_app.command("sglang-router")
def import_sglang_router(
    said: Said, model: Model = "", output: Output = None, strict: Strict = False
) -> None:
    """From the flags of sglang-router, also called SGLang Model Gateway and SMG."""

    def draft() -> Draft:
        words = said if _flags(said) else words_of_script(_file(said), SGLANG_PROGRAM)
        return from_sglang_router(flag_items(words), model=model)

    _write(draft, output, strict=strict)


@import_app.command("production-stack")
def import_production_stack(
    said: Annotated[
        list[str],
        typer.Argument(
            help="The values.yaml of its chart, its dynamic configuration (JSON or YAML), a shell script that starts "
            "its router, or the router's flags after `--`.",
            metavar="FILE | -- FLAGS...",
        ),
    ],
    model: Model = "",
    output: Output = None,
    strict: Strict = False,
) -> None:
    """From vLLM's production-stack."""

    def draft() -> Draft:
        made = Draft("production-stack")
        if _flags(said):
            items = flag_items(said)
        elif (file := _file(said)).suffix in (".yaml", ".yml", ".json"):
            items = settings_of_stack(made, read_document(file))
        else:
            items = flag_items(words_of_script(file, STACK_PROGRAM))
        return from_production_stack(made, items, model=model)

    _write(draft, output, strict=strict)


@import_app.command("reference")
def import_reference() -> None:
    """Print what becomes of every key and flag, as Markdown."""
    typer.echo(migration_tables(), nl=False)


def _flags(said: list[str]) -> bool:
    return any(word.startswith("--") for word in said)


def _file(said: list[str]) -> Path:
    if len(said) > 1:
        raise Unreadable(f"{said[1]}: expected one file, or flags after `--`")
    return Path(said[0])


def _write(make: Callable[[], Draft], output: Path | None, *, strict: bool) -> None:
    try:
        draft = make()
        for note in draft.notes:
            typer.echo(f"note: {note}", err=True)
        if strict and draft.notes:
            count = len(draft.notes)
            raise Unreadable(f"nothing is written: {count} note{'s' * (count > 1)}, with --strict")
        if output is None:
            typer.echo(draft.text(), nl=False)
        else:
            with output.open("x", encoding="utf-8") as file:
                file.write(draft.text())
    except Unreadable as error:
        typer.echo(f"pointsman: {error}", err=True)
        raise typer.Exit(FAILED) from None
    except OSError as error:
        typer.echo(f"pointsman: {output}: {error.strerror}", err=True)
        raise typer.Exit(FAILED) from None
