"""An admin API that says what a test tells it to, and a command line that asks it."""

import json
import ssl
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from pointsman.cli_operator import add_operator_commands

Reply = tuple[int, object] | tuple[int, object, dict[str, str]]


class QuietServer(ThreadingHTTPServer):
    """A server that does not print what a client's hasty end makes of its threads."""

    def handle_error(self, *_: object) -> None:
        """Say nothing."""


class FakeAdmin:
    """`replies` has a list per "METHOD /path below /admin/v1"; its last reply is repeated. `asked` is what came."""

    def __init__(self) -> None:
        self.replies: dict[str, list[Reply]] = {}
        self.asked: list[tuple[str, dict[str, str], bytes]] = []
        fake = self

        class Answering(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                line = f"{self.command} {self.path.removeprefix('/admin/v1')}"
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                fake.asked.append((line, {k.lower(): v for k, v in self.headers.items()}, body))
                replies = fake.replies.get(line.partition("?")[0], [(404, "no such path")])
                status, answer, *more = replies.pop(0) if len(replies) > 1 else replies[0]
                if isinstance(answer, str):
                    answer = {"error": {"message": answer, "type": "x", "param": None}}
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                for name, value in (more[0] if more else {}).items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_DELETE = answer

            def log_message(self, *arguments: object) -> None:
                """Say nothing."""

        self.server = QuietServer(("127.0.0.1", 0), Answering)
        self.url = "http://{}:{}".format(*self.server.server_address)

    def secure(self, context: ssl.SSLContext) -> None:
        """Speak TLS from now on."""
        # The handshake is made where the request is read, so that a bad one does not end the server.
        self.server.socket = context.wrap_socket(
            self.server.socket, server_side=True, do_handshake_on_connect=False
        )
        self.url = self.url.replace("http:", "https:")

    def says(self, line: str, *replies: Reply) -> None:
        """Reply to one method and path."""
        self.replies[line] = list(replies)

    def lines(self) -> list[str]:
        """Return what was asked, without headers and bodies."""
        return [line for line, _, _ in self.asked]


@pytest.fixture
def admin() -> Iterator[FakeAdmin]:
    fake = FakeAdmin()
    thread = Thread(target=fake.server.serve_forever, args=(0.01,))
    thread.start()
    yield fake
    fake.server.shutdown()
    thread.join()
    fake.server.server_close()


Run = Callable[..., Result]


@pytest.fixture
def run(admin: FakeAdmin, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run one command against the fake."""
    for name in ("POINTSMAN_KEY", "POINTSMAN_URL", "VISUAL", "EDITOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    app = typer.Typer(pretty_exceptions_enable=False)
    add_operator_commands(app)

    def command(*arguments: str, input: str | bytes | None = None, **env: str) -> Result:
        settings: dict[str, Any] = {"POINTSMAN_URL": admin.url, "TERM": "dumb", **env}
        result = CliRunner().invoke(app, arguments, input=input, env=settings)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return command
