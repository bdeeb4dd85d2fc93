"""Token bytes become text: whole characters only, and nothing that may still become a stop string. Pure."""

import codecs
from collections.abc import Sequence

__all__ = ["TextStream"]


class TextStream:
    """The text of one answer as it grows. `stops`: strings that end it and are no part of it; the earliest one wins.

    >>> text = TextStream(["END"])
    >>> text.push(b"on"), text.push(b"e E"), text.push(b"x EN"), text.push(b"D two"), text.stopped
    ('on', 'e ', 'Ex ', '', True)
    """

    __slots__ = ("_decoder", "_held", "_stops", "stopped")

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False

    def push(self, piece: bytes) -> str:
        """The text that `piece` sets free, maybe none. Once `stopped`, nothing more comes."""
        return self._release(self._decoder.decode(piece), final=False)

    def flush(self) -> str:
        """What is held at the end of an answer; half a character becomes U+FFFD."""
        return self._release(self._decoder.decode(b"", final=True), final=True)

    def _release(self, text: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        self._held = ""
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        keep = 0 if final else max((_overlap(text, stop) for stop in self._stops), default=0)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
