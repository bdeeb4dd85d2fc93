"""Which engines the pods of a cluster are: from the objects of the Kubernetes API to a list of `Found`.

A pod is there as long as it is Ready and has an address; what its engine answers somewhere else does not count here.
One that is terminating stays, draining, until its object is gone, if it was there before: its engine may stop to be
Ready while it finishes what it has.

Nothing here asks a cluster or remembers anything: what was there before is an argument.
"""

from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Struct

from pointsman.control.discovery.found import Found

__all__ = ["Listing", "Metadata", "Pod", "Pool", "PoolSpec", "listing", "steps"]

PREFIX = "pointsman.dev/"
"""What is before our own labels and annotations of a pod."""

LABELS = {
    key: key.replace("-", "_")
    for key in ("model", "role", "dialect", "scheme", "path", "capacity", "connector")
} | {"bootstrap-port": "bootstrap_port"}
"""What labels and annotations say of an engine, and what `Found` calls it."""

LLM_D_ROLE = "llm-d.ai/role"
"""The label of llm-d for what a pod can do."""

LLM_D_ROLES = {
    "prefill": "prefill",
    "decode": "decode",
    "both": "unified",
    "prefill-decode": "unified",
}

HTTP_PORT = "http"
"""The name of a container port that serves an API where a pod declares several."""


class Metadata(Struct, frozen=True, rename="camel"):
    """What every object has."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class ContainerPort(Struct, frozen=True, rename="camel"):
    """A port that a container says it listens on."""

    container_port: int
    name: str = ""


class Container(Struct, frozen=True):
    """A container of a pod."""

    ports: tuple[ContainerPort, ...] | None = None


class PodSpec(Struct, frozen=True):
    """What a pod is made of."""

    containers: tuple[Container, ...] | None = None


class Condition(Struct, frozen=True):
    """One thing that the cluster says about a pod: True, False or Unknown."""

    type: str
    status: str


class PodStatus(Struct, frozen=True):
    """What became of a pod."""

    pod_ip: str = msgspec.field(default="", name="podIP")
    conditions: tuple[Condition, ...] | None = None


class Pod(Struct, frozen=True):
    """A pod, as far as it matters here."""

    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def ready(self) -> bool:
        """Whether the cluster would send it traffic."""
        return any(
            each.type == "Ready" and each.status == "True" for each in self.status.conditions or ()
        )

    def said(self, key: str) -> str:
        """Return what it says under one of our keys, "" for nothing.

        The annotation wins, since a label cannot hold the name of every model.
        """
        name, meta = PREFIX + key, self.metadata
        return (meta.annotations or {}).get(name) or (meta.labels or {}).get(name, "")


class TargetPort(Struct, frozen=True):
    """A port of an InferencePool."""

    number: int


class PoolSpec(Struct, frozen=True, rename="camel"):
    """Which pods an InferencePool has, and where they listen; both of its versions."""

    selector: dict[str, str | dict[str, str] | None] = {}
    target_ports: tuple[TargetPort, ...] | None = None
    target_port_number: int = 0

    @property
    def label_selector(self) -> str:
        """Return the selector as a query of the API has it, "" where it names no label.

        >>> PoolSpec({"matchLabels": {"app": "vllm", "tier": "a"}}).label_selector
        'app=vllm,tier=a'
        >>> PoolSpec({"app": "vllm"}).label_selector
        'app=vllm'
        """
        nested = self.selector.get("matchLabels")
        labels = nested if isinstance(nested, dict) else self.selector
        return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))

    @property
    def ports(self) -> tuple[int, ...]:
        """Return where its pods listen: each port is an engine of its own."""
        if self.target_ports:
            return tuple(port.number for port in self.target_ports)
        return (self.target_port_number,) if self.target_port_number else ()


class Pool(Struct, frozen=True):
    """An InferencePool of the Gateway API."""

    metadata: Metadata
    spec: PoolSpec = PoolSpec()


class Listing(Struct, frozen=True):
    """The engines of a fleet at one moment, by id; the uid of each one's pod; and what was wrong with pods."""

    found: tuple[Found, ...] = ()
    pods: Mapping[str, str] = {}
    problems: tuple[str, ...] = ()


def listing(pods: Iterable[Pod], ports: tuple[int, ...], before: Listing) -> Listing:
    """Return the engines of these pods.

    `ports` are those of the pool or the configuration, empty where the pods have to say it. A pod that does not is
    left out, with a word about it in `problems`; it is no obstacle to the others.
    """
    known = frozenset(before.pods.values())
    found: dict[str, Found] = {}
    uids: dict[str, str] = {}
    problems = []
    for pod in pods:
        name = f"{pod.metadata.name}.{pod.metadata.namespace}"
        draining = pod.metadata.deletion_timestamp is not None
        stays = pod.metadata.uid in known if draining else pod.ready
        if not (stays and pod.status.pod_ip):
            continue
        try:
            numbers = _ports(pod, ports)
        except ValueError as error:
            problems.append(f"pod {name}: {error}")
            continue
        ip = pod.status.pod_ip
        host = f"[{ip}]" if ":" in ip else ip
        labels = _labels(pod)
        for number in numbers:
            # One engine of a pod keeps its name where only the port changes; of several, each has its own.
            id = f"{name}:{number}" if len(numbers) > 1 else name
            found[id] = Found(id, f"{host}:{number}", labels, draining)
            uids[id] = pod.metadata.uid
    return Listing(
        tuple(found[id] for id in sorted(found)),
        uids,
        tuple(sorted(problems)),
    )


def steps(before: Listing | None, after: Listing) -> list[list[Found]]:
    """Return the lists to hand over, one after another, to get from one listing to the next: none, one or two.

    The first listing is handed over also where it is empty.

    Where another pod took over name and address at once, which a list that was read again can show, the engine of the
    old one goes first: it shall not be taken for the same.
    """
    if before is None:
        return [list(after.found)]
    if before.found == after.found and before.pods == after.pods:
        return []
    old = {each.id: each for each in before.found}
    stay = [
        each
        for each in after.found
        if each.id not in old
        or each.address != old[each.id].address
        or after.pods[each.id] == before.pods[each.id]
    ]
    replaced = len(stay) < len(after.found)
    return [stay, list(after.found)] if replaced else [list(after.found)]


def _ports(pod: Pod, given: tuple[int, ...]) -> tuple[int, ...]:
    """Return where the engines of a pod listen, one port each. Raises ValueError."""
    if said := pod.said("port"):
        numbers: tuple[int, ...] = (int(said),) if said.isascii() and said.isdecimal() else (0,)
    elif given:
        numbers = given
    else:
        declared = [port for each in pod.spec.containers or () for port in each.ports or ()]
        named = [port for port in declared if port.name == HTTP_PORT]
        numbers = tuple(port.container_port for port in named or declared)
        if len(numbers) != 1:
            raise ValueError(
                f"it declares {len(numbers)} ports, and none says which is the engine's: "
                f"give `port`, or the annotation {PREFIX}port"
            )
    if not all(0 < number < 65536 for number in numbers):
        raise ValueError(f"{said or numbers[0]} is no port")
    return numbers


def _labels(pod: Pod) -> dict[str, str]:
    """Return what a pod says about its engine, in the words of `Found`."""
    labels = {ours: said for key, ours in LABELS.items() if (said := pod.said(key))}
    role = LLM_D_ROLES.get((pod.metadata.labels or {}).get(LLM_D_ROLE, ""))
    return {"role": role, **labels} if role else labels
