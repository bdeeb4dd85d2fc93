"""Where engines are found, and what is said of all that one source finds.

Nothing is looked up here: that is `pointsman.control.discovery`.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from msgspec import structs

from pointsman.config.engines import EngineOptions, NamedDialect
from pointsman.config.option import fields_of, option
from pointsman.config.reading import from_text, read_value
from pointsman.config.values import Address, ConfigError, Surface, Unusable
from pointsman.config.words import allowed, shown
from pointsman.domain.worker import Role, Worker

__all__ = ["DnsSource", "KubernetesSource", "SourceOptions", "WorkerFile"]

LABELS = (
    *("model", "role", "dialect", "scheme", "path", "capacity", "connector", "bootstrap_port"),
    *("kv_events_port", "kv_replay_port", "kv_ranks"),
)
"""What a source may say of one engine, against what the table says of all. Credentials are not among them."""


class SourceOptions(EngineOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is the same for every engine that one source finds, unless its labels say otherwise."""

    dialect: Annotated[
        NamedDialect,
        option(
            "How they are spoken to, and asked how they are; `auto`: found out by asking. Empty with a `model`: "
            "nothing is asked, and they count as alive while they are found."
        ),
    ] = "auto"
    scheme: Annotated[Literal["http", "https"], option("How they are reached.")] = "http"
    path: Annotated[str, option("What stands before every path of theirs, such as `/engine`.")] = ""

    kv_events_port: Annotated[
        int,
        option(
            "Port on which they publish what they cache (vLLM and SGLang: `--kv-events-config`); 0: none. Of use where "
            "a tokenizer of their model has `block_tokens`. Needs the extra `pointsman[kv-events]`.",
            ge=0,
            le=65535,
        ),
    ] = 0
    kv_replay_port: Annotated[
        int,
        option("Port on which they can be asked for events once more; 0: none.", ge=0, le=65535),
    ] = 0

    def check(self) -> None:
        """Raise Unusable for keys that do not go together; only some sources have such."""

    def labelled(self, labels: Mapping[str, str]) -> Self:
        """Return what holds for one engine. Labels that mean nothing here are left alone.

        Raises Unusable for one that means something, and says what cannot be.

        >>> SourceOptions().labelled({"capacity": "4", "job": "vllm"}).capacity
        4
        """
        fields = fields_of(type(self))
        values = {}
        for label in LABELS:
            if label in labels:
                kind = fields[label].type
                try:
                    values[label] = read_value(kind, from_text(kind, labels[label]), label)
                except ConfigError:
                    why = f"the label is {shown(labels[label])}: expected {allowed(kind)}"
                    raise Unusable(label, why) from None
        return structs.replace(self, **values)

    def found(
        self,
        id: str,
        address: str,
        *,
        credentials: bytes = b"",
        source: str = "",
        terminating: bool = False,
    ) -> Worker:
        """Return the worker at an address, `host:port`. Raises Unusable."""
        if self.role is not Role.UNIFIED and self.is_own:
            why = (
                f"a {self.role} worker of this dialect is listed in `workers`, or sends heartbeats"
            )
            raise Unusable("role", why)
        if self.path and not self.path.startswith("/"):
            raise Unusable("path", "expected a path such as /engine")
        try:
            surface = Surface.parse(f"{self.scheme}://{address}{self.path}")
        except ValueError as error:
            raise Unusable("path" if self.path else "address", str(error)) from None
        if self.kv_replay_port and not self.kv_events_port:
            raise Unusable("kv_replay_port", "of no use without `kv_events_port`")
        host = surface.address.host
        return self.make(
            id,
            surface,
            credentials=credentials,
            source=source,
            terminating=terminating,
            kv_events=Address(host, self.kv_events_port) if self.kv_events_port else None,
            kv_replay=Address(host, self.kv_replay_port) if self.kv_replay_port else None,
        )


class DnsSource(SourceOptions, frozen=True, forbid_unknown_fields=True):
    """Engines behind a DNS name, which is resolved again and again."""

    name: Annotated[
        str, option("The name, such as `vllm.default.svc.cluster.local`.", min_length=1)
    ]
    port: Annotated[
        int,
        option("Port of every address. SRV records have their own.", ge=0, le=65535),
    ] = 0
    record: Annotated[
        Literal["address", "srv"], option("What is looked up: A and AAAA records, or SRV records.")
    ] = "address"
    interval_s: Annotated[
        float, option("How often it is resolved.", unit="seconds", ge=0.1, le=3600)
    ] = 5.0

    def check(self) -> None:
        """Raise Unusable for a port that is missing, or that nobody would look at."""
        if self.record == "address" and not self.port:
            raise Unusable("port", "address records have no port: expected one in 1..65535")
        if self.record == "srv" and self.port:
            raise Unusable("port", 'of no use where `record = "srv"`: those records have ports')

    @property
    def source(self) -> str:
        """What the workers list calls it."""
        return f"dns {self.name}:{self.port}" if self.port else f"dns {self.name}"


class WorkerFile(SourceOptions, frozen=True, forbid_unknown_fields=True):
    """A file that lists engines, read again when it changes: in the format of Prometheus' file_sd."""

    file: Annotated[str, option("The file.", min_length=1)]

    @property
    def source(self) -> str:
        """What the workers list calls it."""
        return f"file {self.file}"


class KubernetesSource(SourceOptions, frozen=True, forbid_unknown_fields=True):
    """Pods of a Kubernetes namespace, watched. Needs the extra `pointsman[k8s]`."""

    namespace: Annotated[
        str, option("Namespace of the pods, `*` for all. Empty: the gateway's own.")
    ] = ""
    selector: Annotated[str, option("Label selector of the pods, such as `app=vllm`.")] = ""
    inference_pool: Annotated[
        str, option("Name of the InferencePool whose pods are meant, instead of a selector.")
    ] = ""
    port: Annotated[
        int,
        option(
            "Port of the engine in every pod. 0: what the InferencePool or the pod says.",
            ge=0,
            le=65535,
        ),
    ] = 0

    def check(self) -> None:
        """Raise Unusable where it is not said, or said twice, which pods are meant."""
        if not (self.selector or self.inference_pool):
            raise Unusable("selector", "expected one, or an `inference_pool`")
        if self.selector and self.inference_pool:
            raise Unusable("inference_pool", "of no use beside `selector`: one of the two")
        if self.inference_pool and self.namespace == "*":
            raise Unusable("namespace", "an InferencePool stands in one namespace: name it")

    @property
    def source(self) -> str:
        """What the workers list calls it."""
        named = ("kubernetes", self.namespace, self.selector or self.inference_pool)
        return " ".join(filter(None, named))
