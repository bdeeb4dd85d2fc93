"""The command line: arguments in, one call into the program each."""

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from pointsman import __version__
from pointsman.cli_admin import admin_app_commands
from pointsman.cli_agent import agent
from pointsman.cli_cascade import cascade_app
from pointsman.cli_config import config_app
from pointsman.cli_import import import_app
from pointsman.cli_keys import keys_app
from pointsman.cli_operator import add_operator_commands
from pointsman.cli_profile import profile_command
from pointsman.cli_simulate import simulate_command
from pointsman.engine.command import engine

__all__ = ["app", "main"]

app = typer.Typer(
    name="pointsman",
    help="A gateway in front of a fleet of LLM inference engines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(config_app, name="config")
app.add_typer(import_app, name="import")
app.add_typer(keys_app, name="keys")
app.add_typer(admin_app_commands, name="admin")
app.add_typer(cascade_app, name="cascade")
app.command("engine")(engine)
app.command("agent")(agent)
app.command("simulate")(simulate_command)
app.command("profile")(profile_command)
add_operator_commands(app)

BAD_CONFIGURATION = 2


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pointsman {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Pointsman."""


@app.command()
def serve(
    config: Annotated[
        Path | None, typer.Option("--config", help="The TOML file.", dir_okay=False)
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="gateway.key=value, over file and environment."),
    ] = None,
) -> None:
    """Run the gateway in the foreground until SIGTERM. Exits 2 on a bad configuration."""
    from pointsman.app import serve as run
    from pointsman.config import ConfigError, load

    read = partial(load, config, set_ or [], os.environ)
    try:
        run(read(), read, str(config or ""))
    except ConfigError as error:
        typer.echo(f"pointsman: {error}", err=True)
        raise typer.Exit(BAD_CONFIGURATION) from None


@app.command()
def demo(
    check: Annotated[
        bool, typer.Option("--check", help="Ask for everything once, kill a worker, and judge.")
    ] = False,
    engines: Annotated[int, typer.Option(min=1, max=8, help="Engine workers.")] = 2,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the gateway.")] = 8080,
) -> None:
    """Run a gateway and real engines on this machine, with a live table, until Ctrl-C."""
    from pointsman.demo import demo as run

    raise typer.Exit(run(check=check, engines=engines, port=port))


def main() -> None:
    """Run the command line."""
    app()
