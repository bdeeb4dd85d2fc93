"""A few requests of every kind against a gateway over real engines, and the death of one of them in the middle.

Engines with the same model and sampler give the same text for the same request, so every answer here has exactly one
right text, and whatever is spliced, lost or repeated shows. Uses the standard library's HTTP client, so that it proves
nothing about our own.
"""

import http.client
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

__all__ = ["Trial"]

QUESTION = "Tell me a story about a lighthouse."
CHAT = "/v1/chat/completions"
LIMIT_S = 120
BYSTANDERS = 4


class Trial:
    """Asks, compares, and keeps the score."""

    def __init__(self, console: Console, url: str, model: str) -> None:
        self._console = console
        self._address = urlsplit(url).netloc
        self._model = model
        self._failures = 0
        self._greedy = ""

    def kinds(self) -> None:
        """Ask once in every way there is."""
        status, answer = self._post(CHAT, self._chat())
        self._greedy = _text(answer)
        self._console.print(f'asked "{QUESTION}"; the model: "{self._greedy}"', highlight=False)
        self._expect("a chat answer", status == 200 and len(self._greedy) > 40)
        streamed = list(self._stream(self._chat()))
        self._expect("the same chat streamed is the same text", _joined(streamed) == self._greedy)
        self._expect("a stream ends with [DONE]", streamed[-1:] == ["[DONE]"])
        sampled = self._chat(temperature=0.9, seed=7)
        with ThreadPoolExecutor(BYSTANDERS) as threads:
            asked = [threads.submit(self._post, CHAT, sampled) for _ in range(BYSTANDERS)]
            texts = {_text(each.result()[1]) for each in asked}
        self._expect("one seed gives one text, whoever answers", len(texts) == 1)
        other = _text(self._post(CHAT, self._chat(temperature=0.9, seed=8))[1])
        self._expect("another seed gives another", other not in texts)
        prompt = {"model": self._model, "prompt": "Once upon a time", "max_tokens": 16}
        status, answer = self._post("/v1/completions", prompt | {"temperature": 0})
        completed = status == 200 and answer["usage"]["completion_tokens"] == 16
        self._expect("a plain completion", completed)
        status, models = self._get("/v1/models")
        ids = [each["id"] for each in models["data"]]
        self._expect("the model is listed", status == 200 and ids == [self._model])
        status, answer = self._post(CHAT, self._chat(model="no-such-model"))
        code = answer["error"]["code"]
        self._expect("an unknown model is 404", (status, code) == (404, "model_not_found"))
        status, answer = self._post(CHAT, b"{")
        self._expect("bad JSON is 400", (status, set(answer)) == (400, {"error"}))

    def death(self, kill: Callable[[], str]) -> None:
        """Kill a worker under a stream and some plain requests; `kill` returns its name."""
        with ThreadPoolExecutor(BYSTANDERS) as threads:
            stream = self._stream(self._chat(max_tokens=400))
            seen = [next(stream) for _ in range(6)]
            plain = [threads.submit(self._post, CHAT, self._chat()) for _ in range(BYSTANDERS)]
            seen += [next(stream) for _ in range(2)]
            victim = kill()
            self._console.print(
                f"killed [bold]{victim}[/] under a stream and {BYSTANDERS} plain requests"
            )
            seen += stream
            self._expect("the broken stream ends with the error event", _is_error(seen[-1]))
            text = _joined(seen[:-1])
            right = text.startswith(self._greedy) or self._greedy.startswith(text)
            self._expect("what came before it is not spliced", bool(text) and right)
            self._expect("every plain request is answered, and right", all(map(self._right, plain)))
        status, answer = self._post(CHAT, self._chat())
        survives = (status, _text(answer)) == (200, self._greedy)
        self._expect("the survivor answers the first question alike", survives)

    def verdict(self) -> int:
        """Return 0 if everything was right, else 1, and say so."""
        if self._failures:
            self._console.print(f"[red]{self._failures} things went wrong[/]")
            return 1
        self._console.print("[green]every answer was right[/]")
        return 0

    def _expect(self, what: str, right: bool) -> None:
        self._failures += not right
        self._console.print(f"  [green]ok[/]     {what}" if right else f"  [red]wrong[/]  {what}")

    def _right(self, asked: "Future[tuple[int, Any]]") -> bool:
        status, answer = asked.result()
        return (status, _text(answer)) == (200, self._greedy)

    def _chat(self, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": QUESTION}]
        usual = {"model": self._model, "messages": messages, "max_tokens": 48, "temperature": 0}
        return usual | fields

    def _connect(self) -> "closing[http.client.HTTPConnection]":
        return closing(http.client.HTTPConnection(self._address, timeout=LIMIT_S))

    def _get(self, path: str) -> tuple[int, Any]:
        with self._connect() as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, json.load(response)

    def _post(self, path: str, body: dict[str, Any] | bytes) -> tuple[int, Any]:
        content = body if isinstance(body, bytes) else json.dumps(body)
        with self._connect() as connection:
            connection.request("POST", path, content, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, json.load(response)

    def _stream(self, body: dict[str, Any]) -> Iterator[str]:
        """Yield the data of every event, as it comes."""
        with self._connect() as connection:
            connection.request("POST", CHAT, json.dumps(body | {"stream": True}))
            for line in connection.getresponse():
                if line.startswith(b"data: "):
                    yield line[6:].decode().strip()


def _text(answer: Any) -> str:
    try:
        text: str = answer["choices"][0]["message"]["content"]
    except (KeyError, TypeError):
        return ""
    return text


def _joined(events: list[str]) -> str:
    deltas = [json.loads(each)["choices"][0]["delta"] for each in events if each != "[DONE]"]
    return "".join(delta.get("content") or "" for delta in deltas)


def _is_error(event: str) -> bool:
    return event != "[DONE]" and json.loads(event).get("error", {}).get("type") == "server_error"
