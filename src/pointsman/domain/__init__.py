"""The rules of routing, as values and arithmetic.

Nothing below this package knows of sockets, clocks, threads, files or random module state: time and randomness are
arguments, so every rule is tested in microseconds.
"""

__all__: list[str] = []
