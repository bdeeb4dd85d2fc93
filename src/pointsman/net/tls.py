"""TLS contexts of the API and towards the engines, that follow their files without a restart.

A new certificate must reach new connections, and a bad one must not: so a rotation builds a whole new context, and
only one that could be built takes the place of the old. Nothing is ever loaded into a context that is in use, which
OpenSSL would leave half changed when the second of two files turns out to be bad. Connections that exist keep the
context that they were made with; sessions of the old context cannot be resumed, so a CA that is gone lets nobody in.

It opens no connection, and reads no clock: whether a certificate is still valid is for the handshake.
"""

import ssl
from collections.abc import Callable
from functools import cache
from typing import Any, Self

from pointsman.certificates import TlsFiles

__all__ = ["LiveContext", "client_context", "server_context", "system_context"]

ALPN = ["http/1.1"]


class LiveContext(ssl.SSLContext):
    """A context for a listener or a pool to keep: each new connection gets the latest one that `make` built.

    `make` raises TlsError where the files are bad; so do the constructor and `prepare`.
    """

    _make: Callable[[], ssl.SSLContext]
    _latest: ssl.SSLContext

    def __new__(cls, make: Callable[[], ssl.SSLContext]) -> Self:
        """Build the first context."""
        latest = make()
        live = super().__new__(cls, latest.protocol)
        live._make = make
        live._latest = latest
        return live

    def prepare(self) -> Callable[[], None]:
        """Read the files again, and return what puts them in force for new connections, which cannot fail.

        Raises TlsError.
        """
        fresh = self._make()

        def commit() -> None:
            self._latest = fresh

        return commit

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        """Begin a connection. The event loops call this, once for each."""
        return self._latest.wrap_bio(*args, **options)


def server_context(files: TlsFiles) -> LiveContext:
    """Return the context of a listener. With a CA, clients must show a certificate of it.

    Raises TlsError for files that cannot be used.
    """

    def make() -> ssl.SSLContext:
        context = _modern(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        files.load_into(context)
        if files.ca.path:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    return LiveContext(make)


def client_context(files: TlsFiles) -> LiveContext:
    """Return the context towards engines, which are verified by host name or IP address.

    They are trusted by the CA of the files, or by those of the system where there is none; the certificate is for
    engines that ask for one. Raises TlsError for files that cannot be used. Where there are no files at all,
    `system_context` does the same.
    """

    def make() -> ssl.SSLContext:
        context = _modern(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        files.load_into(context)
        if not files.ca.path:
            context.load_default_certs()
        return context

    return LiveContext(make)


@cache
def system_context() -> ssl.SSLContext:
    """Return the context towards engines of which nothing is configured.

    It is made when it is first needed: reading the CAs of a system takes tens of milliseconds.
    """
    context = _modern(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    context.load_default_certs()
    return context


def _modern(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(ALPN)
    return context
