"""The commands against servers, files, URLs and screens that mean no good: one line, status 1, and an end in time."""

import json
import os
import socket
import ssl
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING

import pytest
import trustme

from pointsman.cli_operator import BODY_MAX
from pointsman.remote import client
from pointsman.remote.routefile import render

if TYPE_CHECKING:
    from tests.remote.conftest import FakeAdmin, Run
    from typer.testing import Result

NESTED = b"[" * 100_000 + b"]" * 100_000
COMMANDS = {
    ("workers",): "GET /workers",
    ("routes",): "GET /routes",
    ("routes", "edit"): "GET /routes",
    ("drain", "m", "--deadline", "5"): "POST /models/m:drain",
    ("undrain", "m"): "POST /models/m:undrain",
    ("explain", "--model", "m"): "POST /route:explain",
    ("decisions",): "GET /decisions",
    ("top", "--once"): "GET /stats",
    ("reload",): "POST /config:reload",
}


def the_line(result: "Result") -> str:
    """Return the one line that a failure is."""
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("pointsman: ")
    assert result.stderr.endswith("\n")
    line = result.stderr[:-1]
    assert line.isprintable(), "nothing ends the line or moves the cursor"
    return line.removeprefix("pointsman: ")


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize(
    "content",
    [NESTED, b'{"data":' + NESTED + b"}", b'{"error":{"message":' + NESTED + b"}}"],
    ids=["all", "data", "message"],
)
def test_a_nested_answer_is_one_line(
    admin: "FakeAdmin", run: "Run", arguments: tuple[str, ...], status: int, content: bytes
) -> None:
    admin.says(COMMANDS[arguments], (status, content))
    result = run(*arguments, VISUAL="true")
    wanted = "is not what was expected" if status == 200 else "does not answer as a gateway's"
    assert wanted in the_line(result)
    assert result.stdout == ""


@pytest.mark.parametrize("depth", [100, 600, 900])
def test_routes_nested_as_deep_as_can_be_read_are_shown_or_refused(
    admin: "FakeAdmin", run: "Run", depth: int
) -> None:
    route = b'{"model": "m", "x": ' + b"[" * depth + b"]" * depth + b"}"
    admin.says("GET /routes", (200, b'{"routes": [' + route + b"]}"))
    result = run("routes")
    if result.exit_code:
        assert "nested too deeply" in the_line(result) or "expected" in the_line(result)
    else:
        assert "[" * depth in result.stdout


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("workers", {"data": [{"kv_total_blocks": 1, "kv_free_blocks": -(10**400)}]}),
        ("workers", {"data": [{"oldest_request_s": 1e308}]}),
        ("decisions", {"data": [{"at": 1e300}, {"at": -1e18}]}),
    ],
)
def test_numbers_that_mean_nothing_are_no_traceback(
    admin: "FakeAdmin", run: "Run", line: str, answer: dict[str, list[dict[str, object]]]
) -> None:
    worker = {"worker_id": "a", "model": "m", "role": "r", "http_address": "h", "draining": False}
    decision = {
        **{"request_id": "r", "path": "/", "model": "m", "stream": False, "status": 200},
        **{"error": "", "key_id": "", "tenant": "", "trace_id": "", "seconds": 1e308},
        **{"first_byte_s": None, "attempts": []},
    }
    plain = worker if line == "workers" else decision
    content = json.dumps({"data": [plain | row for row in answer["data"]]})
    admin.says(f"GET /{line}", (200, content.encode()))
    result = run(line)
    if result.exit_code:
        assert "is not what was expected" in the_line(result)


def test_an_answer_has_an_end(
    admin: "FakeAdmin", run: "Run", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "ANSWER_MAX", 1000)
    whole = b'{"data": [], "route_epoch": 1}'
    admin.says("GET /workers", (200, whole.ljust(1000)), (200, whole.ljust(1001)))
    assert run("workers").stdout == "no live worker\n"
    assert "is longer than 1000 bytes" in the_line(run("workers"))
    admin.says("GET /workers", (500, b" " * 1001))
    assert "is longer than 1000 bytes" in the_line(run("workers"))
    assert {headers["accept-encoding"] for _, headers, _ in admin.asked} == {"identity"}


def test_a_refusal_is_told_as_far_as_it_can_be_read(admin: "FakeAdmin", run: "Run") -> None:
    admin.says("GET /workers", (503, "no " * 100_000))
    assert len(the_line(run("workers"))) < 2100


class Dribble:
    """A server that sends one answer byte by byte, each long before anybody calls it silent."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._over = Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = "http://{}:{}".format(*self._listener.getsockname())
        self._thread = Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            with connection:
                connection.recv(65536)
                for byte in self._answer:
                    connection.send(bytes([byte]))
                    if self._over.wait(0.02):
                        return

    def close(self) -> None:
        """Stop it."""
        self._over.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


@pytest.fixture(
    params=[b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9000\r\n\r\n", b""],
    ids=["in the header", "in the body", "from the start"],
)
def dribble(request: pytest.FixtureRequest) -> Iterator[Dribble]:
    server = Dribble(request.param + b"x" * 9000)
    yield server
    server.close()


def test_a_server_that_dribbles_is_left(
    run: "Run", dribble: Dribble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "REQUEST_S", 1.5)
    began = monotonic()
    line = the_line(run("workers", "--url", dribble.url))
    assert line == f"no whole answer from {dribble.url} in 1.5 s"
    assert monotonic() - began < 20


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://[::1", "--url is no URL: "),
        ("http://h/\x1b[2J", "--url is no URL: "),
        ("http://h:x", "--url is no URL: "),
        ("http://", "--url names no host"),
        ("https:///", "--url names no host"),
        ("http://:8080", "--url names no host"),
        ("http://h:99999", "--url has a port that does not exist"),
        ("http://h:0", "--url has a port that does not exist"),
        ("http://h/?", "it takes no ? and no #"),
        ("http://h/#top", "it takes no ? and no #"),
        ("http://a..b", "http://a..b: "),
        ("http://" + "a" * 70_000, "--url is no URL: "),
    ],
)
def test_a_url_that_leads_nowhere_is_one_line(run: "Run", url: str, told: str) -> None:
    for command in (["workers"], ["top", "--once"]):
        assert told in the_line(run(*command, "--url", url))


@pytest.mark.parametrize(
    "url",
    [
        *("http://u:hunter2@127.0.0.1:1", "http://hunter2@h", "http://u:hunter2@[::1"),
        *("http://u:hunter2/x@h", "http://u:1/hunter2@h", "ftp://u:hunter2@h"),
    ],
)
def test_a_password_in_the_url_is_refused_and_not_shown(run: "Run", url: str) -> None:
    result = run("workers", "--url", url)
    assert result.exit_code in (1, 2)
    assert "hunter2" not in result.output
    if url.startswith("http"):
        assert "--url takes no user and no password" in the_line(result)


def test_what_cannot_be_sent_is_one_line(admin: "FakeAdmin", run: "Run") -> None:
    for arguments in (
        ["workers", "--model", "\udcff"],
        ["workers", "--model", "m" * 70_000],
        ["drain", "\udcff", "--deadline", "5"],
        ["explain", "--model", "\udcff"],
    ):
        the_line(run(*arguments))
    assert admin.asked == []


def test_a_tag_cannot_move_the_cursor(admin: "FakeAdmin", run: "Run") -> None:
    admin.says("GET /routes", (200, {"routes": []}, {"ETag": '"\x1b[2J\x9b"'}))
    assert run("routes").stdout == '# version "\ufffd[2J\ufffd"\n\nroutes = []\n'
    route = {"model": "a\x9b\x7f\u2028\U000e0001"}
    assert all(line.isprintable() for line in render([route]).splitlines())
    assert tomllib.loads(render([route])) == {"routes": [route]}


def test_an_unknown_authority_is_told_how_to_be_trusted(admin: "FakeAdmin", run: "Run") -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    admin.secure(context)
    line = the_line(run("workers"))
    assert line.startswith(f"cannot connect to {admin.url}: its certificate is not good: ")
    assert line.endswith("; trust its authority with --cacert")


def test_a_certificate_of_another_name_is_no_matter_of_trust(
    admin: "FakeAdmin", run: "Run", tmp_path: Path
) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("example.org").configure_cert(context)
    admin.secure(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    line = the_line(run("workers", "--cacert", str(tmp_path / "ca.pem")))
    assert "its certificate is not good: IP address mismatch" in line
    assert "--cacert" not in line


def test_a_request_to_explain_has_an_end(admin: "FakeAdmin", run: "Run", tmp_path: Path) -> None:
    whole = tmp_path / "whole.json"
    whole.write_bytes(b" " * BODY_MAX)
    admin.says("POST /route:explain", (400, "no model"))
    assert the_line(run("explain", str(whole))) == "no model (400)"
    too_long = b" " * (BODY_MAX + 1)
    whole.write_bytes(too_long)
    told = f"is longer than {BODY_MAX} bytes: nothing was asked"
    assert told in the_line(run("explain", str(whole)))
    assert told in the_line(run("explain", "-", input=too_long))
    assert told in the_line(run("explain", "/dev/zero"))
    assert len(admin.asked) == 1


@pytest.mark.parametrize(
    "answer",
    [
        *({"data": None}, {}, {"last_reload": None}),
        {"last_reload": {"ok": False, "message": "no such file"}},
    ],
)
@pytest.mark.parametrize("options", [[], ["--json"]], ids=["for people", "json"])
def test_a_reload_that_did_not_happen_is_a_failure(
    admin: "FakeAdmin", run: "Run", answer: dict[str, object], options: list[str]
) -> None:
    admin.says("POST /config:reload", (200, answer))
    result = run("reload", *options)
    assert "does not say that it reloaded" in the_line(result)
    if options:
        assert json.loads(result.stdout) == answer


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device here")
@pytest.mark.parametrize(
    "arguments", [["workers"], ["workers", "--json"], ["routes"], ["reload"]], ids=" ".join
)
def test_a_full_disk_is_one_line(admin: "FakeAdmin", arguments: list[str]) -> None:
    last = {"last_reload": {"ok": True}}
    content = {"data": [], "routes": [], **last}
    for line in ("GET /workers", "GET /routes", "POST /config:reload"):
        admin.says(line, (200, content))
    code = "from pointsman.cli import main; main()"
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments, "--url", admin.url],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.stderr == "pointsman: cannot write the output: No space left on device\n"
    assert done.returncode == 1


def test_a_reader_that_leaves_early_hears_no_complaint(admin: "FakeAdmin") -> None:
    admin.says("GET /workers", (200, {"data": []}))
    code = "from pointsman.cli import main; main()"
    for options in ([], ["--json"]):
        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "wb") as gone:
            done = subprocess.run(
                [sys.executable, "-c", code, "workers", "--url", admin.url, *options],
                stdout=gone,
                stderr=subprocess.PIPE,
                text=True,
            )
        assert (done.returncode, done.stderr) == (1, "")
