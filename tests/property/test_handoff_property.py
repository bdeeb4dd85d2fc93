"""Whatever happens to a hand-off, in whatever order, the decode worker holds nothing in the end.

The story runs against a model of two prefill and two decode workers. A prefill may push at once, later (when the story
has long given it up), or never; a cancelled one does not push any more; a released name is not taken any more. Answers
and failures come as Hypothesis likes, the client may leave and the gateway may stop at every point. No sockets.
"""

import json
from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.registry import Registry
from pointsman.domain.router import Router
from pointsman.domain.routes import Route, RouteTable
from pointsman.domain.worker import Role, Worker
from pointsman.errors import GatewayError
from pointsman.flow.effects import (
    Answer,
    Broken,
    Call,
    ClientGone,
    Done,
    Flow,
    Lost,
    Relay,
    Result,
    Returned,
    Send,
    Status,
    Why,
)
from pointsman.flow.exchange import Exchange
from pointsman.flow.handover import Handoffs
from pointsman.flow.plan import disaggregated
from pointsman.proto.engine_pb2 import CancelRequest, KvHandle, PrefillRequest, PrefillResponse
from pointsman.proto.kv_pb2 import ReleaseRequest
from pointsman.testing.stories import answer
from pointsman.wire.body import parse_request
from pointsman.wire.call import HttpCall, RpcCall

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}]}).encode()
CODES = ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL")


class Decode:
    """What a decode worker holds, by the names that it was pushed under."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.released: list[str] = []
        self.claimed: list[str] = []

    def push(self, name: str) -> None:
        if name not in self.released:
            self.held.add(name)


class Fleet:
    """The workers, and what they have been told."""

    def __init__(self, workers: str) -> None:
        self.registry = Registry()
        self.pools = {f"{id}:52": Decode() for id in "de"}
        self.pending: list[tuple[str, str]] = []
        self.cancelled: set[str] = set()
        self.answering: list[str] = []
        self.clean: list[str] = []
        self.workers = [
            Worker(
                id,
                model="m",
                http_address=f"{id}:80",
                role=Role.PREFILL if id in "pq" else Role.DECODE if id in "de" else Role.UNIFIED,
                grpc_address=f"{id}:51",
                kv_address=f"{id}:52" if id in "de" else "",
                static=True,
            )
            for id in workers
        ]
        for worker in self.workers:
            self.registry.add(worker)

    def push_late(self) -> None:
        """Let every prefill that has not pushed do so, unless it has been cancelled."""
        for name, target in self.pending:
            if name not in self.cancelled:
                self.pools[target].push(name)
        self.pending.clear()

    def told(self, call: HttpCall | RpcCall) -> None:
        assert isinstance(call, RpcCall)
        if call.method.endswith("/Cancel"):
            self.cancelled.add(CancelRequest.FromString(call.message).request_id)
        else:
            name = ReleaseRequest.FromString(call.message).handle_id
            self.pools[call.address].held.discard(name)
            self.pools[call.address].released.append(name)


def outcome(fleet: Fleet, command: Call | Send | Relay, draw: st.DataObject) -> Result:
    """Let a worker do something about a command, well or badly."""
    if isinstance(command, Relay):
        if draw.draw(st.booleans(), "whole"):
            if command.answer.head.status < 300:
                fleet.clean += fleet.answering
            return Done()
        return Broken(Why.RESET)
    if isinstance(command, Send):
        return sent(fleet, command, draw)
    call = command.call
    if isinstance(call, HttpCall):
        kind = draw.draw(st.integers(0, 5), "tokenize")
        if kind < 3:
            return answer(200, b'{"ids":[1,2,3]}')
        failures: list[Result] = [answer(400), answer(503), Lost(Why.REFUSED)]
        return failures[kind - 3]
    if call.method.endswith("/Info"):
        return Status("UNAVAILABLE")
    request = PrefillRequest.FromString(call.message)
    push = draw.draw(st.sampled_from(["now", "late", "never"]), "push")
    works = draw.draw(st.booleans(), "prefill works")
    if works or push == "now":
        fleet.pools[request.decode_target].push(request.request_id)
    elif push == "late":
        fleet.pending.append((request.request_id, request.decode_target))
    if works:
        handle = KvHandle(handle_id=request.request_id)
        return Returned(PrefillResponse(handle=handle).SerializeToString())
    code = draw.draw(st.sampled_from(CODES), "code")
    if code in (
        "INVALID_ARGUMENT",
        "FAILED_PRECONDITION",
    ):  # Said by the worker: it goes on no more.
        fleet.pending = [each for each in fleet.pending if each[0] != request.request_id]
    leg = draw.draw(st.sampled_from(["", "decode"]), "leg")
    return Status(code, stale=draw.draw(st.booleans(), "stale"), leg=leg)


def sent(fleet: Fleet, command: Send, draw: st.DataObject) -> Answer | Lost:
    name = command.headers.removeprefix(b"x-tl-kv-handle: ").strip().decode()
    pool = fleet.pools.get(f"{command.target.worker.id}:52")
    kind = draw.draw(st.integers(0, 5), "send")
    if kind == 0:
        return Lost(Why.REFUSED)
    if kind == 1:
        return answer(503)
    if kind == 2:
        return answer(400)
    if name:
        assert pool is not None
        assert name not in pool.claimed, "a handle is used once"
        pool.claimed.append(name)
        if name not in pool.held:
            return answer(404, b'{"error":{"code":"kv_handle_not_found"}}')
        if kind == 3:  # It takes what is held, and dies of it.
            return Lost(Why.RESET)
        pool.held.discard(name)
    fleet.answering = [name] if name else []
    return answer(200, b"data: x\n\n", stream=kind == 4)


def play(flow: Flow, x: Exchange, fleet: Fleet, draw: st.DataObject) -> None:
    result: Result | None = None
    try:
        while True:
            command = flow.send(result)  # type: ignore[arg-type]  # None starts it
            end = draw.draw(st.integers(0, 9), "goes on")
            if end == 0:
                flow.throw(ClientGone())
            elif end == 1:
                flow.close()
                return
            assert isinstance(command, Call | Send | Relay)
            result = outcome(fleet, command, draw)
    except (StopIteration, GatewayError, ClientGone):
        return


@settings(max_examples=2500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    draw=st.data(),
    workers=st.sampled_from(["pd", "pqde", "pqd", "pde", "pdu", "pqdeu"]),
    late_first=st.booleans(),
)
def test_nothing_is_held_in_the_end(draw: st.DataObject, workers: str, late_first: bool) -> None:
    fleet = Fleet(workers)
    route = Route("m", targets=("disaggregated", "unified"))
    router = Router(fleet.registry, LeastOutstanding(), RouteTable([route]))
    x = Exchange(
        parse_request(BODY, "r"), path="/v1/chat/completions", operation="chat", started=0.0
    )
    handoffs = Handoffs(draw_seed=lambda: 1, wall=lambda: 0.0)
    for _ in range(4):
        play(disaggregated(x, router, 3, route, BODY, handoffs), x, fleet, draw)
        if late_first:
            fleet.push_late()
        for after in x.after:
            for call in after.calls:
                fleet.told(call)
        x.after.clear()
        fleet.push_late()
    held = {name for pool in fleet.pools.values() for name in pool.held}
    assert held == set()
    released = Counter(name for pool in fleet.pools.values() for name in pool.released)
    assert max(released.values(), default=1) == 1, "each is released once"
    assert not released.keys() & set(fleet.clean), "what ended well is not released"
    assert all(worker.in_flight == 0 for worker in fleet.workers)
