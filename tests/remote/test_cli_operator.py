"""What an operator types, and what comes back: tables, JSON, and one line for everything that can go wrong."""

import json
import ssl
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trustme

from pointsman import cli_operator
from pointsman.testing.origin import dead_address

if TYPE_CHECKING:
    from tests.remote.conftest import FakeAdmin, Run

WORKER = {
    "worker_id": "a",
    "role": "unified",
    "model": "smol-v3",
    "http_address": "10.0.0.1:8000",
    "grpc_address": "",
    "kv_address": "",
    "kv_format": 1,
    "queue_depth": 2,
    "running": 3,
    "kv_free_blocks": 25,
    "kv_total_blocks": 100,
    "draining": False,
    "last_heartbeat_unix_ms": 1,
    "static": False,
    "drained": False,
    "in_flight": 4,
    "load": 6,
    "oldest_request_s": 3.25,
    "requests_left": 4,
}
EXPLAINED = {
    "request_id": "req-1",
    "model": "default",
    "route": "smol",
    "served_model": "smol-v3",
    "target": "unified",
    "policy": "affinity",
    "draw": {
        "value": 0.25,
        "backends": [
            {"model": "smol-v3", "weight": 0.9, "since": 0.0, "until": 0.9},
            {"model": "smol-v4", "weight": 0.1, "since": 0.9, "until": 1.0},
        ],
    },
    "candidates": [
        {"worker_id": "a", "load": 6, "score": 0.5, "note": "owner"},
        {"worker_id": "b", "load": 1},
    ],
    "vetoed": [{"worker_id": "c", "why": "draining"}],
    "pick": "a",
    "prefill": None,
    "reason": "canary",
    "policy_reason": "affinity",
    "cascade_step": -1,
    "refusal": None,
    "rule": "the owner of the prefix, up to its cap",
}
DECIDED = {
    "request_id": "req-1",
    "at": 1_700_000_000.0,
    "path": "/v1/chat/completions",
    "model": "smol",
    "stream": True,
    "status": 200,
    "error": "",
    "key_id": "abc",
    "tenant": "acme",
    "trace_id": "",
    "seconds": 2.5,
    "first_byte_s": 0.125,
    "attempts": [
        {
            **{"worker_id": "a", "served_model": "smol-v3", "reason": "affinity"},
            **{"policy_reason": "affinity", "after_s": 0.0, "outcome": "refused"},
            **{"candidates": [], "candidate_count": 2},
        },
        {
            **{"worker_id": "b", "served_model": "smol-v3", "reason": "failover"},
            **{"policy_reason": "affinity", "after_s": 0.01, "outcome": "answered"},
            **{"candidates": [], "candidate_count": 1},
        },
    ],
}


def squeezed(output: str) -> list[str]:
    """Return the lines of a table with one space between words."""
    return [" ".join(line.split()) for line in output.splitlines()]


def test_workers_are_a_table_for_people(admin: "FakeAdmin", run: "Run") -> None:
    drained = WORKER | {"worker_id": "b", "drained": True, "oldest_request_s": None}
    static = WORKER | {"worker_id": "c", "draining": True, "static": True, "kv_total_blocks": 0}
    admin.says("GET /workers", (200, {"data": [WORKER, drained, static], "route_epoch": 7}))
    result = run("workers", "--model", "smol-v3")
    assert admin.lines() == ["GET /workers?model=smol-v3"]
    assert squeezed(result.stdout) == [
        "worker model role dialect state load in flight queued running KV used oldest address",
        "a smol-v3 unified - up 6 4 2 3 75% 3.2 s 10.0.0.1:8000",
        "b smol-v3 unified - drained 6 4 2 3 75% - 10.0.0.1:8000",
        "c smol-v3 unified - draining 6 4 2 3 - 3.2 s 10.0.0.1:8000 (static)",
    ]


@pytest.mark.parametrize(
    ("fields", "state", "kv_used", "source"),
    [
        ({"up": False}, "down", "75%", ""),
        ({"up": False, "degraded": "connection refused"}, "down: connection refused", "75%", ""),
        ({"degraded": "metrics 404"}, "degraded: metrics 404", "75%", ""),
        ({"degraded": "metrics 404", "drained": True}, "drained: metrics 404", "75%", ""),
        ({"kv_usage": 0.126, "source": "dns vllm:8000"}, "up", "13%", " (dns vllm:8000)"),
        ({"static": True}, "up", "-", " (static)"),
    ],
)
def test_a_worker_is_shown_with_its_dialect_its_source_and_what_is_wrong_with_it(
    admin: "FakeAdmin",
    run: "Run",
    fields: dict[str, object],
    state: str,
    kv_used: str,
    source: str,
) -> None:
    row = WORKER | {"dialect": "vllm"} | fields
    admin.says("GET /workers", (200, {"data": [row], "route_epoch": 7}))
    assert squeezed(run("workers").stdout)[1] == (
        f"a smol-v3 unified vllm {state} 6 4 2 3 {kv_used} 3.2 s 10.0.0.1:8000{source}"
    )


def test_a_fleet_without_workers_says_so(admin: "FakeAdmin", run: "Run") -> None:
    admin.says("GET /workers", (200, {"data": [], "route_epoch": 1}))
    assert run("workers").stdout == "no live worker\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["workers"], "GET /workers"),
        (["routes"], "GET /routes"),
        (["drain", "m", "--deadline", "5"], "POST /models/m:drain"),
        (["undrain", "m"], "POST /models/m:undrain"),
        (["explain", "--model", "m"], "POST /route:explain"),
        (["decisions"], "GET /decisions"),
        (["reload"], "POST /config:reload"),
    ],
)
def test_json_is_the_answer_byte_for_byte(
    admin: "FakeAdmin", run: "Run", arguments: list[str], line: str
) -> None:
    content = b'{ "model": "m", "workers": 1,\r\n "requests_left":0, "x": "\xc3\xa9" }'
    admin.says(line, (200, content))
    assert run(*arguments, "--json").stdout_bytes == content


def test_what_comes_over_the_network_cannot_move_the_cursor(admin: "FakeAdmin", run: "Run") -> None:
    evil = WORKER | {"worker_id": "a\x1b[2J[red]x[/]", "model": "m\r\n\x9b31m"}
    admin.says("GET /workers", (200, {"data": [evil], "route_epoch": 1}))
    admin.says("GET /routes", (400, "no \x1b]0;title\x07"))
    shown = run("workers").stdout
    assert "a\ufffd[2J[red]x[/]" in shown
    assert len(shown.splitlines()) == 2
    told = run("routes").stderr
    assert not {"\x1b", "\x07", "\r"} & set(shown + told)
    assert told == "pointsman: no \ufffd]0;title\ufffd (400)\n"


def test_routes_are_shown_as_a_configuration_has_them(admin: "FakeAdmin", run: "Run") -> None:
    route = {"model": "smol", "aliases": ["s"], "backends": [{"model": "smol-v3"}]}
    answer = {"route_epoch": 7, "routes": [route]}
    admin.says("GET /routes", (200, answer, {"ETag": '"routes-7"'}))
    assert run("routes").stdout == (
        '# version "routes-7"\n\n[[routes]]\nmodel = "smol"\naliases = ["s"]\nbackends = [\n'
        '  { model = "smol-v3" },\n]\n'
    )


def test_a_drain_tells_what_is_left(admin: "FakeAdmin", run: "Run") -> None:
    answer = {"model": "org/smol%2F", "workers": 2, "requests_left": 1, "oldest_request_s": 75.5}
    admin.says("POST /models/org%2Fsmol%252F:drain", (202, answer))
    result = run("drain", "org/smol%2F", "--deadline", "30")
    assert result.stdout == (
        "org/smol%2F is draining: 2 workers, 1 request left, the oldest 1 min 15 s\n"
    )
    assert json.loads(admin.asked[0][2]) == {"deadline_s": 30}


def test_a_drain_is_followed_until_nothing_is_left(
    admin: "FakeAdmin", run: "Run", monkeypatch: pytest.MonkeyPatch
) -> None:
    def left(count: int, oldest: float | None) -> dict[str, object]:
        return {"model": "m", "workers": 1, "requests_left": count, "oldest_request_s": oldest}

    monkeypatch.setattr(cli_operator, "FOLLOW_EVERY_S", 0.0)
    steps = [(200, left(1, 4.0)), (200, left(0, None))]
    admin.says("POST /models/m:drain", (202, left(2, 3.0)))
    admin.says("GET /models/m", *steps)
    assert run("drain", "m", "--deadline", "30", "--wait").stdout == (
        "m is draining: 1 worker, 2 requests left, the oldest 3.0 s\n"
        "m is draining: 1 worker, 1 request left, the oldest 4.0 s\n"
        "m is drained: 1 worker, no requests left\n"
    )
    admin.says("GET /models/m", *steps)
    scripted = run("drain", "m", "--deadline", "30", "--wait", "--json")
    assert json.loads(scripted.stdout) == left(0, None), "one document, the last one"


def test_an_undrain_says_that_it_is_over(admin: "FakeAdmin", run: "Run") -> None:
    answer = {"model": "m", "workers": 1, "requests_left": 3, "oldest_request_s": 1.0}
    admin.says("POST /models/m:undrain", (200, answer))
    assert run("undrain", "m").stdout == "m takes requests again: 1 worker\n"


def test_an_explanation_reads_from_the_model_id_to_the_worker(
    admin: "FakeAdmin", run: "Run"
) -> None:
    admin.says("POST /route:explain", (200, EXPLAINED))
    result = run(
        *("explain", "--model", "default", "--prompt", "hi", "--request-id", "req-1"),
        *("--exclude", "x", "--exclude", "y&z"),
    )
    line, _, body = admin.asked[0]
    assert line == "POST /route:explain?request_id=req-1&exclude=x&exclude=y%26z"
    assert json.loads(body) == {
        "model": "default",
        "messages": [{"role": "user", "content": "hi"}],
    }
    assert squeezed(result.stdout) == [
        "request req-1: default is an alias of the route smol, served as smol-v3 (unified)",
        "draw 0.250000: > smol-v3 [0, 0.9) smol-v4 [0.9, 1)",
        "policy affinity: the owner of the prefix, up to its cap",
        "worker load score note",
        "> a 6 0.5 owner",
        "b 1 -",
        "not considered: c (draining)",
        "It would go to a, because the draw by request id chose the model smol-v3 "
        "(canary; the policy: affinity).",
    ]


def test_an_explanation_of_two_workers_has_the_candidates_of_both(
    admin: "FakeAdmin", run: "Run"
) -> None:
    split = EXPLAINED | {
        **{"target": "disaggregated", "draw": None, "route": None, "vetoed": [], "rule": ""},
        **{"prefills": [{"worker_id": "p\x1b", "load": 0}], "prefill": "p\x1b"},
        **{"reason": "failover", "policy_reason": "failover"},
    }
    admin.says("POST /route:explain", (200, split))
    assert squeezed(run("explain", "--model", "default", "--step", "1").stdout) == [
        "request req-1: default has no route and is its own, served as smol-v3 (disaggregated)",
        "policy affinity",
        "worker load score note",
        "> a 6 0.5 owner",
        "b 1 -",
        "for the prefill:",
        "worker load score note",
        "> p\ufffd 0 -",
        "It would go to a after the prefill of p\ufffd, because the excluded workers are out "
        "(failover).",
    ]
    assert admin.lines() == ["POST /route:explain?step=1"]


def test_an_explanation_does_not_guess(admin: "FakeAdmin", run: "Run") -> None:
    open_ = EXPLAINED | {"pick": None, "model": "smol", "reason": "own", "policy": "own"}
    admin.says("POST /route:explain", (200, open_))
    lines = run("explain", "--model", "smol").stdout.splitlines()
    assert lines[0].startswith("request req-1: smol is a route, served as")
    assert lines[-1] == "It would go to one of these candidates; which one cannot be foretold."
    assert not [line for line in lines[3:] if line.startswith(">")]


def test_an_explanation_says_what_is_refused(admin: "FakeAdmin", run: "Run") -> None:
    refusal = {"status": 503, "code": "no_capacity", "message": "no worker can take it"}
    refused = EXPLAINED | {"refusal": refusal, "pick": None, "candidates": [], "draw": None}
    admin.says("POST /route:explain", (200, refused))
    assert run("explain", "-", input=b'{"model": "default"}').stdout.splitlines() == [
        "request req-1: default is an alias of the route smol",
        "not considered: c (draining)",
        "It is refused: no worker can take it (503 no_capacity)",
    ]


def test_a_request_to_explain_is_sent_as_it_is(
    admin: "FakeAdmin", run: "Run", tmp_path: Path
) -> None:
    body = b'{"model":  "m", "prompt": "\xf0\x9f\x90\x88"}\n'
    file = tmp_path / "request.json"
    file.write_bytes(body)
    admin.says("POST /route:explain", (200, EXPLAINED))
    run("explain", str(file))
    run("explain", "-", input=body)
    assert [sent for _, _, sent in admin.asked] == [body, body]


def test_decisions_show_every_attempt(admin: "FakeAdmin", run: "Run") -> None:
    admin.says("GET /decisions", (200, {"data": [DECIDED]}))
    result = run("decisions", "--worker", "a", "--model", "smol", "--limit", "5")
    assert admin.lines() == ["GET /decisions?model=smol&worker=a&limit=5"]
    head, row = squeezed(result.stdout)
    assert head == "time request model status attempts reason first byte whole tenant"
    assert row.partition(" ")[2] == (
        "req-1 smol 200 a refused, b answered failover affinity 125 ms 2.5 s acme"
    )


def test_no_decisions_is_said(admin: "FakeAdmin", run: "Run") -> None:
    admin.says("GET /decisions", (200, {"data": []}))
    assert run("decisions").stdout == "no such decision is kept\n"


def test_a_reload_names_what_waits_for_a_restart(admin: "FakeAdmin", run: "Run") -> None:
    last = {
        **{"at": 1.0, "ok": True, "trigger": "api", "message": ""},
        **{"changed": ["route_policy"], "needs_restart": ["listen", "tls_cert"]},
    }
    answer = {"source": "gateway.toml", "loaded_at": 1.0, "config": {}, "last_reload": last}
    admin.says("POST /config:reload", (200, answer))
    assert run("reload").stdout == (
        "reloaded from gateway.toml\nchanged: route_policy\nwaits for a restart: listen, tls_cert\n"
    )


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (401, "the reason (401); give a valid key with --key or POINTSMAN_KEY"),
        (403, "the reason (403); use a key with the scope admin"),
        (404, "the reason (404)"),
        (412, "the reason (412); somebody else changed it meanwhile: look at it again"),
        (503, "the reason (503)"),
    ],
)
def test_a_refusal_is_one_line_and_status_1(
    admin: "FakeAdmin", run: "Run", status: int, told: str
) -> None:
    admin.says("GET /workers", (status, "the reason"))
    result = run("workers")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"pointsman: {told}\n")


@pytest.mark.parametrize(
    "reply",
    [(404, b"<html>"), (302, b"", {"location": "http://127.0.0.1:1/"}), (500, b'{"error": 1}')],
)
def test_whoever_is_no_gateway_is_called_that(
    admin: "FakeAdmin", run: "Run", reply: tuple[int, bytes]
) -> None:
    admin.says("GET /workers", reply)
    result = run("workers")
    assert result.exit_code == 1
    assert f"{admin.url} does not answer as a gateway's admin API; is --url right?" in result.stderr


@pytest.mark.parametrize("content", [b"", b"[]", b'{"data": [{}]}', b"\xff"])
def test_an_answer_that_is_not_understood_is_one_line(
    admin: "FakeAdmin", run: "Run", content: bytes
) -> None:
    admin.says("GET /workers", (200, content))
    result = run("workers")
    assert result.exit_code == 1
    assert result.stderr.startswith("pointsman: the gateway's answer is not what was expected: ")
    assert result.stderr.count("\n") == 1


def test_a_gateway_that_is_not_there_is_one_line(run: "Run") -> None:
    address = dead_address()
    result = run("workers", "--url", f"http://{address}/")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"pointsman: cannot connect to http://{address}: ")
    assert result.stderr.endswith("is the gateway running, is --url right?\n")
    assert result.stderr.count("\n") == 1


def test_half_an_answer_is_one_line(admin: "FakeAdmin", run: "Run") -> None:
    admin.says("GET /workers", (200, b"{", {"transfer-encoding": "chunked", "connection": "close"}))
    result = run("workers")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"pointsman: no whole answer from {admin.url}: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["workers", "--url", "gateway:8080"],
        ["workers", "--key", "tl_\n_secret"],
        ["workers", "--key", "tl_é_secret"],
        ["drain", "m"],
        ["drain", "m", "--deadline", "3601"],
        ["explain"],
        ["explain", "-", "--model", "m"],
        ["explain", "no/such/file"],
        ["routes", "edit", "--json"],
        ["routes", "burn"],
        ["top", "--json"],
        ["top"],
        ["decisions", "--limit", "0"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_status_2_and_asks_nobody(
    admin: "FakeAdmin", run: "Run", arguments: list[str]
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert "secret" not in result.output
    assert admin.asked == []


def test_the_key_goes_to_the_gateway_and_nowhere_else(admin: "FakeAdmin", run: "Run") -> None:
    admin.says("GET /workers", (401, "bad key"))
    by_option = run("workers", "--key", "tl_abc_secret")
    by_environment = run("workers", POINTSMAN_KEY=" tl_abc_secret\n")
    helped = run("workers", "--help", POINTSMAN_KEY="tl_abc_secret")
    assert [headers["authorization"] for _, headers, _ in admin.asked] == [
        "Bearer tl_abc_secret"
    ] * 2
    assert "secret" not in by_option.output + by_environment.output + helped.output
    run("workers", HTTP_PROXY=f"http://{dead_address()}")
    assert len(admin.asked) == 3, "a proxy of the environment is not asked"
    assert "authorization" not in admin.asked[2][1]


def test_certificates_that_cannot_be_used_are_named(
    admin: "FakeAdmin", run: "Run", tmp_path: Path
) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_bytes(b"")
    for option in ("--cacert", "--cert"):
        result = run("workers", option, str(empty))
        assert result.exit_code == 1
        assert str(empty) in result.stderr
        assert result.stderr.count("\n") == 1


def test_https_takes_a_private_authority_and_shows_a_certificate(
    admin: "FakeAdmin", run: "Run", tmp_path: Path
) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    admin.secure(context)
    admin.says("GET /workers", (200, {"data": [], "route_epoch": 1}))
    mine = authority.issue_cert("operator@example.org")
    ca, cert, key = tmp_path / "ca.pem", tmp_path / "cert.pem", tmp_path / "key.pem"
    authority.cert_pem.write_to_path(ca)
    mine.cert_chain_pems[0].write_to_path(cert)
    mine.private_key_pem.write_to_path(key)
    shown = ["--cacert", str(ca), "--cert", str(cert), "--client-key", str(key)]
    assert run("workers", *shown).stdout == "no live worker\n"
    for wrong in (shown[:2], shown[2:]):
        refused = run("workers", *wrong)
        assert refused.exit_code == 1
        assert refused.stderr.startswith("pointsman: ")
        assert refused.stderr.count("\n") == 1
    assert len(admin.asked) == 1


def test_serving_loads_no_http_client_and_no_tables() -> None:
    code = (
        "import sys, pointsman.cli_operator\n"
        "print(sorted({'httpx', 'pointsman.remote', 'pointsman.domain'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
