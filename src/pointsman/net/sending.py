"""Writing to a socket without the transport's detour, while nothing waits before it.

A transport queues what it is given and writes at the end of the loop's turn; for one small message that costs more than
the system call itself. So bytes go straight to the socket as long as the transport's own queue is empty, and what the
kernel does not take goes to the transport, with its back-pressure. The order of bytes stays what it was.

Measured per 2 kB request, two writes each: 2 to 3 us of some 43.

What is encrypted cannot take that way. Its transport gets the limits that a plain one has: uvloop's queues 512 KiB
by default for a peer that does not read, and reads on 256 KiB while it is paused, which are lost if the peer closes.
"""

import asyncio
import os
from collections.abc import Callable

__all__ = ["sender"]

UNSENT_BYTES = 65536
"""How much may wait in an encrypting transport before it says so; a plain one has the same limit by default."""

UNREAD_BYTES = 1
"""How much an encrypting transport may read while it is paused, before it stops reading from its socket."""


def sender(transport: asyncio.Transport) -> Callable[[bytes], None]:
    """Return the fastest way to write to a transport: to its socket, or the transport's own where it encrypts.

    The buffers of an encrypting transport are limited here as well.
    """
    raw = transport.get_extra_info("socket")
    if transport.get_extra_info("sslcontext") is not None:
        transport.set_write_buffer_limits(UNSENT_BYTES)
        transport.set_read_buffer_limits(UNREAD_BYTES)  # type: ignore[attr-defined]  # those of TLS have it
        return transport.write
    if raw is None:
        return transport.write
    descriptor = raw.fileno()
    queue = transport.write
    queued = transport.get_write_buffer_size
    closing = transport.is_closing

    def send(data: bytes) -> None:
        # A transport that closes gives its descriptor back to the kernel, which may give it to somebody else.
        if not queued() and not closing():
            try:
                sent = os.write(descriptor, data)
            except OSError:  # Full, or broken: the transport finds out which.
                sent = 0
            if sent == len(data):
                return
            data = data[sent:]
        queue(data)

    return send
