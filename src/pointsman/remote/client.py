"""The admin API of a running gateway, called over HTTP: bytes out, bytes in, and every failure as one sentence.

Two failures are kept apart: `Unreachable` may be over in a moment (a gateway that restarts), `Refused` is an answer.
What it does not do: follow redirects, or use a proxy from the environment. An admin key goes to the gateway or nowhere.
Whoever answers is not trusted to be a gateway: an answer has an end, in bytes and in time.
"""

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import httpx
import msgspec

__all__ = ["AdminClient", "Answer", "Refused", "RemoteError", "Unreachable", "printable", "trust"]

SILENCE_S = 10.0
"""How long a connection may take, or be silent."""

REQUEST_S = 30.0
"""How long a request may take in all: a server that dribbles is never silent."""

ANSWER_MAX = 64 * 2**20
"""Bytes of an answer's body."""

MESSAGE_MAX = 2000
"""Characters of a refusal's message that are told."""

ADVICE = {
    401: "give a valid key with --key or POINTSMAN_KEY",
    403: "use a key with the scope admin",
    412: "somebody else changed it meanwhile: look at it again",
}
"""What to do about a refusal, where the gateway's own message does not say it."""

UNKNOWN_AUTHORITY = frozenset({2, 18, 19, 20, 21})
"""OpenSSL's X509_V_ERR codes of a certificate that would be good if its authority were trusted."""

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


class _Reason(msgspec.Struct):
    message: object


class _Refusal(msgspec.Struct):
    error: _Reason


class Answer(msgspec.Struct, frozen=True):
    """A good answer: the bytes of its body, and its entity tag, "" where it has none."""

    content: bytes
    etag: str = ""

    def read(self, kind: type[T]) -> T:
        """Return the body as a value. Raises `RemoteError` where it is not that kind of JSON."""
        try:
            return msgspec.json.decode(self.content, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RemoteError(f"the gateway's answer is not what was expected: {error}") from None


class AdminClient:
    """One connection to a gateway's admin API, as a context manager.

    `url` is where the API port listens, `key` is an admin key ("" for none), `tls` the certificates to trust and show.
    Raises `RemoteError` for a URL that is no gateway's.
    """

    def __init__(self, url: str, key: str = "", *, tls: ssl.SSLContext | None = None) -> None:
        self.url = _address(url)
        # Nothing in a blocking client ends a header that comes byte by byte; a loop can end anything.
        self._runner = asyncio.Runner()
        self._http = httpx.AsyncClient(
            # A small answer could unpack to any size.
            headers={"accept-encoding": "identity"}
            | ({"authorization": f"Bearer {key}"} if key else {}),
            verify=tls if tls is not None else ssl.create_default_context(),
            timeout=SILENCE_S,
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
        with self._runner as runner:
            runner.run(self._http.aclose())

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

        Raises `Unreachable`, `Refused` for every answer that is not a 2xx, and `RemoteError` for what cannot be sent.
        """
        headers = {"content-type": "application/json"} if body is not None else {}
        if if_match:
            headers["if-match"] = if_match
        try:
            request = self._http.build_request(
                method,
                f"{self.url}/admin/v1{path}",
                content=body,
                params={k: v for k, v in (parameters or {}).items() if v is not None},
                headers=headers,
            )
            response, content = self._runner.run(self._exchange(request))
        except httpx.ConnectError as error:
            raise Unreachable(f"cannot connect to {self.url}: {_no_connection(error)}") from None
        except TimeoutError:
            raise Unreachable(f"no whole answer from {self.url} in {REQUEST_S:g} s") from None
        except (httpx.TransportError, OSError) as error:
            what = str(error) or type(error).__name__
            raise Unreachable(f"no whole answer from {self.url}: {what}") from None
        except (httpx.InvalidURL, UnicodeError) as error:
            raise RemoteError(f"this cannot be asked of {self.url}: {error}") from None
        if response.is_success:
            return Answer(content, response.headers.get("etag", ""))
        raise Refused(response.status_code, self._message(content))

    async def _exchange(self, request: httpx.Request) -> tuple[httpx.Response, bytes]:
        content = bytearray()
        async with asyncio.timeout(REQUEST_S):
            response = await self._http.send(request, stream=True)
            try:
                async for piece in response.aiter_raw():
                    content += piece
                    if len(content) > ANSWER_MAX:
                        raise Unreachable(
                            f"the answer of {self.url} is longer than {ANSWER_MAX} bytes"
                        )
            finally:
                await response.aclose()
        return response, bytes(content)

    def _message(self, content: bytes) -> str:
        try:
            message = str(msgspec.json.decode(content, type=_Refusal).error.message)
        except (msgspec.DecodeError, RecursionError):
            return f"{self.url} does not answer as a gateway's admin API; is --url right?"
        return message if len(message) <= MESSAGE_MAX else f"{message[:MESSAGE_MAX]}..."


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


def _address(url: str) -> str:
    """Return a URL to put a path behind. Raises `RemoteError`, which never shows a password."""
    if "@" in url:
        raise RemoteError("--url takes no user and no password: a key goes with --key")
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise RemoteError(f"--url is no URL: {error}") from None
    if not parsed.host:
        raise RemoteError("--url names no host, as http://127.0.0.1:8080 does")
    if parsed.port is not None and not 0 < parsed.port < 65536:
        raise RemoteError("--url has a port that does not exist")
    if parsed.query or parsed.fragment or url.endswith(("?", "#")):
        raise RemoteError("--url ends with the path: it takes no ? and no #")
    return url.rstrip("/")


def _no_connection(error: BaseException) -> str:
    """Return why there is no connection, and what to do about it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return f"{error}; is the gateway running, is --url right?"
    advice = "; trust its authority with --cacert" * (cause.verify_code in UNKNOWN_AUTHORITY)
    return f"its certificate is not good: {cause.verify_message}{advice}"


def printable(text: str) -> str:
    """Return text for a terminal: whatever could move its cursor or change its state is replaced.

    >>> printable("smol" + chr(27) + "[2J")
    'smol\\ufffd[2J'
    """
    return "".join(char if char.isprintable() else "\ufffd" for char in text)
