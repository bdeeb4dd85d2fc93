"""Bytes to values and values to bytes: heads, framing, events, JSON bodies, the gateway's own answers.

Everything here is a pure function of bytes, or a small object that is fed bytes; no socket, no clock. What comes from a
peer is hostile until it is parsed, and is looked at once, however many pieces it arrives in.
"""

__all__: list[str] = []
