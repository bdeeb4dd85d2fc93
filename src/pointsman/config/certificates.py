"""Which options name the files of TLS.

Nothing is read here: that is `pointsman.certificates`.
"""

from typing import NamedTuple

from pointsman.certificates import Pem, TlsFiles
from pointsman.config.options import GatewayConfig

__all__ = ["Tls", "tls_files"]


class Tls(NamedTuple):
    """The files of the three sides that may speak TLS."""

    api: TlsFiles
    registry: TlsFiles
    upstream: TlsFiles


def tls_files(gateway: GatewayConfig) -> Tls:
    """Return which files the options name; nothing is read."""

    def files(*options: str) -> TlsFiles:
        return TlsFiles(*(Pem(option, getattr(gateway, option)) for option in options))

    return Tls(
        api=files("tls_cert", "tls_key", "tls_client_ca"),
        registry=files("registry_tls_cert", "registry_tls_key", "registry_client_ca"),
        upstream=files("upstream_cert", "upstream_key", "upstream_ca"),
    )
