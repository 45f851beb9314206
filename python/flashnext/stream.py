"""Streaming: an answer as an iterator of text pieces that ends with its reader."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

from flashnext.generation import Generation
from flashnext.handle import Handle


class Stream(Iterator[str]):
    """An answer on its way: iterate for text pieces, then read ``result``.

    Pieces are whole characters; joined they are ``result.text``. Leaving the loop early, ``close``
    and Ctrl-C cancel the generation and leave the session usable. Other calls of the session go on
    meanwhile, and a slow reader slows nobody.

    Example:
        >>> stream = session.generate("Tell me a story.", stream=True)
        >>> for piece in stream:
        ...     print(piece, end="", flush=True)
        >>> stream.result.finish_reason
        'stop'
    """

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._closed = False

    def __iter__(self) -> Iterator[str]:
        try:
            while True:
                try:
                    piece = next(self)
                except StopIteration:
                    return
                yield piece
        finally:
            # A break out of the loop ends here, through GeneratorExit.
            self.close()

    def __next__(self) -> str:
        if self._closed:
            raise StopIteration
        try:
            return next(self._handle)
        except BaseException:  # the end, a failure, or Ctrl-C while waiting
            self.close()
            raise

    @property
    def result(self) -> Generation:
        """The finished answer. Reads the rest of the stream if that has not been done.

        After an early close it holds what was generated until then, and its finish reason is
        ``cancelled``.

        Raises:
            flashnext.Error: the generation failed.
        """
        return self._handle.result()

    def close(self) -> None:
        """Cancels what is still running; the rest is not read any more. May be repeated."""
        self._closed = True
        self._handle.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
