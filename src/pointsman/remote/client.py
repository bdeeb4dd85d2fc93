"""The admin API of a running gateway, called over HTTP: bytes out, bytes in, and every failure as one sentence.

Two failures are kept apart: `Unreachable` may be over in a moment (a gateway that restarts), `Refused` is an answer.
What it does not do: follow redirects, or use a proxy from the environment. An admin key goes to the gateway or nowhere.
"""

import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import httpx
import msgspec

__all__ = ["AdminClient", "Answer", "Refused", "RemoteError", "Unreachable", "printable", "trust"]

TIMEOUT_S = 10.0

ADVICE = {
    401: "give a valid key with --key or POINTSMAN_KEY",
    403: "use a key with the scope admin",
    412: "somebody else changed it meanwhile: look at it again",
}
"""What to do about a refusal, where the gateway's own message does not say it."""

Parameters = Mapping[str, str | int | Sequence[str] | None]
T = TypeVar("T")


class RemoteError(Exception):
    """What went wrong, as a sentence for people, in one line of printable characters."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class Unreachable(RemoteError):
    """Nobody answered, or not with a whole answer."""


class Refused(RemoteError):
    """The gateway answered with an error; `status` is its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        advice = ADVICE.get(status)
        super().__init__(f"{message} ({status}){f'; {advice}' if advice else ''}")
        self.status = status


class Answer(msgspec.Struct, frozen=True):
    """A good answer: the bytes of its body, and its entity tag, "" where it has none."""

    content: bytes
    etag: str = ""

    def read(self, kind: type[T]) -> T:
        """Return the body as a value. Raises `RemoteError` where it is not that kind of JSON."""
        try:
            return msgspec.json.decode(self.content, type=kind)
        except msgspec.DecodeError as error:
            raise RemoteError(f"the gateway's answer is not what was expected: {error}") from None


class AdminClient:
    """One connection to a gateway's admin API, as a context manager.

    `url` is where the API port listens, `key` is an admin key ("" for none), `tls` the certificates to trust and show.
    """

    def __init__(self, url: str, key: str = "", *, tls: ssl.SSLContext | None = None) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.Client(
            headers={"authorization": f"Bearer {key}"} if key else {},
            verify=tls if tls is not None else ssl.create_default_context(),
            timeout=TIMEOUT_S,
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def get(self, path: str, parameters: Parameters | None = None) -> Answer:
        """Return what is at `path`, which is below `/admin/v1`. Raises as `ask` does."""
        return self.ask("GET", path, parameters=parameters)

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        parameters: Parameters | None = None,
        if_match: str = "",
    ) -> Answer:
        """Send one request to `path` below `/admin/v1`; parameters that are None are left out.

        Raises `Unreachable`, and `Refused` for every answer that is not a 2xx.
        """
        headers = {"content-type": "application/json"} if body is not None else {}
        if if_match:
            headers["if-match"] = if_match
        try:
            response = self._http.request(
                method,
                f"{self.url}/admin/v1{path}",
                content=body,
                params={k: v for k, v in (parameters or {}).items() if v is not None},
                headers=headers,
            )
        except httpx.ConnectError as error:
            raise Unreachable(
                f"cannot connect to {self.url}: {error}; is the gateway running, is --url right?"
            ) from None
        except (httpx.TransportError, httpx.DecodingError) as error:
            what = str(error) or type(error).__name__
            raise Unreachable(f"no whole answer from {self.url}: {what}") from None
        if response.is_success:
            return Answer(response.content, response.headers.get("etag", ""))
        raise Refused(response.status_code, self._message(response))

    def _message(self, response: httpx.Response) -> str:
        try:
            message = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            return f"{self.url} does not answer as a gateway's admin API; is --url right?"
        return str(message)


def trust(cacert: Path | None, cert: Path | None, client_key: Path | None) -> ssl.SSLContext:
    """Return whom to trust (`cacert` in PEM, else the system's authorities), and what to show to a gateway that asks.

    Raises `RemoteError` naming the file that cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=cacert)
    except OSError as error:
        raise RemoteError(f"cannot use {cacert} as a CA: {error}") from None
    if cert is not None:
        try:
            # The answer to a question for a password must not be waited for: there may be nobody to ask.
            context.load_cert_chain(cert, client_key, password="")
        except OSError as error:
            raise RemoteError(f"cannot use the client certificate {cert}: {error}") from None
    return context


def printable(text: str) -> str:
    """Return text for a terminal: whatever could move its cursor or change its state is replaced.

    >>> printable("smol" + chr(27) + "[2J")
    'smol\\ufffd[2J'
    """
    return "".join(char if char.isprintable() else "\ufffd" for char in text)
