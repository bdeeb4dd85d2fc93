"""The instruments themselves: load.c must see every kind of bad answer, mock_engine.c read every good request."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler"),
]

BENCH = Path(__file__).resolve().parents[2] / "bench"
DONE = b"data: [DONE]\n\n"
ERROR_EVENT = (
    b'data: {"error":{"message":"the upstream stream failed",'
    b'"type":"server_error","param":null,"code":null}}\n\n'
)


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("bench")
    for name in ("load", "mock_engine"):
        source = BENCH / f"{name}.c"
        subprocess.run(["gcc", "-std=c11", "-O1", "-o", build / name, source], check=True)
    return build


def event(sequence: int, total: int = 2, mark: str = "a1-7", id_mark: str | None = None) -> bytes:
    fingerprint = f"{mark}/{sequence}/{total}/1"
    return f'data: {{"id":"{id_mark or mark}","system_fingerprint":"{fingerprint}"}}\n\n'.encode()


def chunked(*parts: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + end


def sized(body: bytes, status: bytes = b"200 OK", missing: int = 0) -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body) + missing, body)


def read_request(client: socket.socket) -> None:
    data = b""
    while b"\r\n\r\n" not in data:
        data += client.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += client.recv(65536)


def verdict(programs: Path, answer: bytes, *, stream: bool) -> dict[str, Any]:
    """What load.c reports when a server gives this answer, byte by byte, and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                read_request(client)
                for i in range(len(answer)):
                    client.sendall(answer[i : i + 1])

        server = threading.Thread(target=serve)
        server.start()
        port = str(listener.getsockname()[1])
        options = ["--requests", "1", "--connections", "1", "--stream-share", str(int(stream))]
        done = subprocess.run(
            [programs / "load", "--port", port, *options], capture_output=True, check=True
        )
        server.join()
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (chunked(event(0), event(1), DONE), None),
        (chunked(event(0)[:20], event(0)[20:] + event(1)[:3], event(1)[3:] + DONE), None),
        (chunked(event(0), event(1), DONE, end=b""), "cut"),
        (chunked(event(0), event(1)), "no_done"),
        (chunked(event(0), DONE), "sequence"),
        (chunked(event(0), event(0), event(1), DONE), "sequence"),
        (chunked(event(1), DONE), "sequence"),
        (chunked(event(0), event(1, mark="b2-7"), DONE), "spliced"),
        (chunked(event(0), event(1, mark="a1-8"), DONE), "spliced"),
        (chunked(event(0), event(1, id_mark="b2-7"), DONE), "spliced"),
        (chunked(event(0), event(1), DONE, DONE), "malformed"),
        (chunked(event(0), event(1)[:9], DONE), "malformed"),
        (chunked(event(0), ERROR_EVENT, DONE), "malformed"),
        (chunked(ERROR_EVENT), "uncommitted"),
        (chunked(event(0), b'data: {"error":"another"}\n\n'), "malformed"),
        (b"", "no_answer"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "bad_http"),
        (sized(b"{}", b"502 Bad Gateway"), "status"),
    ],
)
def test_a_stream_counts_only_if_it_is_whole_in_sequence_and_of_one_engine(
    programs: Path, answer: bytes, fault: str | None
) -> None:
    report = verdict(programs, answer, stream=True)
    assert report["faults"] == ({fault: 1} if fault else {})
    assert (report["streams"], report["broken_streams"]) == (0 if fault else 1, 0)


def test_a_stream_ended_by_the_error_event_counts_as_broken_and_not_as_bad(programs: Path) -> None:
    report = verdict(programs, chunked(event(0), ERROR_EVENT), stream=True)
    assert (report["errors"], report["streams"], report["broken_streams"]) == (0, 0, 1)


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (sized(b'{"id":"a1-7","system_fingerprint":"a1-7"}'), None),
        (sized(b'{"id":"a1-7","system_fingerprint":"b1-7"}'), "spliced"),
        (sized(b'{"id":"a1-7","system_fingerprint":"a1-7"}', missing=1), "cut"),
        (sized(b'{"id":"a1-7","system_fin'), "malformed"),
        (sized(b"{}"), "malformed"),
        (sized(b"{}", b"429 Too Many Requests"), "status"),
    ],
)
def test_a_completion_counts_only_if_it_is_whole_and_of_one_engine(
    programs: Path, answer: bytes, fault: str | None
) -> None:
    report = verdict(programs, answer, stream=False)
    assert report["faults"] == ({fault: 1} if fault else {})
    assert report["plain"] == (0 if fault else 1)


@pytest.fixture
def engine(programs: Path) -> Iterator[socket.socket]:
    """A connection to a mock engine that sends three events a stream, all at once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    options = ["--port", str(port), "--events", "3", "--tick-ms", "0"]
    with subprocess.Popen([programs / "mock_engine", *options]) as process:
        try:
            client = None
            while client is None:
                assert process.poll() is None
                try:
                    client = socket.create_connection(("127.0.0.1", port), timeout=10)
                except ConnectionRefusedError:
                    continue
            with client:
                yield client
        finally:
            process.kill()


def read_until(client: socket.socket, end: bytes) -> bytes:
    data = b""
    while not data.endswith(end):
        part = client.recv(65536)
        assert part, data
        data += part
    return data


def test_the_mock_engine_answers_pipelined_requests_in_order(engine: socket.socket) -> None:
    stream = b'{"stream" : true}'
    plain = b'{"messages":[{"content":"\\"stream\\": true"}]}'
    posts = [
        b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(b), b) for b in (stream, plain)
    ]
    engine.sendall(posts[0] + posts[1] + b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n")
    answer = read_until(engine, b"\r\n\r\n{}")
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.index(b"[DONE]") < answer.index(b'"chat.completion"')
    assert engine.recv(1) == b""


def test_the_mock_engine_reads_a_chunked_request_byte_by_byte(engine: socket.socket) -> None:
    engine.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    request = (
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        b'6;x=y\r\n{"stre\r\nB\r\nam": true }\r\n0\r\nTrailer: t\r\n\r\n'
    )
    for i in range(len(request)):
        engine.sendall(request[i : i + 1])
    assert read_until(engine, b"0\r\n\r\n").count(b"data: {") == 3


def test_the_mock_engine_asks_for_a_body_that_is_held_back(engine: socket.socket) -> None:
    engine.sendall(b"POST / HTTP/1.1\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
    assert read_until(engine, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    engine.sendall(b"{}")
    assert b'"chat.completion"' in read_until(engine, b"}")


@pytest.mark.parametrize("size", [80, 100, 255])
@pytest.mark.parametrize("stream", [True, False])
def test_short_bodies_are_as_long_as_asked(programs: Path, size: int, stream: bool) -> None:
    """A stream's has the shorter of the two words."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        options = ["--body-bytes", str(size), "--stream-share", "1" if stream else "0"]
        command = [str(programs / "load"), "--port", port, *options, "--requests", "1"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as one:
            client, _ = listener.accept()
            with client:
                sent = b""
                while not sent.endswith(b"}"):
                    sent += client.recv(65536)
            one.wait(20)
    body = sent.partition(b"\r\n\r\n")[2]
    assert len(body) == (size - 1 if stream else size)
    assert json.loads(body)["stream"] is stream


def test_one_process_stands_for_the_engines_on_several_ports(programs: Path) -> None:
    count, tries = 3, 0
    while True:  # a port after a free one may be taken
        with socket.create_server(("127.0.0.1", 0)) as listener:
            first = listener.getsockname()[1]
        options = ["--port", str(first), "--ports", str(count)]
        with subprocess.Popen(
            [programs / "mock_engine", *options], stderr=subprocess.DEVNULL
        ) as process:
            try:
                answered = [ask(process, first + i) for i in range(count)]
            finally:
                process.kill()
        if all(answered):
            return
        tries += 1
        assert tries < 20


def ask(process: subprocess.Popen[bytes], port: int) -> bool:
    """Whether something on that port answers before the process ends."""
    while process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
                client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
                return bool(read_until(client, b"{}"))
        except ConnectionRefusedError:
            continue
    return False
