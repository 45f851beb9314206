"""The promise: logits depend on the ids before them and on nothing else. Every test is ==."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import flashnext
from helpers import load_golden

Opener = Callable[..., flashnext.Session]


@pytest.fixture(scope="module")
def ids() -> list[int]:
    """A prompt past the sparse attention's budget, with a separator inside."""
    golden = load_golden("A_visible.npz")
    return [*golden["17/tokens"].tolist(), *golden["13/tokens"].tolist()]


@pytest.fixture(scope="module")
def expected(ids: list[int]) -> Iterator[np.ndarray]:
    with flashnext.Session(flashnext.demo_path(), device="host", threads=1) as session:
        yield session.logits(ids)


@pytest.mark.parametrize(
    "options",
    [
        {"chunk": 1},
        {"chunk": 7},
        {"chunk": 64},
        {"chunk": 1000},
        {"threads": 2},
        {"isa": "scalar"},
        {"isa": "avx2"},
        {"isa": "avx512"},
        {"graphs": False},
        {"graphs": False, "chunk": 5},
        {"window": 128},
        {"lanes": 3},
        *({"seed": seed, "chunk": 33} for seed in range(1, 11)),
    ],
    ids=str,
)
def test_options_never_change_a_bit(
    open_session: Opener, ids: list[int], expected: np.ndarray, options: dict[str, Any]
) -> None:
    best = flashnext.build_info()["isa"]
    order = ["scalar", "avx2", "avx512"]
    if "isa" in options and order.index(options["isa"]) > order.index(best):
        pytest.skip(f"this CPU has no {options['isa']}")
    own = open_session(**options).logits(ids)
    assert (own.view(np.uint32) == expected.view(np.uint32)).all()


def test_a_prefix_gives_the_same_rows(
    session: flashnext.Session, ids: list[int], expected: np.ndarray
) -> None:
    for length in (1, 2, 63, 64, 65, 67, 68, 100, len(ids)):
        own = session.logits(ids[:length])
        assert (own == expected[:length]).all(), length


def test_logits_are_the_same_after_other_work(
    session: flashnext.Session, ids: list[int], expected: np.ndarray
) -> None:
    session.generate("Tell me a story about a hen in the river.", max_new_tokens=30)
    session.generate(ids, max_new_tokens=3)
    assert (session.logits(ids) == expected).all()


def test_one_digit_levels_keep_the_promise_too(open_session: Opener, ids: list[int]) -> None:
    expected = open_session(levels=127, threads=1).logits(ids)
    for options in ({"chunk": 9}, {"isa": "scalar", "threads": 2}, {"graphs": False}):
        assert (open_session(levels=127, **options).logits(ids) == expected).all(), options


def test_decode_equals_prefill(open_session: Opener, ids: list[int]) -> None:
    """Scores of a sampled answer, computed in one piece, are those it was sampled from."""
    session = open_session(lanes=2)
    answers = session.generate_batch([ids, ids[:30]], max_new_tokens=20, temperature=0.0)
    for prompt, answer in zip((ids, ids[:30]), answers, strict=True):
        logits = session.logits(prompt + answer.tokens)[:, : session.tokenizer.size]
        chosen = logits[len(prompt) - 1 : len(prompt) - 1 + len(answer.tokens)].argmax(1)
        assert chosen.tolist() == answer.tokens
