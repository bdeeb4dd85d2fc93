"""Real vLLM on the CPU, two instances that hand over by NIXL, and gateways in front of them.

This takes minutes and gigabytes, so the ordinary run leaves it out: `make interop` sets vLLM up, says where it is in
$POINTSMAN_INTEROP, and runs it. With $POINTSMAN_RECORD=1 the golden bytes of the ordinary suite are recorded anew.
"""

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from pointsman.testing.gateways import Served, served

FOLDER = os.environ.get("POINTSMAN_INTEROP", "")
collect_ignore_glob = [] if FOLDER else ["test_*.py"]
if not os.environ.get("POINTSMAN_RECORD"):
    collect_ignore_glob.append("test_vllm_recording.py")

MODEL = "smollm2"
START_S = 400.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "UCX_TLS": "tcp,self,sm",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}
OPTIONS = (
    *("--max-model-len", "1024", "--max-num-seqs", "8", "--block-size", "32", "--enforce-eager"),
    *("--dtype", "float32", "--generation-config", "vllm", "--enable-prompt-tokens-details"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)
CONNECTOR = '{"kv_connector":"NixlConnector","kv_role":"%s","kv_buffer_device":"cpu"}'

EVENTS = (
    '{"enable_kv_cache_events":true,"publisher":"zmq",'
    '"endpoint":"tcp://*:%d","replay_endpoint":"tcp://*:%d"}'
)


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


class Vllm:
    """`vllm serve` with a role of the NIXL connector, "" for none. Either role serves whole requests as well.

    With `events` it publishes its KV events there, and answers replays.
    """

    def __init__(self, role: str, log: Path, *, events: bool = False) -> None:
        self._role = role
        self._log = log
        self._port, self._side = free_port(), free_port()
        self.events, self.replay = (free_port(), free_port()) if events else (0, 0)
        self.address = f"127.0.0.1:{self._port}"
        self.url = f"http://{self.address}"
        self.start()

    def start(self) -> None:
        """Start it, again on the same port; `ready` waits."""
        command = [f"{FOLDER}/venv/bin/vllm", "serve", f"{FOLDER}/{MODEL}", *OPTIONS]
        command += ["--host", "127.0.0.1", "--port", str(self._port), "--served-model-name", MODEL]
        if self._role:
            command += ["--kv-transfer-config", CONNECTOR % self._role]
        if self.events:
            command += ["--kv-events-config", EVENTS % (self.events, self.replay)]
        side = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(self._side)}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **ENVIRONMENT, **side},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ready(self) -> None:
        """Wait until it answers, the first and slow request included."""
        deadline = time.monotonic() + START_S
        while not self._healthy():
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            assert time.monotonic() < deadline, self._log.read_text()[-3000:]
            time.sleep(0.5)
        body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
        httpx.post(f"{self.url}/v1/completions", json=body, timeout=300).raise_for_status()

    def end(self, how: signal.Signals) -> None:
        """End it and what it started."""
        os.killpg(self._process.pid, how)
        self._process.wait(60)

    def figure(self, name: str) -> float:
        """The sum of all samples of a metric, as it is now."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        assert lines, f"no metric {name}"
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False


class Pair:
    """A prefill and a decode instance."""

    def __init__(self, folder: Path) -> None:
        self.prefill = Vllm("kv_producer", folder / "prefill.log")
        self.decode = Vllm("kv_consumer", folder / "decode.log")

    def __iter__(self) -> Iterator[Vllm]:
        yield self.prefill
        yield self.decode


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    running = Pair(tmp_path_factory.mktemp("vllm"))
    try:
        for each in running:
            each.ready()
        yield running
    finally:
        for each in running:
            each.end(signal.SIGTERM)


@pytest.fixture(scope="module")
def publishing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Vllm, Vllm]]:
    """Two instances that publish their KV events."""
    folder = tmp_path_factory.mktemp("publishing")
    a, b = (Vllm("", folder / f"{name}.log", events=True) for name in "ab")
    try:
        for each in (a, b):
            each.ready()
        yield a, b
    finally:
        for each in (a, b):
            each.end(signal.SIGTERM)


class Front:
    """A gateway process, and a client of it."""

    def __init__(self, gateway: Served, client: httpx.AsyncClient) -> None:
        self.gateway = gateway
        self.client = client

    async def figure(self, name: str) -> float:
        """The sum of all samples of a metric of the gateway; `name` may go on into the labels."""
        host, port = self.gateway.health_address
        text = (await self.client.get(f"http://{host}:{port}/metrics")).text
        return sum(
            float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name)
        )


@pytest.fixture
def front(tmp_path: Path) -> Callable[..., object]:
    """A factory: `front(config, workers=2)` runs `pointsman serve` and waits until so many workers are up."""

    @asynccontextmanager
    async def run(config: str, *, workers: int = 2) -> AsyncIterator[Front]:
        source = tmp_path / "gateway.toml"
        source.write_text(config)
        async with served(source) as gateway:
            host, port = gateway.address
            base = f"http://{host}:{port}"
            async with httpx.AsyncClient(base_url=base, timeout=300) as client:
                try:
                    async with asyncio.timeout(30):
                        for _ in range(workers):
                            await gateway.says(") is up")
                    yield Front(gateway, client)
                except BaseException as error:
                    gateway.process.kill()
                    assert gateway.process.stderr is not None
                    error.add_note((await gateway.process.stderr.read()).decode()[-6000:])
                    raise

    return run
