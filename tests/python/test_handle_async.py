"""Handles in asyncio: awaited, iterated, given up early; the event loop runs meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import flashnext
from helpers import endless, run_async, until

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("hard_timeout")]

STORY = "Tell me a story about a fox and a lamp."
SUM = "Add 17 and 14."
Open = Callable[..., flashnext.Session]


@pytest.fixture(scope="module")
def story(session: flashnext.Session) -> flashnext.Generation:
    return session.generate(STORY)


def test_await_and_async_for(open_session: Open, story: flashnext.Generation) -> None:
    session = open_session(lanes=2)

    async def main() -> None:
        assert (await session.submit(STORY)).tokens == story.tokens
        handle = session.submit(STORY)
        pieces = [piece async for piece in handle]
        assert "".join(pieces) == story.text and len(pieces) > 10
        assert await handle is await handle
        prompts = [STORY if i % 3 == 0 else SUM for i in range(20)]
        answers = await asyncio.gather(*(session.submit(prompt) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.text == (story.text if prompt == STORY else "17 + 14 = 31.")

    run_async(main())


def test_the_loop_runs_meanwhile(open_session: Open) -> None:
    session = endless(open_session())

    async def main() -> int:
        ticks = 0
        waiting = asyncio.ensure_future(_wait(session.submit(STORY, max_new_tokens=300)))
        while not waiting.done():
            ticks += 1
            await asyncio.sleep(0.001)
        assert len((await waiting).tokens) == 300
        return ticks

    assert run_async(main()) > 20


async def _wait(handle: flashnext.Handle) -> flashnext.Generation:
    return await handle


async def _first_piece(handle: flashnext.Handle) -> str:
    async for piece in handle:
        return piece
    return ""


def test_leaving_early_cancels(open_session: Open) -> None:
    session = endless(open_session())

    def cancelled(count: int) -> Callable[[], bool]:
        return lambda: session.stats()["cancelled"] == count

    async def main() -> None:
        loop = asyncio.get_running_loop()
        handle = session.submit(STORY, max_new_tokens=3000)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(handle, 0.2)
        await loop.run_in_executor(None, until, cancelled(1))
        handle = session.submit(STORY, max_new_tokens=3000)
        assert await _first_piece(handle)
        await loop.run_in_executor(None, until, cancelled(2))
        assert (await handle).finish_reason == "cancelled"
        handle = session.submit(STORY, max_new_tokens=3000)
        task = asyncio.ensure_future(_wait(handle))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await loop.run_in_executor(None, until, cancelled(3))

    run_async(main())
    assert len(session.generate(SUM, max_new_tokens=3).tokens) == 3


def test_several_wait_for_one_handle(open_session: Open, story: flashnext.Generation) -> None:
    session = open_session()

    async def main(handle: flashnext.Handle) -> None:
        answers = await asyncio.gather(*(_wait(handle) for _ in range(3)))
        assert all(answer is answers[0] for answer in answers)
        assert answers[0].tokens == story.tokens

    run_async(main(session.submit(STORY)))
    # Event loops of several threads, and a thread without one.
    handle = session.submit(STORY)
    done: list[str] = []

    def one() -> None:
        run_async(main(handle))
        done.append("loop")

    threads = [threading.Thread(target=one, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert handle.result().tokens == story.tokens
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert done == ["loop"] * 3


def test_no_reader_stays_on_the_loop(open_session: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    session = endless(open_session())
    open_readers: set[int] = set()
    added = 0

    async def main() -> None:
        nonlocal added
        loop = asyncio.get_running_loop()
        add, remove = loop.add_reader, loop.remove_reader

        def count(fd: int, *rest: Any) -> None:
            nonlocal added
            added += 1
            open_readers.add(fd)
            add(fd, *rest)

        monkeypatch.setattr(loop, "add_reader", count)
        monkeypatch.setattr(
            loop, "remove_reader", lambda fd: (open_readers.discard(fd), remove(fd))[1]
        )
        await session.submit(STORY, max_new_tokens=20)
        await _first_piece(session.submit(STORY, max_new_tokens=3000))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(session.submit(STORY, max_new_tokens=3000), 0.05)
        await asyncio.sleep(0.05)

    run_async(main())
    assert added >= 3 and open_readers == set()
