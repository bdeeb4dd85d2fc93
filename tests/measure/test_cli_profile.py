"""`pointsman profile`: an engine measured over a real socket, and what is said where it cannot be."""

import json
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner, Result

from pointsman.cli import app
from pointsman.measure import profiling
from pointsman.measure.profiling import Profiled, written
from pointsman.simulate.profile import EngineProfile
from pointsman.simulate.sources import profile_of

MODELS = {"data": [{"id": "m", "owned_by": "pointsman", "max_model_len": 1024}]}
HEALTH = {"status": "ok", "running": 0, "kv_total_blocks": 64, "kv_block_tokens": 16}

KNOWN = EngineProfile(
    prefill_tokens_per_s=600,
    decode_base_s=0.002,
    decode_per_sequence_s=0.002,
    chunk_tokens=64,
)


class Handler(BaseHTTPRequestHandler):
    """What an engine tells of itself."""

    def do_GET(self) -> None:
        body = json.dumps(MODELS if self.path == "/v1/models" else HEALTH).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def ran(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["profile", *arguments])


def test_a_measured_engine_becomes_a_file_that_simulations_read(
    url: str, tmp_path: Path, steps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What answers takes its time on a clock of its own, so that the figures are always the same.
    monkeypatch.setattr(profiling, "Engine", lambda *args, **kwargs: steps(KNOWN))
    file = tmp_path / "engine.toml"
    command = ("--model", "m", "--url", url, "--repeats", "1", "--concurrency", "8")
    result = ran(
        *(*command, "-o", str(file), "--set", "sequences_max=9"),
        *("--engine", "sleeper", "--note", "a test"),
    )
    assert result.exit_code == 0, result.stderr
    assert "prompt of 870: 1.45 s, by the profile 1.45 s\n" in result.stderr
    assert "8 answers: 18 ms a token, by the profile 18 ms\n" in result.stderr
    assert "not measured" not in result.stderr
    profile = profile_of(str(file))
    assert profile == replace(KNOWN, sequences_max=9, kv_tokens=1024)
    source = tomllib.loads(file.read_text())["source"]
    assert (source["engine"], source["model"], source["note"]) == ("sleeper", "m", "a test")
    assert source["url"] == url and source["by"].startswith("pointsman profile ")
    result = ran(*command)
    assert result.exit_code == 0 and tomllib.loads(result.stdout)["source"]["engine"] == "tl"
    assert "not measured, so defaults: sequences_max\n" in result.stderr
    result = ran(*command, "-o", str(tmp_path / "no" / "file"))
    assert result.exit_code == 1 and "cannot write" in result.stderr


def test_what_is_written_is_read_again_whatever_it_says() -> None:
    profile = EngineProfile(
        prefill_context_s=3.25e-9, kv_tokens=123, prefix_cache="slots", sequences_max=7
    )
    text = written(
        Profiled(profile, ("chunk_tokens",), 0.0123, 0.05),
        engine='a "strange"\nname',
        model="m",
        url="http://x",
        now=datetime(2026, 1, 2, tzinfo=UTC),
    )
    values = tomllib.loads(text)
    source = values.pop("source")
    assert EngineProfile(**values) == profile
    assert source["engine"] == 'a "strange"\nname' and source["measured"] == "2026-01-02"
    assert source["assumed"] == "chunk_tokens" and "prompts 1.2%" in source["fit"]
    assert "note" not in source


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--set", "kv_token=1"], "profile: there is no 'kv_token', did you mean kv_tokens?"),
        (["--url", "ftp://x"], "'ftp://x' is not http://HOST or https://HOST"),
        ([], "no model is called 'n': there are m"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(arguments: list[str], error: str, url: str) -> None:
    result = ran("--model", "n", "--url", url, *arguments)
    assert (result.exit_code, result.stderr) == (1, f"pointsman: {error}\n")


@pytest.mark.parametrize("key", ["s\u00e9cret", "se\ncret"])
def test_a_key_that_is_none_is_wrong_usage_and_not_repeated(key: str, url: str) -> None:
    result = ran("--model", "m", "--url", url, "--key", key)
    assert result.exit_code == 2
    assert "the key has characters that no key has" in result.stderr
    assert "cret" not in result.stderr


def test_an_engine_that_is_not_there_is_told() -> None:
    result = ran("--model", "m", "--url", "http://127.0.0.1:1")
    assert result.exit_code == 1 and "/v1/models: " in result.stderr
