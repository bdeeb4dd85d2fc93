"""The connectors: how the cache of a prompt gets from one engine to another, one small file each.

    tl         the gateway tokenizes, `EngineControl/Prefill` pushes, a handle tells the decode worker
    nixl       vLLM: the prefill worker's answer has what the decode worker needs to pull
    mooncake   vLLM: the two meet under a transfer id at the prefill worker's bootstrap server
    bootstrap  SGLang: both are asked at once, and meet in a room
    slots      llama.cpp: a slot is saved to a file that both workers see, and restored

The story around them is `pointsman.flow.handoff`.
"""

from collections.abc import Mapping

from pointsman.flow.connectors.bootstrap import Bootstrap
from pointsman.flow.connectors.mooncake import Mooncake
from pointsman.flow.connectors.nixl import Nixl
from pointsman.flow.connectors.slots import Slots
from pointsman.flow.connectors.tl import Tl
from pointsman.flow.handover import Connector

__all__ = ["CONNECTORS"]

CONNECTORS: Mapping[str, Connector] = {
    "tl": Tl(),
    "nixl": Nixl(),
    "mooncake": Mooncake(),
    "bootstrap": Bootstrap(),
    "slots": Slots(),
}
