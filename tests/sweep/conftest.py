"""A server of models that know the answers of a table, over a real socket."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Body = dict[str, Any]
Script = Callable[[str, Body], tuple[int, Body | bytes]]
"""What a server answers to a path and a body: a status, and a body."""


def completion(
    path: str, text: str | None, logprobs: list[float | None], *, margin: float = 1.0
) -> Body:
    """The answer of a model that says `text`, with the logprobs in the form of the path."""
    usage = {"prompt_tokens": 7, "completion_tokens": len(logprobs)}
    if path == "/v1/completions":
        top = [None if p is None else {"a": p, "b": p - margin} for p in logprobs]
        form: Body = {"token_logprobs": logprobs, "top_logprobs": top}
        return {"choices": [{"text": text, "logprobs": form}], "usage": usage}
    content = [
        {
            "token": "a",
            "logprob": p,
            "top_logprobs": [] if p is None else [{"logprob": p}, {"logprob": p - margin}],
        }
        for p in logprobs
    ]
    choice = {"message": {"content": text}, "logprobs": {"content": content}}
    return {"choices": [choice], "usage": usage}


@dataclass
class FakeModels:
    """`script` answers; `asked` are the requests so far, `most` how many were open at a time."""

    url: str
    script: Script
    asked: list[tuple[str, Body]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    open: int = 0
    most: int = 0

    def of(self, model: str) -> list[Body]:
        return [body for _, body in self.asked if body["model"] == model]


@pytest.fixture
def models() -> Iterator[Callable[[Script], FakeModels]]:
    """A factory: `models(script)` starts a server on a free port."""
    servers: list[tuple[ThreadingHTTPServer, threading.Thread]] = []

    def start(script: Script) -> FakeModels:
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # head and body are two writes, 40 ms apart otherwise

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with lock:
                    fake.asked.append((self.path, body))
                    fake.keys.append(self.headers["authorization"])
                    fake.open += 1
                    fake.most = max(fake.most, fake.open)
                status, answer = fake.script(self.path, body)
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                with lock:
                    fake.open -= 1
                self.send_response(status)
                if status == 429:
                    self.send_header("retry-after", "3")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                # A sweep that gives up leaves without the rest of its answers.
                if not isinstance(sys.exception(), ConnectionError):
                    super().handle_error(request, client_address)

        server = Server(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        fake = FakeModels(f"http://127.0.0.1:{server.server_address[1]}", script)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return fake

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def says() -> Callable[..., Body]:
    return completion
