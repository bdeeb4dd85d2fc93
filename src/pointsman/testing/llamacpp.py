"""A real llama.cpp server for tests, as a process of its own: needs the extra `engine`.

    with llama_server(weights, slots=2, slot_folder=folder) as address: ...

Run as a module it is that process: it says its address on its first line, and ends with its standard input.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

__all__ = ["Setting", "llama_server"]


class Setting(msgspec.Struct, frozen=True):
    """How a server is started. `slot_folder` is where slots are saved, "" for nowhere; `api_key` is "" for none.

    Without `introspection` it tells nothing of its load: /metrics and /slots are switched off. A step computes `batch`
    prompt tokens at most. Prompts that left their slots are kept in `cache_mib` MiB of memory, the oldest go first; by
    default in as much as the server takes on its own.
    """

    weights: str
    slots: int = 2
    context: int = 2048
    slot_folder: str = ""
    alias: str = "smol"
    api_key: str = ""
    embeddings: bool = False
    introspection: bool = True
    batch: int = 2048
    cache_mib: int | None = None


@contextlib.contextmanager
def llama_server(weights: Path, **settings: object) -> Iterator[str]:
    """Run a server, and give its `host:port`; `settings` are fields of `Setting`. One thread computes."""
    setting = msgspec.convert({"weights": str(weights), **settings}, Setting)
    command = [sys.executable, "-m", __name__, msgspec.json.encode(setting).decode()]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert address, "the server did not start"
            yield address
        finally:
            process.kill()


def serve(setting: Setting) -> None:
    """Serve until standard input ends."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = setting.weights
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_ctx = setting.context * setting.slots
    params.n_parallel = setting.slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.endpoint_metrics = params.endpoint_slots = setting.introspection
    params.endpoint_props = True
    params.use_jinja = True
    params.model_alias = {setting.alias}
    params.embedding = setting.embeddings
    params.n_batch = setting.batch
    if setting.cache_mib is not None:
        params.cache_ram_mib = setting.cache_mib
    if setting.slot_folder:
        params.slot_save_path = setting.slot_folder.rstrip("/") + "/"
    if setting.api_key:
        params.api_keys = [setting.api_key]
    server = xllamacpp.Server(params)
    print(server.listening_address.removeprefix("http://"), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    serve(msgspec.json.decode(sys.argv[1], type=Setting))
