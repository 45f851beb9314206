"""Requests of many threads: each has its own options and end, and the answer it has alone."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashnext
from helpers import endless

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("hard_timeout")]

STORY = "Tell me a story about a fox and a lamp."
SUM = "Add 17 and 14."
PROMPTS = [STORY, SUM, "What is the opposite of up?", "Count from 7 to 16.", STORY * 9]
Open = Callable[..., flashnext.Session]


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Starts the work in a thread; the returned call waits for its result, or its error."""
    result: list[Any] = []
    error: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as e:
            error.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join() -> Any:
        thread.join(60)
        assert not thread.is_alive(), "the thread hangs"
        if error:
            raise error[0]
        return result[0]

    return join


# ---- stats --------------------------------------------------------------------------------------


def test_stats_answer_beside_an_open_stream(open_session: Open) -> None:
    session = endless(open_session())
    with session.generate(STORY, stream=True, max_new_tokens=3000) as stream:
        for _ in range(30):
            next(stream)
        assert session.stats()["requests"] == 1
        assert in_thread(session.stats)()["decoding"] == 1
    seen: list[dict[str, Any]] = []
    session.generate(STORY, max_new_tokens=9, on_token=lambda *_: seen.append(session.stats()))
    assert len(seen) >= 9 and seen[-1]["requests"] == 2


def test_stats_wait_for_no_step(open_session: Open) -> None:
    session = open_session(chunk=4000)
    handle = session.submit([5] * 4000, max_new_tokens=1)
    times = []
    time.sleep(0.05)
    started = time.perf_counter()
    while not handle.done():
        before = time.perf_counter()
        session.stats()
        times.append(time.perf_counter() - before)
        time.sleep(0.01)
    step = time.perf_counter() - started
    assert step > 0.4, "the step is too short to tell anything"
    assert len(times) > 8
    assert sorted(times)[len(times) // 2] < 0.05 and max(times) < step / 3


# ---- many threads -------------------------------------------------------------------------------


class Jobs:
    """Random requests of every kind, each compared with its answer alone."""

    def __init__(self, alone: flashnext.Session, seed: int) -> None:
        self._alone = alone
        self._random = random.Random(seed)
        self.runs: list[Callable[[flashnext.Session], None]] = []
        kinds = [self._generate, self._stream, self._batch, self._logits, self._cancel, self._fail]
        for i in range(48):
            self.runs.append(kinds[i % len(kinds)]())
        self._random.shuffle(self.runs)

    def _options(self) -> tuple[str, dict[str, Any]]:
        choose = self._random
        options: dict[str, Any] = {"max_new_tokens": choose.choice([1, 7, 30, 60])}
        if choose.random() < 0.6:
            options |= {"temperature": choose.uniform(0.5, 1.5), "seed": choose.randrange(99)}
            options |= choose.choice([{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}])
        if choose.random() < 0.4:
            options["stop"] = choose.choice([".", [" and", "fox"], " the "])
        return choose.choice(PROMPTS), options

    def _generate(self) -> Callable[[flashnext.Session], None]:
        prompt, options = self._options()
        want = self._alone.generate(prompt, **options)

        def run(session: flashnext.Session) -> None:
            self._same(session.generate(prompt, **options), want)

        return run

    def _stream(self) -> Callable[[flashnext.Session], None]:
        prompt, options = self._options()
        want = self._alone.generate(prompt, **options)

        def run(session: flashnext.Session) -> None:
            stream = session.generate(prompt, stream=True, **options)
            assert "".join(stream) == want.text
            self._same(stream.result, want)

        return run

    def _batch(self) -> Callable[[flashnext.Session], None]:
        _, options = self._options()
        prompts = self._random.sample(PROMPTS, 4)
        want = [self._alone.generate(prompt, **options) for prompt in prompts]

        def run(session: flashnext.Session) -> None:
            for got, one in zip(session.generate_batch(prompts, **options), want, strict=True):
                self._same(got, one)

        return run

    def _logits(self) -> Callable[[flashnext.Session], None]:
        ids = self._random.choices(range(self._alone.tokenizer.size), k=40)
        logits, score = self._alone.logits(ids), self._alone.score(ids)

        def run(session: flashnext.Session) -> None:
            assert np.array_equal(session.logits(ids), logits)
            assert np.array_equal(session.score(ids), score, equal_nan=True)

        return run

    def _cancel(self) -> Callable[[flashnext.Session], None]:
        prompt, options = self._options()
        options |= {"max_new_tokens": 200, "stop": None}
        want = self._alone.generate(prompt, **options)
        after = self._random.randrange(4)

        def run(session: flashnext.Session) -> None:
            handle = session.submit(prompt, **options)
            for _ in range(after):
                next(handle, "")
            handle.cancel()
            got = handle.result()
            assert got.finish_reason in ("cancelled", want.finish_reason)
            assert got.tokens == want.tokens[: len(got.tokens)]
            assert want.text.startswith(got.text.rstrip("\ufffd"))

        return run

    def _fail(self) -> Callable[[flashnext.Session], None]:
        def fail(token: int | None, text: str) -> None:
            raise KeyError("mine")

        def run(session: flashnext.Session) -> None:
            with pytest.raises(KeyError, match="mine"):
                session.generate(STORY, on_token=fail)

        return run

    @staticmethod
    def _same(got: flashnext.Generation, want: flashnext.Generation) -> None:
        assert (got.tokens, got.text, got.finish_reason) == (
            want.tokens,
            want.text,
            want.finish_reason,
        )


@pytest.mark.parametrize("seed", [1, 2])
def test_eight_threads_get_the_answers_of_one(open_session: Open, seed: int) -> None:
    jobs = Jobs(open_session(prefix_snapshots=0), seed).runs
    session = open_session(lanes=3, prefix_snapshots=6, chunk=48)

    def work(mine: int) -> int:
        for job in jobs[mine::8]:
            job(session)
        return len(jobs[mine::8])

    assert sum(join() for join in [in_thread(lambda i=i: work(i)) for i in range(8)]) == 48
    stats = session.stats()
    assert stats["queued"] == stats["reading"] == stats["decoding"] == 0
    assert session.generate(SUM).text == "17 + 14 = 31."


def test_requests_that_come_meanwhile_change_nothing(open_session: Open) -> None:
    session = open_session(lanes=2)
    want = open_session().generate(STORY).tokens
    others: list[flashnext.Handle] = []

    def more(token: int | None, text: str) -> None:
        if len(others) < 6:
            others.append(session.submit(SUM, temperature=0.1 * len(others)))

    assert session.generate(STORY, on_token=more).tokens == want
    assert all(handle.result().finish_reason == "stop" for handle in others) and len(others) == 6


# ---- batches ------------------------------------------------------------------------------------


def test_limits_belong_to_a_request(open_session: Open) -> None:
    alone = open_session().generate(STORY)
    assert len(alone.tokens) == 117 and alone.finish_reason == "stop"
    for lanes in (1, 2):
        session = open_session(lanes=lanes)
        first, second = session.generate_batch([STORY, "x " * 2030])
        assert first.tokens == alone.tokens and first.finish_reason == "stop"
        assert second.prompt_tokens + len(second.tokens) <= session.window
        assert second.prompt_tokens > session.window - 117


def test_a_callback_that_raises_fails_its_request_alone(open_session: Open) -> None:
    alone = open_session()
    prompts = [STORY, SUM, STORY, PROMPTS[3]]
    session = open_session(lanes=2)

    def told(request: int, token: int | None, text: str) -> bool:
        if request == 0:
            raise ValueError("no more")
        return request == 2

    batch = session.generate_batch(prompts, on_token=told)
    assert [answer.finish_reason for answer in batch] == ["failed", "stop", "cancelled", "stop"]
    assert batch[0].error == "on_token raised ValueError: no more"
    assert len(batch[0].tokens) == len(batch[2].tokens) == 1
    for i in (1, 3):
        assert batch[i].tokens == alone.generate(prompts[i]).tokens and batch[i].error is None


def test_ctrl_c_in_a_callback_ends_the_whole_batch(open_session: Open) -> None:
    session = endless(open_session(lanes=2))

    def told(request: int, token: int | None, text: str) -> None:
        raise KeyboardInterrupt

    before = session.stats()["cancelled"]
    with pytest.raises(KeyboardInterrupt):
        session.generate_batch([STORY] * 4, on_token=told, max_new_tokens=3000)
    session.generate(SUM, max_new_tokens=3)
    assert session.stats()["cancelled"] == before + 4


# ---- policies -----------------------------------------------------------------------------------

CALLS: dict[str, Callable[[flashnext.Session], Any]] = {
    "generate": lambda s: s.generate(SUM),
    "logits": lambda s: s.logits([1, 2]),
    "score": lambda s: s.score([1, 2]),
    "batch": lambda s: s.generate_batch([SUM, SUM]),
    "stream": lambda s: next(s.generate(SUM, stream=True)),
    "result": lambda s: s.submit(SUM).result(timeout=5),
    "record": lambda s: s.record("no-such-folder/trace"),
    "close": lambda s: s.close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_policy_cannot_wait_for_its_own_session(open_session: Open, call: str) -> None:
    raised: list[BaseException] = []

    class Asking(flashnext.Policy):
        session: flashnext.Session | None = None

        def plan(self, counters: flashnext.Counters) -> flashnext.PlanOutput:
            if self.session is not None:
                self.session.stats()  # waits for nothing, so it is allowed
                try:
                    CALLS[call](self.session)
                except BaseException as e:
                    raised.append(e)
                    raise
            return flashnext.PlanOutput()

    policy = Asking()
    session = open_session(experts="offload", cache_lines=8, policy=policy)
    want = open_session().generate(STORY, max_new_tokens=40).tokens
    policy.session = session
    assert in_thread(lambda: session.generate(STORY, max_new_tokens=40))().tokens == want
    assert [type(e) for e in raised] == [flashnext.InputError]
    assert any("Asking" in note and "policy" in str(raised[0]) for note in session.notes)
    assert session.generate(STORY, max_new_tokens=40).tokens == want
    policy.session = None


# ---- closing ------------------------------------------------------------------------------------


def test_an_error_leaves_a_with_block_with_an_open_stream(demo: Path) -> None:
    with (
        pytest.raises(KeyError, match="mine"),
        flashnext.Session(demo, device="host") as session,
    ):
        stream = endless(session).generate(STORY, stream=True, max_new_tokens=3000)
        next(stream)
        raise KeyError("mine")
    with pytest.raises(flashnext.InputError, match="closed"):
        session.generate(SUM)
    assert stream.result.finish_reason == "cancelled" and len(stream.result.tokens) >= 1


def test_close_ends_all_who_wait(demo: Path) -> None:
    for _ in range(3):
        session = endless(flashnext.Session(demo, device="host", lanes=2))
        handle = session.submit(STORY, max_new_tokens=3000)
        stream = session.generate(STORY, max_new_tokens=3000, stream=True)
        waiting = [
            in_thread(lambda s=session: s.generate(STORY, max_new_tokens=3000)),
            in_thread(lambda s=session: s.generate_batch([STORY] * 5, max_new_tokens=3000)[0]),
            in_thread(handle.result),
            in_thread(lambda s=session: s.logits([5] * 4000)),
            in_thread(lambda s=stream: (list(s), s.result)[1]),
        ]
        time.sleep(0.3)
        closing = [in_thread(session.close) for _ in range(3)]
        assert [join() for join in closing] == [None] * 3
        for join in waiting:
            with contextlib.suppress(flashnext.InputError):
                assert join().finish_reason == "cancelled"
        session.close()
        for call in (session.stats, lambda s=session: s.submit(SUM)):
            with pytest.raises(flashnext.InputError, match="closed"):
                call()
        assert session.notes is not None and handle.done()


def test_a_cancel_of_nothing_is_not_kept(open_session: Open) -> None:
    session = open_session()
    for _ in range(200):
        session.cancel()
        assert session.generate(SUM, max_new_tokens=2).finish_reason == "length"
