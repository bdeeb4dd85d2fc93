"""The gateways that can be measured, each as its users run it, in front of the two mock engines.

All get one process or one thread for the data where they have the choice, keep-alive to clients and to engines, no
buffering of answers, no access log. A gateway that is not here (not installed, cannot be installed) raises `Missing`
with the reason.
"""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from harness import ENGINE_PORTS, HERE

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["GATEWAYS", "KEY", "KEY_TEXT", "Gateway", "Missing"]

_HOSTS = [f"127.0.0.1:{port}" for port in ENGINE_PORTS]
# What sglang-router imports; without --no-deps it would bring a whole inference engine.
_ROUTER_EXTRAS = (
    "setproctitle pyyaml grpcio grpcio-health-checking requests aiohttp orjson uvicorn fastapi"
)

_NGINX = """\
worker_processes 1;
daemon off;
pid {scratch}/nginx.pid;
error_log {scratch}/nginx.err;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  client_body_temp_path {scratch}/body;
  proxy_temp_path {scratch}/proxy;
  fastcgi_temp_path {scratch}/fastcgi;
  uwsgi_temp_path {scratch}/uwsgi;
  scgi_temp_path {scratch}/scgi;
  upstream engines {{
    least_conn;
    {servers}
    keepalive 512;
    keepalive_requests 1000000000;
  }}
  server {{
    listen 127.0.0.1:{port};
    keepalive_requests 1000000000;
    client_max_body_size 64m;
    client_body_buffer_size 256k;
    location / {{
      proxy_pass http://engines;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""

# Without http-no-delay HAProxy holds events back for up to 200 ms, to send fewer and fuller packets.
_HAPROXY = """\
global
  nbthread 1
  maxconn 8000
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
  http-reuse always
  option http-no-delay
frontend clients
  bind 127.0.0.1:{port}
  default_backend engines
backend engines
  balance leastconn
{servers}
"""


KEY_TEXT = f"tl_{12 * 'a'}_{32 * 'A'}"
KEY = {
    "key_id": 12 * "a",
    "hmac": "900c4259ee85eb80ae9c8806518e9b788e7e3dc5e5d5f8fab81feaa126334306",
    "tenant": "bench",
    "name": "bench",
    "scopes": ["infer"],
}
"""The record of that key under the pepper `pepper`."""


class Missing(Exception):
    """The gateway is not on this machine."""


@dataclass(frozen=True)
class Gateway:
    """`command(scratch, cache)` writes what configuration it needs into `scratch` and returns the command to run."""

    name: str
    port: int
    command: Callable[[Path, Path], list[str]]
    version: Callable[[Path], str]
    about: str
    key: str = ""  # an API key for every request


def _program(name: str) -> str:
    # Debian keeps servers in sbin, which is not on every user's path.
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if found is None:
        raise Missing(f"{name} is not installed (a package of that name is in most distributions)")
    return found


def _output(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout.strip()


def _nginx(scratch: Path, cache: Path) -> list[str]:
    servers = "\n    ".join(f"server {host};" for host in _HOSTS)
    text = _NGINX.format(scratch=scratch, port=8081, servers=servers)
    (scratch / "nginx.conf").write_text(text)
    return [_program("nginx"), "-p", str(scratch), "-c", str(scratch / "nginx.conf")]


def _nginx_version(cache: Path) -> str:
    return _output(_program("nginx"), "-v").rpartition("/")[2]


def _haproxy(scratch: Path, cache: Path) -> list[str]:
    servers = "\n".join(f"  server e{i} {host}" for i, host in enumerate(_HOSTS))
    (scratch / "haproxy.cfg").write_text(_HAPROXY.format(port=8082, servers=servers))
    return [_program("haproxy"), "-db", "-f", str(scratch / "haproxy.cfg")]


def _haproxy_version(cache: Path) -> str:
    return _output(_program("haproxy"), "-v").split()[2].partition("-")[0]


def _sglang_router_home(cache: Path) -> Path:
    home = cache / "sglang-router"
    ready = home / "installed"
    if ready.exists():
        return home
    print("sglang-router: installing into a virtual environment of its own ...", file=sys.stderr)
    pip = [str(home / "bin" / "pip"), "install", "-q"]
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        subprocess.run([*pip, "--no-deps", "sglang-router"], check=True)
        subprocess.run([*pip, *_ROUTER_EXTRAS.split()], check=True)
    except subprocess.CalledProcessError as error:
        raise Missing(f"sglang-router cannot be installed: {error}") from error
    ready.touch()
    return home


def _sglang_router(scratch: Path, cache: Path) -> list[str]:
    launch = str(_sglang_router_home(cache) / "bin" / "sglang-router")
    urls = [f"http://{host}" for host in _HOSTS]
    options = "--policy cache_aware --log-level error --host 127.0.0.1 --port 8084"
    metrics = "--prometheus-host 127.0.0.1 --prometheus-port 28084"
    return [launch, "launch", *options.split(), *metrics.split(), "--worker-urls", *urls]


def _sglang_router_version(cache: Path) -> str:
    python = str(_sglang_router_home(cache) / "bin" / "python")
    return _output(
        python, "-c", "import importlib.metadata as m; print(m.version('sglang-router'))"
    )


def _pointsman_program() -> str:
    beside = Path(sys.executable).parent / "pointsman"
    return str(beside) if beside.exists() else _program("pointsman")


def _pointsman(scratch: Path, cache: Path) -> list[str]:
    own = os.environ.get("POINTSMAN_BENCH")
    if own:
        return shlex.split(own)
    return [_pointsman_program(), "serve", "--config", str(HERE / "compare.toml")]


def _pointsman_keys(scratch: Path, cache: Path) -> list[str]:
    """Everything on that an operator has on: keys, and an access line for one request of a hundred."""
    keys = scratch / "keys.jsonl"
    keys.write_bytes(msgspec.json.encode(KEY) + b"\n")
    settings = {
        "keys_file": keys,
        "access_log": "sampled",
        "listen": "127.0.0.1:8088",
        "health_listen": "127.0.0.1:18089",
        "registry_listen": "127.0.0.1:18090",
    }
    sets = [part for key, value in settings.items() for part in ("--set", f"gateway.{key}={value}")]
    serve = [_pointsman_program(), "serve", "--config", str(HERE / "compare.toml")]
    return [_program("env"), "TL_GATEWAY_PEPPER=pepper", *serve, *sets]


def _pointsman_former(scratch: Path, cache: Path) -> list[str]:
    own = os.environ.get("POINTSMAN_FORMER")
    if not own:
        raise Missing("POINTSMAN_FORMER has no command that serves another version on port 8089")
    return shlex.split(own)


def _pointsman_version(cache: Path) -> str:
    return importlib.metadata.version("pointsman")


def _direct(scratch: Path, cache: Path) -> list[str]:
    return ["sleep", "infinity"]  # stands for the gateway; the load goes to an engine


def _no_version(cache: Path) -> str:
    return ""


GATEWAYS = {
    gateway.name: gateway
    for gateway in (
        Gateway("direct", ENGINE_PORTS[0], _direct, _no_version, "no gateway: the floor"),
        Gateway("nginx", 8081, _nginx, _nginx_version, "least_conn, one worker process"),
        Gateway("haproxy", 8082, _haproxy, _haproxy_version, "leastconn, one thread"),
        Gateway(
            "sglang-router", 8084, _sglang_router, _sglang_router_version, "cache_aware, metrics"
        ),
        Gateway("pointsman", 8087, _pointsman, _pointsman_version, "affinity, metrics, decisions"),
        Gateway(
            "pointsman-keys",
            8088,
            _pointsman_keys,
            _pointsman_version,
            "the same with keys and a sampled access log",
            key=KEY_TEXT,
        ),
        Gateway(
            "pointsman-former",
            8089,
            _pointsman_former,
            _no_version,
            "another version, to compare with",
        ),
    )
}
