"""The commands for operators: one call to the admin API of a running gateway each, and its answer on the screen.

`--json` prints the API's answer as it came, for scripts. Failures are one line on stderr and status 1, wrong usage is
status 2. The HTTP client is imported when a command runs, so that `pointsman serve` does not load it.
"""

import errno
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec
from urllib.parse import quote

import typer

from pointsman.cli_input import checked_key, key_option
from pointsman.cli_output import output

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from pointsman.remote.client import AdminClient, Answer

__all__ = ["add_operator_commands"]

FAILED = 1

FOLLOW_EVERY_S = 1.0

BODY_MAX = 4 * 2**20
"""Bytes of a request to explain."""

P = ParamSpec("P")
Model = Annotated[str, typer.Argument(metavar="MODEL", help="The model id that workers serve.")]


class Action(StrEnum):
    """What to do with the route table."""

    SHOW = "show"
    EDIT = "edit"


class Session:
    """A command's gateway and screen."""

    def __init__(self, client: "AdminClient", console: "Console", *, as_json: bool) -> None:
        self.client = client
        self.console = console
        self.as_json = as_json

    def show(self, answer: "Answer", render: "Callable[[], RenderableType]") -> None:
        """Print an answer: as it came, or for people."""
        if self.as_json:
            typer.echo(answer.content, nl=False)
        else:
            self.console.print(render(), highlight=False, markup=False)


def add_operator_commands(app: typer.Typer) -> None:
    """Add the commands to a command line."""
    for command in (workers, routes, drain, undrain, explain, decisions, top, reload):
        app.command(command.__name__)(_operating(command))


def workers(
    session: Session,
    model: Annotated[str | None, typer.Option(help="Only those that serve this model.")] = None,
) -> None:
    """Show the live workers with their load and state."""
    from pointsman.remote.answers import Workers
    from pointsman.remote.tables import workers_table

    answer = session.client.get("/workers", {"model": model})
    session.show(answer, lambda: workers_table(answer.read(Workers)))


def routes(
    session: Session,
    action: Annotated[
        Action, typer.Argument(help="Show the table, or change it in $VISUAL or $EDITOR.")
    ] = Action.SHOW,
) -> None:
    """Show the route table, or edit it: it is put back only if nobody else changed it meanwhile."""
    from pointsman.remote.edit import Editing, Table, editor_of

    if action is Action.EDIT:
        if session.as_json:
            raise typer.BadParameter("an editor gets TOML: --json is for showing")
        editing = Editing(
            session.client, editor_of(os.environ), ask=_ask, say=lambda text: _say(text)
        )
        if not editing.run():
            raise typer.Exit(FAILED)
        return
    answer = session.client.get("/routes")
    session.show(
        answer,
        lambda: Table(answer.read(Table).routes).text(f"version {answer.etag}").rstrip("\n"),
    )


def drain(
    session: Session,
    model: Model,
    deadline: Annotated[
        int,
        typer.Option(min=0, max=3600, help="Seconds that engines may take for what they have."),
    ],
    wait: Annotated[bool, typer.Option("--wait", help="Follow it until nothing is left.")] = False,
) -> None:
    """Send a model's workers nothing new, and let them end what they have."""
    from pointsman.remote.answers import ModelRow
    from pointsman.remote.tables import drain_line

    path = f"/models/{quote(model, safe='')}"
    answer = session.client.ask("POST", f"{path}:drain", b'{"deadline_s":%d}' % deadline)
    row = answer.read(ModelRow)
    line = drain_line(row, drained=True)
    while wait and row.requests_left:
        if not session.as_json:
            session.console.print(line, highlight=False, markup=False)
        time.sleep(FOLLOW_EVERY_S)
        answer = session.client.get(path)
        row = answer.read(ModelRow)
        line = drain_line(row, drained=True)
    session.show(answer, lambda: line)


def undrain(session: Session, model: Model) -> None:
    """Let a model's workers have requests again."""
    from pointsman.remote.answers import ModelRow
    from pointsman.remote.tables import drain_line

    answer = session.client.ask("POST", f"/models/{quote(model, safe='')}:undrain")
    session.show(answer, lambda: drain_line(answer.read(ModelRow), drained=False))


def explain(
    session: Session,
    file: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="The JSON body of a request; - is stdin.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Instead of a file: the model id.")] = None,
    prompt: Annotated[str, typer.Option(help="With --model: the text of a user's message.")] = "",
    request_id: Annotated[
        str | None, typer.Option(help="What the draw of a canary depends on.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="A worker that has failed already; repeatable.")
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, help="The step of a cascade.")] = None,
) -> None:
    """Say which worker would get a request, and why. Nothing is sent to it."""
    from pointsman.domain.explain import Explanation
    from pointsman.remote.tables import explanation

    body = _inference_body(file, model, prompt)
    parameters = {"request_id": request_id, "exclude": exclude or None, "step": step}
    answer = session.client.ask("POST", "/route:explain", body, parameters=parameters)
    session.show(answer, lambda: explanation(answer.read(Explanation)))


def decisions(
    session: Session,
    model: Annotated[str | None, typer.Option(help="Only requests for this model id.")] = None,
    worker: Annotated[str | None, typer.Option(help="Only those that it was asked for.")] = None,
    request_id: Annotated[str | None, typer.Option(help="Only this request.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = 20,
) -> None:
    """Show where the latest requests went and what became of each attempt, newest first."""
    from pointsman.remote.answers import Decisions
    from pointsman.remote.tables import decisions_table

    wanted = {"model": model, "worker": worker, "request_id": request_id, "limit": limit}
    answer = session.client.get("/decisions", wanted)
    session.show(answer, lambda: decisions_table(answer.read(Decisions).data))


def top(
    session: Session,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, max=60, help="Seconds between two looks.")
    ] = 1.0,
) -> None:
    """Watch workers, load, requests per second, time to first byte, failovers and errors, until Ctrl-C."""
    from pointsman.remote.top import Top, look_at

    if session.as_json:
        raise typer.BadParameter("top draws for people: see /admin/v1/stats for its numbers")
    screen = Top(session.client.url, lambda: look_at(session.client), lambda: time.sleep(interval))
    if once:
        session.console.print(screen.once(), highlight=False)
    elif session.console.is_terminal:
        with suppress(KeyboardInterrupt):
            screen.run(session.console)
    else:
        raise typer.BadParameter("this is no terminal; --once prints one frame")


def reload(session: Session) -> None:
    """Let the gateway read its configuration again: all of it takes effect, or nothing."""
    from pointsman.remote.answers import Configuration
    from pointsman.remote.client import RemoteError
    from pointsman.remote.tables import reload_lines

    answer = session.client.ask("POST", "/config:reload")
    session.show(answer, lambda: reload_lines(answer.read(Configuration)))
    last = answer.read(Configuration).last_reload
    if last is None or not last.ok:
        raise RemoteError("the gateway does not say that it reloaded its configuration")


def _options(
    *,
    url: Annotated[
        str, typer.Option(envvar="POINTSMAN_URL", help="Where the gateway's API listens.")
    ] = "http://127.0.0.1:8080",
    key: Annotated[str, key_option("A key with the scope admin.")] = "",
    cacert: Annotated[
        Path | None, typer.Option(help="Whom to trust with https, as PEM.", dir_okay=False)
    ] = None,
    cert: Annotated[
        Path | None, typer.Option(help="A client certificate, as PEM.", dir_okay=False)
    ] = None,
    client_key: Annotated[
        Path | None, typer.Option(help="The certificate's key, if not beside it.", dir_okay=False)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the API's answer as it came.")
    ] = False,
) -> tuple[str, str, Path | None, Path | None, Path | None, bool]:
    """Take what every command takes."""
    return url, key, cacert, cert, client_key, as_json


def _operating(command: Callable[Concatenate[Session, P], None]) -> Callable[..., None]:
    """Return a command that takes the common options as well, and gets a session for them."""
    shared = inspect.signature(_options).parameters
    _, *own = inspect.signature(command).parameters.values()

    def run(**arguments: Any) -> None:
        given = _options(**{name: arguments.pop(name) for name in shared})
        with _connected(*given) as session:
            command(session, **arguments)  # type: ignore[call-arg]

    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
    parameters += shared.values()
    run.__doc__ = command.__doc__
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


@contextmanager
def _connected(
    url: str,
    key: str,
    cacert: Path | None,
    cert: Path | None,
    client_key: Path | None,
    as_json: bool,
) -> Iterator[Session]:
    if not url.startswith(("http://", "https://")):
        raise typer.BadParameter("--url must begin with http:// or https://")
    key = checked_key(key)
    from pointsman.remote.client import AdminClient, RemoteError, trust

    console = output()
    try:
        with AdminClient(url, key, tls=trust(cacert, cert, client_key)) as client:
            yield Session(client, console, as_json=as_json)
    except RemoteError as error:
        _say(f"pointsman: {error}")
    except UnicodeError as error:
        _say(f"pointsman: a character cannot be sent or shown: {error}")
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # a reader that has seen enough, as `head` does: typer ends quietly
        _say(f"pointsman: cannot write the output: {error.strerror or error}")
        _discard_output()
    else:
        return
    raise typer.Exit(FAILED)


def _inference_body(file: str | None, model: str | None, prompt: str) -> bytes:
    if (file is None) == (model is None):
        raise typer.BadParameter("give a FILE (- for stdin), or --model with --prompt")
    if model is not None:
        import msgspec

        messages = [{"role": "user", "content": prompt}]
        return msgspec.json.encode({"model": model, "messages": messages})
    assert file is not None
    try:
        with nullcontext(sys.stdin.buffer) if file == "-" else open(file, "rb") as source:
            body = source.read(BODY_MAX + 1)
    except OSError as error:
        raise typer.BadParameter(f"cannot read {file}: {error.strerror}") from None
    if len(body) > BODY_MAX:
        from pointsman.remote.client import RemoteError

        raise RemoteError(f"{file} is longer than {BODY_MAX} bytes: nothing was asked")
    return body


def _discard_output() -> None:
    """Throw away what could not be written: the interpreter would try it again at its end, and complain."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _ask(question: str) -> bool:
    return typer.confirm(question, default=True, err=True)


def _say(text: str) -> None:
    typer.echo(text, err=True)
