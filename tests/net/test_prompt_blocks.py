"""What a policy sees of a prompt through the whole gateway, and when it hears of the answer."""

import json

import pytest

from pointsman.domain.placement import Placement
from pointsman.domain.policy.least_outstanding import LeastOutstanding
from pointsman.domain.request import InferenceRequest
from pointsman.domain.worker import Worker
from pointsman.testing.client import post
from pointsman.testing.gateways import fronted
from pointsman.wire.apis import api_of

pytestmark = pytest.mark.anyio

FORMS = "/v1/audio/transcriptions"


class Reading(LeastOutstanding):
    """A policy that looks at every prompt, and listens."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []
        self.heard: list[tuple[int, int]] = []

    def placed(self, worker: Worker, request: InferenceRequest, now: float) -> Placement:
        self.seen.append((request.block_tokens, len(request.blocks)))
        return Placement(worker, request.prompt_tokens, request.prompt_tokens, now, self._heard)

    def _heard(self, placement: Placement, now: float) -> None:
        worker = placement.worker
        assert now >= placement.at
        self.heard.append((worker.pending_tokens, worker.active_tokens))


@pytest.mark.parametrize("path", ["/v1/chat/completions", FORMS])
async def test_a_policy_sees_the_blocks_of_the_configured_size_and_hears_of_the_answer(
    path: str,
) -> None:
    assert api_of(path).form == (path == FORMS)
    message = {"role": "user", "content": "x" * 251}
    body = json.dumps({"model": "m", "messages": [message], "prompt": None}).encode()
    async with fronted(prefix_block_bytes=64, paths=[path]) as (_, gateway, client):
        policy = gateway.router.policy = Reading()
        assert (await client.ask(post(body, path))).status == 200
        (worker,) = gateway.registry.snapshot()
        assert (worker.pending_tokens, worker.active_tokens) == (0, 0)
    if path == FORMS:
        assert policy.seen[0][0] == 16
    else:
        assert policy.seen == [(16, 4)]
        assert policy.heard == [(0, 65)]
