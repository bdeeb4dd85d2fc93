"""Hand-offs on the real model, through the gateway: are they exact, and what do they cost?

    python bench/handoff.py equal --prompts 200
    python bench/handoff.py cost --lengths 128 512 1500 --repeat 5

Three engines (unified, prefill, decode) and one gateway run as processes of their own. The gateway has two routes to
the one model: `whole` is answered by the unified worker, `apart` by the other two.

`equal` asks both routes the same, chats and completions, greedy, sampled with a seed of the client's and sampled
without one. In the last case the seed is what the decode worker was told: a hop in front of it reads along. Answers
must agree in every token and in every digit of every log-probability. Exits 1 if one does not, or if one that should
have been handed over was not: the hop must have seen a handle, and the decode worker must have computed one prompt
token. With `--spread` each prompt is asked in one of the six ways, in turn, instead of in all of them.

`cost` measures the time to the first token on both routes, with prompts that no cache knows, one after the other and in
turn. It then makes the calls of a hand-off itself, one by one, for the split: tokenize; prefill (as the prefill worker
counts it, from the arrival of the call to the first token); push (the rest of that call: cutting the state into blocks,
and sending them); resume (until the decode worker's first token).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import signal
import socket
import socketserver
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, cast

import grpc
import httpx

from pointsman.proto import engine_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["KINDS", "PATHS", "Fleet", "Tap", "compare", "cost", "main", "prompts", "text_of_length"]

MODEL = "smollm2"
WHOLE, APART = "whole", "apart"
PATHS = {"chat": "/v1/chat/completions", "text": "/v1/completions"}
ANSWER_TOKENS = 40
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "seed": 1},
    "seeded": SAMPLED | {"seed": 20_261_202},
    "unseeded": SAMPLED,
}
_TIMEOUT_S = 300.0

_CONFIG = """\
[gateway]
listen = "127.0.0.1:0"
health_listen = "127.0.0.1:0"
registry_listen = "127.0.0.1:0"
log_format = "text"
prefill_timeout_s = 120.0

[[gateway.routes]]
model = "whole"
targets = ["unified"]
backends = [{{ model = "smollm2" }}]

[[gateway.routes]]
model = "apart"
targets = ["disaggregated"]
backends = [{{ model = "smollm2" }}]

[[gateway.workers]]
id = "unified"
url = "http://{unified.address}"
model = "smollm2"

[[gateway.workers]]
id = "prefill"
url = "http://{prefill.address}"
model = "smollm2"
role = "prefill"
grpc_address = "{prefill.control}"

[[gateway.workers]]
id = "decode"
url = "http://{tap}"
model = "smollm2"
role = "decode"
grpc_address = "{decode.control}"
kv_address = "{decode.kv}"
"""


# ------------------------------------------------------------------ the fleet


class Engine:
    """A `pointsman engine` process in a role, on free ports."""

    def __init__(self, role: str, options: Sequence[str]) -> None:
        command = [sys.executable, "-m", "pointsman.engine", "--listen", "127.0.0.1:0"]
        command += ["--served-model", MODEL, "--role", role, *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        # The first time the model is fetched before it says anything.
        lines = self.process.stdout.readline() + self.process.stdout.readline()
        found = re.search(r" on (\S+)\n\w+: control on ([^\s,]+)(?:, KV on (\S+))?\n", lines)
        if found is None:
            self.stop()
            raise SystemExit(f"the {role} engine did not start: {lines!r}")
        self.address, self.control = found[1], found[2]
        self.kv: str = found[3] or ""

    def health(self) -> dict[str, Any]:
        return cast("dict[str, Any]", httpx.get(f"http://{self.address}/health").json())

    def stop(self) -> None:
        _stop(self.process)


class Told(NamedTuple):
    """What the decode worker was told with a request; `seed` None: nothing."""

    handle: str
    seed: int | None


class Tap(socketserver.ThreadingTCPServer):
    """A hop that passes on every byte, and remembers what requests told the worker behind it, by request id."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Hop)
        host, _, port = target.rpartition(":")
        self.target = host, int(port)
        self.told: dict[str, Told] = {}
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def address(self) -> str:
        host, port = self.server_address[:2]
        return f"{host!s}:{port}"

    def stop(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Hop(socketserver.StreamRequestHandler):
    server: Tap
    timeout: ClassVar[float | None] = None

    def handle(self) -> None:
        # Either side may end a connection whenever it likes.
        with contextlib.suppress(OSError), socket.create_connection(self.server.target) as worker:
            back = threading.Thread(target=self._answers, args=(worker,), daemon=True)
            back.start()
            while head := self._head():
                fields = dict(
                    line.lower().split(": ", 1)
                    for line in head.decode("latin-1").split("\r\n")[1:-2]
                )
                body = self.rfile.read(int(fields.get("content-length", "0")))
                if fields.get("x-request-id"):
                    told = Told(fields.get("x-tl-kv-handle", ""), json.loads(body).get("seed"))
                    self.server.told[fields["x-request-id"]] = told
                worker.sendall(head + body)
            worker.shutdown(socket.SHUT_WR)
            back.join()

    def _head(self) -> bytes:
        """The next head with its empty line; b"" when the gateway has closed the connection."""
        head = b""
        while line := self.rfile.readline():
            head += line
            if line == b"\r\n":
                return head
        return b""

    def _answers(self, worker: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := worker.recv(65536):
                self.connection.sendall(data)
            self.connection.shutdown(socket.SHUT_RDWR)


class Fleet:
    """The three engines, the hop in front of the decode worker, and the gateway: a context manager."""

    def __init__(self, *engine_options: str) -> None:
        self._options = ("--context", "8192", "--parallel", "4", *engine_options)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with self._stack as stack:
            self.unified = self._engine("unified")
            self.prefill = self._engine("prefill")
            self.decode = self._engine("decode")
            self.tap = Tap(self.decode.address)
            stack.callback(self.tap.stop)
            self.url = f"http://{self._gateway(stack)}"
            # It sends head and body apart, and the second would wait for the first to be acknowledged.
            at_once = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
            transport = httpx.HTTPTransport(socket_options=at_once)
            self.http = stack.enter_context(httpx.Client(timeout=_TIMEOUT_S, transport=transport))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _engine(self, role: str) -> Engine:
        engine = Engine(role, self._options)
        self._stack.callback(engine.stop)
        return engine

    def _gateway(self, stack: contextlib.ExitStack) -> str:
        """Start the gateway; where it listens. What it says is read to its end, or it would stop at a full pipe."""
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="handoff-")))
        config, log = folder / "gateway.toml", folder / "log"
        config.write_text(
            _CONFIG.format(
                unified=self.unified,
                prefill=self.prefill,
                decode=self.decode,
                tap=self.tap.address,
            )
        )
        command = [sys.executable, "-m", "pointsman", "serve", "--config", str(config)]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        stack.callback(_stop, process)
        for _ in range(300):
            if found := re.search(r"serving on ([^\s,]+)", log.read_text(errors="replace")):
                return found[1]
            if process.poll() is not None:
                break
            time.sleep(0.1)
        raise SystemExit(f"the gateway did not start: {log.read_text(errors='replace')[-600:]}")

    def held(self) -> dict[str, int]:
        """What is going on in the engines right now; all zero: nothing runs, nothing is held."""
        decode, prefill = self.decode.health(), self.prefill.health()
        return {
            "handles": decode["kv_handles"],
            "held_blocks": decode["kv_held_blocks"],
            "decoding": decode["running"] + decode["queue_depth"],
            "prefilling": prefill["running"] + prefill["queue_depth"],
        }

    def ask(self, path: str, body: dict[str, Any], request_id: str) -> dict[str, Any]:
        """An answer of the gateway.

        Raises:
            RuntimeError: it is no success.
        """
        response = self.http.post(self.url + path, json=body, headers={"X-Request-Id": request_id})
        if response.status_code != 200:
            raise RuntimeError(f"{request_id}: {response.status_code} {response.text}")
        return cast("dict[str, Any]", response.json())

    def tokenize(self, text: str) -> list[int]:
        """The tokens of a text, as the prefill worker counts them."""
        asked = {"model": MODEL, "text": text, "add_special": True}
        response = self.http.post(f"http://{self.prefill.address}/v1/tokenize", json=asked)
        return cast("list[int]", response.raise_for_status().json()["ids"])


def _stop(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


# ------------------------------------------------------------------ equal

_TASKS = (
    "Write a short poem about",
    "Explain to a child",
    "List three facts about",
    "Tell a story about",
    "Describe the smell of",
    "Write a letter to a friend about",
    "Give advice to someone who is afraid of",
    "Compare yesterday and today, speaking of",
    "Invent a riddle about",
    "What would a sailor say about",
)
_TOPICS = (
    *("rivers", "an old clock", "bread", "the first snow", "bees", "a night train", "maps"),
    *("a quiet library", "salt", "lighthouses", "a lost key", "winter apples", "the moon"),
    *("paper boats", "thunder", "a blue door", "chess", "mountain goats", "glass", "the harbour"),
)
_ASIDE = "Keep in mind that the reader knows little, that it is late, and that the kettle is on. "


def prompts(count: int) -> list[str]:
    """`count` prompts, all different, of a dozen to 200 tokens: they end anywhere in a block and in a chunk."""
    pairs = itertools.product(_TOPICS, _TASKS)
    made = [
        f"{_ASIDE * (i % 9)}{task} {topic}" + ", in verse" * (i % 4) + "."
        for i, (topic, task) in enumerate(pairs)
    ]
    if count > len(made):
        raise ValueError(f"there are {len(made)} prompts")
    # Every so many, so that a few of them differ as much as all.
    return [made[i * len(made) // count] for i in range(count)]


@dataclass
class Verdict:
    """What came of one comparison; `wrong` is empty where all was as it should be."""

    name: str
    wrong: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0


def compare(fleet: Fleet, path: str, kind: str, prompt: str, name: str) -> Verdict:
    """Ask both routes the same; `name` becomes part of the request ids."""
    body: dict[str, Any] = {"max_tokens": ANSWER_TOKENS, **KINDS[kind]}
    if path == "chat":
        body |= {"messages": [{"role": "user", "content": prompt}], "logprobs": True}
    else:
        body |= {"prompt": prompt, "logprobs": 0}
    apart = fleet.ask(PATHS[path], {"model": APART, **body}, f"{name}-{APART}")
    told = fleet.tap.told[f"{name}-{APART}"]
    verdict = Verdict(name)
    if told.seed is None or told.seed != body.get("seed", told.seed):
        verdict.wrong.append(f"the decode worker was told the seed {told.seed}")
    body["seed"] = told.seed
    whole = fleet.ask(PATHS[path], {"model": WHOLE, **body}, f"{name}-{WHOLE}")
    verdict.prompt_tokens = whole["usage"]["prompt_tokens"]
    verdict.tokens = whole["usage"]["completion_tokens"]
    cached = apart["usage"]["prompt_tokens_details"]["cached_tokens"]
    if not told.handle or cached != verdict.prompt_tokens - 1:
        verdict.wrong.append(f"not handed over: handle {told.handle!r}, {cached} tokens resumed")
    verdict.wrong += differences(whole, apart)
    return verdict


def differences(whole: dict[str, Any], apart: dict[str, Any]) -> list[str]:
    """Where two answers differ, in what they say and in what they count.

    >>> one = {"choices": [{"text": "a"}], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
    >>> differences(one, one)
    []
    >>> differences(one, one | {"choices": [{"text": "b"}]})
    ["choices[0].text: 'a', 'b'"]
    """
    wrong = [
        f"{what}: {whole['usage'][what]}, {apart['usage'][what]}"
        for what in ("prompt_tokens", "completion_tokens")
        if whole["usage"][what] != apart["usage"][what]
    ]
    if len(whole["choices"]) != len(apart["choices"]):
        wrong.append("another number of choices")
    for i, (ours, theirs) in enumerate(zip(whole["choices"], apart["choices"], strict=False)):
        wrong += [
            f"choices[{i}].{key}: {ours.get(key)!r}, {theirs.get(key)!r}"
            for key in sorted(ours.keys() | theirs.keys())
            if ours.get(key) != theirs.get(key)
        ]
    return wrong


def equal(fleet: Fleet, count: int, *, clients: int, spread: bool) -> list[Verdict]:
    """Compare `count` prompts, each in every way or, `spread`, in one; `clients` at a time. Says how it is going."""
    verdicts: list[Verdict] = []
    ways = list(itertools.product(PATHS, KINDS))

    def each(item: tuple[int, str]) -> list[Verdict]:
        i, prompt = item
        return [
            compare(fleet, path, kind, prompt, f"{path}-{kind}-{i}")
            for path, kind in ([ways[i % len(ways)]] if spread else ways)
        ]

    with ThreadPoolExecutor(clients) as pool:
        for done, batch in enumerate(pool.map(each, enumerate(prompts(count))), 1):
            verdicts += batch
            wrong = [verdict for verdict in batch if verdict.wrong]
            for verdict in wrong:
                print(f"DIFFERS {verdict.name}: {'; '.join(verdict.wrong)}", flush=True)
            if done % 10 == 0:
                print(f"{done} of {count} prompts", file=sys.stderr, flush=True)
    return verdicts


# ------------------------------------------------------------------ cost


class Split(NamedTuple):
    """The calls of one hand-off, in milliseconds, and how much of the prompt was cached (it should be nothing)."""

    tokenize: float
    prefill: float
    push: float
    resume: float
    cached: int


@dataclass
class Cost:
    """Times to the first token, in milliseconds, one entry for each repeat."""

    length: int
    unified: list[float] = field(default_factory=list)
    disaggregated: list[float] = field(default_factory=list)
    splits: list[Split] = field(default_factory=list)


_FRESH = itertools.count(1)
_WORDS = (" river", " house", " night", " water", " light", " story", " small", " green")


def text_of_length(fleet: Fleet, length: int) -> str:
    """A text of exactly `length` tokens that no engine has seen: it differs from all others in its first block."""
    start = f"Number {next(_FRESH)} of {time.time_ns()}:"
    text = start
    while missing := length - len(fleet.tokenize(text)):
        if missing < 0:
            raise ValueError(f"a text of {length} tokens is too short")
        text += "".join(itertools.islice(itertools.cycle(_WORDS), missing))
    return text


def first_token_ms(
    fleet: Fleet, url: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> float:
    """Milliseconds from the sending of a streamed completion to its first event; the rest is read, too."""
    began = time.perf_counter()
    first = 0.0
    with fleet.http.stream("POST", url + PATHS["text"], json=body, headers=headers) as response:
        for line in response.iter_lines():
            if response.status_code == 200 and line.startswith("data: {") and not first:
                first = time.perf_counter()
    if not first:
        raise RuntimeError(f"no token came, status {response.status_code}")
    return (first - began) * 1000


def split(fleet: Fleet, text: str, name: str) -> Split:
    """Make the calls of a hand-off as the gateway does, and time each."""
    started = time.perf_counter()
    ids = fleet.tokenize(text)
    tokenized = time.perf_counter()
    request = engine_pb2.PrefillRequest(
        request_id=name,
        model=MODEL,
        prompt_ids=ids,
        decode_target=fleet.decode.kv,
        sampling=engine_pb2.SamplingParams(max_new_tokens=1),
    )
    with grpc.insecure_channel(fleet.prefill.control) as channel:
        grpc.channel_ready_future(channel).result(10)
        call = channel.unary_unary(
            "/tl.engine.v1.EngineControl/Prefill",
            request_serializer=engine_pb2.PrefillRequest.SerializeToString,
            response_deserializer=engine_pb2.PrefillResponse.FromString,
        )
        sent = time.perf_counter()
        answer = call(request, timeout=_TIMEOUT_S)
        pushed = time.perf_counter()
    body = {"model": MODEL, "prompt": text, "max_tokens": 1, "temperature": 0, "stream": True}
    headers = {"X-TL-KV-Handle": answer.handle.handle_id}
    resume = first_token_ms(fleet, f"http://{fleet.decode.address}", body, headers)
    return Split(
        tokenize=(tokenized - started) * 1000,
        prefill=answer.ttft_ms,
        push=(pushed - sent) * 1000 - answer.ttft_ms,
        resume=resume,
        cached=answer.cached_prompt_tokens,
    )


def cost(fleet: Fleet, length: int, repeat: int) -> Cost:
    """Measure prompts of `length` tokens, each way in turn, so that a slow minute of the machine hits all of them."""
    measured = Cost(length)
    ask = {"max_tokens": 1, "temperature": 0, "stream": True}
    for _ in range(repeat):
        for model, times in ((WHOLE, measured.unified), (APART, measured.disaggregated)):
            body = {"model": model, "prompt": text_of_length(fleet, length), **ask}
            times.append(first_token_ms(fleet, fleet.url, body))
        text = text_of_length(fleet, length)
        measured.splits.append(split(fleet, text, f"split-{next(_FRESH)}"))
    return measured


def table(costs: Sequence[Cost]) -> Iterator[str]:
    """The medians as a Markdown table, in milliseconds; the least and the most of the totals in parentheses."""
    yield "| prompt tokens | unified | disaggregated | tokenize | prefill | push | resume |"
    yield "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for each in costs:
        totals = [
            f"{statistics.median(times):.0f} ({min(times):.0f} to {max(times):.0f})"
            for times in (each.unified, each.disaggregated)
        ]
        parts = [
            f"{statistics.median(part):.1f}" for part in list(zip(*each.splits, strict=True))[:4]
        ]
        yield f"| {' | '.join([str(each.length), *totals, *parts])} |"


# ------------------------------------------------------------------ command line


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a GGUF file, instead of the engine's default")
    commands = parser.add_subparsers(dest="command", required=True)
    equality = commands.add_parser("equal")
    equality.add_argument("--prompts", type=int, default=200)
    equality.add_argument("--clients", type=int, default=4, help="prompts at a time")
    equality.add_argument("--spread", action="store_true", help="one way for each prompt")
    costs = commands.add_parser("cost")
    costs.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 1500])
    costs.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args(arguments)
    with Fleet(*(("--model", str(args.model)) if args.model else ())) as fleet:
        if args.command == "cost":
            print("\n".join(table([cost(fleet, each, args.repeat) for each in args.lengths])))
            return 0
        began = time.monotonic()
        verdicts = equal(fleet, args.prompts, clients=args.clients, spread=args.spread)
        seconds, held = time.monotonic() - began, fleet.held()
    wrong = sum(bool(verdict.wrong) for verdict in verdicts)
    lengths = [verdict.prompt_tokens for verdict in verdicts]
    print(
        f"equal: {args.prompts} prompts of {min(lengths)} to {max(lengths)} tokens, {len(verdicts)} pairs of answers,"
        f" {sum(verdict.tokens for verdict in verdicts)} tokens each way, {wrong} differ, {seconds:.0f} s;"
        f" afterwards {held}"
    )
    return 1 if wrong or any(held.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
