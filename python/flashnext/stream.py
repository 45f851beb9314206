"""Streaming: an answer as an iterator of text pieces, computed by a worker thread.

The worker runs the engine and puts pieces into a bounded queue: a slow reader slows the engine
down, and a reader that goes away (break, close, Ctrl-C, garbage collection) cancels it.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType

from flashnext.errors import LogicError
from flashnext.generation import Generation

Put = Callable[[str], bool]

_CAPACITY = 256  # pieces; a reader that far behind makes the engine wait


class _Channel:
    """What reader and worker share. The worker must not hold the Stream, or it could never die."""

    def __init__(self) -> None:
        self.pieces: queue.Queue[str | None] = queue.Queue(_CAPACITY)  # None: the end
        self.closed = threading.Event()
        self.result: Generation | None = None
        self.error: BaseException | None = None

    def put(self, piece: str | None) -> bool:
        """Hands a piece over, waiting for room; True when the reader is gone."""
        while not self.closed.is_set():
            try:
                self.pieces.put(piece, timeout=0.05)
                break
            except queue.Full:
                continue
        return self.closed.is_set()


def _work(channel: _Channel, run: Callable[[Put], Generation]) -> None:
    try:
        channel.result = run(channel.put)
    except BaseException as error:  # handed to the reader, whatever it is
        channel.error = error
    channel.put(None)


def _shut(channel: _Channel, worker: threading.Thread, cancel: Callable[[], None]) -> None:
    channel.closed.set()
    if worker is threading.current_thread():
        return
    while worker.is_alive():
        cancel()
        worker.join(0.05)


class Stream(Iterator[str]):
    """An answer on its way: iterate for text pieces, then read ``result``.

    Pieces are whole characters; joined they are ``result.text``. Leaving the loop early, ``close``
    and Ctrl-C cancel the generation and leave the session usable. While a stream is open its
    session is busy.

    Example:
        >>> stream = session.generate("Tell me a story.", stream=True)
        >>> for piece in stream:
        ...     print(piece, end="", flush=True)
        >>> stream.result.finish_reason
        'stop'
    """

    def __init__(self, run: Callable[[Put], Generation], cancel: Callable[[], None]) -> None:
        self._channel = _Channel()
        self._worker = threading.Thread(
            target=_work, args=(self._channel, run), name="flashnext-stream", daemon=True
        )
        # Also runs when the Stream is collected and at interpreter exit.
        self._shut = weakref.finalize(self, _shut, self._channel, self._worker, cancel)
        self._worker.start()
        self._ended = False

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
        if self._ended or self._channel.closed.is_set():
            raise StopIteration
        try:
            piece = self._channel.pieces.get()
        except BaseException:  # Ctrl-C while waiting
            self.close()
            raise
        if piece is not None:
            return piece
        self._ended = True
        self.close()
        if self._channel.error is not None:
            raise self._channel.error
        raise StopIteration

    @property
    def result(self) -> Generation:
        """The finished answer. Reads the rest of the stream if that has not been done.

        After an early close it holds what was generated until then, and its finish reason is
        ``cancelled``.

        Raises:
            flashnext.Error: the generation failed.
        """
        for _ in self:
            pass
        if self._channel.error is not None:
            raise self._channel.error
        if self._channel.result is None:
            raise LogicError("the stream ended without a result")
        return self._channel.result

    def close(self) -> None:
        """Cancels what is still running and waits for the engine to let go. May be repeated."""
        self._shut()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
