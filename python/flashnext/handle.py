"""Handle: a request on its way, for whoever wants to wait, to iterate, to cancel, or to await."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any

from flashnext import _core, checks
from flashnext.errors import InputError, RequestFailed
from flashnext.generation import Generation
from flashnext.requests import END, PREFILL, TOKEN, Answer, OnPrefill, OnToken


class Handle:
    """A request that was submitted to a session and runs beside others.

    Iterate for pieces of text, or call :meth:`result`; in a coroutine ``async for`` and ``await``
    do the same. Any thread may use it. The engine never waits for the reader: what is not read is
    kept, up to ``max_new_tokens``. A handle that nobody holds any more is cancelled.

    Example:
        >>> handles = [session.submit(prompt) for prompt in prompts]
        >>> texts = [handle.result().text for handle in handles]
        >>> async def answer(prompt):
        ...     return (await session.submit(prompt)).text
    """

    def __init__(
        self,
        submission: _core.Submission,
        answer: Answer,
        on_token: OnToken | None = None,
        on_prefill: OnPrefill | None = None,
    ) -> None:
        self._submission = submission
        self._answer = answer
        self._on_token = on_token
        self._on_prefill = on_prefill
        # Whoever has the lock takes updates and tells the callbacks, which may use the handle. It
        # is held while waiting for the engine: others wait for it as long as for the engine.
        self._lock = threading.RLock()
        self._telling = False  # a callback
        self._process = os.getpid()
        self._pieces: deque[str] = deque()
        self._generation: Generation | None = None
        self._error: BaseException | None = None
        self._waiters: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}

    # ---- waiting --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """Waits for the next piece of text.

        Raises:
            StopIteration: the answer has ended.
            flashnext.Error: as :meth:`result`.
        """
        while True:
            over = self._over()  # before the look for a piece: afterwards there come no more
            if (piece := self._piece()) is not None:
                return piece
            if over:
                self._raise_failure()
                raise StopIteration
            self._pump(-1.0)

    def result(self, timeout: float | None = None) -> Generation:
        """Waits for the end of the answer and returns it. May be called again.

        Args:
            timeout: seconds to wait at most; None: as long as it takes.

        Raises:
            TimeoutError: the answer is not there yet; it goes on.
            RequestFailed: this request failed; the session and other requests go on.
            DeviceError: the device failed.
            InputError: from a callback of this very request, or from a policy.
            BaseException: what a callback raised.
        """
        if timeout is not None:
            timeout = checks.real("timeout", timeout, "seconds, or None to wait for the end")
        until = None if timeout is None else time.monotonic() + timeout
        while not self._over():
            left = -1.0 if until is None else max(until - time.monotonic(), 0.0)
            self._pump(min(left, threading.TIMEOUT_MAX))
            if until is not None and not self._over() and time.monotonic() >= until:
                raise TimeoutError(f"the answer is not there after {timeout} seconds")
        return self._outcome()

    def done(self) -> bool:
        """Whether the answer has ended; then :meth:`result` does not wait."""
        self._pump(0.0)
        return self._over()

    def cancel(self) -> None:
        """Ends the request within a step, with finish reason ``cancelled`` and what it has."""
        self._submission.cancel()

    # ---- asyncio --------------------------------------------------------------------------------

    def __await__(self) -> Generator[Any, None, Generation]:
        """Like :meth:`result`. Cancelling the task cancels the request."""
        return self._wait_for_end().__await__()

    async def __aiter__(self) -> AsyncIterator[str]:
        """Pieces of text. Leaving the loop early cancels the request."""
        try:
            while True:
                over = self._over()
                if (piece := self._piece()) is not None:
                    yield piece
                elif over:
                    self._raise_failure()
                    return
                else:
                    await self._wait_for_update()
        finally:
            if not self._over():
                self.cancel()

    async def _wait_for_end(self) -> Generation:
        try:
            while not self._over():
                await self._wait_for_update()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self._outcome()

    async def _wait_for_update(self) -> None:
        # The engine's thread writes to a descriptor that the loop watches: no thread of Python's
        # stands between, and the engine never waits for the interpreter. It is readable at once
        # when there is something to take already.
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        descriptor = self._submission.fileno()
        waiters = self._waiters.setdefault(loop, [])
        waiters.append(waiter)
        if len(waiters) == 1:
            loop.add_reader(descriptor, _wake, waiters)
        try:
            await waiter
        finally:
            waiters.remove(waiter)
            if not waiters:
                loop.remove_reader(descriptor)
                del self._waiters[loop]
        self._pump(0.0)

    # ---- inside ---------------------------------------------------------------------------------

    def _piece(self) -> str | None:
        try:
            return self._pieces.popleft()
        except IndexError:
            return None

    def _over(self) -> bool:
        return self._generation is not None or self._error is not None

    def _outcome(self) -> Generation:
        self._raise_failure()
        if self._generation is None:
            raise RequestFailed("the request ended without an answer")
        return self._generation

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error
        if self._generation is not None and self._generation.finish_reason == "failed":
            raise RequestFailed(self._generation.error or "the request failed")

    def _pump(self, seconds: float) -> None:
        """Takes what the engine has for this request; waits up to so long (negative: for ever)."""
        if os.getpid() != self._process:  # where the lock may be held by a thread left behind
            raise InputError("the answer is one of the parent process, which alone can read it")
        until = time.monotonic() + seconds
        if not self._lock.acquire(blocking=seconds != 0, timeout=seconds or -1):
            return  # another thread takes it
        try:
            if self._over():
                return
            if self._telling:
                if seconds:
                    raise InputError("a callback cannot wait for the answer that it is told of")
                return
            left = max(until - time.monotonic(), 0.0) if seconds > 0 else seconds
            updates = self._submission.updates(left)
            if not updates and self._submission.ended:
                # Ctrl-C may have come between the taking of the end and the telling of it.
                updates = self._submission.updates(0.0) or [(0, END, 0, 0)]
            for _, kind, value, total in updates:
                if kind == PREFILL:
                    if self._on_prefill is not None:
                        self._call(self._on_prefill, value, total)
                elif kind == TOKEN and self._answer.ended is None:
                    self._add(value, self._answer.token(value))
                elif kind == END:
                    self._end()
        finally:
            self._lock.release()

    def _add(self, token: int | None, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
        if self._on_token is not None and self._call(self._on_token, token, piece):
            self._answer.ended = "cancelled"
            self.cancel()

    def _call(self, callback: Any, *arguments: Any) -> Any:
        self._telling = True
        try:
            return callback(*arguments)
        except BaseException as error:
            self._error = error
            self._answer.ended = "cancelled"
            self.cancel()
            raise
        finally:
            self._telling = False

    def _end(self) -> None:
        tail = self._answer.finish()
        if tail and self._answer.ended is None:
            self._add(None, tail)
        elif tail:
            self._pieces.append(tail)
        try:
            self._generation = self._answer.generation(self._submission.completion(0))
        except Exception as error:  # of the engine; Ctrl-C is no end of the request
            self._error = error


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
