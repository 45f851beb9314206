"""Streaming text: whole characters, stop strings over token borders, and nothing lost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashnext.text import StopMatcher, TextStream


def feed_all(stream: TextStream, pieces: list[bytes]) -> str:
    out = [stream.feed(piece) for piece in pieces]
    return "".join([*out, stream.finish()])


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=8))
def test_pieces_join_to_the_full_decode(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut <= len(data)), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    assert feed_all(TextStream(), pieces) == data.decode("utf-8", errors="replace")


@given(st.text(max_size=30))
def test_no_broken_character_is_ever_shown(text: str) -> None:
    stream = TextStream()
    shown = ""
    for byte in text.encode():
        shown += stream.feed(bytes([byte]))
        assert text.startswith(shown)
    assert shown + stream.finish() == text


@given(
    st.text("ab<|x", max_size=40),
    st.lists(st.text("ab<|x", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    stream = TextStream(stops)
    own = ""
    for char in text:  # one character a token: the stop that completes first ends the text
        own += stream.feed(char.encode())
        assert not any(stop in own for stop in stops)
        if stream.stopped:
            break
    own += stream.finish()
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert own == text and not stream.stopped
    else:
        done = min(ends)
        starts = [done - len(stop) for stop in stops if text[:done].endswith(stop)]
        assert own == text[: min(starts)] and stream.stopped


def test_possible_beginnings_of_a_stop_are_held_back() -> None:
    matcher = StopMatcher(["<end>"])
    assert matcher.feed("hello <e") == "hello "
    assert matcher.feed("n") == ""
    assert matcher.feed("d of it") == "<end of it"
    assert matcher.feed(" <end") == " "
    assert matcher.finish() == "<end"


def test_stop_inside_one_piece_drops_what_follows() -> None:
    stream = TextStream(["\n"])
    assert stream.feed(b"one\ntwo") == "one"
    assert stream.stopped
    assert stream.feed(b"three") == ""
    assert stream.finish() == ""
    assert stream.text == "one"


@pytest.mark.parametrize("text", ["Grüße", "世界", "🦊 fox", "e\u0301"])
def test_character_comes_with_its_last_byte(text: str) -> None:
    stream = TextStream()
    seen = [stream.feed(bytes([byte])) for byte in text.encode()]
    assert "".join(seen) == text
    assert [piece for piece in seen if piece] == list(text)
