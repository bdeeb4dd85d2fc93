"""Heartbeats of engines that send none themselves: every two seconds one of each, on a connection of its own.

    python bench/beats.py REGISTRY HOST:PORT HOST:PORT ...

They are spread over the two seconds, as those of engines are that were not started at one time.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from pointsman.heartbeat import Heartbeat
from pointsman.proto.control_pb2 import WorkerStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_INTERVAL_S = 2.0


async def _beat(registry: str, hosts: Sequence[str]) -> None:
    async def one(number: int, host: str) -> None:
        def status() -> WorkerStatus:
            return WorkerStatus(
                worker_id=f"w{number}",
                http_address=host,
                role="unified",
                model="m",
                kv_free_blocks=1000,
                kv_total_blocks=1000,
            )

        await asyncio.sleep(_INTERVAL_S * number / len(hosts))
        await Heartbeat(registry, status, lambda: None, interval=_INTERVAL_S).run()

    async with asyncio.TaskGroup() as group:
        for number, host in enumerate(hosts):
            group.create_task(one(number, host))


def main(arguments: Sequence[str]) -> int:
    registry, *hosts = arguments
    asyncio.run(_beat(registry, hosts))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
