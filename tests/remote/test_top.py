"""`pointsman top`: rates from two looks, restarts survived, and no look at a door that stays shut."""

import io
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec
import pytest
from rich.console import Console

from pointsman.remote.answers import Stats, WorkerRow
from pointsman.remote.client import Refused, Unreachable
from pointsman.remote.top import UNKNOWN, Look, Top, rates

if TYPE_CHECKING:
    from tests.remote.conftest import FakeAdmin, Run

START = Stats(
    started_at=1000.0,
    now=1060.0,
    requests_total=100,
    errors_total=10,
    failovers_total=5,
    first_byte_seconds_sum=9.0,
    first_byte_count=90,
    in_flight=4,
    workers={"a": 60, "b": 40},
)
LATER = Stats(
    started_at=1000.0,
    now=1062.0,
    requests_total=130,
    errors_total=11,
    failovers_total=8,
    first_byte_seconds_sum=12.0,
    first_byte_count=100,
    in_flight=7,
    workers={"a": 70, "b": 3, "c": 20},
)
RESTARTED = msgspec.structs.replace(LATER, started_at=1061.0, requests_total=3)


def worker(name: str, load: int = 0, **fields: object) -> WorkerRow:
    """Return a worker."""
    plain = {"worker_id": name, "model": "m", "role": "unified", "http_address": "h:1"}
    return msgspec.convert(plain | {"draining": False, "load": load, **fields}, WorkerRow)


def looks(*seen: Look | Exception) -> Callable[[], Look]:
    """Return what sees one thing after the other."""
    rest = iter(seen)

    def look() -> Look:
        found = next(rest)
        if isinstance(found, Exception):
            raise found
        return found

    return look


def drawn(top: Top) -> list[str]:
    """Return the lines of the present frame with one space between words."""
    screen = io.StringIO()
    Console(file=screen, width=200).print(top.frame())
    return [" ".join(line.split()) for line in screen.getvalue().splitlines()]


def quiet(seen: Iterable[Look | Exception]) -> Top:
    """Return a top that does not wait."""
    return Top("http://gateway", looks(*seen), lambda: None)


def test_rates_are_differences_over_the_gateways_own_time() -> None:
    now = rates(START, LATER)
    assert (now.requests, now.errors, now.failovers) == (15.0, 0.5, 1.5)
    assert now.first_byte_s == pytest.approx(0.3)
    assert now.workers == {"a": 5.0, "b": 0.0, "c": 10.0}, "b began again under its old id"


def test_two_lives_are_not_compared() -> None:
    assert rates(START, RESTARTED) is UNKNOWN
    assert rates(LATER, LATER) is UNKNOWN, "there was no time between them"


def test_without_answers_there_is_no_time_to_the_first_byte() -> None:
    idle = msgspec.structs.replace(START, now=1061.0)
    assert rates(START, idle).first_byte_s is None


def test_a_frame_has_the_totals_and_the_busiest_worker_first() -> None:
    top = quiet([Look(START), Look(LATER, (worker("b", 1), worker("c", 3, drained=True)))])
    top.step()
    assert drawn(top)[0] == "http://gateway up 1 min 0 s"
    assert drawn(top)[1] == ("- requests/s, 4 in flight first byte - - failovers/s - errors/s")
    top.step()
    assert drawn(top) == [
        "http://gateway up 1 min 2 s",
        "15.0 requests/s, 7 in flight first byte 300 ms 1.5 failovers/s 0.5 errors/s",
        "",
        "worker model state load in flight requests/s oldest",
        "c m drained 3 0 10.0 -",
        "b m up 1 0 0.0 -",
    ]


def test_a_restart_of_the_gateway_is_lived_through() -> None:
    refused = Refused(503, "shutting down")
    steps: list[Look | Exception] = [
        Look(START),
        Unreachable("connection refused"),
        refused,
        Look(RESTARTED),
    ]
    top = quiet([*steps, Look(msgspec.structs.replace(RESTARTED, now=1063.0, requests_total=7))])
    top.step()
    for told in ("connection refused", "shutting down (503)"):
        top.step()
        assert drawn(top)[0] == f"unreachable, trying again: {told}"
        assert drawn(top)[1] == "http://gateway up 1 min 0 s", "what was seen last stays"
    top.step()
    assert drawn(top)[0] == "http://gateway up 1.0 s"
    assert drawn(top)[1].startswith("- requests/s")
    top.step()
    assert drawn(top)[1].startswith("4.0 requests/s")


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_shut_door_ends_it(status: int) -> None:
    with pytest.raises(Refused):
        quiet([Refused(status, "no")]).run(Console(file=io.StringIO(), force_terminal=True))


def test_it_draws_until_it_is_told_to_stop() -> None:
    screen = io.StringIO()
    pauses: list[int] = []

    def pause() -> None:
        pauses.append(1)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    top = Top("http://gateway", looks(Look(START), Unreachable("gone"), Look(LATER)), pause)
    with pytest.raises(KeyboardInterrupt):
        top.run(Console(file=screen, force_terminal=True, width=120, height=30))
    shown = screen.getvalue()
    assert shown.index("4 in flight") < shown.index("trying again: gone")
    assert shown.index("trying again: gone") < shown.index("15.0 requests/s")
    assert shown.endswith("\x1b[?25h\x1b[?1049l"), "the terminal gets its cursor back"


def test_once_prints_one_frame_after_one_interval(admin: "FakeAdmin", run: "Run") -> None:
    admin.says(
        "GET /stats",
        (200, msgspec.to_builtins(START)),
        (200, msgspec.to_builtins(LATER)),
    )
    admin.says("GET /workers", (200, {"data": [], "route_epoch": 1}))
    result = run("top", "--once", "--interval", "0.1")
    assert "15.0 requests/s, 7 in flight" in result.stdout
    assert admin.lines() == ["GET /stats", "GET /workers"] * 2


def test_once_does_not_try_again(admin: "FakeAdmin", run: "Run") -> None:
    admin.says("GET /stats", (503, "shutting down"))
    result = run("top", "--once", "--interval", "0.1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "pointsman: shutting down (503)\n"


def test_ctrl_c_is_its_good_end(
    admin: "FakeAdmin", run: "Run", monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupted)
    admin.says("GET /stats", (200, msgspec.to_builtins(START)))
    admin.says("GET /workers", (200, {"data": [], "route_epoch": 1}))
    result = run("top", TERM="xterm", FORCE_COLOR="1")
    assert result.exit_code == 0
    assert "4 in flight" in result.stdout
    assert result.stderr == ""
