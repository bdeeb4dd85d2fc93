"""From a prefill worker to a decode worker, over real sockets: what is equal, and what is held after each way out."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import pytest

from pointsman.engine.control import FAILED_LEG, SERVICE
from pointsman.proto import engine_pb2, kv_pb2

Code = grpc.StatusCode
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
LENGTHS = (1, 2, 16, 17, 31, 32, 33, 64, 65, 100)


def prompt_of(length: int) -> list[int]:
    return [(7 * i + length) % 256 for i in range(length)]


class Pair:
    """A prefill and a decode worker, and a unified one to compare with."""

    def __init__(self, prefill: Any, decode: Any, unified: Any) -> None:
        self.prefill = prefill
        self.decode = decode
        self.unified = unified
        self.numbers = iter(range(1000))

    def hand_over(self, prompt: list[int], name: str = "", **sampling: Any) -> Any:
        """A future of the Prefill; `.name` of it is the handle."""
        message = engine_pb2.PrefillRequest(
            request_id=name or f"r{next(self.numbers)}",
            prompt_ids=prompt,
            decode_target=self.decode.ports.kv_address,
            sampling=engine_pb2.SamplingParams(max_new_tokens=1, **sampling),
        )
        return rpc(self.prefill.ports.grpc_address, f"/{SERVICE}/Prefill", message)

    def handle(self, prompt: list[int], name: str = "", **sampling: Any) -> str:
        return str(self.hand_over(prompt, name, **sampling).result().handle.handle_id)

    def release(self, handle: str) -> None:
        message = kv_pb2.ReleaseRequest(handle_id=handle)
        address = self.decode.ports.kv_address
        rpc(address, "/tl.kv.v1.KvTransferService/Release", message).result()

    def cancel(self, handle: str) -> bool:
        message = engine_pb2.CancelRequest(request_id=handle)
        return bool(
            rpc(self.prefill.ports.grpc_address, f"/{SERVICE}/Cancel", message).result().found
        )

    @property
    def held(self) -> tuple[int, int]:
        pool = self.decode.pool
        return len(pool.handles), pool.held_blocks


ANSWERS: dict[str, Any] = {
    "Prefill": engine_pb2.PrefillResponse,
    "Cancel": engine_pb2.CancelResponse,
    "Release": kv_pb2.ReleaseResponse,
}
channels: dict[str, grpc.Channel] = {}


def rpc(address: str, method: str, message: Any) -> Any:
    channel = channels.setdefault(address, grpc.insecure_channel(address))
    call = channel.unary_unary(
        method,
        request_serializer=type(message).SerializeToString,
        response_deserializer=ANSWERS[method.rpartition("/")[2]].FromString,
    )
    return call.future(message, timeout=20)


@pytest.fixture(autouse=True)
def closing() -> Iterator[None]:
    yield
    for channel in channels.values():
        channel.close()
    channels.clear()


@pytest.fixture
def pair(worker: Any, fakes: Any) -> Callable[..., Pair]:
    def pair(machine: Any = None, **options: Any) -> Pair:
        prefill = worker("prefill")
        return Pair(prefill, worker("decode", machine, **options), worker("unified"))

    return pair


def post(engine: Any, path: str, body: dict[str, Any], handle: str = "") -> httpx.Response:
    headers = {"X-TL-KV-Handle": handle} if handle else {}
    body = {"model": "bytes", "seed": 9, "max_tokens": 12, **body}
    return httpx.post(engine.url + path, json=body, headers=headers, timeout=20)


def choices(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        return [json.loads(event)["choices"] for event in events]
    return response.json()["choices"]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_handed_over_completion_equals_the_unified_one(
    pair: Any, length: int, temperature: float
) -> None:
    workers = pair()
    prompt = prompt_of(length)
    for stream in (False, True):
        body = {"prompt": prompt, "temperature": temperature, "top_p": 0.95, "logprobs": 3}
        body |= {"stream": stream, "presence_penalty": 0.5, "repetition_penalty": 1.1}
        handle = workers.handle(prompt, temperature=temperature, seed=9)
        resumed = post(workers.decode, TEXT, body, handle)
        assert choices(resumed) == choices(post(workers.unified, TEXT, body))
        assert resumed.headers["x-tl-kv-tokens"] == str(length)
        if not stream:
            details = resumed.json()["usage"]["prompt_tokens_details"]
            assert details == {"cached_tokens": length - 1}
    assert workers.held == (0, 0)


def test_a_handed_over_chat_equals_the_unified_one(pair: Any) -> None:
    workers = pair()
    body = {"messages": [{"role": "user", "content": "How are you?"}], "logprobs": True}
    asked = {"model": "bytes", "messages": body["messages"], "add_special": True, "text": ""}
    ids = httpx.post(workers.prefill.url + "/v1/tokenize", json=asked).json()["ids"]
    for stream in (False, True):
        resumed = post(workers.decode, CHAT, body | {"stream": stream}, workers.handle(ids))
        assert choices(resumed) == choices(post(workers.unified, CHAT, body | {"stream": stream}))
        assert resumed.headers["x-tl-kv-tokens"] == str(len(ids))


def test_an_answer_that_was_not_resumed_does_not_say_so(pair: Any) -> None:
    assert "x-tl-kv-tokens" not in post(pair().decode, TEXT, {"prompt": "a"}).headers


def test_many_hand_offs_at_a_time_are_each_equal_to_the_unified_answer(pair: Any) -> None:
    workers = pair(kv_blocks=500)

    def both(i: int) -> bool:
        prompt = [3, *prompt_of(40), *prompt_of(5 + 9 * (i % 7))]
        body = {"prompt": prompt, "seed": i, "logprobs": 1}
        resumed = post(workers.decode, TEXT, body, workers.handle(prompt))
        return bool(choices(resumed) == choices(post(workers.unified, TEXT, body)))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(both, range(24)))
    assert workers.held == (0, 0)


def test_a_prefix_that_the_decode_worker_has_is_not_sent_again_and_changes_nothing(
    pair: Any,
) -> None:
    workers = pair()
    first, second = prompt_of(70), [*prompt_of(70)[:66], 1, 2, 3]
    for prompt in (first, second):
        body = {"prompt": prompt, "logprobs": 2}
        resumed = post(workers.decode, TEXT, body, workers.handle(prompt))
        assert choices(resumed) == choices(post(workers.unified, TEXT, body))
    assert workers.decode.pool.cached_blocks == 4


@pytest.mark.parametrize("role", ["unified", "prefill", "decode"])
def test_an_unknown_handle_is_a_404(worker: Any, role: str) -> None:
    answer = post(worker(role), TEXT, {"prompt": "a"}, "none")
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (
        404,
        "invalid_request_error",
        "kv_handle_not_found",
    )


def test_a_handle_resumes_once(pair: Any) -> None:
    workers = pair()
    prompt = prompt_of(20)
    handle = workers.handle(prompt)
    assert post(workers.decode, TEXT, {"prompt": prompt}, handle).status_code == 200
    assert post(workers.decode, TEXT, {"prompt": prompt}, handle).status_code == 404


@pytest.mark.parametrize("prompt", [prompt_of(39), prompt_of(41), [9, *prompt_of(40)[1:]]])
def test_another_prompt_than_the_pushed_one_is_a_409_and_nothing_is_held(
    pair: Any, prompt: list[int]
) -> None:
    workers = pair()
    handle = workers.handle(prompt_of(40))
    assert workers.held == (1, 3)
    answer = post(workers.decode, TEXT, {"prompt": prompt}, handle)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (
        409,
        "invalid_request_error",
        "kv_handle_mismatch",
    )
    assert workers.held == (0, 0)


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        ({"temperature": 9}, {}, 400),
        ({"model": "other"}, {}, 404),
        ({"prompt": []}, {}, 400),
        ({}, {"X-TL-Priority": "101"}, 400),
    ],
)
def test_a_refused_request_holds_nothing(
    pair: Any, body: dict[str, Any], headers: dict[str, str], status: int
) -> None:
    workers = pair()
    prompt = prompt_of(20)
    headers = {"X-TL-KV-Handle": workers.handle(prompt), **headers}
    body = {"model": "bytes", "prompt": prompt, **body}
    answer = httpx.post(workers.decode.url + TEXT, json=body, headers=headers)
    assert answer.status_code == status
    assert workers.held == (0, 0)


def test_a_draining_decode_worker_refuses_a_resume_and_holds_nothing(pair: Any) -> None:
    workers = pair()
    prompt = prompt_of(20)
    handle = workers.handle(prompt)
    workers.decode.scheduler.drain()
    answer = post(workers.decode, TEXT, {"prompt": prompt}, handle)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_capacity")
    assert workers.held == (0, 0)


def test_a_draining_decode_worker_takes_no_push_and_the_caller_hears_whose_fault_it_is(
    pair: Any,
) -> None:
    workers = pair()
    workers.decode.scheduler.drain()
    with pytest.raises(grpc.RpcError) as info:
        workers.handle(prompt_of(20))
    assert info.value.code() is Code.UNAVAILABLE
    assert (FAILED_LEG, "decode") in info.value.trailing_metadata()
    assert workers.held == (0, 0)


def test_blocks_of_handles_are_not_free_in_heartbeats_and_health_shows_them(pair: Any) -> None:
    workers = pair()
    before = workers.decode.status()
    handle = workers.handle(prompt_of(40))
    during = workers.decode.status()
    health = httpx.get(workers.decode.url + "/health").json()
    assert before.kv_free_blocks - during.kv_free_blocks == 3
    assert (health["kv_handles"], health["kv_held_blocks"]) == (1, 3)
    workers.release(handle)
    assert workers.decode.status() == before


def test_a_heartbeat_tells_role_and_ports(pair: Any) -> None:
    workers = pair()
    for engine, role in (
        (workers.prefill, "prefill"),
        (workers.decode, "decode"),
        (workers.unified, "unified"),
    ):
        status = engine.status()
        assert (status.role, status.kv_format, status.model) == (role, 101, "bytes")
        assert status.grpc_address == engine.ports.grpc_address
        assert (status.kv_address != "") == (role == "decode")


def test_a_released_handle_cannot_be_resumed(pair: Any) -> None:
    workers = pair()
    handle = workers.handle(prompt_of(20))
    workers.release(handle)
    assert workers.held == (0, 0)
    assert post(workers.decode, TEXT, {"prompt": prompt_of(20)}, handle).status_code == 404


def test_a_handle_that_nobody_resumes_is_freed_after_its_time(pair: Any) -> None:
    workers = pair(hold_s=0.2)
    handle = workers.handle(prompt_of(40))
    assert workers.decode.settled(lambda: workers.held == (0, 0), within=5)
    assert post(workers.decode, TEXT, {"prompt": prompt_of(40)}, handle).status_code == 404


def test_a_full_decode_worker_is_resource_exhausted_by_the_decode_leg(pair: Any) -> None:
    workers = pair(kv_blocks=4)
    handle = workers.handle(prompt_of(40))
    refused = workers.hand_over(prompt_of(41))
    assert refused.exception().code() is Code.RESOURCE_EXHAUSTED
    assert dict(refused.trailing_metadata())[FAILED_LEG] == "decode"
    assert workers.held == (1, 3)
    assert workers.prefill.scheduler.idle
    workers.release(handle)
    assert workers.hand_over(prompt_of(41)).result().prompt_tokens == 41


def test_an_absent_decode_worker_is_unavailable_by_the_decode_leg(worker: Any, fakes: Any) -> None:
    prefill = worker("prefill")
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        nowhere = f"127.0.0.1:{reserved.getsockname()[1]}"
    message = engine_pb2.PrefillRequest(
        request_id="r",
        prompt_ids=[1, 2, 3],
        decode_target=nowhere,
        deadline_unix_ms=int((time.time() + 10) * 1000),
        sampling=engine_pb2.SamplingParams(max_new_tokens=1),
    )
    refused = rpc(prefill.ports.grpc_address, f"/{SERVICE}/Prefill", message)
    assert refused.exception().code() is Code.UNAVAILABLE
    assert dict(refused.trailing_metadata())[FAILED_LEG] == "decode"
    assert prefill.scheduler.idle


def test_a_decode_worker_that_was_restarted_is_pushed_to_again(
    pair: Any, worker: Any, fakes: Any
) -> None:
    workers = pair()
    prompt = prompt_of(40)
    lost = workers.handle(prompt)
    address = workers.decode.ports.kv_address
    workers.decode.stop()
    workers.decode = worker("decode", kv_listen=address)
    assert post(workers.decode, TEXT, {"prompt": prompt}, lost).status_code == 404
    body = {"prompt": prompt, "logprobs": 1}
    resumed = post(workers.decode, TEXT, body, workers.handle(prompt))
    assert choices(resumed) == choices(post(workers.unified, TEXT, body))


@pytest.fixture
def slow_push(worker: Any) -> Any:
    """A pair whose pushes wait at a gate before they are sent, and one that is there."""
    gate = threading.Event()
    entered = threading.Event()
    prefill = worker("prefill")
    control = prefill.ports.control
    really = control._push

    async def push(*args: Any, **options: Any) -> Any:
        entered.set()
        # Held at a gate of another thread, but a cancellation is not.
        await asyncio.to_thread(gate.wait, 5)
        return await really(*args, **options)

    control._push = push
    return Pair(prefill, worker("decode"), worker("unified")), gate, entered


@pytest.mark.parametrize("opened", [False, True])
def test_a_caller_that_leaves_during_the_push_leaves_nothing(slow_push: Any, opened: bool) -> None:
    workers, gate, entered = slow_push
    future = workers.hand_over(prompt_of(40), "gone")
    assert entered.wait(5)
    if opened:
        gate.set()
    future.cancel()
    workers.cancel("gone")
    workers.release("gone")
    gate.set()
    assert workers.held == (0, 0)
    assert workers.prefill.settled(lambda: not workers.prefill.ports.control._jobs)
    assert workers.held == (0, 0)


def test_a_release_after_cancel_is_the_last_word(slow_push: Any) -> None:
    workers, gate, entered = slow_push
    future = workers.hand_over(prompt_of(40), "r")
    assert entered.wait(5)
    assert workers.cancel("r")
    workers.release("r")
    gate.set()
    assert future.exception().code() is Code.CANCELLED
    assert workers.held == (0, 0)


def leave(workers: Pair, prompt: list[int], handle: str) -> socket.socket:
    """A raw connection that has asked to resume."""
    host, port = workers.decode.url.removeprefix("http://").split(":")
    payload = json.dumps({"model": "bytes", "prompt": prompt, "max_tokens": 900}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nX-TL-KV-Handle: {handle}\r\n"
    connection = socket.create_connection((host, int(port)), timeout=5)
    connection.sendall(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
    return connection


def test_a_client_that_leaves_a_resumed_answer_leaves_nothing(pair: Any, fakes: Any) -> None:
    workers = pair(fakes.Machine(lambda tokens: 97, step_s=0.001), slots=1, context=100_000)
    prompt = prompt_of(40)
    decode = workers.decode
    running = leave(workers, prompt, workers.handle(prompt))
    assert decode.settled(lambda: decode.scheduler.load.running == 1)
    queued = leave(workers, prompt, workers.handle(prompt))
    assert decode.settled(lambda: decode.scheduler.load.queue_depth == 1)
    queued.close()
    assert decode.settled(lambda: decode.scheduler.load.queue_depth == 0)
    running.close()
    assert decode.settled(lambda: decode.scheduler.idle)
    assert workers.held == (0, 0)


@pytest.mark.parametrize("value", ["", "x", "1.5", "101", "-101", "1000", "1_0", "+", "0x1", "1 2"])
def test_a_priority_that_is_none_is_a_400(worker: Any, value: str) -> None:
    body = {"model": "bytes", "prompt": "a", "max_tokens": 1}
    url = worker("unified").url + TEXT
    answer = httpx.post(url, json=body, headers={"X-TL-Priority": value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-TL-Priority")


@pytest.mark.parametrize("value", ["0", "-100", "100", "+7"])
def test_a_priority_in_range_is_taken(worker: Any, value: str) -> None:
    body = {"model": "bytes", "prompt": "a", "max_tokens": 1}
    url = worker("unified").url + TEXT
    assert httpx.post(url, json=body, headers={"X-TL-Priority": value}).status_code == 200
