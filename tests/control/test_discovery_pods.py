"""From pods to engines: who is there, where it listens, and what is known about it."""

from typing import Any

import msgspec
import pytest

from pointsman.control.discovery.found import Found
from pointsman.control.discovery.pods import Listing, Pod, PoolSpec, listing, steps
from pointsman.testing.kubernetes import pod, pool

NOTHING = Listing()


def read(*objects: dict[str, Any]) -> list[Pod]:
    return [msgspec.convert(each, Pod) for each in objects]


def listed(
    *objects: dict[str, Any], ports: tuple[int, ...] = (), before: Listing = NOTHING
) -> Listing:
    return listing(read(*objects), ports, before)


def one(**said: Any) -> Found:
    after = listed(pod("a", **said))
    assert after.problems == ()
    [found] = after.found
    return found


def test_a_ready_pod_is_an_engine_at_its_address() -> None:
    assert one() == Found("a.default", "10.0.0.1:8000")


def test_an_ipv6_address_stands_in_brackets() -> None:
    assert one(ip="fd00::7").address == "[fd00::7]:8000"


def test_r04_a_pod_that_is_not_ready_is_not_there_whatever_it_answers_elsewhere() -> None:
    assert listed(pod("a", ready=False)) == NOTHING
    bare = pod("a")
    bare["status"].pop("conditions")
    assert listed(bare) == NOTHING


def test_a_pod_without_an_address_is_not_there() -> None:
    assert listed(pod("a", ip="")) == NOTHING


@pytest.mark.parametrize("ready", [True, False])
def test_r03_a_terminating_pod_that_was_there_stays_and_drains(ready: bool) -> None:
    before = listed(pod("a"))
    after = listed(pod("a", terminating=True, ready=ready), before=before)
    assert [each.draining for each in after.found] == [True]
    again = listed(pod("a", terminating=True, ready=ready), before=after)
    assert again == after


def test_r03_a_terminating_pod_that_was_not_there_does_not_come() -> None:
    assert listed(pod("a", terminating=True)) == NOTHING
    assert listed(pod("a", terminating=True, uid="2"), before=listed(pod("a"))).found == ()


def test_annotations_and_labels_say_what_an_engine_is_and_annotations_win() -> None:
    found = one(
        labels={
            "pointsman.dev/role": "prefill",
            "pointsman.dev/model": "llama",
            "pointsman.dev/capacity": "4",
            "pointsman.dev/other": "x",
        },
        annotations={
            "pointsman.dev/model": "meta-llama/Llama-3.1-8B",
            "pointsman.dev/dialect": "sglang",
            "pointsman.dev/connector": "bootstrap",
            "pointsman.dev/bootstrap-port": "8997",
            "pointsman.dev/scheme": "https",
            "pointsman.dev/path": "/engine",
            "pointsman.dev/port": "30000",
        },
    )
    assert found.address == "10.0.0.1:30000"
    assert found.labels == {
        "role": "prefill",
        "model": "meta-llama/Llama-3.1-8B",
        "capacity": "4",
        "dialect": "sglang",
        "connector": "bootstrap",
        "bootstrap_port": "8997",
        "scheme": "https",
        "path": "/engine",
    }


@pytest.mark.parametrize(
    ("said", "role"),
    [
        ("prefill", "prefill"),
        ("decode", "decode"),
        ("both", "unified"),
        ("prefill-decode", "unified"),
    ],
)
def test_the_roles_of_llm_d_are_understood(said: str, role: str) -> None:
    assert one(labels={"llm-d.ai/role": said}).labels == {"role": role}


def test_a_role_of_llm_d_that_we_do_not_have_says_nothing_and_our_own_word_wins() -> None:
    assert one(labels={"llm-d.ai/role": "encode"}).labels == {}
    own = {"llm-d.ai/role": "decode", "pointsman.dev/role": "unified"}
    assert one(labels=own).labels == {"role": "unified"}


def test_each_port_of_a_pool_is_an_engine_with_a_name_of_its_own() -> None:
    after = listed(pod("a"), ports=(8000, 8001))
    assert [(each.id, each.address) for each in after.found] == [
        ("a.default:8000", "10.0.0.1:8000"),
        ("a.default:8001", "10.0.0.1:8001"),
    ]
    assert listed(pod("a"), ports=(9000,)).found == (Found("a.default", "10.0.0.1:9000"),)


def test_a_port_is_told_or_named_http_or_the_only_one() -> None:
    told = pod("a", annotations={"pointsman.dev/port": "9001"})
    assert listed(told, ports=(8000,)).found[0].address == "10.0.0.1:9001"
    assert one(ports={"metrics": 9090, "http": 8080}).address == "10.0.0.1:8080"
    assert one(ports={"serve": 8081}).address == "10.0.0.1:8081"


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"ports": {}}, "declares 0 ports"),
        ({"ports": {"a": 1, "b": 2}}, "declares 2 ports"),
        ({"annotations": {"pointsman.dev/port": "http"}}, "http is no port"),
        ({"annotations": {"pointsman.dev/port": "٣"}}, "٣ is no port"),
        ({"annotations": {"pointsman.dev/port": "65536"}}, "65536 is no port"),
        ({"ports": {"a": 0}}, "0 is no port"),
    ],
)
def test_r02_a_pod_that_does_not_say_where_it_listens_is_no_obstacle_to_others(
    said: dict[str, Any], problem: str
) -> None:
    after = listed(pod("bad", **said), pod("good"))
    assert [each.id for each in after.found] == ["good.default"]
    [told] = after.problems
    assert told.startswith("pod bad.default: ")
    assert problem in told


def test_a_bare_pod_is_read_and_has_no_port() -> None:
    bare = {"metadata": {"name": "a", "namespace": "b"}, "status": pod("a")["status"]}
    assert listed(bare, ports=(1,)).found == (Found("a.b", "10.0.0.1:1"),)
    assert "declares 0 ports" in listed(bare).problems[0]


def test_engines_stand_in_the_order_of_their_names_whatever_the_order_of_pods() -> None:
    a, b = pod("a"), pod("b", ip="10.0.0.2")
    assert listed(b, a) == listed(a, b)


def test_a_pool_of_either_version_names_pods_and_ports() -> None:
    new = msgspec.convert(pool("p", 8000, 8001, app="vllm", tier="a")["spec"], PoolSpec)
    assert (new.label_selector, new.ports) == ("app=vllm,tier=a", (8000, 8001))
    old = msgspec.convert(pool("p", 8000, old=True, app="vllm")["spec"], PoolSpec)
    assert (old.label_selector, old.ports) == ("app=vllm", (8000,))
    assert (PoolSpec().label_selector, PoolSpec().ports) == ("", ())


def test_the_first_list_is_handed_over_also_where_it_is_empty() -> None:
    assert steps(None, NOTHING) == [[]]


def test_what_did_not_change_is_not_handed_over() -> None:
    before = listed(pod("a"))
    assert steps(before, listed(pod("a"), before=before)) == []


def test_what_changed_is_handed_over_whole() -> None:
    before = listed(pod("a"))
    after = listed(pod("a"), pod("b", ip="10.0.0.2"), before=before)
    assert steps(before, after) == [list(after.found)]
    moved = listed(pod("a", ip="10.0.0.9", uid="2"), before=before)
    assert steps(before, moved) == [list(moved.found)]


def test_k09_a_pod_that_took_over_name_and_address_is_another_engine() -> None:
    keeps = pod("b", ip="10.0.0.2")
    before = listed(pod("a"), keeps)
    after = listed(pod("a", uid="2"), keeps, before=before)
    assert after.found == before.found
    gone, whole = steps(before, after)
    assert [each.id for each in gone] == ["b.default"]
    assert [each.id for each in whole] == ["a.default", "b.default"]
