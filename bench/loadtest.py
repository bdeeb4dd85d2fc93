"""A load by aiperf, as its users install it, through a gateway in front of two real engines: is its report whole?

    python bench/loadtest.py

Two llama.cpp servers with the project's default model, which the gateway polls, answer streamed chats. The prompts are
a file, the tokens are counted by the servers, and the tokenizer that aiperf wants all the same is made out of the
model's file: nothing needs a model hub.

It says nothing of speed: a model on the CPU is slow, and whatever else the machine does shows in the figures. It needs
the extras `engine` and `dev`; aiperf is installed from PyPI into an environment of its own the first time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import msgspec
from compare import CACHE
from rich.console import Console

from pointsman.engine.weights import cache_folder, default_weights
from pointsman.testing.client import Client, get
from pointsman.testing.gateways import served
from pointsman.testing.llamacpp import llama_server
from pointsman.testing.vocabulary import tokenizer_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["MEASURED", "Measured", "Run", "objections", "table"]

AIPERF = "aiperf==0.13.0"
MODEL = "smol"
REPORT = "profile_export_aiperf.json"
PATIENCE_S = 600.0
# Whoever asks a hub fails at once. HF_HUB_OFFLINE would not do: with it aiperf takes no folder for a tokenizer.
NO_HUB = {"HF_ENDPOINT": "http://127.0.0.1:9"}
CONFIG = """\
[gateway]
access_log = "off"

"""
WORKER = """\
[[gateway.workers]]
id = "{name}"
url = "http://{address}"
dialect = "llamacpp"
poll_interval_s = 0.5
poll_timeout_s = 10.0

"""

MEASURED = (
    "request_latency",
    "time_to_first_token",
    "inter_token_latency",
    "usage_prompt_tokens",
    "usage_completion_tokens",
)
"""What the report has to have of every request."""


class Measured(msgspec.Struct, frozen=True):
    """What aiperf says of one thing that it measured of `count` requests."""

    unit: str
    avg: float
    p50: float = 0.0
    p99: float = 0.0
    max: float = 0.0
    sum: float = 0.0
    count: int = 0


class Run(msgspec.Struct, frozen=True):
    """One load: what aiperf reported, and the tokens that each engine counted meanwhile."""

    requests: int
    report: Mapping[str, msgspec.Raw]
    computed: Mapping[str, int]

    def measured(self, name: str) -> Measured | None:
        """Return one figure of the report, None where it is missing."""
        found = self.report.get(name)
        return None if found is None else msgspec.json.decode(found, type=Measured)


def objections(run: Run) -> list[str]:
    """Say why a report is not whole; nothing is the good answer."""
    said = []
    count = run.measured("request_count")
    answered = 0.0 if count is None else count.avg
    if answered != run.requests:
        said.append(f"{run.requests} requests were asked for, {answered:g} were answered")
    failed = bytes(run.report.get("error_summary", msgspec.Raw(b"nothing said"))).decode()
    if failed != "[]":
        said.append(f"errors: {failed}")
    for name in MEASURED:
        found = run.measured(name)
        if found is None:
            said.append(f"{name} is missing")
        elif found.count != run.requests or found.avg <= 0:
            said.append(f"{name}: {found.count} requests have one, {found.avg:g} on average")
    tokens = run.measured("usage_completion_tokens")
    computed = sum(run.computed.values())
    if tokens is not None and tokens.sum != computed:
        said.append(
            f"the clients were told of {tokens.sum:g} tokens, the engines computed {computed}"
        )
    said += [f"{name} computed nothing" for name, count in run.computed.items() if not count]
    return said


def table(run: Run) -> str:
    """Return the figures as a Markdown table."""
    rows = ["| | mean | p50 | p99 | max |", "|---|---|---|---|---|"]
    for name in MEASURED:
        if found := run.measured(name):
            figures = (found.avg, found.p50, found.p99, found.max)
            cells = " | ".join(f"{figure:.1f}" for figure in figures)
            rows.append(f"| {name} ({found.unit}) | {cells} |")
    return "\n".join(rows)


def program(cache: Path) -> Path:
    """Return aiperf in its own environment below `cache`, which is made first where it is missing."""
    home = cache / AIPERF
    if not (home / "installed").exists():
        print(f"{AIPERF}: installing into a virtual environment of its own ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
        subprocess.run([home / "bin" / "pip", "install", "-q", AIPERF], check=True)
        (home / "installed").touch()
    return home / "bin" / "aiperf"


def tokenizer(weights: Path, folder: Path) -> Path:
    """Write the tokenizer of a model into a new folder, as Hugging Face's libraries read it, and return the folder."""
    folder.mkdir()
    made = tokenizer_json(gguf.GGUFReader(weights).fields)
    (folder / "tokenizer.json").write_bytes(msgspec.json.encode(made))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def prompts(count: int) -> str:
    """Return the chats: half of them begin alike, as conversations with one system prompt do."""
    common = "You are the guide of a museum of clocks. Answer in a few plain words. "
    rows = []
    for number in range(count):
        text = f"What was built in {1500 + 7 * number}, and what is {number} times three?"
        rows.append(msgspec.json.encode({"text": common + text if number % 2 else text}).decode())
    return "\n".join(rows)


async def figure(address: str, name: str) -> int:
    """Return a metric of an engine as it is now."""
    host, _, port = address.partition(":")
    async with Client((host, int(port))) as client:
        answer = await client.ask(get("/metrics"))
    lines = answer.body.decode().splitlines()
    return int(next(float(line.split()[1]) for line in lines if line.startswith(f"{name} ")))


async def profile(command: Sequence[str], log: Path) -> int:
    """Run aiperf to its end, and return its exit status; its processes end with it."""
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | NO_HUB | {"TMPDIR": str(log.parent)},
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(PATIENCE_S):
                status = await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return status


async def load(aiperf: Path, weights: Path, scratch: Path, args: argparse.Namespace) -> Run:
    """Start engines and gateway, run the load once, and stop everything."""
    with contextlib.ExitStack() as stack:
        engines = {name: stack.enter_context(llama_server(weights)) for name in ("a", "b")}
        config, chats = scratch / "gateway.toml", scratch / "chats.jsonl"
        config.write_text(
            CONFIG + "".join(WORKER.format(name=name, address=at) for name, at in engines.items())
        )
        chats.write_text(prompts(args.requests))
        async with served(config) as gateway:
            async with asyncio.timeout(60):
                for _ in engines:
                    await gateway.says(") is up")
            host, port = gateway.address
            options = {
                "--model": MODEL,
                "--url": f"http://{host}:{port}",
                "--endpoint-type": "chat",
                "--tokenizer": str(tokenizer(weights, scratch / "tokenizer")),
                "--input-file": str(chats),
                "--custom-dataset-type": "single_turn",
                "--request-count": str(args.requests),
                "--concurrency": str(args.concurrency),
                "--extra-inputs": f"max_tokens:{args.tokens}",
                "--artifact-dir": str(args.artifacts or scratch / "artifacts"),
                "--ui": "none",
            }
            words = [word for option in options.items() for word in option]
            command = [str(aiperf), "profile", "--streaming", "--use-server-token-count", *words]
            print(" ".join(command))
            log = scratch / "aiperf.log"
            if status := await profile(command, log):
                raise SystemExit(f"aiperf ended with {status}:\n{log.read_text()[-4000:]}")
        report = Path(options["--artifact-dir"]) / REPORT
        return Run(
            requests=args.requests,
            report=msgspec.json.decode(report.read_bytes(), type=dict[str, msgspec.Raw]),
            computed={
                name: await figure(at, "llamacpp:tokens_predicted_total")
                for name, at in engines.items()
            },
        )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=24, help="most tokens of an answer")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where aiperf is installed")
    parser.add_argument("--artifacts", type=Path, help="where what aiperf writes is kept")
    args = parser.parse_args(arguments)
    weights = default_weights(cache_folder(os.environ), Console(stderr=True))
    with tempfile.TemporaryDirectory() as scratch:
        run = asyncio.run(load(program(args.cache), weights, Path(scratch), args))
    print(table(run))
    print(f"tokens that the engines computed: {dict(run.computed)}")
    said = objections(run)
    for text in said:
        print("FAILS " + text)
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
