"""A canary is walked by the example script against a real gateway, under load: only the answers tell of it."""

import doctest
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import pytest

from pointsman.app import Gateway
from pointsman.domain.keys import Key, Scope
from pointsman.domain.routes import Route, RouteTable, pick_backend, routes_from_json
from pointsman.domain.worker import Worker
from pointsman.testing.client import Client, post
from pointsman.testing.gateways import running
from pointsman.testing.origin import Origin, answers

if TYPE_CHECKING:
    from examples import canary_rollout
else:
    place = Path(__file__).parents[2] / "examples" / "canary_rollout.py"
    spec = spec_from_file_location("canary_rollout", place)
    canary_rollout = sys.modules["canary_rollout"] = module_from_spec(spec)
    spec.loader.exec_module(canary_rollout)

Routes = list[dict[str, Any]]

CLIENTS = 50
IDS_EACH = 4
ANSWERS_PER_STEP = 200
SHARES = [number / 10 for number in range(1, 11)]
PEPPER = "pepper"
KEY_ID = "abcdefghijkl"
KEY = f"tl_{KEY_ID}_{'A' * 32}"
DIGEST = "900c4259ee85eb80ae9c8806518e9b788e7e3dc5e5d5f8fab81feaa126334306"
"""Source: specification, section 4.2."""

SMOL = {"model": "smol", "aliases": ["s"], "backends": [{"model": "smol-v3"}]}
CASCADE = {
    "model": "auto",
    "cascade": [{"model": "smol-v3", "accept_if": "mean_logprob >= -1.25"}, {"model": "größer"}],
}
BYSTANDERS: Routes = [
    {"model": "größer", "aliases": ["auto"], "backends": [{"model": "smol-v3"}]},
    {
        "model": "split",
        "targets": ["disaggregated", "unified"],
        "backends": [{"model": "a", "weight": 1 / 3}, {"model": "b", "weight": 2 / 3}],
        "default_max_tokens": 7,
    },
]
"""Routes that no canary may touch."""


class Clocked(canary_rollout.Admin):
    """An admin API that notes when each table was sent, and when it was acknowledged."""

    def __init__(self, url: str, key: str) -> None:
        super().__init__(url, key)
        self.puts: list[tuple[float, float, Routes]] = []
        self.stale = 0

    def put_routes(self, routes: Routes, etag: str) -> str:
        """Put a table and note it."""
        sent = time.monotonic()
        try:
            tag: str = super().put_routes(routes, etag)
        except canary_rollout.Stale:
            self.stale += 1
            raise
        self.puts.append((sent, time.monotonic(), routes))
        return tag


@asynccontextmanager
async def fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Gateway, str]]:
    """Run a gateway over a worker of smol-v3 and one of smol-v4; yield it and its address."""
    monkeypatch.setenv("TL_GATEWAY_PEPPER", PEPPER)
    record = Key(
        key_id=KEY_ID,
        hmac=DIGEST,
        tenant="acme",
        name="test",
        scopes=(Scope.INFER, Scope.ADMIN),
        rpm=0,
        tpm=0,
    )
    keys_file = tmp_path / "keys.jsonl"
    keys_file.write_bytes(msgspec.json.encode(record) + b"\n")
    keys_file.chmod(0o600)
    async with (
        Origin(answers({"served": "smol-v3"})) as old,
        Origin(answers({"served": "smol-v4"})) as new,
        running(
            {"old": old.address},
            model="smol-v3",
            routes=routes_from_json([SMOL, *BYSTANDERS]),
            keys_file=str(keys_file),
        ) as gateway,
    ):
        canary = Worker("new", model="smol-v4", http_address=new.address, static=True)
        gateway.registry.add(canary)
        host, port = gateway.address
        yield gateway, f"http://{host}:{port}"


class Load:
    """Clients that ask with the same request ids again and again; `asked` is what they got, and when."""

    def __init__(self, address: tuple[str, int], key: str) -> None:
        self._address = address
        self._key = key
        self.asked: list[tuple[str, str, float, float]] = []
        self.failed: list[tuple[int, bytes]] = []
        self.over = False

    async def client(self, number: int) -> None:
        """Ask until it is over, on one connection."""
        ids = [f"req-{number}-{each}" for each in range(IDS_EACH)]
        async with Client(self._address) as client:
            while not self.over:
                for request_id in ids:
                    headers = {
                        "x-request-id": request_id,
                        "authorization": f"Bearer {self._key}",
                    }
                    began = time.monotonic()
                    response = await client.ask(post({"model": "s"}, headers=headers))
                    ended = time.monotonic()
                    if response.status != 200 or response.header("x-request-id") != request_id:
                        self.failed.append((response.status, response.body))
                        continue
                    served = msgspec.json.decode(response.body)["served"]
                    self.asked.append((request_id, served, began, ended))

    def wait(self, count: int) -> None:
        """Wait, in a thread, for that many answers more."""
        enough = len(self.asked) + count
        while len(self.asked) < enough and not self.failed:
            time.sleep(0.005)


@pytest.mark.anyio
@pytest.mark.slow
async def test_a_canary_is_walked_under_load_and_every_request_id_keeps_its_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, monkeypatch) as (gateway, url), AsyncExitStack() as stack:
        load = Load(gateway.address, KEY)
        admin = Clocked(url, KEY)
        stack.callback(setattr, load, "over", True)

        def healthy(_share: float) -> bool:
            load.wait(ANSWERS_PER_STEP)
            return not load.failed

        def walk() -> bool:
            load.wait(ANSWERS_PER_STEP)
            return canary_rollout.walk(admin, "smol", "smol-v4", SHARES, healthy=healthy)

        async with anyio.create_task_group() as clients:
            for number in range(CLIENTS):
                clients.start_soon(load.client, number)
            walked = await anyio.to_thread.run_sync(walk)
            load.over = True

        table = gateway.router.table

    assert load.failed == []
    assert walked
    assert [put[0] for put in admin.puts] == sorted(put[0] for put in admin.puts)
    assert len(admin.puts) == len(SHARES)
    assert (
        table.routes[0].backends
        == routes_from_json([{**SMOL, "backends": [{"model": "smol-v4"}]}])[0].backends
    )
    assert table.routes[1:] == routes_from_json(BYSTANDERS), "other routes are as they were"

    routes = [route_of([SMOL]), *(route_of(put[2]) for put in admin.puts)]
    sure = [0] * len(routes)
    for request_id, served, began, ended in load.asked:
        possible = [
            number
            for number in range(len(routes))
            if (number == 0 or admin.puts[number - 1][0] <= ended)
            and (number == len(admin.puts) or admin.puts[number][1] >= began)
        ]
        backends = {pick_backend(routes[number], request_id) for number in possible}
        assert served in backends, (request_id, served, possible)
        if len(possible) == 1:
            sure[possible[0]] += 1
    assert min(sure) > ANSWERS_PER_STEP / 4, "each table was seen alone, by many"
    assert {served for _, served, _, _ in load.asked} == {"smol-v3", "smol-v4"}


def route_of(routes: Routes) -> Route:
    """Return the route that the canary is of."""
    found = RouteTable(routes_from_json(routes)).lookup("smol")
    assert found is not None
    return found


@pytest.mark.anyio
async def test_of_two_scripts_that_edit_at_once_one_gets_412_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, monkeypatch) as (gateway, url):
        both_have_read = threading.Barrier(2)
        admins = [Clocked(url, KEY), Clocked(url, KEY)]

        def script(admin: Clocked, model: str, edit: Callable[[Any], Any]) -> Any:
            first: list[None] = []

            def edited(route: Any) -> Any:
                if not first:
                    first.append(None)
                    both_have_read.wait(10)
                return edit(route)

            return canary_rollout.change(admin, model, edited)

        def canary(route: Any) -> Any:
            return canary_rollout.with_canary(route, "smol-v4", 0.25)

        def longer(route: Any) -> Any:
            return {**route, "default_max_tokens": 9}

        before = gateway.router.table.epoch
        async with anyio.create_task_group() as scripts:
            for admin, model, edit in zip(admins, ("smol", "split"), (canary, longer), strict=True):
                scripts.start_soon(anyio.to_thread.run_sync, script, admin, model, edit)
        table = gateway.router.table

    assert sorted(admin.stale for admin in admins) == [0, 1]
    assert table.epoch == before + 2
    assert table.routes == routes_from_json([canary(SMOL), BYSTANDERS[0], longer(BYSTANDERS[1])])


class Paper:
    """An admin API of two routes; `stale` puts are refused first."""

    def __init__(self, *, stale: int = 0, serving: bool = True) -> None:
        self.table: Routes = [{"model": "other"}, dict(SMOL)]
        self.epoch = 1
        self.stale = stale
        self.serving = serving

    def ready(self, model: str) -> bool:
        """Tell whether the canary is served."""
        return self.serving

    def routes(self) -> tuple[Routes, str]:
        """Return a copy of the table."""
        return msgspec.json.decode(msgspec.json.encode(self.table)), f'"routes-{self.epoch}"'

    def put_routes(self, routes: Routes, etag: str) -> str:
        """Take a table."""
        assert etag == f'"routes-{self.epoch}"'
        if self.stale:
            self.stale -= 1
            self.epoch += 1
            raise canary_rollout.Stale
        self.table = routes
        self.epoch += 1
        return f'"routes-{self.epoch}"'


def silent(_text: str) -> None:
    """Say nothing."""


def test_the_examples_in_the_script_are_true() -> None:
    assert doctest.testmod(canary_rollout) == (0, 1)


def test_a_step_is_done_again_up_to_five_times() -> None:

    def edit(route: dict[str, Any]) -> dict[str, Any]:
        return {**route, "default_max_tokens": 1}

    paper: Any = Paper(stale=4)
    busy: Any = Paper(stale=5)
    assert canary_rollout.change(paper, "smol", edit) == (SMOL, '"routes-6"')
    with pytest.raises(canary_rollout.RolloutError, match="changed by others 5 times in a row"):
        canary_rollout.change(busy, "smol", edit)
    assert busy.table == [{"model": "other"}, SMOL]
    with pytest.raises(canary_rollout.RolloutError, match="there is no route smal"):
        canary_rollout.change(paper, "smal", edit)


@pytest.mark.parametrize("end", ["not healthy", "KeyboardInterrupt"])
def test_a_canary_that_is_given_up_leaves_the_route_as_it_was(end: str) -> None:
    paper: Any = Paper()
    weights = []

    def healthy(share: float) -> bool:
        weights.append([each["weight"] for each in paper.table[1]["backends"]])
        if share > 0.2:
            if end == "KeyboardInterrupt":
                raise KeyboardInterrupt
            return False
        return True

    try:
        assert not canary_rollout.walk(
            paper, "smol", "smol-v4", [0.1, 0.3, 1], healthy=healthy, say=silent
        )
    except KeyboardInterrupt:
        assert end == "KeyboardInterrupt"
    assert weights == [[0.9, 0.1], [0.7, 0.3]]
    assert paper.table == [{"model": "other"}, SMOL]


def test_a_model_that_nobody_serves_gets_no_requests() -> None:
    paper: Any = Paper(serving=False)
    with pytest.raises(canary_rollout.RolloutError, match="no worker serves smol-v4 yet"):
        canary_rollout.walk(paper, "smol", "smol-v4", [1], healthy=lambda _: True, say=silent)
    assert paper.epoch == 1


def test_others_keep_their_proportions_and_the_canary_comes_last() -> None:
    backends = [
        {"model": "a", "weight": 1 / 3},
        {"model": "c", "weight": 1 / 3},
        {"model": "b", "weight": 1 / 3},
    ]
    route = {"model": "m", "aliases": ["x"], "backends": backends}
    assert canary_rollout.with_canary(route, "c", 0.1) == {
        **route,
        "backends": [
            {"model": "a", "weight": 0.45},
            {"model": "b", "weight": 0.45},
            {"model": "c", "weight": 0.1},
        ],
    }
    walked = canary_rollout.with_canary(canary_rollout.with_canary(route, "d", 0.1), "d", 1 / 3)
    RouteTable.validate(routes_from_json([walked]))
    assert [each["weight"] for each in walked["backends"]] == [0.222222222] * 3 + [0.333333333]
    assert canary_rollout.with_canary(walked, "d", 1) == {
        **route,
        "backends": [{"model": "d", "weight": 1}],
    }


@pytest.mark.parametrize(
    ("route", "share", "why"),
    [
        (SMOL, 0, "more than 0"),
        (SMOL, 1.01, "at most 1"),
        (SMOL, float("nan"), "more than 0"),
        (CASCADE, 0.5, "is a cascade"),
        ({"model": "m", "backends": [{"model": "smol-v4"}]}, 0.5, "alone already"),
    ],
)
def test_what_is_no_canary_is_refused(route: dict[str, Any], share: float, why: str) -> None:
    with pytest.raises(canary_rollout.RolloutError, match=why):
        canary_rollout.with_canary(route, "smol-v4", share)


def test_a_gateway_that_is_not_there_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--url", "http://127.0.0.1:1", "--route", "smol", "--canary", "smol-v4"]
    assert canary_rollout.main(arguments) == 1
    told = capsys.readouterr().err
    assert told.startswith("canary_rollout: GET /workers: ")
    assert told.count("\n") == 1
