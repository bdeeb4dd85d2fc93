"""A copy of a cluster's objects: what lists and events make of it, against a model that simply looks at the cluster."""

import json
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from msgspec import Raw

from pointsman.control.discovery.found import Found
from pointsman.control.discovery.pods import Listing, Pod, listing, steps
from pointsman.control.discovery.reflection import Gap, Reflection, page, refusal
from pointsman.testing.kubernetes import pod


def raw(each: dict[str, Any]) -> Raw:
    return Raw(json.dumps(each).encode())


def event(kind: str, each: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": each}).encode() + b"\n"


def names(reflection: Reflection[Pod]) -> list[str]:
    return sorted(each.metadata.name for each in reflection.objects)


def test_r01_a_list_is_the_truth_and_what_it_does_not_have_is_gone() -> None:
    pods = Reflection(Pod)
    pods.replace([raw(pod("a")), raw(pod("b"))])
    pods.replace([raw(pod("b"))])
    assert names(pods) == ["b"]


def test_events_carry_on_from_a_list() -> None:
    pods = Reflection(Pod)
    pods.replace([raw(pod("a"))])
    assert pods.apply(event("ADDED", pod("b")))
    assert pods.apply(event("MODIFIED", pod("a", ready=False)))
    assert [each.ready for each in pods.objects] == [False, True]
    assert pods.apply(event("DELETED", pod("a")))
    assert pods.apply(event("DELETED", pod("never-seen")))
    assert names(pods) == ["b"]
    assert not pods.apply(event("BOOKMARK", {"metadata": {"resourceVersion": "7"}}))


def test_pods_of_one_name_in_two_namespaces_are_two() -> None:
    pods = Reflection(Pod)
    pods.replace([raw(pod("a")), raw(pod("a", namespace="other"))])
    pods.apply(event("DELETED", pod("a")))
    assert [each.metadata.namespace for each in pods.objects] == ["other"]


def test_r02_an_object_that_makes_no_sense_is_left_out_of_a_list() -> None:
    pods = Reflection(Pod)
    bad = pod("bad")
    bad["status"]["podIP"] = 7
    pods.replace([raw(bad), raw(pod("good"))])
    assert names(pods) == ["good"]
    assert pods.unreadable == 1
    pods.replace([raw(pod("good"))])
    assert pods.unreadable == 0


@pytest.mark.parametrize(
    ("line", "said", "status"),
    [
        (event("ERROR", {"code": 410, "message": "too old"}), "too old", 410),
        (event("ERROR", {"code": 500, "reason": "InternalError"}), "InternalError", 500),
        (event("ERROR", {}), "an error event", 0),
        (event("SOMETHING", {}), "of type 'SOMETHING'", 0),
        (event("ADDED", {"metadata": 1}), "cannot be read", 0),
        (b'{"type": "ADDED", "obj', "cannot be read", 0),
        (b"\xff\n", "cannot be read", 0),
        (b"", "cannot be read", 0),
    ],
)
def test_an_event_that_tells_of_trouble_or_nothing_is_a_gap(
    line: bytes, said: str, status: int
) -> None:
    with pytest.raises(Gap, match=said) as gap:
        Reflection(Pod).apply(line)
    assert gap.value.status == status


def test_a_page_says_how_the_list_goes_on() -> None:
    first = page(b'{"metadata": {"resourceVersion": "7", "continue": "x"}, "items": [{}, {}]}')
    assert (len(first.items), first.version, first.following) == (2, "7", "x")
    last = page(b'{"metadata": {"resourceVersion": "7"}, "items": null}')
    assert (last.items, last.following) == ((), "")


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"items": []}'])
def test_what_is_no_list_is_a_gap_and_not_an_empty_list(body: bytes) -> None:
    with pytest.raises(Gap):
        page(body)


def test_a_refusal_is_told_in_one_short_line() -> None:
    assert refusal(b'{"message": "pods is\\nforbidden"}') == "pods is forbidden"
    assert refusal(b"") == ""
    assert refusal(b"\xff") == "\ufffd"
    assert len(refusal(b"x" * 999)) == 200


class Fleet(RuleBasedStateMachine):
    """A cluster whose pods come, flap, terminate, go and are born again, and a watch that loses whatever it likes.

    `told` is the naive model: the pods that we have been told of, by name, as they were told last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cluster: dict[str, dict[str, Any]] = {}
        self.told: dict[str, dict[str, Any]] = {}
        self.born = 0
        self.pending: list[tuple[str, dict[str, Any]]] = []
        self.reflection = Reflection(Pod)
        self.listing: Listing | None = None
        self.handed: dict[str, Found] = {}
        self.lives: dict[str, str] = {}

    @rule(name=st.sampled_from("abc"), ready=st.booleans(), ip=st.sampled_from(["", "1.1.1.1"]))
    def is_there(self, name: str, ready: bool, ip: str) -> None:
        old = self.cluster.get(name)
        self.born += old is None
        uid = old["metadata"]["uid"] if old else f"uid-{self.born}"
        going = old is not None and "deletionTimestamp" in old["metadata"]
        self.cluster[name] = pod(name, ready=ready, ip=ip, uid=uid, terminating=going)
        self.pending.append(("MODIFIED" if old else "ADDED", self.cluster[name]))

    @rule(name=st.sampled_from("abc"))
    def terminates(self, name: str) -> None:
        if old := self.cluster.get(name):
            meta = {**old["metadata"], "deletionTimestamp": "now"}
            self.cluster[name] = {**old, "metadata": meta}
            self.pending.append(("MODIFIED", self.cluster[name]))

    @rule(name=st.sampled_from("abc"))
    def is_gone(self, name: str) -> None:
        if name in self.cluster:
            self.pending.append(("DELETED", self.cluster.pop(name)))

    @precondition(lambda self: self.listing is not None)
    @rule()
    def events_come(self) -> None:
        for kind, each in self.pending:
            self.reflection.apply(event(kind, each))
            name = each["metadata"]["name"]
            self.told.pop(name, None)
            if kind != "DELETED":
                self.told[name] = each
            self.is_handed_over()
        self.pending.clear()

    @rule()
    def the_watch_breaks_and_the_list_is_read(self) -> None:
        self.pending.clear()
        self.reflection.replace(raw(each) for each in self.cluster.values())
        self.told = dict(self.cluster)
        self.is_handed_over()

    def is_handed_over(self) -> None:
        """What is handed over is what we were told of, and never one engine's list entry for two pods."""
        before = set(self.lives.values())
        after = listing(self.reflection.objects, (), self.listing or Listing())
        for found in steps(self.listing, after):
            handed = {each.id: each for each in found}
            for id, each in handed.items():
                if id in self.handed and each.address == self.handed[id].address:
                    assert self.lives[id] == after.pods[id]
            self.handed, self.lives = handed, {id: after.pods[id] for id in handed}
        self.listing = after
        expected = {}
        for name, each_pod in self.told.items():
            meta, status = each_pod["metadata"], each_pod["status"]
            going = "deletionTimestamp" in meta
            ready = status["conditions"][1]["status"] == "True"
            if status["podIP"] and (meta["uid"] in before if going else ready):
                id = f"{name}.default"
                expected[id] = Found(id, f"{status['podIP']}:8000", draining=going)
        assert self.handed == expected


Fleet.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestFleet = Fleet.TestCase
