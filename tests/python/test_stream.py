"""Streams: the same text as without, cancelled by whoever walks away, and the session lives on."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

import flashnext

STORY = "Tell me a story about a fox and a lamp."


@pytest.fixture(scope="module")
def story(session: flashnext.Session) -> flashnext.Generation:
    return session.generate(STORY)


def test_streaming_equals_waiting(session: flashnext.Session, story: flashnext.Generation) -> None:
    stream = session.generate(STORY, stream=True)
    pieces = list(stream)
    assert "".join(pieces) == story.text
    assert len(pieces) > 10
    assert stream.result.tokens == story.tokens
    assert stream.result.finish_reason == story.finish_reason == "stop"
    assert stream.result.timings.time_to_first_token is not None


def test_streaming_equals_waiting_when_sampling(session: flashnext.Session) -> None:
    options = {"temperature": 1.3, "top_p": 0.95, "seed": 11, "max_new_tokens": 60}
    waited = session.generate(STORY, **options)
    stream = session.generate(STORY, stream=True, **options)
    assert "".join(stream) == waited.text
    assert stream.result.tokens == waited.tokens


def test_result_reads_the_rest(session: flashnext.Session, story: flashnext.Generation) -> None:
    stream = session.generate(STORY, stream=True)
    next(stream)
    assert stream.result.text == story.text


def test_break_cancels(session: flashnext.Session, story: flashnext.Generation) -> None:
    stream = session.generate(STORY, stream=True)
    for _ in stream:
        break
    assert list(stream) == []
    partial = stream.result
    assert story.text.startswith(partial.text)
    assert partial.finish_reason in ("cancelled", "stop")
    assert session.generate(STORY).text == story.text


def test_close_cancels_and_frees_the_session(session: flashnext.Session) -> None:
    endless = session.stop_ids
    session.stop_ids = []
    try:
        stream = session.generate(STORY, stream=True, max_new_tokens=3000)
        next(stream)
        stream.close()
        stream.close()
        assert stream.result.finish_reason == "cancelled"
        assert len(stream.result.tokens) < 3000
    finally:
        session.stop_ids = endless
    assert session.generate("Add 17 and 14.").text == "17 + 14 = 31."


def test_a_dropped_stream_lets_go(session: flashnext.Session) -> None:
    stream = session.generate(STORY, stream=True)
    next(stream)
    del stream
    gc.collect()
    assert session.generate("Add 17 and 14.").text == "17 + 14 = 31."


def test_with_block_closes(session: flashnext.Session) -> None:
    with session.generate(STORY, stream=True) as stream:
        next(stream)
    assert session.generate("Add 17 and 14.").text == "17 + 14 = 31."


def test_a_session_with_an_open_stream_answers_beside_it(
    session: flashnext.Session, story: flashnext.Generation
) -> None:
    ids = session.tokenize(STORY)
    logits, score = session.logits(ids), session.score(ids)
    with session.generate(STORY, stream=True) as stream:
        pieces = [next(stream)]
        # The stream has the only lane: what comes next waits for it, not for its reader.
        assert session.generate("Add 17 and 14.").text == "17 + 14 = 31."
        assert np.array_equal(session.logits(ids), logits)
        assert np.array_equal(session.score(ids), score, equal_nan=True)
        assert "".join(pieces + list(stream)) == story.text
    assert stream.result.tokens == story.tokens


def test_a_slow_reader_loses_nothing(
    session: flashnext.Session, story: flashnext.Generation
) -> None:
    stream = session.generate(STORY, stream=True)
    waited = threading.Event()
    text = ""
    for piece in stream:
        waited.wait(0.005)
        text += piece
    assert text == story.text


def test_an_unread_stream_ends_all_the_same(
    session: flashnext.Session, story: flashnext.Generation
) -> None:
    before = session.stats()
    stream = session.generate(STORY, stream=True)
    assert session.generate("Add 17 and 14.").text == "17 + 14 = 31."
    # The one lane was given on, so that the stream has ended with nobody reading.
    after = session.stats()
    assert after["decoding"] == after["reading"] == after["queued"] == 0
    assert after["requests"] == before["requests"] + 2
    assert after["cancelled"] == before["cancelled"]
    assert "".join(stream) == story.text and stream.result.finish_reason == "stop"


def test_errors_of_callbacks_reach_the_caller(session: flashnext.Session) -> None:
    def fail(token: int | None, text: str) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        session.generate(STORY, on_token=fail)
    stream = session.generate(STORY, stream=True, on_token=fail)
    with pytest.raises(KeyError, match="mine"):
        list(stream)
    with pytest.raises(KeyError, match="mine"):
        _ = stream.result
    assert session.generate("Add 17 and 14.").text == "17 + 14 = 31."
