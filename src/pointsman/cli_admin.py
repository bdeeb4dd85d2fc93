"""`pointsman admin`: the declaration of the admin API, for machines and for people."""

import json

import typer

__all__ = ["admin_app_commands"]

admin_app_commands = typer.Typer(help="What the admin API can do.", no_args_is_help=True)


@admin_app_commands.command("openapi")
def admin_openapi() -> None:
    """Print the OpenAPI 3.1 document of the admin API."""
    from pointsman.control.admin import openapi

    typer.echo(json.dumps(openapi(), indent=2))


@admin_app_commands.command("reference")
def admin_reference() -> None:
    """Print the reference page of the admin API, as Markdown."""
    from pointsman.control.admin import openapi, reference

    typer.echo(reference(openapi()), nl=False)
