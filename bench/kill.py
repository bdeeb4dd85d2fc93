"""Kill one of two engines under load, again and again, and read every answer.

    python bench/kill.py [pointsman] --seconds 60 --rate 100

Half of the requests are streamed. Engine b dies by SIGKILL, comes back after a while on the same port, dies again.
Passes (exit 0) when no request got a client error before it was committed, nothing was spliced, lost or repeated
(the marks of mock_engine.c tell), every stream that broke ended with the gateway's error event, and the deaths were
felt at all: at least one stream broke, and both engines answered.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from gateways import GATEWAYS, Missing
from harness import ENGINE_PORTS, LoadReport, MockEngine, build, load_command, parse_report
from soak import running

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main", "objections", "run"]


def run(
    name: str, *, seconds: float, rate: float, up_s: float, down_s: float
) -> tuple[LoadReport, int]:
    """The report of the load, and how many deaths it saw. Streams take a second: 50 events of 20 ms."""
    a_port, b_port = ENGINE_PORTS
    deaths = 0
    b = MockEngine(b_port, "b", events=50)
    try:
        with MockEngine(a_port, "a", events=50), running(name):
            command = load_command(
                GATEWAYS[name].port,
                key=GATEWAYS[name].key,
                connections=512,
                rate=rate,
                seconds=seconds,
                stream_share=0.5,
                drain=True,
            )
            with subprocess.Popen(command, stdout=subprocess.PIPE) as generator:
                # The last life of b outlasts the load, so that the end is an ordinary one.
                end = time.monotonic() + seconds - down_s
                while time.monotonic() + up_s < end:
                    time.sleep(up_s)
                    b.kill()
                    deaths += 1
                    time.sleep(down_s)
                    b = MockEngine(b_port, "b", events=50)
                output, _ = generator.communicate()
    finally:
        b.stop()
    return parse_report(output), deaths


def objections(report: LoadReport, deaths: int) -> list[str]:
    """What is wrong with the run; empty if nothing is."""
    said = []
    if report.errors:
        said.append(f"{report.errors} bad answers: {report.faults}, statuses {report.statuses}")
    if report.resent:
        said.append(
            f"{report.resent} requests were dropped without an answer on an idle connection"
        )
    if not deaths or not report.broken_streams:
        said.append("no stream was broken: this run shows nothing")
    lives = [name for name in report.workers if name.startswith("b")]
    if len(lives) < 2:
        said.append(f"engine b did not answer again after a death: {report.workers}")
    return said


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gateway", nargs="?", default="pointsman", choices=list(GATEWAYS))
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rate", type=float, default=100, help="requests a second")
    parser.add_argument("--up-s", type=float, default=4, help="how long b lives")
    parser.add_argument("--down-s", type=float, default=2, help="how long b stays dead")
    args = parser.parse_args(arguments)
    build()
    try:
        report, deaths = run(
            args.gateway, seconds=args.seconds, rate=args.rate, up_s=args.up_s, down_s=args.down_s
        )
    except Missing as reason:
        print(reason, file=sys.stderr)
        return 1
    print(
        f"kill: {deaths} deaths in {report.seconds:.0f} s;"
        f" {report.plain} completions and {report.streams} streams whole,"
        f" {report.broken_streams} streams broken and ended by the error event, {report.errors} bad answers"
    )
    said = objections(report, deaths)
    for text in said:
        print("FAILS " + text)
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
