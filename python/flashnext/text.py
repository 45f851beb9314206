"""From token bytes to text as it streams: whole characters only, and no text past a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string in text that arrives in pieces.

    Text that may be the beginning of a stop string is held back until the next piece decides.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, piece: str) -> str:
        """Takes the next piece and returns the text that is now certain."""
        if self.stopped:
            return ""
        text = self._held + piece
        hits = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if hits:
            self.stopped = True
            self._held = ""
            return text[: min(hits)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Returns what was held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


class TextStream:
    """Turns the bytes of tokens into text pieces; their concatenation is the full decode.

    A character whose bytes are split over tokens comes out with its last byte. Bytes that are not
    UTF-8 become U+FFFD, as they do in the full decode.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matcher = StopMatcher(stops)
        self._pieces: list[str] = []

    @property
    def stopped(self) -> bool:
        """True once a stop string was met; the text ends before it."""
        return self._matcher.stopped

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._pieces)

    def feed(self, data: bytes) -> str:
        """Takes the bytes of one token and returns the text that is now certain (maybe empty)."""
        return self._emit(self._matcher.feed(self._decoder.decode(data)))

    def finish(self) -> str:
        """Ends the text and returns the rest of it."""
        piece = self._matcher.feed(self._decoder.decode(b"", final=True))
        return self._emit(piece + self._matcher.finish())

    def _emit(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece
