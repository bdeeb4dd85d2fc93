"""Loopback stand-ins of engines that send no heartbeats: `FakeVllm` and `FakeSglang`.

They are written from the documented surfaces, not from the engines themselves, so what they agree to proves nothing
about real ones; that is what the tests with real engines are for. What they are good for is failing on demand.
`fleet.apart` runs them behind a gateway.
"""

from pointsman.testing.engines.sglang import FakeSglang
from pointsman.testing.engines.surface import Load, answer_of
from pointsman.testing.engines.vllm import FakeVllm, Lease

__all__ = ["FakeSglang", "FakeVllm", "Lease", "Load", "answer_of"]
