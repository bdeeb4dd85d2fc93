"""`pointsman keys`: making, listing and revoking API keys in a key file, with no gateway needed.

Gateways that use the file follow within seconds. A new key is the last line of stdout, and stands nowhere else;
everything said about it goes to stderr. What is done here can also be asked of a running gateway (`/admin/v1/keys`).
"""

import json
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from pointsman.cli_output import WIDE
from pointsman.control.keyfile import KeyFile, KeyFileError, read_pepper
from pointsman.domain.keys import Key, Keyring, Scope

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["keys_app"]

FAILED = 1
WRONG_USAGE = 2

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}

keys_app = typer.Typer(help="Make, list and revoke API keys in a key file.", no_args_is_help=True)

KeysFile = Annotated[
    Path,
    typer.Option(envvar="TL_GATEWAY__KEYS_FILE", help="The gateway's `keys_file`.", dir_okay=False),
]


@keys_app.command("create")
def create(
    keys_file: KeysFile,
    tenant: Annotated[str, typer.Option(help="Whose it is: a-z, 0-9 and dashes.")],
    name: Annotated[str, typer.Option(help="What people call it, 1 to 128 characters.")],
    scope: Annotated[
        list[Scope] | None,
        typer.Option(help="What it may be used for, infer if not given; repeatable."),
    ] = None,
    rpm: Annotated[int, typer.Option(min=0, help="Requests per minute, 0 for no limit.")] = 60,
    tpm: Annotated[int, typer.Option(min=0, help="Tokens per minute, 0 for no limit.")] = 100_000,
    priority: Annotated[
        int, typer.Option(min=-100, max=100, help="Told to engines in X-TL-Priority.")
    ] = 0,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model id or alias that it may ask for, all if not given; repeatable."),
    ] = None,
    expires_in: Annotated[
        str, typer.Option(help="How long it is good, such as 12h, 30d or 8w; forever if not given.")
    ] = "",
    pepper_env: Annotated[
        str, typer.Option(help="Environment variable with the pepper of the key digests.")
    ] = "TL_GATEWAY_PEPPER",
) -> None:
    """Make a key and print it, once, as the last line. The file is made where it is missing."""
    now = int(time.time())
    with _failing_clearly():
        pepper = read_pepper(os.environ, pepper_env)
        keyring = Keyring(pepper, wall=time.time, cache_key=secrets.token_bytes(32))
        key, text = KeyFile(keys_file, keyring).create(
            tenant=tenant,
            name=name,
            scopes=scope or [Scope.INFER],
            rpm=rpm,
            tpm=tpm,
            priority=priority,
            models=model or [],
            expires_at=now + _seconds(expires_in) if expires_in else None,
            now=now,
        )
    typer.echo(f"key {key.key_id} of {key.tenant}: {_cell(key.name)}", err=True)
    typer.echo(f"  scopes    {', '.join(key.scopes)}", err=True)
    typer.echo(f"  models    {', '.join(map(_cell, key.models)) or 'all'}", err=True)
    typer.echo(f"  limits    {_limits(key)}, priority {key.priority}", err=True)
    typer.echo(f"  expires   {_moment(key.expires_at)}", err=True)
    typer.echo(f"  kept in   {keys_file}, as a digest: this is the only time it is shown", err=True)
    typer.echo(text)


@keys_app.command("list")
def list_(
    keys_file: KeysFile,
    tenant: Annotated[str | None, typer.Option(help="Only those of this tenant.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="As JSON, as `GET /admin/v1/keys` answers.")
    ] = False,
) -> None:
    """List the keys, newest first, also those that are revoked or expired."""
    with _failing_clearly():
        keys = KeyFile(keys_file, None).list(tenant)
    if as_json:
        typer.echo(json.dumps({"data": [_shown(key) for key in keys]}, indent=2))
        return
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDE)
    if keys:
        console.print(_table(keys, time.time()), highlight=False, markup=False)
    else:
        console.print("no keys", highlight=False)


@keys_app.command("revoke")
def revoke(
    key_id: Annotated[
        str, typer.Argument(metavar="KEY_ID", help="The middle part of the key, see `list`.")
    ],
    keys_file: KeysFile,
) -> None:
    """Revoke a key for good. Gateways that use the file refuse it within seconds."""
    with _failing_clearly():
        found = KeyFile(keys_file, None).revoke(key_id)
    if not found:
        # Not repeated: whoever mistakes the whole key for its id should not find it in a log.
        typer.echo("pointsman: no key has this id, which is the middle part of the key", err=True)
        raise typer.Exit(FAILED)
    typer.echo(f"revoked {key_id}", err=True)


@contextmanager
def _failing_clearly() -> Iterator[None]:
    """Turn what can go wrong into one line on stderr and an exit status."""
    try:
        yield
    except (KeyFileError, ValueError) as error:
        typer.echo(f"pointsman: {error}", err=True)
        status = FAILED if isinstance(error, KeyFileError) else WRONG_USAGE
        raise typer.Exit(status) from None


def _seconds(duration: str) -> int:
    found = re.fullmatch(r"([1-9][0-9]{0,8})([smhdw])", duration)
    if found is None:
        raise ValueError(
            f"--expires-in {duration}: expected a number and one of s, m, h, d, w, such as 30d"
        )
    return int(found[1]) * UNITS[found[2]]


def _table(keys: Sequence[Key], now: float) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("id", "tenant", "name", "scopes", "models", "limits", "created", "expires"):
        table.add_column(heading)
    table.add_column("state")
    for key in keys:
        state = _state(key, now)
        table.add_row(
            key.key_id,
            key.tenant,
            Text(_cell(key.name)),
            ",".join(key.scopes),
            Text(",".join(map(_cell, key.models)) or "all"),
            _limits(key),
            _moment(key.created_at),
            _moment(key.expires_at),
            Text(state, style="green" if state == "good" else "red"),
        )
    return table


def _shown(key: Key) -> dict[str, Any]:
    fields = msgspec.structs.asdict(key)
    del fields["hmac"]
    return fields


def _state(key: Key, now: float) -> str:
    if key.revoked:
        return "revoked"
    return "good" if key.expires_at is None or now < key.expires_at else "expired"


def _limits(key: Key) -> str:
    return f"{key.rpm or 'any'} rpm, {key.tpm or 'any'} tpm"


def _moment(seconds: int | None) -> str:
    if seconds is None:
        return "never"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _cell(text: str) -> str:
    """Return a text that cannot move the cursor of a terminal."""
    return text if text.isprintable() else repr(text)
