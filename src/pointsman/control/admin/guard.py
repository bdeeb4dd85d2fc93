"""Who may call the admin API: the second lock, behind the data plane's, and what keeps web pages out.

The data plane verifies keys and leaves the principal in the request's state; a request without one, or without the
scope `admin`, is refused here too, whoever mounted the application and however.

A gateway without keys lets everybody on its own machine in, and a browser is on it as well. So whoever comes without a
key must not come from a web page: `Origin`, which browsers send with every change, must be the gateway itself,
`Sec-Fetch-Site` must not say otherwise, and `Host` must be a loopback name, since a foreign name that resolves to
loopback is DNS rebinding. Nor may they come through a proxy on this machine, which may serve everybody. A key needs
none of this: a page does not have it, and browsers do not add it by themselves.
"""

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pointsman.control.admin.endpoint import error_response
from pointsman.domain.keys import Principal
from pointsman.errors import GatewayError, InsufficientScope, InvalidKey, NotFound

__all__ = ["Guard"]

PORTS = {"http": 80, "https": 443}


class Guard:
    """Middleware that refuses what must not reach an endpoint."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on."""
        try:
            if scope["type"] == "http":
                _admit(scope)
        except GatewayError as error:
            await error_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _admit(scope: Scope) -> None:
    principal = scope.setdefault("state", {}).get("principal")
    if not isinstance(principal, Principal):
        raise InvalidKey
    if not principal.admin:
        raise InsufficientScope("this path needs a key with the scope `admin`")
    if not principal.key_id:
        _same_site(Headers(scope=scope))
    # No name has one, and to a pattern of Python a path may end before its last line feed.
    if not scope["path"].isprintable():
        raise NotFound("no such path")


PROXIED = (
    "forwarded",
    "via",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-proto",
    "x-real-ip",
)
"""What proxies add to a request. One that adds nothing cannot be told from a client."""


def _same_site(headers: Headers) -> None:
    if any(name in headers for name in PROXIED):
        raise InsufficientScope("without a key, the admin API takes nothing through a proxy")
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise InsufficientScope("without a key, the admin API takes nothing from other web pages")
    hosts, origins = headers.getlist("host"), headers.getlist("origin")
    if len(hosts) > 1 or not all(map(_is_loopback, hosts)):
        raise InsufficientScope(
            "without a key, the admin API is for this machine: `Host` must be a loopback name"
        )
    if len(origins) > 1 or not all(_is_origin(each, "".join(hosts)) for each in origins):
        raise InsufficientScope("without a key, the admin API takes nothing from other web pages")


def _is_loopback(host: str) -> bool:
    name, _ = _authority("http", host)
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _is_origin(origin: str, host: str) -> bool:
    scheme, separator, authority = origin.partition("://")
    if not separator or scheme not in PORTS:
        return False
    where = _authority(scheme, authority)
    return where != NOWHERE and where == _authority(scheme, host)


NOWHERE = ("", 0)


def _authority(scheme: str, text: str) -> tuple[str, int]:
    """Return host (lower case) and port, `NOWHERE` for what is not just these two."""
    try:
        url = urlsplit(f"//{text}")
        port = url.port
    except ValueError:
        return NOWHERE
    if url.netloc != text or "@" in text or not url.hostname:
        return NOWHERE
    return url.hostname.removesuffix("."), PORTS[scheme] if port is None else port
