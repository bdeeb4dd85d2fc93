"""The gateways that can be measured, each as its users run it, in front of whichever mock engines it is told.

All get one process or one thread for the data where they have the choice, keep-alive to clients and to engines, no
buffering of answers, no access log. A gateway that is not here (not installed, cannot be installed) raises `Missing`
with the reason.
"""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from harness import ENGINE_PORTS, HERE
from installed import Missing, output, program
from rivals import LITELLM_KEY, PORTS, litellm, litellm_version, router, router_version

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["GATEWAYS", "KEY", "KEY_TEXT", "Gateway", "Missing"]

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
    keepalive {keepalive};
    keepalive_requests 1000000000;
  }}
  server {{
    listen 127.0.0.1:{port};
    keepalive_requests 1000000000;
    client_max_body_size 64m;
    client_body_buffer_size 2m;
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


@dataclass(frozen=True)
class Gateway:
    """`command(scratch, cache, hosts)` writes what configuration it needs into `scratch` and returns the command that
    serves from the engines at `hosts` (host:port).
    """

    name: str
    port: int
    command: Callable[[Path, Path, Sequence[str]], list[str]]
    version: Callable[[Path], str]
    about: str
    key: str = ""  # an API key for every request
    beside: Callable[[Sequence[str]], list[str]] | None = (
        None  # what must run too, and is not counted
    )


def _nginx(scratch: Path, cache: Path, hosts: Sequence[str]) -> list[str]:
    servers = "\n    ".join(f"server {host};" for host in hosts)
    # Idle connections are kept in one list for all engines: with fewer than engines none would be used twice.
    text = _NGINX.format(
        scratch=scratch, port=8081, servers=servers, keepalive=512 + 2 * len(hosts)
    )
    (scratch / "nginx.conf").write_text(text)
    return [program("nginx"), "-p", str(scratch), "-c", str(scratch / "nginx.conf")]


def _nginx_version(cache: Path) -> str:
    return output(program("nginx"), "-v").rpartition("/")[2]


def _haproxy(scratch: Path, cache: Path, hosts: Sequence[str]) -> list[str]:
    servers = "\n".join(f"  server e{i} {host}" for i, host in enumerate(hosts))
    (scratch / "haproxy.cfg").write_text(_HAPROXY.format(port=8082, servers=servers))
    return [program("haproxy"), "-db", "-f", str(scratch / "haproxy.cfg")]


def _haproxy_version(cache: Path) -> str:
    return output(program("haproxy"), "-v").split()[2].partition("-")[0]


def _pointsman_program() -> str:
    beside = Path(sys.executable).parent / "pointsman"
    return str(beside) if beside.exists() else program("pointsman")


def _pointsman_serve(scratch: Path, hosts: Sequence[str], **settings: object) -> list[str]:
    """compare.toml with these engines in place of its own, and what else is set."""
    gateway = (HERE / "compare.toml").read_text().partition("[[gateway.workers]]")[0]
    workers = [
        f'[[gateway.workers]]\nid = "w{i}"\nurl = "http://{host}"\nmodel = "m"\ncapacity = 1\n'
        for i, host in enumerate(hosts)
    ]
    (scratch / "pointsman.toml").write_text("\n".join([gateway, *workers]))
    sets = [part for key, value in settings.items() for part in ("--set", f"gateway.{key}={value}")]
    return [_pointsman_program(), "serve", "--config", str(scratch / "pointsman.toml"), *sets]


def _pointsman(scratch: Path, cache: Path, hosts: Sequence[str]) -> list[str]:
    """Everything on that an operator has on: keys, decisions, and an access line for one request of a hundred."""
    own = os.environ.get("POINTSMAN_BENCH")
    if own:
        return shlex.split(own)
    keys = scratch / "keys.jsonl"
    keys.write_bytes(msgspec.json.encode(KEY) + b"\n")
    serve = _pointsman_serve(scratch, hosts, keys_file=keys, access_log="sampled")
    return [program("env"), "TL_GATEWAY_PEPPER=pepper", *serve]


def _pointsman_open(scratch: Path, cache: Path, hosts: Sequence[str]) -> list[str]:
    return _pointsman_serve(
        scratch,
        hosts,
        access_log="off",
        decisions_kept=0,
        listen="127.0.0.1:8088",
        health_listen="127.0.0.1:18089",
        registry_listen="127.0.0.1:18090",
    )


def _pointsman_beats(scratch: Path, cache: Path, hosts: Sequence[str]) -> list[str]:
    return _pointsman(scratch, cache, ())


def _beats(hosts: Sequence[str]) -> list[str]:
    return [sys.executable, str(HERE / "beats.py"), "127.0.0.1:18088", *hosts]


def _pointsman_former(scratch: Path, cache: Path, hosts: Sequence[str]) -> list[str]:
    own = os.environ.get("POINTSMAN_FORMER")
    if not own:
        raise Missing("POINTSMAN_FORMER has no command that serves another version on port 8089")
    return shlex.split(own)


def _pointsman_version(cache: Path) -> str:
    return importlib.metadata.version("pointsman")


def _direct(scratch: Path, cache: Path, hosts: Sequence[str]) -> list[str]:
    return ["sleep", "infinity"]  # stands for the gateway; the load goes to an engine


def _no_version(cache: Path) -> str:
    return ""


GATEWAYS = {
    gateway.name: gateway
    for gateway in (
        Gateway("direct", ENGINE_PORTS[0], _direct, _no_version, "no gateway: the floor"),
        Gateway("nginx", 8081, _nginx, _nginx_version, "least_conn, one worker process"),
        Gateway("haproxy", 8082, _haproxy, _haproxy_version, "leastconn, one thread"),
        *(
            Gateway(name, PORTS[name], router(name), router_version(name), "cache_aware, metrics")
            for name in ("smg", "sglang-router", "vllm-router")
        ),
        Gateway(
            "litellm",
            PORTS["litellm"],
            litellm,
            litellm_version,
            "simple-shuffle, a master key",
            key=LITELLM_KEY,
        ),
        Gateway(
            "pointsman",
            8087,
            _pointsman,
            _pointsman_version,
            "affinity, keys, metrics, decisions, a sampled access log",
            key=KEY_TEXT,
        ),
        Gateway(
            "pointsman-open",
            8088,
            _pointsman_open,
            _pointsman_version,
            "affinity and metrics: no keys, decisions, access log",
        ),
        Gateway(
            "pointsman-beats",
            8087,
            _pointsman_beats,
            _pointsman_version,
            "as pointsman, of engines that send heartbeats",
            key=KEY_TEXT,
            beside=_beats,
        ),
        Gateway(
            "pointsman-former",
            8089,
            _pointsman_former,
            _no_version,
            "another version, to compare with",
            key=KEY_TEXT,
        ),
    )
}
