"""The routers of the field, each as its users run it: installed from PyPI, told of the engines on its command line or
in its file. What is set, and why, is in README.md.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from installed import environment, package_version

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["LITELLM_KEY", "PORTS", "litellm", "litellm_version", "router", "router_version"]

PORTS = {"smg": 8083, "sglang-router": 8084, "vllm-router": 8085, "litellm": 8086}

LITELLM_KEY = "sk-" + 4 * "b7c1f0e2d9a84c35"
"""litellm does not start without a master key. This one is worth nothing: it opens a bench on loopback."""

# What the launchers of the Rust routers import; without --no-deps some would bring a whole inference engine.
_IMPORTED = (
    "setproctitle pyyaml grpcio grpcio-health-checking requests aiohttp orjson uvicorn fastapi"
)
# Workers are asked every so often at the start until they are well. The default is 30 s of vllm-router.
_SOON = ("--worker-startup-check-interval", "1")


def _router_home(name: str, cache: Path) -> Path:
    return environment(cache, name, f"--no-deps {name}", _IMPORTED)


def _router(name: str, scratch: Path, cache: Path, hosts: Sequence[str]) -> list[str]:
    port = PORTS[name]
    # One thread for the data, as all the others have; whoever sets the variable gets another number.
    threads = os.environ.get("TOKIO_WORKER_THREADS", "1")
    program = str(_router_home(name, cache) / "bin" / name)
    launch = ["env", f"TOKIO_WORKER_THREADS={threads}", program]
    if name != "vllm-router":
        launch.append("launch")
    options = f"--policy cache_aware --log-level error --host 127.0.0.1 --port {port}"
    metrics = f"--prometheus-host 127.0.0.1 --prometheus-port {port + 20000}"
    urls = [f"http://{host}" for host in hosts]
    return [*launch, *options.split(), *metrics.split(), *_SOON, "--worker-urls", *urls]


def router(name: str) -> Callable[[Path, Path, Sequence[str]], list[str]]:
    """How one of the Rust routers is started: they have one family of command lines."""
    return partial(_router, name)


def router_version(name: str) -> Callable[[Path], str]:
    """How the version of one of the Rust routers is found out."""
    return lambda cache: package_version(_router_home(name, cache), name)


def _litellm_home(cache: Path) -> Path:
    return environment(cache, "litellm", "litellm[proxy]")


def litellm(scratch: Path, cache: Path, hosts: Sequence[str]) -> list[str]:
    deployments = [
        {
            "model_name": "m",
            "litellm_params": {
                "model": "openai/m",
                "api_base": f"http://{host}/v1",
                "api_key": "none",
            },
        }
        for host in hosts
    ]
    settings = {
        "model_list": deployments,
        "general_settings": {"master_key": LITELLM_KEY},
    }
    path = scratch / "litellm.yaml"
    path.write_bytes(msgspec.json.encode(settings))  # JSON is YAML
    # Without the last one it fetches its table of prices from the network when it starts.
    quiet = "LITELLM_LOG=ERROR LITELLM_MODE=PRODUCTION LITELLM_LOCAL_MODEL_COST_MAP=True"
    serve = "--host 127.0.0.1 --num_workers 1 --telemetry False --port"
    command = str(_litellm_home(cache) / "bin" / "litellm")
    start = [command, *serve.split(), str(PORTS["litellm"]), "--config", str(path)]
    return ["env", *quiet.split(), *start]


def litellm_version(cache: Path) -> str:
    return package_version(_litellm_home(cache), "litellm")
