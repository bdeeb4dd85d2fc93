"""EngineControl over real gRPC: refusals and their order, cancelling and draining at every stage of a Prefill."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import pytest

from pointsman.engine import control
from pointsman.engine.control import FAILED_LEG, SERVICE, sampling_of
from pointsman.engine.kv.push import PushFailed
from pointsman.engine.sampling import SamplingParams
from pointsman.proto import engine_pb2

Code = grpc.StatusCode
PROMPT = [7 * i % 256 for i in range(70)]
ANSWERS: dict[str, Any] = {
    "Prefill": engine_pb2.PrefillResponse,
    "Info": engine_pb2.InfoResponse,
    "Cancel": engine_pb2.CancelResponse,
    "Drain": engine_pb2.DrainResponse,
}


class Pushes:
    """A decode worker that is always there. It records what it is sent, and may hold a push or fail it."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []
        self.failure: PushFailed | None = None
        self.stuck = False
        self.entered = threading.Event()
        self.left = threading.Event()

    async def __call__(
        self,
        target: str,
        handle_id: str,
        n_tokens: int,
        payloads: Sequence[bytes],
        hashes: Sequence[int],
        *,
        timeout_s: float,
    ) -> None:
        self.entered.set()
        try:
            if self.stuck:
                await asyncio.sleep(60)
            if self.failure:
                raise self.failure
            self.sent.append((target, handle_id, n_tokens, list(payloads), list(hashes), timeout_s))
        finally:
            self.left.set()


@pytest.fixture
def pushes() -> Pushes:
    return Pushes()


@pytest.fixture
def call() -> Iterator[Callable[..., Any]]:
    """`call(worker, "Prefill", request)`: a future of the answer."""
    channels: dict[str, grpc.Channel] = {}

    def call(worker: Any, name: str, request: Any) -> Any:
        address = worker.ports.grpc_address
        channel = channels.setdefault(address, grpc.insecure_channel(address))
        method = channel.unary_unary(
            f"/{SERVICE}/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=ANSWERS[name].FromString,
        )
        return method.future(request, timeout=10)

    yield call
    for channel in channels.values():
        channel.close()


def request(prompt: Sequence[int] = PROMPT, **more: Any) -> engine_pb2.PrefillRequest:
    sampling = engine_pb2.SamplingParams(temperature=1, seed=9, max_new_tokens=5)
    fields = {"request_id": "r1", "model": "bytes", "decode_target": "d:1", "sampling": sampling}
    return engine_pb2.PrefillRequest(prompt_ids=prompt, **(fields | more))


def failed(future: Any) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    error = future.exception()
    assert isinstance(error, grpc.RpcError), future.result()
    return future.code(), future.details(), dict(future.trailing_metadata() or ())


def endless(fakes: Any) -> Any:
    return fakes.Machine(lambda tokens: 97, step_s=0.001)


@pytest.fixture
def busy(worker: Any, fakes: Any, pushes: Pushes) -> Any:
    """A prefill worker with one slot, which an endless request has."""
    engine = worker("prefill", endless(fakes), push=pushes, slots=1, context=1_000_000)
    from pointsman.engine.scheduler import Request

    asked = Request([1], SamplingParams(temperature=0), 900_000, id="endless")
    engine.scheduler.submit(asked, lambda event: None)
    assert engine.settled(lambda: engine.scheduler.load.running == 1)
    return engine


@pytest.mark.parametrize("length", [1, 2, 16, 17, 32, 33, 70])
def test_a_prefill_pushes_every_block_and_tells_the_first_token(
    worker: Any, call: Any, pushes: Pushes, length: int
) -> None:
    engine = worker("prefill", push=pushes)
    answer = call(engine, "Prefill", request(PROMPT[:length])).result()
    whole = worker("unified")
    from pointsman.engine.kv.blocks import hashes_of

    (pushed,) = pushes.sent
    hashes = hashes_of(PROMPT[:length], whole_chunks=32)
    assert pushed[:3] == ("d:1", "r1", length)
    assert len(pushed[3]) == -(-length // 16)
    assert pushed[4] == hashes
    assert answer.handle == engine_pb2.KvHandle(
        handle_id="r1",
        decode_target="d:1",
        n_tokens=length,
        block_hashes=[value for value in hashes if value],
        kv_format=101,
        first_token=answer.first_token,
        prompt_tokens=length,
        rng_draws_consumed=1,
    )
    import httpx

    body = {"model": "bytes", "prompt": PROMPT[:length], "max_tokens": 1, "seed": 9, "logprobs": 0}
    choice = httpx.post(whole.url + "/v1/completions", json=body).json()["choices"][0]
    assert bytes([answer.first_token]).decode("utf-8", "replace") == choice["text"]
    assert answer.first_logprob == pytest.approx(choice["logprobs"]["token_logprobs"][0], rel=1e-6)
    assert (answer.prompt_tokens, answer.cached_prompt_tokens) == (length, 0)
    assert answer.ttft_ms > 0
    assert engine.scheduler.idle


def test_a_prefix_that_was_computed_before_is_told_as_cached(
    worker: Any, call: Any, pushes: Pushes
) -> None:
    engine = worker("prefill", push=pushes)
    answers = [call(engine, "Prefill", request()).result() for _ in range(2)]
    assert [answer.cached_prompt_tokens for answer in answers] == [0, 64]
    assert pushes.sent[0][3] == pushes.sent[1][3]


def test_greedy_draws_nothing_and_a_nameless_request_is_named_after_its_seed(
    worker: Any, call: Any, pushes: Pushes
) -> None:
    sampling = engine_pb2.SamplingParams(seed=0xBEEF, max_new_tokens=1)
    asked = request(request_id="", model="", sampling=sampling)
    answer = call(worker("prefill", push=pushes), "Prefill", asked).result()
    assert (answer.handle.handle_id, answer.handle.rng_draws_consumed) == ("hbeef", 0)


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"model": "other"}, Code.FAILED_PRECONDITION, "serves bytes"),
        ({"prompt_ids": []}, Code.INVALID_ARGUMENT, "prompt_ids"),
        ({"prompt_ids": [258]}, Code.INVALID_ARGUMENT, "token id"),
        ({"prompt_ids": [1] * 512}, Code.INVALID_ARGUMENT, "fit into 512"),
        ({"decode_target": ""}, Code.INVALID_ARGUMENT, "decode_target"),
        ({"priority": 101}, Code.INVALID_ARGUMENT, "priority"),
        ({"deadline_unix_ms": 1}, Code.DEADLINE_EXCEEDED, "deadline"),
        ({"sampling": None}, Code.INVALID_ARGUMENT, "max_new_tokens"),
    ],
)
def test_what_cannot_be_done_is_refused(
    worker: Any, call: Any, changes: dict[str, Any], code: grpc.StatusCode, says: str
) -> None:
    changes = dict(changes)
    prompt = changes.pop("prompt_ids", PROMPT)
    answer = failed(call(worker("prefill"), "Prefill", request(prompt, **changes)))
    assert (answer[0], says in answer[1], FAILED_LEG in answer[2]) == (code, True, False)


@pytest.mark.parametrize("role", ["unified", "decode"])
def test_only_a_prefill_worker_prefills_and_that_is_said_first(
    worker: Any, call: Any, role: str
) -> None:
    code, details, _ = failed(call(worker(role), "Prefill", request([], deadline_unix_ms=1)))
    assert (code, role in details) == (Code.FAILED_PRECONDITION, True)


def test_refusals_come_in_the_order_of_the_contract(worker: Any, call: Any) -> None:
    engine = worker("prefill")
    bad = engine_pb2.SamplingParams(top_k=-1)
    first = failed(call(engine, "Prefill", request([], deadline_unix_ms=1, sampling=bad)))
    second = failed(call(engine, "Prefill", request(deadline_unix_ms=1, sampling=bad)))
    third = failed(call(engine, "Prefill", request(sampling=bad)))
    assert [first[0], second[0]] == [Code.INVALID_ARGUMENT, Code.DEADLINE_EXCEEDED]
    assert (third[0], "top_k" in third[1]) == (Code.INVALID_ARGUMENT, True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1}, {"temperature": 2.1}, {"temperature": float("nan")}, {"top_p": 1.1}, {"top_p": -0.1},
        {"top_k": -1}, {"min_p": 1.1}, {"repetition_penalty": -1.0}, {"repetition_penalty": float("inf")},
        {"presence_penalty": 2.1}, {"frequency_penalty": -2.1}, {"max_new_tokens": 0}, {"logprobs": 21},
    ],
)  # fmt: skip
def test_sampling_out_of_range_is_refused_by_name(wrong: dict[str, Any]) -> None:
    message = engine_pb2.SamplingParams(**({"max_new_tokens": 1} | wrong))
    with pytest.raises(control._Refused, match=next(iter(wrong))) as caught:
        sampling_of(message)
    assert caught.value.code is Code.INVALID_ARGUMENT


def test_sampling_comes_out_as_a_client_wrote_it() -> None:
    message = engine_pb2.SamplingParams(temperature=0.8, top_p=0.95, min_p=0.1, max_new_tokens=1)
    message.seed = 2**64 - 1
    assert sampling_of(message) == SamplingParams(0.8, 0.95, 0, 0.1, 1.0, seed=2**64 - 1)
    zeros = engine_pb2.SamplingParams(max_new_tokens=1)
    assert sampling_of(zeros) == SamplingParams(temperature=0.0)


def test_info_tells_role_context_and_format(worker: Any, call: Any) -> None:
    for role in ("unified", "prefill", "decode"):
        info = call(worker(role), "Info", engine_pb2.InfoRequest()).result()
        assert info == engine_pb2.InfoResponse(
            model="bytes",
            roles=[role],
            kv_format=101,
            max_context=512,
            block_size=16,
            kv_formats_read=[101],
        )


@pytest.mark.parametrize(
    ("code", "fault", "told"),
    [
        (Code.RESOURCE_EXHAUSTED, True, Code.RESOURCE_EXHAUSTED),
        (Code.FAILED_PRECONDITION, True, Code.FAILED_PRECONDITION),
        (Code.UNAVAILABLE, True, Code.UNAVAILABLE),
        (Code.DATA_LOSS, True, Code.DATA_LOSS),
        (Code.INVALID_ARGUMENT, False, Code.INVALID_ARGUMENT),
        (Code.UNKNOWN, True, Code.UNAVAILABLE),
        (Code.CANCELLED, True, Code.UNAVAILABLE),
        (Code.DEADLINE_EXCEEDED, True, Code.UNAVAILABLE),
    ],
)
def test_a_push_that_fails_is_told_with_the_leg_that_failed(
    worker: Any,
    call: Any,
    pushes: Pushes,
    code: grpc.StatusCode,
    fault: bool,
    told: grpc.StatusCode,
) -> None:
    pushes.failure = PushFailed(code, "as it says")
    engine = worker("prefill", push=pushes)
    answer = failed(call(engine, "Prefill", request()))
    assert answer[:2] == (told, "as it says")
    assert answer[2].get(FAILED_LEG) == ("decode" if fault else None)
    assert engine.scheduler.idle


def test_a_broken_machine_is_internal_and_not_the_decode_workers_fault(
    worker: Any, call: Any, fakes: Any
) -> None:
    machine = fakes.Machine()
    machine.broken = True
    answer = failed(call(worker("prefill", machine), "Prefill", request()))
    assert (answer[0], FAILED_LEG in answer[2]) == (Code.INTERNAL, False)


def test_a_full_queue_and_a_deadline_in_the_queue_are_resource_exhausted(
    busy: Any, call: Any
) -> None:
    soon = int((time.time() + 0.05) * 1000)
    late = failed(call(busy, "Prefill", request(deadline_unix_ms=soon)))
    assert (late[0], "free" in late[1]) == (Code.RESOURCE_EXHAUSTED, True)
    assert busy.settled(lambda: busy.scheduler.load.queue_depth == 0)
    busy.scheduler._queue_capacity = 0
    full = failed(call(busy, "Prefill", request()))
    assert (full[0], "waiting" in full[1]) == (Code.RESOURCE_EXHAUSTED, True)


def test_waiting_longer_than_the_queue_allows_is_resource_exhausted(busy: Any, call: Any) -> None:
    busy.scheduler._queue_deadline = 0.0
    assert failed(call(busy, "Prefill", request()))[0] is Code.RESOURCE_EXHAUSTED


def test_a_deadline_in_the_prompt_is_deadline_exceeded(
    worker: Any, call: Any, fakes: Any, pushes: Pushes
) -> None:
    engine = worker("prefill", fakes.Machine(step_s=0.1), push=pushes)
    soon = int((time.time() + 0.15) * 1000)
    answer = failed(call(engine, "Prefill", request(PROMPT * 4, deadline_unix_ms=soon)))
    assert answer[0] is Code.DEADLINE_EXCEEDED
    assert pushes.sent == []
    assert engine.settled(lambda: engine.scheduler.idle)


def test_a_deadline_between_prompt_and_push_is_deadline_exceeded(
    worker: Any, call: Any, pushes: Pushes
) -> None:
    engine = worker("prefill", push=pushes)
    clock = iter([0.0, 0.0, 9.0])
    engine.ports.control._wall = lambda: next(clock)
    answer = failed(call(engine, "Prefill", request(deadline_unix_ms=8000)))
    assert (answer[0], pushes.sent) == (Code.DEADLINE_EXCEEDED, [])


def test_a_drain_is_told_to_who_wants_to_know(worker: Any, call: Any) -> None:
    engine = worker("unified")
    told: list[bool] = []
    engine.ports.control._on_drain = lambda: told.append(engine.status().draining)
    call(engine, "Drain", engine_pb2.DrainRequest(deadline_ms=0)).result()
    assert told == [True]


def test_a_push_gets_what_the_deadline_has_left(worker: Any, call: Any, pushes: Pushes) -> None:
    engine = worker("prefill", push=pushes)
    call(engine, "Prefill", request(deadline_unix_ms=int((time.time() + 5) * 1000))).result()
    call(engine, "Prefill", request()).result()
    timeouts = [sent[-1] for sent in pushes.sent]
    assert 0 < timeouts[0] <= 5
    assert timeouts[1] == control.PUSH_S


Stage = Callable[[], Any]


@pytest.fixture(params=["queue", "prompt", "push"])
def at(request: Any, worker: Any, call: Any, fakes: Any, pushes: Pushes) -> Any:
    """A worker with one Prefill that is at this stage, and its future."""
    if request.param == "queue":
        engine = request.getfixturevalue("busy")
    elif request.param == "prompt":
        engine = worker("prefill", fakes.Machine(step_s=0.05), push=pushes)
    else:
        pushes.stuck = True
        engine = worker("prefill", push=pushes)
    asked = engine_pb2.PrefillRequest(
        request_id="r1",
        prompt_ids=PROMPT * (7 if request.param == "prompt" else 1),
        decode_target="d:1",
        sampling=engine_pb2.SamplingParams(max_new_tokens=1),
    )
    future = call(engine, "Prefill", asked)
    reached: dict[str, Stage] = {
        "queue": lambda: engine.scheduler.load.queue_depth == 1,
        "prompt": lambda: engine.scheduler.load.running == 1,
        "push": pushes.entered.is_set,
    }
    assert engine.settled(reached[request.param])
    return engine, future, request.param


def at_rest(engine: Any, stage: str, pushes: Pushes) -> bool:
    """Nothing of the Prefill is left; in the stage `queue` the endless request may still run."""
    load = engine.scheduler.load
    still = load.queue_depth == 0 and load.running == (stage == "queue")
    return still and (stage != "push" or pushes.left.is_set()) and not engine.ports.control._jobs


def test_a_caller_that_goes_away_ends_a_prefill_at_every_stage(at: Any, pushes: Pushes) -> None:
    engine, future, stage = at
    future.cancel()
    assert engine.settled(lambda: at_rest(engine, stage, pushes))
    assert pushes.sent == []


def test_cancel_ends_a_prefill_at_every_stage_and_answers_when_it_is_over(
    at: Any, call: Any, pushes: Pushes
) -> None:
    engine, future, stage = at
    cancel = engine_pb2.CancelRequest(request_id="r1")
    assert call(engine, "Cancel", cancel).result().found
    if stage == "push":
        assert pushes.left.is_set()
    assert failed(future)[0] is Code.CANCELLED
    assert engine.settled(lambda: at_rest(engine, stage, pushes))
    assert not call(engine, "Cancel", cancel).result().found
    assert not call(engine, "Cancel", engine_pb2.CancelRequest()).result().found
    assert pushes.sent == []


def test_a_drain_counts_what_its_deadline_ends_at_every_stage(
    at: Any, call: Any, pushes: Pushes
) -> None:
    engine, future, stage = at
    drained = call(engine, "Drain", engine_pb2.DrainRequest(deadline_ms=50)).result()
    assert drained.aborted == (2 if stage == "queue" else 1)
    code, details, trailing = failed(future)
    assert (code, "draining" in details, trailing.get(FAILED_LEG)) == (Code.UNAVAILABLE, True, None)
    assert engine.settled(lambda: engine.scheduler.idle)
    assert failed(call(engine, "Prefill", request()))[0] is Code.UNAVAILABLE
    assert engine.status().draining


def test_a_drain_lets_end_what_ends_in_time(worker: Any, call: Any, fakes: Any) -> None:
    pushes = Pushes()
    engine = worker("prefill", fakes.Machine(step_s=0.02), push=pushes)
    future = call(engine, "Prefill", request())
    assert engine.settled(lambda: engine.scheduler.load.running == 1)
    drained = call(engine, "Drain", engine_pb2.DrainRequest(deadline_ms=5000)).result()
    assert drained.aborted == 0
    assert future.result().prompt_tokens == len(PROMPT)


def test_a_negative_deadline_of_a_drain_changes_nothing(worker: Any, call: Any) -> None:
    engine = worker("unified")
    answer = failed(call(engine, "Drain", engine_pb2.DrainRequest(deadline_ms=-1)))
    assert answer[0] is Code.INVALID_ARGUMENT
    assert not engine.status().draining


def test_cancel_finds_what_http_asked_for_by_its_request_id(
    worker: Any, call: Any, fakes: Any
) -> None:
    import httpx

    engine = worker("decode", endless(fakes), context=1_000_000)
    answers: list[httpx.Response] = []

    def ask() -> None:
        body = {"model": "bytes", "prompt": [1], "max_tokens": 900_000}
        headers = {"X-Request-Id": "over-http"}
        answers.append(httpx.post(engine.url + "/v1/completions", json=body, headers=headers))

    asking = threading.Thread(target=ask)
    asking.start()
    assert engine.settled(lambda: engine.scheduler.load.running == 1)
    assert call(engine, "Cancel", engine_pb2.CancelRequest(request_id="over-http")).result().found
    asking.join()
    (answer,) = answers
    assert (answer.status_code, answer.json()["error"]["code"]) == (499, "request_cancelled")
