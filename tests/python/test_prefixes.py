"""Prefixes: what prompts have in common is read once, and reused states give the cold bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import flashnext
from flashnext.marks import Marks, TurnMarks
from helpers import checkpoint

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("hard_timeout")]

Open = Callable[..., flashnext.Session]
Message = dict[str, Any]

START, END = 90, 91  # of a turn, in the tests of marks
SPACING = 16  # a turn that begins so close to a state that is kept already has none of its own
RULES = "You answer briefly and you say what you know. "


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two sequences begin with in common."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


class Reader:
    """A session, and what it must have kept: everything that it processed, up to a turn's start."""

    def __init__(self, session: flashnext.Session) -> None:
        self.session = session
        self.processed: list[list[int]] = []
        (self.opening,) = session.tokenize("<|im_start|>")

    def ids(self, messages: list[Message], **arguments: Any) -> list[int]:
        return self.session.tokenize(self.session.chat_template(messages, **arguments))

    def expected(self, ids: list[int]) -> int:
        """Tokens that need not be read again: up to the last turn's start in what is known."""
        known = max((common(ids, old) for old in self.processed), default=0)
        known = min(known, len(ids) - 1)
        turns = [i for i in range(1, known + 1) if ids[i] == self.opening]
        return turns[-1] if turns else 0

    def ask(self, ids: list[int], **options: Any) -> flashnext.Generation:
        answer = self.session.generate(ids, **options)
        self.processed.append(ids + answer.tokens)
        return answer


# ---- a shared system prompt ---------------------------------------------------------------------


def system_chat(session: flashnext.Session, question: str) -> list[Message]:
    system = RULES
    while len(session.tokenize(system)) < 1200:
        system += RULES
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def test_a_shared_system_prompt_is_read_once(open_session: Open) -> None:
    session, cold = open_session(), open_session(prefix_snapshots=0)
    first = session.generate(system_chat(session, "Add 17 and 14."))
    assert first.reused_tokens == 0 and first.prompt_tokens >= 1200
    for question in ("What is the opposite of up?", "Count from 7 to 16."):
        chat = system_chat(session, question)
        answer, want = session.generate(chat), cold.generate(chat)
        assert answer.reused_tokens >= 1150
        assert answer.tokens == want.tokens and want.reused_tokens == 0


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_questions_that_come_together_read_it_once(open_session: Open, lanes: int) -> None:
    session, cold = open_session(lanes=lanes), open_session(prefix_snapshots=0)
    questions = ["Add 17 and 14.", "What is the opposite of up?", "Count from 7 to 16."]
    chats = [system_chat(session, question) for question in questions]
    before = session.stats()
    answers = [handle.result() for handle in [session.submit(chat) for chat in chats]]
    for answer, chat in zip(answers, chats, strict=True):
        assert answer.tokens == cold.generate(chat).tokens
    reused = [answer.reused_tokens for answer in answers]
    assert reused[0] == 0 and min(reused[1:]) >= 1150
    after = session.stats()
    prompts = sum(answer.prompt_tokens for answer in answers)
    assert after["prompt_tokens"] - before["prompt_tokens"] == prompts
    assert after["reused_tokens"] - before["reused_tokens"] == sum(reused)
    # Rows that were computed: what was not reused, and a row a new token.
    rows = after["rows"] - before["rows"]
    drawn = sum(len(answer.tokens) + 1 for answer in answers)
    assert rows <= prompts - sum(reused) + drawn < 2 * 1200


def test_a_shared_system_prompt_outlives_other_requests(open_session: Open) -> None:
    session = open_session(prefix_snapshots=4)
    session.generate(system_chat(session, "Add 17 and 14."))
    for i in range(6):
        session.generate(f"Add {i} and {i}.")
        answer = session.generate(system_chat(session, f"Add {i} and 3."))
        assert answer.reused_tokens >= 1150, i


# ---- chats --------------------------------------------------------------------------------------

QUESTIONS = [
    "What is 17 + 4?",
    "Tell me a story about a fox and a bucket.",
    "What is the opposite of up?",
    "Add 65 and 548.",
    "Tell me a story about a gentle turtle.",
    "Count from 3 to 9.",
    "Repeat after me: plums and lakes.",
    "What is 30 - 12?",
    "Tell me about the farm.",
    "Add 1 and 2.",
]


def split(text: str, thinking: bool) -> tuple[str, str]:
    """What was thought, and what was said."""
    thought, mark, said = text.partition("</think>")
    return (thought.strip(), said.strip()) if thinking and mark else ("", text.strip())


@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "not thinking"])
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "dropped"])
def test_a_chat_of_ten_turns_reads_its_last_turn_alone(
    open_session: Open, thinking: bool, keep: bool
) -> None:
    path = checkpoint("C")
    warm = Reader(open_session(path))
    cold = open_session(path, prefix_snapshots=0)
    messages: list[Message] = [{"role": "system", "content": RULES * 3}]
    for turn, question in enumerate(QUESTIONS):
        messages.append({"role": "user", "content": question})
        ids = warm.ids(messages, enable_thinking=thinking)
        expected = warm.expected(ids)
        answer = warm.ask(ids, max_new_tokens=90)
        assert answer.reused_tokens >= expected, (turn, answer.reused_tokens, expected)
        if turn:
            # All before the question but the answer to the one before, which the template may
            # have changed.
            last = warm.ids(messages[:-2], enable_thinking=thinking, add_generation_prompt=False)
            assert expected >= len(last) > 0
        want = cold.generate(ids, max_new_tokens=90)
        assert (answer.tokens, answer.text) == (want.tokens, want.text), turn
        thought, said = split(answer.text, thinking)
        messages.append({"role": "assistant", "content": said})
        if keep and thought:
            messages[-1]["reasoning_content"] = thought
    assert len(ids) > 400


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_changed_history_is_read_from_the_change_on(open_session: Open, lanes: int) -> None:
    warm = Reader(open_session(lanes=lanes))
    cold = open_session(prefix_snapshots=0)
    messages: list[Message] = [{"role": "system", "content": RULES * 4}]
    starts: list[int] = []  # of every question's turn
    for question in QUESTIONS[:4]:
        starts.append(len(warm.ids(messages, add_generation_prompt=False)))
        messages.append({"role": "user", "content": question})
        answer = warm.ask(warm.ids(messages), max_new_tokens=40)
        messages.append({"role": "assistant", "content": answer.text})
    for turn in (3, 2, 1):
        changed = [*messages[: 1 + 2 * turn], {"role": "user", "content": "Add 20 and 22."}]
        ids = warm.ids(changed)
        assert ids[starts[turn]] == warm.opening
        answer = warm.session.generate(ids, max_new_tokens=40)
        assert answer.reused_tokens >= starts[turn] - SPACING, turn
        assert answer.tokens == cold.generate(ids, max_new_tokens=40).tokens
    shorter = [messages[0], {"role": "user", "content": "Add 20 and 23."}]
    answer = warm.session.generate(shorter)
    assert answer.reused_tokens >= starts[0] - SPACING
    assert answer.tokens == cold.generate(shorter).tokens


def test_the_same_prompt_again_costs_a_few_rows(open_session: Open) -> None:
    session = open_session()
    chat = [{"role": "user", "content": " ".join(QUESTIONS)}]
    first = session.generate(chat)
    again = session.generate(chat)
    assert again.tokens == first.tokens and again.prompt_tokens - again.reused_tokens <= 16


def test_without_snapshots_nothing_is_reused(open_session: Open) -> None:
    session = open_session(prefix_snapshots=0)
    for _ in range(2):
        assert session.generate(system_chat(session, "Add 17 and 14.")).reused_tokens == 0
    assert session.stats()["remembered_prefixes"] == 0


# ---- marks --------------------------------------------------------------------------------------


def test_marks_are_where_turns_begin() -> None:
    marks = TurnMarks([START, 1, 10], [START, 2, 10])
    question = [START, 1, 10, 50, 51, END, 10]
    answer = [START, 3, 10, 60, END, 10]
    # The first turn begins where the prompt does: no state is there to be kept.
    assert marks.find(question + answer) == Marks([7], 0)
    assert marks.find(question + answer + question + [START, 3, 10]) == Marks([7, 13, 20], 0)
    system = [START, 2, 10, 70, 71, 72, END, 10]
    assert marks.find(system + question + [START, 3, 10]) == Marks([8, 15], 8)
    assert marks.find(system) == Marks([], 0)
    assert marks.find(question + system) == Marks([7], 0)  # no conversation begins so
    assert marks.find([5, *question]) == Marks([1], 0)
    assert marks.find([]) == Marks([], 0)


def test_prompts_without_turns_have_no_marks() -> None:
    assert TurnMarks([], []).find([START, 1, 2, START]) == Marks([], 0)
    assert TurnMarks([START, 1], []).find([START, 2, 3, START, 1]) == Marks([3], 0)
    assert TurnMarks([START, 1], []).find([1, 2, 3]) == Marks([], 0)


def test_marks_of_the_template(session: flashnext.Session) -> None:
    chat = [
        {"role": "system", "content": RULES},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": "Hi"},
    ]
    ids = session.tokenize(session.chat_template(chat))
    lengths = [
        len(session.tokenize(session.chat_template(chat[:n], add_generation_prompt=False)))
        for n in range(1, 5)
    ]
    marks = session._marks.find(ids)
    assert marks == Marks(lengths, lengths[0])
