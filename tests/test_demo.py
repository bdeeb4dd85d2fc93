"""The demo is the README's first command: it must judge honestly, and it must succeed."""

import io
import subprocess
import sys

import pytest
from rich.console import Console

from pointsman.testing.gateways import running
from pointsman.testing.origin import Origin, answers, streams
from pointsman.trial import Trial


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_checks_everything_with_real_engines_and_succeeds() -> None:
    pytest.importorskip("xllamacpp", reason="needs the [engine] extra")
    command = [sys.executable, "-m", "pointsman", "demo", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every answer was right" in done.stdout
    assert done.stdout.count("ok  ") == 13


@pytest.mark.anyio
async def test_a_trial_against_wrong_answers_fails() -> None:
    import anyio

    chat = {"choices": [{"message": {"content": "x" * 60}}], "usage": {"completion_tokens": 3}}
    engine = Origin(answers(chat), streams("y" * 60), *[answers(chat)] * 8)
    heard = io.StringIO()
    async with engine, running({"a": engine.address}) as gateway:
        host, port = gateway.address
        trial = Trial(Console(file=heard, width=200), f"http://{host}:{port}", "m")
        await anyio.to_thread.run_sync(trial.kinds)
    assert trial.verdict() == 1
    wrong = [line for line in heard.getvalue().splitlines() if "wrong  " in line]
    assert len(wrong) == 3
    assert "the same chat streamed is the same text" in wrong[0]
    assert "another seed gives another" in wrong[1]
    assert "a plain completion" in wrong[2]
