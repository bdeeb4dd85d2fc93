"""The page about the command line: every example is what the command prints, and no command or option is left out."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typer

from pointsman.cli_operator import add_operator_commands

if TYPE_CHECKING:
    from tests.remote.conftest import FakeAdmin, Run

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
EXAMPLES = re.findall(r"^```console\n\$ pointsman (.*)\n((?:.*\n)*?)```$", PAGE, re.MULTILINE)


def worker(name: str, model: str, busy: int, **fields: object) -> dict[str, object]:
    host = f"10.0.0.{ord(name[-1]) - ord('0')}:8000"
    usual = {
        **{"worker_id": name, "model": model, "role": "unified", "http_address": host},
        **{"queue_depth": 0, "running": busy, "kv_free_blocks": 2048 - 200 * busy},
        **{"kv_total_blocks": 2048, "draining": False, "drained": False, "static": False},
        **{"in_flight": busy, "load": busy, "oldest_request_s": 1.7 * busy or None},
        **{"dialect": "tl", "up": True, "degraded": "", "source": "", "kv_usage": None},
    }
    return usual | fields


FLEET = [
    worker("gpu-1", "smol-v3", 3),
    worker("gpu-2", "smol-v3", 5, queue_depth=1, load=6),
    worker("gpu-3", "smol-v4", 0, static=True, source="static", dialect="vllm", kv_usage=0.0),
    worker("gpu-4", "large", 2, drained=True),
]
ROUTE = {
    "model": "smol",
    "aliases": ["default"],
    "backends": [{"model": "smol-v3", "weight": 0.9}, {"model": "smol-v4", "weight": 0.1}],
}
STATS = {
    **{"started_at": 1_767_000_000.0, "now": 1_767_007_500.0, "requests_total": 51_000},
    **{"errors_total": 12, "failovers_total": 40, "first_byte_seconds_sum": 9_000.0},
    **{"first_byte_count": 50_000, "in_flight": 10},
    "workers": {"gpu-1": 20_000, "gpu-2": 22_000, "gpu-3": 6_000, "gpu-4": 3_000},
}
LATER = STATS | {
    **{"now": 1_767_007_501.0, "requests_total": 51_038, "failovers_total": 41},
    **{"first_byte_seconds_sum": 9_007.0, "first_byte_count": 50_035},
    "workers": {"gpu-1": 20_017, "gpu-2": 22_015, "gpu-3": 6_006, "gpu-4": 3_000},
}
EXPLANATION = {
    **{"request_id": "req-7", "model": "default", "route": "smol", "served_model": "smol-v3"},
    **{"target": "unified", "policy": "least_outstanding", "cascade_step": -1, "refusal": None},
    "draw": {
        "value": 0.3312014263885037,
        "backends": [
            {"model": "smol-v3", "weight": 0.9, "since": 0.0, "until": 0.9},
            {"model": "smol-v4", "weight": 0.1, "since": 0.9, "until": 1.0},
        ],
    },
    "rule": "the lowest load wins, the smallest id among equals",
    "candidates": [
        {"worker_id": "gpu-1", "load": 3, "score": 3.0},
        {"worker_id": "gpu-2", "load": 6, "score": 6.0},
    ],
    "vetoed": [{"worker_id": "gpu-5", "why": "draining"}],
    **{"pick": "gpu-1", "prefill": None, "reason": "canary", "policy_reason": "load"},
}


def tried(name: str, outcome: str, reason: str) -> dict[str, object]:
    return {
        **{"worker_id": name, "served_model": "smol-v3", "reason": reason, "outcome": outcome},
        **{"policy_reason": "load", "after_s": 0.0, "candidates": [], "candidate_count": 2},
    }


def decided(number: int, *attempts: dict[str, object], **fields: object) -> dict[str, object]:
    usual = {
        **{"request_id": f"req-{number}", "at": 1_767_007_400.0 + number, "model": "default"},
        **{"path": "/v1/chat/completions", "stream": True, "status": 200, "error": ""},
        **{"key_id": "abc", "tenant": "acme", "trace_id": "", "seconds": 2.5},
        **{"first_byte_s": 0.18, "attempts": attempts},
    }
    return usual | fields


def left(model: str, count: int, oldest: float | None) -> dict[str, object]:
    return {"model": model, "workers": 1, "requests_left": count, "oldest_request_s": oldest}


@pytest.fixture(autouse=True)
def in_utc() -> Iterator[None]:
    """Tell times as the page does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.fixture(autouse=True)
def answers(admin: "FakeAdmin", monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway of the page."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    admin.says("GET /workers", (200, {"data": FLEET, "route_epoch": 7}))
    table = {"route_epoch": 7, "routes": [ROUTE]}
    admin.says("GET /routes", (200, table, {"etag": '"routes-7"'}))
    admin.says("POST /models/large:drain", (202, left("large", 2, 3.4)))
    admin.says("GET /models/large", (200, left("large", 1, 5.1)), (200, left("large", 0, None)))
    admin.says("POST /models/large:undrain", (200, left("large", 0, None)))
    admin.says("POST /route:explain", (200, EXPLANATION))
    attempts = tried("gpu-2", "refused", "canary"), tried("gpu-1", "answered", "failover")
    failed = decided(8, *attempts, first_byte_s=1.31, seconds=4.0)
    whole = decided(7, tried("gpu-1", "answered", "canary"))
    admin.says("GET /decisions", (200, {"data": [failed, whole]}))
    admin.says("GET /stats", (200, STATS), (200, LATER))
    reloaded = {
        **{"ok": True, "message": "the configuration is in force"},
        **{"changed": ["route_policy"], "needs_restart": ["listen"]},
    }
    admin.says("POST /config:reload", (200, {"source": "gateway.toml", "last_reload": reloaded}))


@pytest.mark.parametrize(("command", "output"), EXAMPLES, ids=[each for each, _ in EXAMPLES])
def test_an_example_is_what_the_command_prints(
    admin: "FakeAdmin", run: "Run", command: str, output: str
) -> None:
    printed = run(*command.split()).output.replace(admin.url, "http://127.0.0.1:8080")
    assert [line.rstrip() for line in printed.splitlines()] == output.splitlines()


def test_every_command_has_an_example_and_every_option_is_told() -> None:
    app = typer.Typer()
    add_operator_commands(app)
    commands = {each.name for each in app.registered_commands}
    assert {command.split()[0] for command, _ in EXAMPLES} == commands
    group = typer.main.get_command(app)
    for command in group.commands.values():  # type: ignore[attr-defined]
        for parameter in command.params:
            for option in parameter.opts:
                if option.startswith("--") and option != "--help":
                    assert f"`{option}" in PAGE, f"{command.name} {option}"
