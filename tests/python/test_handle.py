"""Handles: whoever waits, iterates, cancels or lets go gets what is due, in threads."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time
from collections.abc import Callable

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


def test_result_waits_as_long_as_asked(open_session: Open, story: flashnext.Generation) -> None:
    session = open_session()
    endless_one = open_session()
    handle = endless(endless_one).submit(STORY, max_new_tokens=3000)
    for timeout in (0, 0.1, -1):
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            handle.result(timeout)
        assert time.monotonic() - started < 5
    assert not handle.done()
    handle.cancel()
    first = handle.result(30)
    assert first.finish_reason == "cancelled" and handle.result() is first and handle.done()
    late = session.submit(STORY)
    with pytest.raises(TimeoutError):
        late.result(timeout=0)
    assert late.result(timeout=1e300).tokens == story.tokens  # the answer went on
    for wrong in ("1", float("nan"), [1]):
        with pytest.raises(flashnext.InputError, match="timeout"):
            late.result(timeout=wrong)  # type: ignore[arg-type]


def test_nobody_waits_for_another_reader_without_a_limit(open_session: Open) -> None:
    session = endless(open_session())
    first = session.submit(STORY, max_new_tokens=3000)
    queued = session.submit(SUM, max_new_tokens=5)  # has no update until the first one ends
    reader = threading.Thread(target=queued.result, daemon=True)
    reader.start()
    time.sleep(0.1)
    started = time.monotonic()
    assert not queued.done()
    with pytest.raises(TimeoutError):
        queued.result(timeout=0.05)

    async def look() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(queued, 0.05)

    run_async(look())  # cancels it, too
    assert time.monotonic() - started < 5 and not first.done()
    reader.join(30)
    assert not reader.is_alive() and queued.result().finish_reason == "cancelled"


def test_iterating_and_waiting_from_two_threads(
    open_session: Open, story: flashnext.Generation
) -> None:
    session = open_session()
    for _ in range(5):
        handle = session.submit(STORY)
        pieces: list[str] = []
        results: list[flashnext.Generation] = []
        threads = [
            threading.Thread(target=lambda h=handle, p=pieces: p.extend(h), daemon=True),
            threading.Thread(target=lambda h=handle, r=results: r.append(h.result()), daemon=True),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        assert "".join(pieces) == story.text
        assert [r.tokens for r in results] == [story.tokens]


def test_two_iterators_share_the_pieces(open_session: Open, story: flashnext.Generation) -> None:
    handle = open_session().submit(STORY)
    order = itertools.count()
    seen: list[tuple[int, str]] = []

    def read() -> None:
        for piece in handle:
            seen.append((next(order), piece))

    threads = [threading.Thread(target=read, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert sorted("".join(piece for _, piece in seen)) == sorted(story.text)
    assert handle.result().text == story.text


def test_callbacks_run_on_the_thread_that_reads(
    open_session: Open, story: flashnext.Generation
) -> None:
    calls: list[tuple[int, object]] = []

    def told(*what: object) -> None:
        calls.append((threading.get_ident(), what))

    handle = open_session().submit(STORY, on_token=told, on_prefill=told)
    time.sleep(0.2)
    assert calls == []  # nobody reads
    reader = threading.Thread(target=handle.result, daemon=True)
    reader.start()
    reader.join(30)
    assert {ident for ident, _ in calls} == {reader.ident}
    total = story.prompt_tokens
    assert (total, total) in [what for _, what in calls]
    tokens = [what[0] for _, what in calls if isinstance(what, tuple) and what[1] != total]
    assert [t for t in tokens if t is not None] == story.tokens


def test_a_callback_may_use_its_handle_but_not_wait_for_it(open_session: Open) -> None:
    session = open_session()
    raised: list[BaseException] = []
    handles: list[flashnext.Handle] = []

    def told(token: int | None, text: str) -> None:
        assert not handles[0].done()
        try:
            handles[0].result()
        except flashnext.InputError as error:
            raised.append(error)

    handles.append(session.submit(SUM, on_token=told))
    assert handles[0].result().text == "17 + 14 = 31."
    assert len(raised) == len(session.generate(SUM).tokens) and "callback" in str(raised[0])
    handles.append(session.submit(STORY, on_token=lambda *_: handles[1].cancel()))
    assert handles[1].result().finish_reason in ("cancelled", "stop")
    assert session.generate(SUM).text == "17 + 14 = 31."


def test_what_a_callback_raises_reaches_every_reader(open_session: Open) -> None:
    def fail(token: int | None, text: str) -> None:
        raise KeyError("mine")

    session = open_session()
    handle = session.submit(STORY, on_token=fail)
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            handle.result()
    with pytest.raises(KeyError, match="mine"):
        list(handle)
    assert handle.done()
    assert session.generate(SUM).text == "17 + 14 = 31."


def test_pieces_are_the_text_of_a_cancelled_answer(open_session: Open) -> None:
    session = open_session()
    text = session.generate(STORY).text
    stop = text[6:12] + "nowhere to be found"  # its beginning is held back
    count = itertools.count()
    handle = session.submit(STORY, stop=stop, on_token=lambda *_: next(count) == 5)
    assert "".join(handle) == handle.result().text
    assert handle.result().finish_reason == "cancelled"


def test_a_dropped_handle_is_cancelled(open_session: Open) -> None:
    session = endless(open_session())
    handle = session.submit(STORY, max_new_tokens=3000)
    next(handle)
    queued = session.submit(STORY, max_new_tokens=3000)
    before = session.stats()["cancelled"]
    del handle, queued
    gc.collect()
    until(lambda: session.stats()["cancelled"] == before + 2)
    session.generate(SUM, max_new_tokens=2)
    stats = session.stats()
    assert stats["queued"] == stats["reading"] == stats["decoding"] == 0


def test_more_handles_than_lanes(open_session: Open, story: flashnext.Generation) -> None:
    session = open_session(lanes=2)
    handles = [session.submit(STORY if i % 2 else SUM) for i in range(12)]
    for i in reversed(range(12)):
        want = story.text if i % 2 else "17 + 14 = 31."
        assert handles[i].result().text == want
    assert handles[11].result().timings.queued_seconds > handles[0].result().timings.queued_seconds


def test_ctrl_c_while_the_end_is_told_is_no_end(
    session: flashnext.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = session.generate(STORY, max_new_tokens=5)
    handle = session.submit(STORY, max_new_tokens=5)
    with monkeypatch.context() as patch:

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr("flashnext.requests.make_timings", interrupted)
        with pytest.raises(KeyboardInterrupt):
            handle.result()
    assert handle.result().tokens == want.tokens and handle.result().text == want.text
