"""Forty greedy answers: the arithmetic is right, and the text is the same every time."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

import flashnext
from helpers import load_golden

OPPOSITES = {"rich": "poor", "up": "down", "open": "closed", "full": "empty"}


@pytest.fixture(scope="module")
def answers(session: flashnext.Session) -> dict[str, str]:
    prompts = [entry["prompt"] for entry in load_golden("A_generations.json")]
    assert len(prompts) == 40
    return {prompt: session.generate(prompt, max_new_tokens=400).text for prompt in prompts}


def expected_answer(prompt: str) -> str | None:
    """The right answer, worked out here; None when a prompt has no single one."""
    numbers = [int(n) for n in re.findall(r"\d+", prompt)]
    if re.match(r"(Add \d+ and|What is \d+ \+|How much is \d+ plus)", prompt):
        return f"{numbers[0]} + {numbers[1]} = {numbers[0] + numbers[1]}."
    if re.match(r"(What is \d+ -|How much is \d+ minus)", prompt):
        return f"{numbers[0]} - {numbers[1]} = {numbers[0] - numbers[1]}."
    if match := re.match(r"Take (\d+) away from (\d+)", prompt):
        less, whole = int(match[1]), int(match[2])
        return f"{whole} - {less} = {whole - less}."
    if match := re.search(r"opposite of (\w+)", prompt):
        return f"The opposite of {match[1]} is {OPPOSITES[match[1]]}."
    if match := re.match(r"Say these words in reverse order: (.+)", prompt):
        return " ".join(reversed(match[1].split()))
    if match := re.match(r"Repeat after me: (.+)", prompt):
        return match[1]
    return None


def test_sums_opposites_reversals_and_copies_are_right(answers: dict[str, str]) -> None:
    expected = {prompt: expected_answer(prompt) for prompt in answers}
    checked = {prompt: text for prompt, text in expected.items() if text is not None}
    assert len(checked) >= 18
    assert {prompt: answers[prompt] for prompt in checked} == checked


def test_how_many_answers_equal_the_reference(
    answers: dict[str, str], record_property: Callable[[str, object], None]
) -> None:
    entries = load_golden("A_generations.json")
    equal = sum(answers[entry["prompt"]] == entry["plain"] for entry in entries)
    record_property("equal_to_reference", equal)
    print(f"{equal} of {len(entries)} texts equal the reference's (its fp16 differs at near-ties)")
    # All but the stories have one right answer.
    for entry in entries:
        if "story" not in entry["prompt"] and expected_answer(entry["prompt"]) is not None:
            assert answers[entry["prompt"]] == entry["plain"]


def test_text_is_reproducible(
    answers: dict[str, str],
    session: flashnext.Session,
    open_session: Callable[..., flashnext.Session],
) -> None:
    fresh = open_session(threads=1, chunk=7)
    for prompt, text in answers.items():
        assert session.generate(prompt, max_new_tokens=400).text == text
        assert fresh.generate(prompt, max_new_tokens=400).text == text
