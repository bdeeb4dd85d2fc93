"""The ordinary side of the gateway: heartbeats, eviction, what outlives a restart, health.

Nothing here touches a request. It shares the `Registry` and `Router` objects with the data plane,
and they meet in `pointsman.app` alone.
"""

__all__: list[str] = []
