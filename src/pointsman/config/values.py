"""The values that options are made of: what was refused, and where to listen."""

import ipaddress
import re
from typing import NamedTuple

__all__ = ["Address", "ConfigError"]


class ConfigError(Exception):
    """A configuration that the gateway refuses; the text is for the person who wrote it."""


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
