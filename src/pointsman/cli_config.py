"""`pointsman config`: the declaration of the options, for machines and for people."""

import json

import typer

from pointsman import config

__all__ = ["config_app"]

config_app = typer.Typer(help="What can be configured.", no_args_is_help=True)


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of a configuration file."""
    typer.echo(json.dumps(config.schema(), indent=2))


@config_app.command("reference")
def config_reference() -> None:
    """Print the reference page of all options, as Markdown."""
    typer.echo(config.reference(), nl=False)
