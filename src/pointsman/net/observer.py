"""What the data plane tells whoever counts. The metrics implement it; tests may too."""

from typing import Protocol

from pointsman.flow.exchange import Exchange

__all__ = ["Observer", "Silent"]


class Observer(Protocol):
    """Hears of every event once. Called on the hot path: it must be cheap and must not raise."""

    def finished(self, x: Exchange) -> None:
        """Hear of a request to an engine that is over."""

    def answered(
        self, method: str, path: str, status: int, seconds: float, error: str = ""
    ) -> None:
        """Hear of an answer that the gateway gave itself; `error` is the code or type of one that is an error."""

    def stale_resend(self) -> None:
        """Hear that a request was sent again, because its reused connection was closed already."""

    def pool_wait(self) -> None:
        """Hear that a request waits for a connection."""

    def hold_ended(self, outcome: str) -> None:
        """Hear how the wait of a request for a worker ended (`pointsman.net.holding`)."""

    def opened(self, side: str) -> None:
        """Hear of a new connection; `side` is downstream or upstream."""

    def closed(self, side: str) -> None:
        """Hear that a connection closed."""

    def fault(self, where: str) -> None:
        """Hear of an exception that nobody foresaw."""


class Silent:
    """An observer that ignores everything."""

    def finished(self, x: Exchange) -> None:
        """Ignore it."""

    def answered(
        self, method: str, path: str, status: int, seconds: float, error: str = ""
    ) -> None:
        """Ignore it."""

    def stale_resend(self) -> None:
        """Ignore it."""

    def pool_wait(self) -> None:
        """Ignore it."""

    def hold_ended(self, outcome: str) -> None:
        """Ignore it."""

    def opened(self, side: str) -> None:
        """Ignore it."""

    def closed(self, side: str) -> None:
        """Ignore it."""

    def fault(self, where: str) -> None:
        """Ignore it."""
