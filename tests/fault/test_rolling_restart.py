"""Gateways that are restarted one after another behind a balancer: nobody is refused, and no answer ends silently."""

import asyncio
import sys
from pathlib import Path

import pytest

ROLLING = Path(__file__).parents[2] / "bench" / "rolling.py"

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_a_rolling_restart_refuses_nobody_and_ends_every_stream() -> None:
    """Streams outlast the drain deadline here, so both ends are seen: `[DONE]`, and the error event."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, ROLLING, "--streams", "8", "--stream-s", "3", "--rate", "20"),
        *("--grace-s", "0.6", "--drain-s", "0.5"),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    assert b"'ended by the error event'" in output
