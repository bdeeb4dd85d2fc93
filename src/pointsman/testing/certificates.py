"""A certificate authority of a test's own, and the files that a gateway, its engines and its clients need.

It needs the distribution `trustme`, which nothing else here does.
"""

import ssl
from pathlib import Path

import trustme

__all__ = ["Authority"]


class Authority:
    """A CA whose certificates lie in a folder. `ca` is the path of its own one, in PEM."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._authority = trustme.CA()
        self._folder = folder
        self.ca = str(folder / f"{name}.pem")
        self._authority.cert_pem.write_to_path(self.ca)

    def issue(self, name: str, *identities: str) -> tuple[str, str]:
        """Write `<name>.crt` and `<name>.key` for some host names or addresses, and return their paths.

        The files of a name are replaced where they exist: that is how certificates are rotated.
        """
        issued = self._authority.issue_cert(*(identities or ("127.0.0.1", "localhost")))
        cert, key = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        issued.private_key_pem.write_to_path(str(key))
        cert.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        return str(cert), str(key)

    def server(self, pair: tuple[str, str], *, asks: bool = False) -> ssl.SSLContext:
        """Return the context of a server, that asks its clients for a certificate of this CA where it is told to."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*pair)
        if asks:
            context.load_verify_locations(self.ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client(self, pair: tuple[str, str] | None = None) -> ssl.SSLContext:
        """Return the context of a client that trusts this CA alone, with a certificate to show or without."""
        context = ssl.create_default_context(cafile=self.ca)
        if pair is not None:
            context.load_cert_chain(*pair)
        return context
