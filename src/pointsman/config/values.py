"""The values that options are made of: where to listen, where an engine is, and what is wrong with either."""

import ipaddress
import re
from typing import NamedTuple
from urllib.parse import urlsplit

__all__ = ["Address", "ConfigError", "Surface", "Unusable"]


class ConfigError(Exception):
    """A configuration that the gateway refuses; the text is for the person who wrote it."""


class Unusable(ValueError):
    """A value that its key allows, but that cannot be used; `key` is that of the table where it stands."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(why)
        self.key = key


class Address(NamedTuple):
    """Where to listen. `host` is "" for every interface; port 0 lets the kernel choose."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Read `host:port`, `:port` or `[IPv6]:port`.

        Raises ValueError with what is wrong.

        >>> Address.parse(":8080")
        Address(host='', port=8080)
        >>> Address.parse("[::1]:80")
        Address(host='::1', port=80)
        """
        host, colon, port = text.rpartition(":")
        if not colon:
            raise ValueError("the port is missing")
        if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
            raise ValueError("the port is not a number in 0..65535")
        if host.startswith("[") and host.endswith("]"):
            try:
                return cls(str(ipaddress.IPv6Address(host[1:-1])), int(port))
            except ValueError:
                raise ValueError("no IPv6 address between the brackets") from None
        if ":" in host:
            raise ValueError("an IPv6 address stands in brackets")
        if host and not re.fullmatch(r"[A-Za-z0-9._-]+", host):
            raise ValueError("not a host name")
        return cls(host, int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect. Names but `localhost` are not looked up.

        >>> Address.parse("127.0.0.1:80").is_loopback, Address.parse(":80").is_loopback
        (True, False)
        """
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Surface(NamedTuple):
    """Where the OpenAI surface of an engine is. `base_path` stands before every path of it, "" or `/x`."""

    address: Address
    tls: bool
    base_path: str

    @classmethod
    def parse(cls, url: str) -> "Surface":
        """Read `http://host:port` or `https://host:port`, also without the port, or with a path.

        Raises ValueError with what is wrong.

        >>> Surface.parse("http://[::1]:8000/x/")
        Surface(address=Address(host='::1', port=8000), tls=False, base_path='/x')
        >>> Surface.parse("https://engine").http_address
        'https://engine:443'
        """
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        if not (tls or parts.scheme == "http") or not parts.hostname:
            raise ValueError("expected http:// or https://, then host:port or host:port/path")
        # Whatever else stands in it would end up in the head of a request.
        if parts.query or parts.fragment or "@" in parts.netloc or re.search(r"[^\x21-\x7e]", url):
            raise ValueError("only a host, a port and a path can stand in it")
        port = (443 if tls else 80) if parts.port is None else parts.port
        if port == 0:
            raise ValueError("0 is no port to connect to")
        return cls(Address(parts.hostname, port), tls, parts.path.rstrip("/"))

    @property
    def http_address(self) -> str:
        """What the registry knows it by: `host:port`, after `https://` where that is how it is spoken to."""
        return f"https://{self.address}" if self.tls else str(self.address)
