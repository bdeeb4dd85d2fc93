"""A Kubernetes API server that breaks its watches: `ApiServer`, with objects that a test puts there and takes away.

It lists, watches and selects as the real one does, with versions, pages and bookmarks, for pods and InferencePools.
What it adds is trouble: it ends a watch in the middle of a line, says nothing any more, forgets its past, refuses, and
wants another token. It knows nothing else of Kubernetes.
"""

import asyncio
import json
import re
import ssl
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qsl, urlsplit

__all__ = ["ApiServer", "Asked", "Break", "pod", "pool"]

Object = dict[str, Any]

PATH = re.compile(
    r"/apis?/(?P<group>[\w./-]+?)(?:/namespaces/(?P<namespace>[\w-]+))?/(?P<kind>\w+)"
)


PATIENCE_S = 20.0
"""How long a test waits for what should come at once."""


HALF = b'{"type": "DELETED", "object": {"metadata": {"na'


class Break(Enum):
    """What can become of a watch: `HANG` keeps its connection and tells nothing any more."""

    END = "the answer ends in good order"
    CUT = "the connection is closed in the middle of a line"
    PART = "the answer ends in good order, but in the middle of a line"
    RESET = "the connection is reset"
    GONE = "an error event says that the version is too old"
    ERROR = "an error event says that something is wrong"
    NONSENSE = "a line that is no event"
    HANG = "nothing comes any more"


class Asked(NamedTuple):
    """A request that came: its path, its query, and the credentials that it had."""

    path: str
    query: dict[str, str]
    authorization: str


class _Change(NamedTuple):
    version: int
    kind: str
    before: Object | None
    after: Object | None


class _Watch:
    """One that watches: what it wants to see, and the lines that wait for it, a `Break` at the end."""

    def __init__(self, wants: "_Wanted") -> None:
        self.wants = wants
        self.lines: asyncio.Queue[bytes | Break] = asyncio.Queue()


class _Wanted(NamedTuple):
    kind: str
    namespace: str | None
    labels: str
    fields: str

    def matches(self, each: Object | None) -> bool:
        if each is None or self.namespace not in (None, each["metadata"]["namespace"]):
            return False
        if self.fields and self.fields != f"metadata.name={each['metadata']['name']}":
            return False
        labels = each["metadata"].get("labels", {})
        wanted = [term.split("=") for term in self.labels.split(",") if term]
        return all(labels.get(key) == value for key, value in wanted)

    def event(self, change: _Change) -> bytes | None:
        """Return what a watch is told of a change: also that an object no longer matches."""
        was, now = self.matches(change.before), self.matches(change.after)
        if change.kind != self.kind or not (was or now):
            return None
        kind = "MODIFIED" if was and now else "ADDED" if now else "DELETED"
        shown = change.after if change.after is not None else change.before
        assert shown is not None
        meta = {**shown["metadata"], "resourceVersion": str(change.version)}
        return _line(kind, {**shown, "metadata": meta})


class ApiServer:
    """The API server of a cluster. `url` is where it is, `asked` what it was asked.

    `token` is what a bearer has to show, "" for nobody has to. `refusal` is the status of every answer where it is not
    0, `refused_watches` that of watches; `hangs` lets no answer begin. `served` are the groups and versions that exist.
    `page` is the most objects of one answer.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._objects: dict[tuple[str, str, str], Object] = {}
        self._version = 100
        self._forgotten = 0
        self._history: list[_Change] = []
        self._watches: list[_Watch] = []
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self.asked: list[Asked] = []
        self.token = ""
        self.refusal = 0
        self.refused_watches = 0
        self.hangs = False
        self.served = {"v1", "inference.networking.k8s.io/v1"}
        self.page = 500
        self.url = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=self._tls)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"{'https' if self._tls else 'http'}://127.0.0.1:{port}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.down()

    async def down(self) -> None:
        """Stop to listen, and drop every connection."""
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def up(self) -> None:
        """Listen again, on the same port."""
        port = int(self.url.rpartition(":")[2])
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", port, ssl=self._tls)

    def kubeconfig(self, *, namespace: str = "default") -> str:
        """Return the text of a kubeconfig file for it, with its token."""
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "it",
                "contexts": [
                    {
                        "name": "it",
                        "context": {"cluster": "it", "user": "me", "namespace": namespace},
                    }
                ],
                "clusters": [{"name": "it", "cluster": {"server": self.url}}],
                "users": [{"name": "me", "user": {"token": self.token or "none"}}],
            }
        )

    def put(self, each: Object, kind: str = "v1/pods") -> None:
        """Create an object, or replace it. `kind` is its group, version and plural."""
        meta = each["metadata"]
        key = (kind, meta["namespace"], meta["name"])
        self._version += 1
        shown = {**each, "metadata": {**meta, "resourceVersion": str(self._version)}}
        self._tell(_Change(self._version, kind, self._objects.get(key), shown))
        self._objects[key] = shown

    def delete(self, name: str, namespace: str = "default", kind: str = "v1/pods") -> None:
        """Delete an object that is there."""
        self._version += 1
        gone = self._objects.pop((kind, namespace, name))
        self._tell(_Change(self._version, kind, gone, None))

    def forget(self) -> None:
        """Forget what happened so far: whoever wants to watch on from before is told so (410)."""
        self._forgotten = self._version
        self._history.clear()

    def bookmark(self) -> None:
        """Send a bookmark to every watch."""
        line = _line("BOOKMARK", {"metadata": {"resourceVersion": str(self._version)}})
        for watch in self._watches:
            watch.lines.put_nowait(line)

    def break_watches(self, how: Break) -> None:
        """Let this become of every watch that is open, after what it was told so far."""
        for watch in self._watches:
            watch.lines.put_nowait(how)

    async def watched(self, count: int = 1) -> None:
        """Wait until so many watches are open."""
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: len(self._watches) == count)

    async def seen(self, count: int) -> None:
        """Wait until it was asked so many times."""
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: len(self.asked) >= count)

    def _tell(self, change: _Change) -> None:
        self._history.append(change)
        for watch in self._watches:
            if line := watch.wants.event(change):
                watch.lines.put_nowait(line)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                while True:
                    head = (await reader.readuntil(b"\r\n\r\n")).decode()
                    await self._answer(head, reader, writer)
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(
        self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        line, *fields = head.split("\r\n")
        headers = dict(field.lower().split(": ", 1) for field in fields if field)
        url = urlsplit(line.split(" ")[1])
        query = dict(parse_qsl(url.query))
        shown = next((f for f in fields if f.lower().startswith("authorization: ")), "")
        asked = Asked(url.path, query, shown.partition(": ")[2])
        assert headers["accept"] == "application/json"
        self.asked.append(asked)
        async with self._changed:
            self._changed.notify_all()
        if self.hangs:
            await asyncio.Event().wait()
        match = PATH.fullmatch(url.path)
        watching = query.get("watch") == "true"
        if self.token and asked.authorization != f"Bearer {self.token}":
            await _refuse(writer, 401, "Unauthorized")
        elif self.refusal or (watching and self.refused_watches):
            await _refuse(writer, self.refusal or self.refused_watches, "it is broken")
        elif match is None or match["group"] not in self.served:
            await _refuse(writer, 404, "the server could not find the requested resource")
        else:
            kind = f"{match['group']}/{match['kind']}"
            selectors = query.get("labelSelector", ""), query.get("fieldSelector", "")
            wants = _Wanted(kind, match["namespace"], *selectors)
            if watching:
                await self._watch(wants, query, reader, writer)
            else:
                await self._list(wants, query, writer)

    async def _list(
        self, wants: _Wanted, query: Mapping[str, str], writer: asyncio.StreamWriter
    ) -> None:
        found = [
            each
            for key, each in sorted(self._objects.items())
            if key[0] == wants.kind and wants.matches(each)
        ]
        first = int(query.get("continue", 0))
        end = first + min(self.page, int(query.get("limit", self.page)))
        meta = {"resourceVersion": str(self._version)}
        if end < len(found):
            meta["continue"] = str(end)
        await _send(writer, 200, {"kind": "List", "metadata": meta, "items": found[first:end]})

    async def _watch(
        self,
        wants: _Wanted,
        query: Mapping[str, str],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        since = int(query["resourceVersion"])
        if since < self._forgotten:
            await _refuse(writer, 410, "too old resource version")
            return
        watch = _Watch(wants)
        for change in self._history:
            if change.version > since and (line := wants.event(change)):
                watch.lines.put_nowait(line)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        self._watches.append(watch)
        async with self._changed:
            self._changed.notify_all()
        how = Break.END
        left = asyncio.get_running_loop().create_task(reader.read(1))
        left.add_done_callback(lambda _: watch.lines.put_nowait(Break.RESET))
        try:
            async with asyncio.timeout(float(query["timeoutSeconds"])):
                while isinstance(told := await watch.lines.get(), bytes):
                    _chunk(writer, told)
                    await writer.drain()
                how = told
        except TimeoutError:
            pass
        finally:
            self._watches.remove(watch)
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
            async with self._changed:
                self._changed.notify_all()
        await _break(writer, how)


async def _break(writer: asyncio.StreamWriter, how: Break) -> None:
    """End a watch in this way; the connection stays for another request only where it ends in good order."""
    match how:
        case Break.HANG:
            await asyncio.Event().wait()
        case Break.PART:
            _chunk(writer, HALF)
        case Break.CUT:
            _chunk(writer, HALF)
            writer.close()
            raise ConnectionResetError
        case Break.RESET:
            writer.transport.abort()
            raise ConnectionResetError
        case Break.GONE:
            _chunk(writer, _line("ERROR", _status(410, "too old resource version")))
        case Break.ERROR:
            _chunk(writer, _line("ERROR", _status(500, "etcd has no leader")))
        case Break.NONSENSE:
            _chunk(writer, b"nonsense\n")
    writer.write(b"0\r\n\r\n")


def pod(
    name: str,
    *,
    namespace: str = "default",
    ip: str = "10.0.0.1",
    ready: bool = True,
    terminating: bool = False,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    ports: Mapping[str, int] | None = None,
    uid: str = "",
) -> Object:
    """Return a pod, as the API shows it: of the app `vllm`, listening on port 8000 unless told otherwise."""
    meta: Object = {
        "name": name,
        "namespace": namespace,
        "uid": uid or f"uid-{name}",
        "labels": {"app": "vllm", **(labels or {})},
        "annotations": {**(annotations or {})},
    }
    if terminating:
        meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    declared = {"http": 8000} if ports is None else ports
    return {
        "metadata": meta,
        "spec": {
            "containers": [
                {
                    "name": "engine",
                    "ports": [
                        {"name": each, "containerPort": port} for each, port in declared.items()
                    ],
                }
            ]
        },
        "status": {
            "phase": "Running",
            "podIP": ip,
            "conditions": [
                {"type": "Initialized", "status": "True"},
                {"type": "Ready", "status": "True" if ready else "False"},
            ],
        },
    }


def pool(name: str, *ports: int, old: bool = False, **labels: str) -> Object:
    """Return an InferencePool of the namespace `default`: of v1, or of v1alpha2 where it is an old one."""
    spec = (
        {"selector": labels, "targetPortNumber": ports[0]}
        if old
        else {
            "selector": {"matchLabels": labels},
            "targetPorts": [{"number": port} for port in ports],
        }
    )
    return {"metadata": {"name": name, "namespace": "default"}, "spec": spec}


def _status(code: int, message: str) -> Object:
    return {"kind": "Status", "metadata": {}, "code": code, "message": message}


def _line(kind: str, each: Object) -> bytes:
    return json.dumps({"type": kind, "object": each}).encode() + b"\n"


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


async def _refuse(writer: asyncio.StreamWriter, code: int, message: str) -> None:
    await _send(writer, code, _status(code, message))


async def _send(writer: asyncio.StreamWriter, code: int, answer: Object) -> None:
    body = json.dumps(answer).encode()
    head = f"HTTP/1.1 {code} Said\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
