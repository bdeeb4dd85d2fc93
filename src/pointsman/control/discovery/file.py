"""Workers that a file lists, read again whenever it changes: Prometheus' file_sd, or the manifest of SMG.

The first is a list of groups, `targets` with `labels`, as JSON or (with PyYAML, by the ending .yml or .yaml) as YAML.
A label counts with `pointsman_`, `__meta_pointsman_` or `__meta_` before its name, or nothing, in this order; those
that mean nothing here are left alone, since the same file may be read by Prometheus. The second is an object with
`version` 1 and `workers`; as there, a field that nobody knows is an error.

A file is taken whole or not at all: one that cannot be read keeps the last list, and so does one that is gone. Write a
new file beside it and rename that, or the gateway may read a half.
"""

import asyncio
import importlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from pointsman.control.discovery.found import Found
from pointsman.control.reload import Watch

__all__ = ["File", "Unreadable", "read"]

logger = logging.getLogger(__name__)

LABELS = (
    *("model", "role", "dialect", "scheme", "path", "capacity", "connector", "bootstrap_port"),
    "id",
)
"""What labels can say of an engine."""

PREFIXES = ("", "__meta_", "__meta_pointsman_", "pointsman_")
"""What can stand before a label; the last one wins."""

PORTS = {"http": 80, "https": 443}

ROLES = {"regular": "unified"}
"""The worker types of a manifest that are called something else here."""

CONNECTORS = {"NixlConnector": "nixl", "MooncakeConnector": "mooncake"}
"""The connectors of a manifest, by their names in vLLM."""


class Unreadable(ValueError):
    """A file that lists no workers; the text says why."""


class Group(Struct):
    """Some targets of a file_sd, and what is said of all of them."""

    targets: list[str]
    labels: dict[str, Any] = {}


class Entry(Struct, forbid_unknown_fields=True):
    """A worker of a manifest. `kv_role` and `kv_engine_id` are what its engine knows itself."""

    url: str
    id: str = ""
    worker_type: str = ""
    bootstrap_port: int | None = None
    model_id: str | None = None
    kv_connector: str | None = None
    kv_role: str | None = None
    kv_engine_id: str | None = None


class Manifest(Struct, forbid_unknown_fields=True):
    """SMG's list of workers."""

    version: int
    workers: list[Entry]


class File:
    """The engines that the file at `path` lists. `sleep` is in seconds."""

    def __init__(
        self,
        path: Path,
        *,
        sleep: Callable[[float], Coroutine[Any, Any, object]],
        on_fault: Callable[[], None] = lambda: None,
    ) -> None:
        self._path = path
        self._sleep = sleep
        self._on_fault = on_fault
        self._contents: bytes | None = None
        self._listed: list[Found] | str = []
        self._broken = False
        self._known: list[Found] | None = None

    async def run(self, found: Callable[[list[Found]], None]) -> None:
        """Hand over the whole list whenever it changed, until cancelled."""

        async def changed() -> None:
            self._take(found)

        watch = await asyncio.to_thread(
            Watch, self._look, changed, sleep=self._sleep, on_fault=self._on_fault
        )
        self._take(found)
        watch.start()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            watch.stop()

    def _look(self) -> object:
        """Read the file, and return what differs when it changed. Runs in a thread: YAML of many workers takes long."""
        try:
            contents = self._path.read_bytes()
        except OSError as error:
            self._contents = None
            self._listed = error.strerror or type(error).__name__
            return self._listed
        if contents != self._contents:
            self._contents = contents
            try:
                self._listed = read(contents, yaml=self._path.suffix in (".yml", ".yaml"))
            except Unreadable as error:
                self._listed = str(error)
        return contents

    def _take(self, found: Callable[[list[Found]], None]) -> None:
        listed = self._listed
        if isinstance(listed, str):
            self._broken = True
            kept = "there are no workers yet" if self._known is None else "its workers stay"
            logger.warning("file %s: %s; %s", self._path, listed, kept)
            return
        if self._broken:
            logger.info("file %s: it can be read again", self._path)
            self._broken = False
        if listed != self._known:
            self._known = listed
            found(listed)


def read(contents: bytes, *, yaml: bool = False) -> list[Found]:
    """Return the engines that a file lists, sorted by id. Raises Unreadable.

    Whether they make sense, and are there only once, is for others to judge.

    >>> read(b'[{"targets": ["10.0.0.7:8000"], "labels": {"pointsman_role": "prefill"}}]')
    [Found(id='10.0.0.7:8000', address='10.0.0.7:8000', labels={'role': 'prefill'}, draining=False)]
    >>> read(b'{"version": 1, "workers": [{"id": "a", "url": "https://h", "worker_type": "regular"}]}')
    [Found(id='a', address='h:443', labels={'role': 'unified', 'scheme': 'https'}, draining=False)]
    """
    tree = _yaml(contents) if yaml else _json(contents)
    try:
        if isinstance(tree, Mapping):
            listed = [_of_entry(each) for each in _manifest(tree).workers]
        else:
            groups = msgspec.convert(tree, list[Group])
            listed = [each for group in groups for each in _of_group(group)]
    except msgspec.ValidationError as error:
        raise Unreadable(str(error)) from None
    return sorted(listed, key=lambda each: each.id)


def _json(contents: bytes) -> object:
    try:
        return msgspec.json.decode(contents)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"not JSON: {error}") from None


def _yaml(contents: bytes) -> object:
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise Unreadable("YAML needs PyYAML, which is not installed; JSON does not") from None
    try:
        tree: object = yaml.safe_load(contents)
    # Not all that PyYAML raises for what a tag does not fit is its own.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise Unreadable(f"not YAML: {' '.join(str(error).split())}") from None
    return [] if tree is None else tree


def _manifest(tree: Mapping[object, object]) -> Manifest:
    # The version first: another one may have fields that this one has not.
    if tree.get("version") != 1:
        raise Unreadable("an object is a manifest, and its `version` has to be 1")
    return msgspec.convert(tree, Manifest)


def _of_group(group: Group) -> list[Found]:
    said = {
        label: _text(group.labels[prefix + label])
        for prefix in PREFIXES
        for label in LABELS
        if prefix + label in group.labels
    }
    if scheme := group.labels.get("__scheme__"):
        said.setdefault("scheme", str(scheme))
    id = said.pop("id", "")
    if id and len(group.targets) > 1:
        raise Unreadable(f"the label id {id!r} is that of {len(group.targets)} targets")
    return [_found(target, id, said) for target in group.targets]


def _of_entry(entry: Entry) -> Found:
    connector = entry.kv_connector or ""
    said = {
        "role": ROLES.get(entry.worker_type, entry.worker_type),
        "model": entry.model_id or "",
        "connector": CONNECTORS.get(connector, connector),
        "bootstrap_port": _text(entry.bootstrap_port),
    }
    return _found(entry.url, entry.id, said)


def _found(target: str, id: str, said: Mapping[str, str]) -> Found:
    """Return an engine by `host:port` or by a URL, in which the port can be left to the scheme."""
    if "@" in target:
        raise Unreadable("a target has a user in it; credentials do not belong into this file")
    labels = {label: value for label, value in said.items() if value}
    if "://" not in target:
        return Found(id or target, target, labels)
    try:
        url = urlsplit(target)
        host, port = url.hostname or "", url.port or PORTS.get(url.scheme, 0)
    except ValueError as error:
        raise Unreadable(f"a target is no URL: {error}") from None
    labels["scheme"] = url.scheme
    if path := url.path.rstrip("/"):
        labels["path"] = path
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return Found(id or address, address, labels)


def _text(value: object) -> str:
    return "" if value is None else str(value)
