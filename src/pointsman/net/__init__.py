"""Sockets: clients on one side, engines on the other, and the driver of the stories between them.

This is the only layer of the data path that knows an event loop, a clock or a transport.
"""

__all__: list[str] = []
