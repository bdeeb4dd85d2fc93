"""Hand-offs of the real model that lose somebody: killed workers, a client that leaves, a gateway that is told to stop.

Engines and gateway are processes of their own. Whoever is lost, the client has one complete answer, equal to that of a
unified worker, or one clean error; and whoever is left computes nothing and holds nothing for a request that is over.
"""

import contextlib
import http.client
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

pytest.importorskip("xllamacpp", reason="needs the [engine] extra: pip install 'pointsman[engine]'")
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(120)]

PATH = "/v1/completions"
SOON_S = 1.0
"""How long whoever is left may compute for a request that is over."""
WITHIN_S = 20.0
SIZE = ("--context", "512", "--parallel", "1", "--threads", "1")
COMPUTES = ("running", "queue_depth")
HOLDS = ("kv_handles", "kv_held_blocks")

CONFIG = """\
[gateway]
listen = "127.0.0.1:0"
health_listen = "127.0.0.1:0"
registry_listen = "127.0.0.1:0"
drain_deadline_s = {deadline_s}

[[gateway.routes]]
model = "apart"
targets = ["disaggregated"]
backends = [{{ model = "smollm2" }}]

[[gateway.routes]]
model = "either"
targets = ["disaggregated", "unified"]
backends = [{{ model = "smollm2" }}]
"""
WORKER = """
[[gateway.workers]]
id = "{id}"
url = "{url}"
model = "smollm2"
role = "{role}"
grpc_address = "{control}"
"""


class Told(NamedTuple):
    """What a client was told: the events of a stream, without what is different for each, or one error."""

    status: int
    events: list[Any]
    done: bool
    cached: int | None
    error: dict[str, Any] | None


class Gateway:
    def __init__(self, folder: Path, engines: Sequence[Any], deadline_s: float) -> None:
        config, self._log = folder / "gateway.toml", folder / "log"
        workers = ""
        for i, engine in enumerate(engines):
            workers += WORKER.format(id=f"{engine.role}-{i}", **vars(engine))
            workers += f'kv_address = "{engine.kv}"\n' if engine.kv else ""
        config.write_text(CONFIG.format(deadline_s=deadline_s) + workers)
        command = [sys.executable, "-m", "pointsman", "serve", "--config", str(config)]
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)
        self.url = ""

    def wait_until_it_serves(self) -> None:
        def serves() -> bool:
            assert self.process.poll() is None, self._log.read_text()
            found = re.search(r"serving on ([^\s,\"]+)", self._log.read_text(errors="replace"))
            self.url = f"http://{found[1]}" if found else ""
            return bool(found)

        assert comes_true(serves)


def comes_true(condition: Callable[[], bool]) -> bool:
    """Whether it does, in time: what other processes do has no clock that a test could turn."""
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def told(url: str, body: dict[str, Any], *, seen: Callable[[], None] = lambda: None) -> Told:
    """Ask, and read to the end; `seen` is called at the first event."""
    events: list[Any] = []
    lines: list[str] = []
    with httpx.stream("POST", url + PATH, json=body, timeout=WITHIN_S) as response:
        if response.status_code != 200:
            response.read()
            return Told(response.status_code, [], False, None, response.json()["error"])
        for line in response.iter_lines():
            if line.startswith("data: "):
                lines.append(line[6:])
                if len(lines) == 1:
                    seen()
    done = lines[-1] == "[DONE]"
    cached, error = None, None
    for line in lines[: -1 if done else None]:
        event = json.loads(line)
        if "error" in event:
            assert error is None
            error = event["error"]
            continue
        assert error is None
        if event.get("usage"):
            cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        events.append(event["choices"])
    return Told(200, events, done, cached, error)


def kill(engine: Any) -> None:
    engine.process.send_signal(signal.SIGKILL)
    engine.process.wait()


def idle(*engines: Any) -> bool:
    """Whether nothing runs and nothing is held, anywhere."""
    for engine in engines:
        health = engine.health()
        if any(health[name] for name in COMPUTES + HOLDS * (engine.role == "decode")):
            return False
    return True


def clock(engine: Any) -> float:
    """The seconds that an engine has computed, where the system tells: it may have to wait for a processor."""
    stat = Path(f"/proc/{engine.process.pid}/stat")
    if not stat.exists():
        return time.monotonic()
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def leave_off(*engines: Any) -> bool:
    """Whether they do, soon: nothing runs and nothing is held."""
    latest = [clock(engine) + SOON_S for engine in engines]
    return comes_true(lambda: idle(*engines)) and all(
        clock(engine) < end for engine, end in zip(engines, latest, strict=True)
    )


@pytest.fixture(scope="module")
def lasting(launch: Any) -> Iterator[dict[str, Any]]:
    """One engine of each role that no test kills."""
    roles = ("unified", "prefill", "decode")
    with ThreadPoolExecutor() as threads:
        engines = list(threads.map(lambda role: launch("--role", role, *SIZE), roles))
    yield dict(zip(roles, engines, strict=True))
    assert [engine.stop() for engine in engines] == [0, 0, 0]


@pytest.fixture
def mortal(launch: Any) -> Iterator[Callable[[str], Any]]:
    """Launches engines that a test may kill."""
    with contextlib.ExitStack() as stack:

        def mortal(role: str) -> Any:
            engine = launch("--role", role, *SIZE)
            stack.callback(engine.stop)
            return engine

        yield mortal


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Callable[..., Gateway]]:
    with contextlib.ExitStack() as stack:

        def gateway(*engines: Any, deadline_s: float = 30.0) -> Gateway:
            made = Gateway(tmp_path, engines, deadline_s)
            stack.callback(made.process.wait)
            stack.callback(made.process.kill)
            made.wait_until_it_serves()
            return made

        yield gateway


@pytest.fixture
def background() -> Iterator[Callable[..., "Future[Told]"]]:
    """Asks in another thread."""
    with ThreadPoolExecutor() as threads:
        yield lambda *given, **named: threads.submit(told, *given, **named)


numbers = itertools.count(1)
SECONDS = 24
"""So many `repeat` make a prompt of several seconds: nobody leaves off just because it ends."""
LONG = {"prompt": "Once upon a time there was", "temperature": 0, "max_tokens": 450, "stream": True}
"""Of a short prompt, an answer that goes on for a second at least."""
WORDS = "the fox went down to the river and the old ferryman told him a story about "


def body(model: str, repeat: int = 7) -> dict[str, Any]:
    """A request that no cache knows, and whose prompt takes a second or so."""
    prompt = f"Number {next(numbers)} of the tales: " + WORDS * repeat
    asked = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0.8, "seed": 7}
    asked |= {"stream": True, "stream_options": {"include_usage": True}, "logprobs": 1}
    return asked


def expected(lasting: dict[str, Any], asked: dict[str, Any]) -> Told:
    """What the unified worker answers."""
    answer = told(lasting["unified"].url, asked | {"model": "smollm2"})
    assert answer.done
    return answer


def was_handed_over(answer: Told) -> bool:
    """Whether it was; the prompt was not in any cache."""
    return answer.cached is not None and answer.cached > 16


def is_whole(answer: Told, unified: Told) -> bool:
    return answer._replace(cached=None) == unified._replace(cached=None)


@contextlib.contextmanager
def leaving(url: str, asked: dict[str, Any]) -> Iterator[http.client.HTTPConnection]:
    """A client that has asked, has read nothing yet, and goes away at the end of the context."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=WITHIN_S)
    headers = {"content-type": "application/json"}
    connection.request("POST", PATH, json.dumps(asked), headers)
    try:
        yield connection
    finally:
        connection.close()


@contextlib.contextmanager
def busy(engine: Any) -> Iterator[None]:
    """An engine whose only slot is taken; what comes meanwhile waits in its queue."""
    with leaving(engine.url, LONG | {"model": "smollm2"}) as answer:
        assert answer.getresponse().readline()
        assert engine.running() == 1
        yield


def test_a_prefill_worker_that_is_killed_is_replaced_by_another_one(
    lasting: Any, mortal: Any, gateway: Any, background: Any
) -> None:
    pair, decode = [mortal("prefill"), mortal("prefill")], lasting["decode"]
    asked = body("apart")
    answer = background(gateway(*pair, decode).url, asked)
    assert comes_true(lambda: any(engine.running() for engine in pair))
    (lost,) = (engine for engine in pair if engine.running())
    pair.remove(lost)
    kill(lost)
    assert was_handed_over(answer.result())
    assert leave_off(*pair, decode)
    assert is_whole(answer.result(), expected(lasting, asked))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_unified_worker_takes_over_from_one_that_is_killed_during_the_prefill(
    lasting: Any, mortal: Any, gateway: Any, background: Any, role: str
) -> None:
    team = {**lasting, role: mortal(role)}
    asked = body("either")
    answer = background(gateway(*team.values()).url, asked)
    assert comes_true(lambda: team["prefill"].running() == 1)
    kill(team[role])
    assert answer.result().done
    assert leave_off(*lasting.values())
    assert is_whole(answer.result(), expected(lasting, asked))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_without_another_worker_a_kill_during_the_prefill_is_one_clean_error(
    lasting: Any, mortal: Any, gateway: Any, background: Any, role: str
) -> None:
    team = {**lasting, role: mortal(role)}
    answer = background(gateway(*team.values()).url, body("apart"))
    assert comes_true(lambda: team["prefill"].running() == 1)
    kill(team[role])
    assert (answer.result().status, answer.result().error["code"]) == (503, "no_capacity")
    assert leave_off(*lasting.values())


def test_a_decode_worker_that_is_killed_before_its_first_byte_is_replaced_by_another_one(
    lasting: Any, mortal: Any, gateway: Any, background: Any
) -> None:
    pair, prefill = [mortal("decode"), mortal("decode")], lasting["prefill"]
    asked = body("apart", repeat=1)
    url = gateway(*pair, prefill).url
    with busy(pair[0]), busy(pair[1]):
        answer = background(url, asked)
        assert comes_true(lambda: any(engine.health()["queue_depth"] for engine in pair))
        (lost,) = (engine for engine in pair if engine.health()["queue_depth"])
        pair.remove(lost)
        kill(lost)
    assert was_handed_over(answer.result())
    assert leave_off(*pair, prefill)
    assert is_whole(answer.result(), expected(lasting, asked))


def test_a_decode_worker_that_is_killed_while_it_streams_ends_the_stream_with_one_error(
    lasting: Any, mortal: Any, gateway: Any, background: Any
) -> None:
    decode, prefill = mortal("decode"), lasting["prefill"]
    asked = body("either") | LONG
    url = gateway(decode, prefill, lasting["unified"]).url
    answer = told(url, asked, seen=lambda: kill(decode))
    assert leave_off(prefill, lasting["unified"])
    assert (answer.status, answer.done) == (200, False)
    assert answer.error is not None
    events = answer.events
    assert 0 < len(events) < 100
    unified = expected(lasting, asked | {"max_tokens": len(events) + 1})
    assert events == unified.events[: len(events)]


@pytest.mark.parametrize("moment", ["prefill", "stream"])
def test_a_client_that_leaves_leaves_nothing_behind(
    lasting: Any, gateway: Any, moment: str
) -> None:
    prefill, decode = lasting["prefill"], lasting["decode"]
    asked = body("apart", SECONDS) if moment == "prefill" else body("apart") | LONG
    with leaving(gateway(prefill, decode).url, asked) as client:
        if moment == "prefill":
            assert comes_true(lambda: prefill.running() == 1)
        else:
            assert client.getresponse().readline()
            assert decode.running() == 1
    assert leave_off(prefill, decode)


def test_a_gateway_that_is_told_to_stop_sees_the_hand_off_through(
    lasting: Any, gateway: Any, background: Any
) -> None:
    prefill, decode = lasting["prefill"], lasting["decode"]
    running, asked = gateway(prefill, decode), body("apart")
    answer = background(running.url, asked)
    assert comes_true(lambda: prefill.running() == 1)
    running.process.send_signal(signal.SIGTERM)
    assert is_whole(answer.result(), expected(lasting, asked))
    assert running.process.wait(WITHIN_S) == 0
    assert leave_off(prefill, decode)


def test_a_gateway_whose_time_is_up_leaves_nothing_behind(
    lasting: Any, gateway: Any, background: Any
) -> None:
    prefill, decode = lasting["prefill"], lasting["decode"]
    running = gateway(prefill, decode, deadline_s=0.1)
    answer = background(running.url, body("apart", SECONDS))
    assert comes_true(lambda: prefill.running() == 1)
    running.process.send_signal(signal.SIGTERM)
    assert answer.result().status == 503
    assert running.process.wait(WITHIN_S) == 0
    assert leave_off(prefill, decode)
