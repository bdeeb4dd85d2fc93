"""Finds engines among the pods of a Kubernetes cluster: those of a label selector, or of an InferencePool.

It joins two things that are followed each for itself, the pool and its pods, and hands over the whole list whenever it
changed. As long as the cluster cannot be asked, the last list stays, and `degraded` says why. What pods mean stands in
`pods`, how lists and watches go in `informer`, and how the cluster is reached in `cluster`.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator

from pointsman.control.discovery.found import Found
from pointsman.control.discovery.informer import Clock, Cluster, Informer, Pace
from pointsman.control.discovery.pods import Listing, Pod, Pool, PoolSpec, listing, steps

__all__ = ["Kubernetes"]

logger = logging.getLogger(__name__)

POOLS = ("inference.networking.k8s.io/v1", "inference.networking.x-k8s.io/v1alpha2")
"""The versions of the InferencePool, the newest first."""

PACE = Pace()

EVERYWHERE = "*"
"""What stands for all namespaces."""


class Kubernetes:
    """The engines in the pods of a cluster.

    `namespace` is "" for our own, or `*` for all. Either `selector` names the pods, in the words of the Kubernetes API,
    or `inference_pool` does, of one namespace. `port` is where engines listen whose pods do not say it, 0 for the port
    that they declare; a pool's own ports come before it.

    `found` gets the whole list with the first one that was read, and whenever it changed. `degraded` is "" or why the
    list may be old or not whole; `on_degraded` gets it when it changes. Raises ValueError.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        clock: Clock,
        found: Callable[[list[Found]], None],
        namespace: str = "",
        selector: str = "",
        inference_pool: str = "",
        port: int = 0,
        on_degraded: Callable[[str], None] = lambda reason: None,
        pace: Pace = PACE,
    ) -> None:
        if bool(selector) == bool(inference_pool):
            raise ValueError("give either `selector` or `inference_pool`")
        if inference_pool and namespace == EVERYWHERE:
            raise ValueError("an InferencePool stands in one namespace: name it")
        self._cluster = cluster
        self._clock = clock
        self._pace = pace
        self._found = found
        self._on_degraded = on_degraded
        self._namespace = namespace or cluster.namespace
        self._selector = selector
        self._pool = inference_pool
        self._ports = (port,) if port else ()
        self._listing: Listing | None = None
        self._pods: Informer[Pod] | None = None
        self._pools: Informer[Pool] | None = None
        self._spec: PoolSpec | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._following: asyncio.Task[None] | None = None
        self.degraded = ""

    def start(self) -> None:
        """Follow from now on."""
        if not self._pool:
            self._follow_pods(self._selector)
            return
        self._pools = Informer(
            Pool,
            self._cluster,
            [f"/apis/{each}/namespaces/{self._namespace}/inferencepools" for each in POOLS],
            {"fieldSelector": f"metadata.name={self._pool}"},
            clock=self._clock,
            pace=self._pace,
            changed=self._pool_changed,
            told=self._judge,
        )
        self._run(self._pools)

    async def stop(self) -> None:
        """Follow no more; what was handed over stays as it is."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _run(self, informer: Informer[Pod] | Informer[Pool]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(informer.run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _follow_pods(self, selector: str) -> None:
        """Follow the pods of another selector from now on; the last list stays until theirs is there."""
        if self._following is not None:
            self._following.cancel()
        everywhere = self._namespace == EVERYWHERE
        self._pods = Informer(
            Pod,
            self._cluster,
            ["/api/v1/pods" if everywhere else f"/api/v1/namespaces/{self._namespace}/pods"],
            {"labelSelector": selector},
            clock=self._clock,
            pace=self._pace,
            changed=self._hand_over,
            told=self._judge,
        )
        self._following = self._run(self._pods)

    def _pool_changed(self, pools: list[Pool]) -> None:
        before, self._spec = self._spec, pools[0].spec if pools else None
        if self._spec is None or not self._spec.label_selector:
            if self._following is not None:
                self._following.cancel()
            self._pods = self._following = None
            self._hand_over([])
        elif before is None or before.label_selector != self._spec.label_selector:
            self._follow_pods(self._spec.label_selector)
        elif before.ports != self._spec.ports and self._pods is not None:
            self._hand_over(self._pods.objects)

    def _hand_over(self, pods: list[Pod]) -> None:
        """Hand over the engines of these pods, where they are not the same as before."""
        ports = self._spec.ports if self._spec is not None else ()
        after = listing(pods, ports or self._ports, self._listing or Listing())
        for found in steps(self._listing, after):
            self._found(found)
        self._listing = after
        self._judge()

    def _judge(self) -> None:
        """Say whether the list can be trusted, where that is news."""
        reason = "; ".join(self._reasons())
        if reason == self.degraded:
            return
        self.degraded = reason
        where = self._pool or self._selector
        count = len(self._listing.found) if self._listing is not None else 0
        if reason:
            logger.warning("kubernetes %s: %s (engines in the list: %d)", where, reason, count)
        else:
            logger.info("kubernetes %s: in order again (engines in the list: %d)", where, count)
        self._on_degraded(reason)

    def _reasons(self) -> Iterator[str]:
        informers = [each for each in (self._pools, self._pods) if each is not None]
        for informer in informers:
            if informer.degraded:
                yield informer.degraded
            if informer.unreadable:
                yield f"{informer.unreadable} objects of the API cannot be read"
        if self._pools is not None and self._pools.listed:
            if self._spec is None:
                yield f"there is no InferencePool {self._pool} in {self._namespace}"
            elif not self._spec.label_selector:
                yield f"InferencePool {self._pool} selects no pods"
        if self._listing is not None and (problems := self._listing.problems):
            yield problems[0]
            if len(problems) > 1:
                yield f"and {len(problems) - 1} more pods like that"
