"""Certificates as files: which belong together, whether they can be used, and what is wrong with them if not.

There are three sides that speak TLS (the API, the registry, the engines); each has a `TlsFiles`. The files are read
anew at every use, because that is how certificates are rotated: somebody replaces them.

It does not watch the files, and knows no protocol: contexts are made in `pointsman.net.tls`, gRPC's credentials in
`pointsman.control.heartbeat`. Whether a certificate has expired is for the peer to judge.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

__all__ = ["Pem", "TlsError", "TlsFiles"]


class Pem(NamedTuple):
    """A PEM file and the option that names it; `path` is "" where the option is not set."""

    option: str
    path: str

    def read(self) -> bytes:
        """Return what is in the file now, b"" for none. Raises TlsError where it cannot be read."""
        if not self.path:
            return b""
        try:
            return Path(self.path).read_bytes()
        except OSError as error:
            raise TlsError(self, error.strerror or "cannot be read") from None


class TlsError(ValueError):
    """A file that cannot be used, or one that is missing: `pem` says which, `why` what is wrong."""

    def __init__(self, pem: Pem, why: str) -> None:
        super().__init__(f'{pem.option} = "{pem.path}": {why}')
        self.pem = pem
        self.why = why


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of one side: its own certificate chain and private key, and the CA that its peers are trusted by."""

    cert: Pem
    key: Pem
    ca: Pem

    def __bool__(self) -> bool:
        """Whether any of the options is set."""
        return any(pem.path for pem in (self.cert, self.key, self.ca))

    def check(self, *, server: bool) -> None:
        """Try whether the files can be used, by a server or by a client.

        Raises TlsError for a certificate without its key, a key without its certificate, a server's CA without a
        certificate, and a file that is missing, unreadable, encrypted, or not what it should be.
        """
        if self.cert.path and not self.key.path:
            raise TlsError(self.key, f"needed beside {self.cert.option}")
        for pem in (self.key, self.ca) if server else (self.key,):
            if pem.path and not self.cert.path:
                raise TlsError(pem, f"of no use without {self.cert.option}")
        self.load_into(
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        )

    def load_into(self, context: ssl.SSLContext) -> None:
        """Load what there is into a context. Raises TlsError, and leaves the context good for nothing then."""
        cert, key, ca = self.cert, self.key, self.ca
        if cert.path:
            _parse(cert)
            key.read()

            def password() -> str:
                raise TlsError(key, "is encrypted; the gateway has nobody to ask for its password")

            try:
                context.load_cert_chain(cert.path, key.path, password)
            except ssl.SSLError as error:
                mismatch = error.reason == "KEY_VALUES_MISMATCH"
                why = f"not the key of {cert.option}" if mismatch else "not a private key in PEM"
                raise TlsError(key, why) from None
            except OSError as error:
                raise TlsError(cert, error.strerror or "cannot be read") from None
        if ca.path:
            _parse(ca)
            try:
                context.load_verify_locations(ca.path)
            except OSError as error:  # It has changed since it was parsed.
                raise TlsError(ca, error.strerror or "cannot be read") from None


def _parse(pem: Pem) -> None:
    """Raise TlsError where a file holds no certificates, or broken ones."""
    text = pem.read().decode(
        "ascii", "ignore"
    )  # What stands between certificates may be in any language.
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError):
        raise TlsError(pem, "not a certificate in PEM") from None
