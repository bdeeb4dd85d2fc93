"""Engines in a cluster whose API server breaks its watches: what was deleted unseen is gone, what is not told stays."""

import asyncio
import json
import logging
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pointsman.control.discovery.cluster import ApiServer as Client
from pointsman.control.discovery.cluster import KubernetesMissing
from pointsman.control.discovery.found import Found
from pointsman.control.discovery.informer import Clock, Pace
from pointsman.control.discovery.kubernetes import Kubernetes
from pointsman.testing.certificates import Authority
from pointsman.testing.kubernetes import ApiServer, Break, pod, pool

pytestmark = pytest.mark.anyio

V1 = "inference.networking.k8s.io/v1"
ALPHA = "inference.networking.x-k8s.io/v1alpha2"
QUICK = Pace(request_s=5.0, silence_s=5.0)
PATIENCE_S = 20.0


class Followed:
    """A source that is followed, with what it told: the lists and the reasons, in order."""

    def __init__(self) -> None:
        self.lists: list[list[Found]] = []
        self.reasons: list[str] = []
        self.delays: list[float] = []
        self.fails = 0
        self._news = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def found(self, found: list[Found]) -> None:
        if self.fails:
            self.fails -= 1
            raise RuntimeError("the registry is full")
        self.lists.append(found)
        self._tell()

    def degraded(self, reason: str) -> None:
        self.reasons.append(reason)
        self._tell()

    async def sleep(self, seconds: float) -> None:
        self.delays.append(seconds)
        self._tell()
        await asyncio.sleep(0.001)

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait until something holds, which what is told can make true."""
        async with asyncio.timeout(PATIENCE_S), self._news:
            await self._news.wait_for(holds)

    async def names(self, *names: str) -> None:
        """Wait until the last list has the engines of these pods, and no others."""
        await self.until(lambda: self.lists and self._names() == list(names))

    async def says(self, reason: str) -> None:
        """Wait until the last reason has this in it, or is "" as well."""
        await self.until(
            lambda: (
                self.reasons and (reason in self.reasons[-1] if reason else not self.reasons[-1])
            )
        )

    def _names(self) -> list[str]:
        return [each.id.removesuffix(".default") for each in self.lists[-1]]

    def _tell(self) -> None:
        async def tell() -> None:
            async with self._news:
                self._news.notify_all()

        task = asyncio.get_running_loop().create_task(tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    async with ApiServer() as server:
        yield server


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Path:
    return tmp_path / "kubeconfig"


@asynccontextmanager
async def following(
    client: Client, *, pace: Pace = QUICK, draw: float = 0.5, **options: Any
) -> AsyncIterator[Followed]:
    followed = Followed()
    clock = Clock(random=lambda: draw, sleep=followed.sleep)
    if not options.get("inference_pool"):
        options.setdefault("selector", "app=vllm")
    source = Kubernetes(
        client,
        clock=clock,
        pace=pace,
        found=followed.found,
        on_degraded=followed.degraded,
        **options,
    )
    source.start()
    try:
        yield followed
        assert source.degraded == (followed.reasons[-1] if followed.reasons else "")
    finally:
        await source.stop()
        await client.close()


def with_config(api: ApiServer, kubeconfig: Path) -> Client:
    kubeconfig.write_text(api.kubeconfig())
    return Client({"KUBECONFIG": str(kubeconfig)}, Path("/nowhere"))


@pytest.fixture
def client(api: ApiServer, kubeconfig: Path) -> Client:
    return with_config(api, kubeconfig)


async def test_pods_come_change_and_go(api: ApiServer, client: Client) -> None:
    api.put(pod("a"))
    api.put(pod("other", labels={"app": "web"}))
    async with following(client) as told:
        await told.names("a")
        await api.watched()
        api.put(pod("b", ip="10.0.0.2"))
        await told.names("a", "b")
        api.put(pod("b", ip="10.0.0.3", uid="new"))
        await told.until(lambda: told.lists[-1][1].address == "10.0.0.3:8000")
        api.delete("b")
        await told.names("a")
    assert told.reasons == []


async def test_an_empty_fleet_is_told_as_well(client: Client) -> None:
    async with following(client) as told:
        await told.names()


async def test_r03_a_terminating_pod_drains_until_it_is_gone(
    api: ApiServer, client: Client
) -> None:
    api.put(pod("a"))
    async with following(client) as told:
        await told.names("a")
        await api.watched()
        api.put(pod("a", terminating=True))
        await told.until(lambda: told.lists[-1][0].draining)
        api.put(pod("a", terminating=True, ready=False))
        api.put(pod("b", ip="10.0.0.2"))
        await told.names("a", "b")
        assert [each.draining for each in told.lists[-1]] == [True, False]
        api.delete("a")
        await told.names("b")


@pytest.mark.parametrize("change", [{"ready": False}, {"labels": {"app": "web"}}])
async def test_r04_a_pod_that_is_not_ready_or_not_selected_any_more_is_gone_at_once(
    api: ApiServer, client: Client, change: dict[str, Any]
) -> None:
    api.put(pod("a"))
    api.put(pod("b", ip="10.0.0.2"))
    async with following(client) as told:
        await told.names("a", "b")
        await api.watched()
        api.put(pod("a", **change))
        await told.names("b")
        api.put(pod("a"))
        await told.names("a", "b")


@pytest.mark.parametrize("how", Break)
async def test_r01_a_pod_that_was_deleted_in_a_gap_is_gone(
    api: ApiServer, client: Client, how: Break
) -> None:
    api.put(pod("dead"))
    api.put(pod("b", ip="10.0.0.2"))
    pace = Pace(silence_s=0.2) if how is Break.HANG else QUICK
    async with following(client, pace=pace) as told:
        await told.names("b", "dead")
        await api.watched()
        api.break_watches(how)
        api.delete("dead")  # after the end of the watch: nobody is told of it
        api.forget()
        await told.names("b")
        await api.watched()
        api.put(pod("c", ip="10.0.0.3"))
        await told.names("b", "c")
    assert told.reasons == []


async def test_r01_a_pod_that_was_deleted_in_an_outage_is_gone_after_it(
    api: ApiServer, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    api.put(pod("dead"))
    api.put(pod("b", ip="10.0.0.2"))
    caplog.set_level(logging.INFO, "pointsman.control.discovery.kubernetes")
    async with following(client) as told:
        await told.names("b", "dead")
        await api.watched()
        await api.down()
        await told.says("cannot be asked")
        api.delete("dead")
        await told.until(lambda: len(told.delays) > 8)
        assert len(told.lists) == 1, "the last list stays"
        await api.up()
        await told.says("")
        await told.names("b")
    assert len(told.reasons) == 2
    logged = [each.message for each in caplog.records]
    assert len(logged) == 2, "one line for each change, however often it was tried"
    assert "(engines in the list: 2)" in logged[0]
    assert "in order again" in logged[1]


async def test_waits_grow_to_a_cap_during_an_outage(api: ApiServer, client: Client) -> None:
    api.refusal = 500
    pace = Pace(backoff_s=0.2, cap_s=2.0)
    async with following(client, pace=pace, draw=1.0) as told:
        await told.says("500 Said: it is broken")
        await api.seen(7)
        api.refusal = 0
        await told.says("")
    assert told.delays[:6] == [0.4, 0.8, 1.6, 2.0, 2.0, 2.0]


async def test_watches_that_end_at_once_are_not_opened_in_a_hurry(
    api: ApiServer, client: Client
) -> None:
    async with following(client, draw=1.0) as told:
        for _ in range(3):
            await api.watched()
            api.break_watches(Break.END)
            await api.watched(0)
    assert told.delays[:2] == [0.4, 0.8]


async def test_an_api_server_that_does_not_answer_is_given_up(
    api: ApiServer, client: Client
) -> None:
    api.hangs = True
    async with following(client, pace=Pace(request_s=0.1)) as told:
        await told.says("does not answer in time")
        api.hangs = False
        await told.says("")


async def test_a_watch_that_is_refused_is_told_and_the_list_is_read_all_the_same(
    api: ApiServer, client: Client
) -> None:
    api.refused_watches = 403
    async with following(client) as told:
        await told.says("403")
        api.put(pod("a"))
        await told.names("a")
        await api.seen(len(api.asked) + 6)
        assert len(told.reasons) == 1, "it does not flap between list and watch"
        api.refused_watches = 0
        await told.says("")


async def test_a_version_that_is_forgotten_is_a_gap_and_no_fault(
    api: ApiServer, client: Client
) -> None:
    api.refused_watches = 410
    async with following(client) as told:
        await told.names()
        await api.seen(6)
        api.refused_watches = 0
        await api.watched()
    assert told.reasons == []


async def test_a_list_comes_in_pages(api: ApiServer, client: Client) -> None:
    api.page = 2
    for n in range(5):
        api.put(pod(f"p{n}", ip=f"10.0.0.{n}"))
    async with following(client) as told:
        await told.names("p0", "p1", "p2", "p3", "p4")
        await api.watched()
    assert [each.query.get("continue") for each in api.asked] == [None, "2", "4", None]


@pytest.mark.parametrize(("draw", "lasts"), [(0.0, "270"), (1.0, "330")])
async def test_a_watch_ends_by_itself_so_that_the_list_is_read_again(
    api: ApiServer, client: Client, draw: float, lasts: str
) -> None:
    api.put(pod("a"))
    async with following(client, draw=draw):
        await api.watched()
    first, watch = api.asked
    assert first.query == {"labelSelector": "app=vllm", "limit": "500"}
    assert watch.path == first.path == "/api/v1/namespaces/default/pods"
    assert watch.query == {
        "labelSelector": "app=vllm",
        "watch": "true",
        "allowWatchBookmarks": "true",
        "resourceVersion": "101",
        "timeoutSeconds": lasts,
    }


@pytest.mark.slow
async def test_the_end_of_a_watch_that_tells_of_nothing_shows_what_it_missed(
    api: ApiServer, client: Client
) -> None:
    async with following(client, pace=Pace(empty_s=1.0)):
        await api.watched()
        await api.seen(4)
        await api.watched()
    assert [each.query.get("watch") for each in api.asked[:4]] == [None, "true"] * 2


async def test_bookmarks_change_nothing(api: ApiServer, client: Client) -> None:
    async with following(client) as told:
        await api.watched()
        api.bookmark()
        api.put(pod("a"))
        await told.names("a")
    assert len(told.lists) == 2
    assert len(api.asked) == 2


async def test_pods_of_all_namespaces(api: ApiServer, client: Client) -> None:
    api.put(pod("a"))
    api.put(pod("a", namespace="other", ip="10.0.0.2"))
    async with following(client, namespace="*") as told:
        await told.until(lambda: told.lists)
    assert [each.id for each in told.lists[0]] == ["a.default", "a.other"]


async def test_a_namespace_and_a_port_that_are_given(api: ApiServer, client: Client) -> None:
    api.put(pod("a", namespace="other", ports={}))
    async with following(client, namespace="other", port=9000) as told:
        await told.until(lambda: told.lists)
    assert told.lists == [[Found("a.other", "10.0.0.1:9000")]]


async def test_r02_pods_that_cannot_be_used_are_told_of_and_others_are_there(
    api: ApiServer, client: Client
) -> None:
    broken = pod("broken")
    broken["status"]["podIP"] = 7
    for each in (broken, pod("x", ports={}), pod("y", ports={}), pod("good")):
        api.put(each)
    async with following(client) as told:
        await told.names("good")
        await told.says("1 objects of the API cannot be read")
        assert "pod x.default: it declares 0 ports" in told.reasons[-1]
        assert "and 1 more" in told.reasons[-1]
        for name in ("broken", "x", "y"):
            api.delete(name)
        await told.says("")


async def test_a_registry_that_refuses_does_not_end_the_following(
    api: ApiServer, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    api.put(pod("a"))
    followed = Followed()
    followed.fails = 2
    clock = Clock(random=lambda: 0.5, sleep=followed.sleep)
    source = Kubernetes(
        client,
        clock=clock,
        found=followed.found,
        on_degraded=followed.degraded,
        selector="app=vllm",
    )
    source.start()
    await followed.names("a")
    await followed.says("")
    await source.stop()
    await client.close()
    assert followed.reasons == ["RuntimeError: the registry is full", ""]
    assert "goes on" in caplog.text


async def test_a_token_that_is_rejected_is_told_and_the_next_one_is_taken(
    api: ApiServer, client: Client, kubeconfig: Path
) -> None:
    api.put(pod("a"))
    api.token = "second"
    async with following(client) as told:
        await told.says("401 Said: Unauthorized")
        await asyncio.to_thread(kubeconfig.write_text, api.kubeconfig())
        await told.names("a")
        await told.says("")
    assert api.asked[-1].authorization == "Bearer second"
    assert "second" not in "".join(told.reasons)


async def test_a_kubeconfig_that_is_not_there_yet_is_waited_for(
    api: ApiServer, kubeconfig: Path
) -> None:
    client = Client({"KUBECONFIG": str(kubeconfig)}, Path("/nowhere"))
    async with following(client) as told:
        await told.says("cannot be asked")
        await asyncio.to_thread(kubeconfig.write_text, api.kubeconfig())
        await told.says("")


def test_our_namespace_is_that_of_the_account(tmp_path: Path) -> None:
    assert Client({}, tmp_path).namespace == "default"
    (tmp_path / "namespace").write_text("fleet\n")
    assert Client({}, tmp_path).namespace == "fleet"


@pytest.fixture
def account(tmp_path: Path) -> Path:
    """The folder of a service account, whose token is `first`."""
    Authority(tmp_path, "ca").issue("api")
    (tmp_path / "ca.crt").write_text((tmp_path / "ca.pem").read_text())
    (tmp_path / "token").write_text("first")
    (tmp_path / "namespace").write_text("fleet")
    return tmp_path


async def test_in_a_cluster_the_token_of_the_account_is_read_again_when_it_rotates(
    account: Path,
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(account / "api.crt", account / "api.key")
    async with ApiServer(context) as api:
        api.token = "first"
        api.put(pod("a", namespace="fleet"))
        host, port = api.url.removeprefix("https://").split(":")
        environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        async with following(Client(environ, account)) as told:
            await told.until(lambda: told.lists)
            assert [each.id for each in told.lists[0]] == ["a.fleet"]
            await api.watched()
            api.token = "rotated"
            api.break_watches(Break.RESET)
            await told.says("401")
            await asyncio.to_thread((account / "token").write_text, "rotated")
            await told.says("")
            await api.watched()
            assert api.asked[-1].authorization == "Bearer rotated"


@pytest.mark.parametrize(("group", "old"), [(V1, False), (ALPHA, True)])
async def test_a_pool_names_the_pods_and_their_ports(
    api: ApiServer, client: Client, group: str, old: bool
) -> None:
    api.served = {"v1", group}
    kind = f"{group}/inferencepools"
    api.put(pool("fleet", 8000, old=old, app="vllm"), kind)
    api.put(pod("a", ports={}))
    async with following(client, inference_pool="fleet") as told:
        await told.names("a")
        await api.watched(2)
        api.put(pool("fleet", 9000, old=old, app="vllm"), kind)
        await told.until(lambda: told.lists[-1][0].address == "10.0.0.1:9000")
        api.put(pod("b", labels={"app": "next"}))
        api.put(pool("fleet", 9000, old=old, app="next"), kind)
        await told.names("b")
        await api.watched(2)
        api.delete("fleet", kind=kind)
        await told.names()
        await told.says("there is no InferencePool fleet in default")
        await api.watched(1)
        api.put(pool("fleet", 8000, old=old, app="vllm"), kind)
        await told.names("a")
        await told.says("")
    assert len(told.lists) == 5, "between two selectors the former list stays"


async def test_a_pool_of_the_old_version_is_found_beside_the_new_one(
    api: ApiServer, client: Client
) -> None:
    api.served |= {ALPHA}
    api.put(pool("fleet", 8000, old=True, app="vllm"), f"{ALPHA}/inferencepools")
    api.put(pod("a"))
    async with following(client, inference_pool="fleet") as told:
        await told.names("a")


async def test_a_pool_that_selects_nothing_has_no_pods(api: ApiServer, client: Client) -> None:
    api.put(pool("fleet", 8000), f"{V1}/inferencepools")
    api.put(pod("a"))
    async with following(client, inference_pool="fleet") as told:
        await told.names()
        await told.says("InferencePool fleet selects no pods")


async def test_a_kind_that_the_api_does_not_know_at_the_moment_is_no_empty_fleet(
    api: ApiServer, client: Client
) -> None:
    api.put(pool("fleet", 8000, app="vllm"), f"{V1}/inferencepools")
    api.put(pod("a"))
    async with following(client, inference_pool="fleet") as told:
        await told.names("a")
        await api.watched(2)
        api.served.discard(V1)
        api.break_watches(Break.END)
        await told.says("404")
        api.served.add(V1)
        await told.says("")
    assert len(told.lists) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "either"),
        ({"selector": "a=b", "inference_pool": "p"}, "either"),
        ({"inference_pool": "p", "namespace": "*"}, "one namespace"),
    ],
)
async def test_what_cannot_be_followed_is_refused(
    client: Client, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        Kubernetes(client, clock=Clock(random=float), found=print, **options)


async def test_a_source_that_was_never_started_can_be_stopped(client: Client) -> None:
    await Kubernetes(client, clock=Clock(random=float), found=print, selector="a=b").stop()
    await client.close()


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio", None)
    with pytest.raises(KubernetesMissing, match=r"pip install 'pointsman\[k8s\]'"):
        Client({})


def test_nothing_of_the_extra_is_loaded_before_it_is_needed() -> None:
    code = (
        "import json, sys, pointsman.app, pointsman.control.discovery.kubernetes as k;"
        "from pointsman.control.discovery.cluster import ApiServer; ApiServer({});"
        "print(json.dumps([m for m in ('kubernetes_asyncio', 'aiohttp') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert json.loads(done.stdout) == []
