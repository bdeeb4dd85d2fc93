"""The engines that can be spoken to, by the name of their dialect, and which of them it is that answers.

The contract of a dialect is in `pointsman.dialect.reading`; it can be imported from here as well.
"""

from pointsman.dialect.heartbeating import Heartbeating
from pointsman.dialect.llamacpp import LlamaCpp
from pointsman.dialect.openai import OpenAi
from pointsman.dialect.reading import Dialect, Probe, Probed, Reading, due, models_of
from pointsman.dialect.sglang import SgLang
from pointsman.dialect.vllm import Vllm

__all__ = ["DIALECTS", "SERVES", "Dialect", "Probe", "Probed", "Reading", "detect", "due"]

DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect for dialect in (Heartbeating(), Vllm(), SgLang(), LlamaCpp(), OpenAi())
}

SERVES = {name: DIALECTS[name].paths for name in ("vllm", "sglang", "llamacpp")}
"""The API paths that engines of a dialect can serve. Those that send heartbeats, or are unknown, may serve any."""

OWNERS = {"pointsman": "tl", "vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp"}
"""What engines say of themselves in `owned_by`."""


def detect(models: Probed) -> str:
    """Return the dialect of an engine by its answer to GET /v1/models, `openai` where nothing tells.

    >>> detect(Probed(200, b'{"data":[{"id":"m","owned_by":"vllm"}]}')), detect(Probed(404))
    ('vllm', 'openai')
    """
    for model in models_of(models) or ():
        if isinstance(model.owned_by, str) and model.owned_by in OWNERS:
            return OWNERS[model.owned_by]
    return "openai"
