"""Policies in Python: what they see, what they may say, and what becomes of those that fail."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashnext
from flashnext import Counters, PlanOutput, Policy, Trace
from flashnext.policy import policy_names
from traces import write_trace


@pytest.fixture(scope="module")
def trace() -> Trace:
    return Trace.synthetic(3, 32, 4, line_bytes=1000, steps=100, zipf=0.9, seed=5)


class Listening(Policy):
    """Keeps what it saw."""

    def __init__(self) -> None:
        self.first: Any = None
        self.seen: list[Counters] = []
        self.copies: list[dict[str, Any]] = []

    def initial(self, shape: Any, budget: int, profile: Any) -> Any:
        self.first = (shape, budget, profile)
        return super().initial(shape, budget, profile)

    def plan(self, counters: Counters) -> PlanOutput:
        self.seen.append(counters)
        names = ("recent", "total", "last", "expert_of")
        self.copies.append({name: getattr(counters, name).copy() for name in names})
        return PlanOutput()


def test_a_policy_sees_the_counters(tmp_path: Path) -> None:
    # One layer of 6 experts, two a token; steps 1..5, planned before 1, 3 and 5.
    steps = [[0, 5], [5, 1], [3, 5], [3, 3], [2, 0]]
    write_trace(tmp_path / "t", (1, 6, 2), [("step", i + 1, 0, [s]) for i, s in enumerate(steps)])
    policy = Listening()
    Trace(tmp_path / "t").replay(3, policy, plan_every=2)
    shape, budget, profile = policy.first
    assert (shape.layers, shape.experts, shape.top_k, shape.line_bytes) == (1, 6, 2, 100)
    assert budget == 3 and profile is None
    assert [c.sequence for c in policy.seen] == [0, 2, 4]
    none, one, two = policy.copies
    assert none["recent"].sum() == 0 and none["expert_of"].tolist() == [[2, 1, 0]]
    assert one["recent"].tolist() == [[1, 1, 0, 0, 0, 2]]
    assert two["recent"].tolist() == [[0, 0, 0, 2, 0, 1]]
    assert one["total"].tolist() == [[1, 1, 0, 0, 0, 2]]
    assert two["total"].tolist() == [[1, 1, 0, 2, 0, 3]]
    assert two["last"].tolist() == [[1, 2, 0, 4, 0, 3]]
    # Lines 2 1 0 at first; 5 takes the line of 2; then 3 that of 0, which is unused longest.
    assert one["expert_of"].tolist() == [[5, 1, 0]]
    assert two["expert_of"].tolist() == [[5, 1, 3]]
    assert one["recent"].dtype == np.uint32 and one["total"].dtype == np.uint64
    assert one["last"].dtype == np.int32 and one["expert_of"].dtype == np.int32


def test_counters_are_read_only_and_outlive_the_run(trace: Trace) -> None:
    policy = Listening()
    trace.replay(8, policy)
    kept = policy.seen[0]
    with pytest.raises(ValueError, match="read-only"):
        kept.total[0, 0] = 1
    gc.collect()
    assert kept.total.shape == (3, 32) and kept.expert_of.shape == (3, 8)
    # The arrays are those of the last plan, not of memory that is gone.
    assert np.array_equal(kept.total, policy.copies[-1]["total"])


def test_the_base_class_is_recency(trace: Trace) -> None:
    profile = trace.uses()
    for lines in (4, 8, 31):
        for uses in (None, profile):
            mine = trace.replay(lines, Policy(), profile=uses)
            theirs = trace.replay(lines, "recency", profile=uses)
            assert mine.fault is None
            assert np.array_equal(mine.step_hits, theirs.step_hits)


def test_the_profile_reaches_the_policy(trace: Trace) -> None:
    policy = Listening()
    profile = np.arange(96, dtype=np.uint64).reshape(3, 32)
    trace.replay(8, policy, profile=profile)
    assert np.array_equal(policy.first[2], profile)
    before, after = policy.copies[:2]
    assert np.array_equal(before["total"], profile)  # the first plan: no step has run
    assert after["total"].sum() == profile.sum() + 16 * 3 * 4  # of sixteen steps, one row each


def test_what_a_policy_says_is_done(trace: Trace) -> None:
    class Frozen(Policy):
        def plan(self, counters: Counters) -> PlanOutput:
            return PlanOutput(install=False)

    class Promoting(Policy):
        def plan(self, counters: Counters) -> PlanOutput:
            absent = [e for e in range(32) if e not in counters.expert_of[1]][:3]
            return PlanOutput(promote=[(1, e) for e in absent], install=False)

    class Arrays(Promoting):
        def plan(self, counters: Counters) -> PlanOutput:
            plan = super().plan(counters)
            evict = np.tile(np.arange(32, dtype=np.uint16), (3, 1))
            return PlanOutput(np.array(plan.promote, np.int64), evict, np.bool_(False))

    frozen = trace.replay(8, Frozen())
    assert frozen.fault is None and frozen.promoted == 0
    # The first plan comes before the first step, so the lines hold 0..7 all along.
    assert frozen.hits == trace.uses()[:, :8].sum()
    static = trace.replay(8, "static")
    assert np.array_equal(frozen.step_hits, static.step_hits)
    for policy in (Promoting(), Arrays()):
        done = trace.replay(8, policy)
        assert done.fault is None
        assert done.layer_promoted.tolist() == [0, 21, 0]  # seven plans: before steps 1, 17 .. 97
        assert done.bytes == 1000 * (done.fetched + done.promoted)


def bad_promote(counters: Counters) -> Any:
    return PlanOutput(promote=[(0, 99)])


BAD = {
    "promote[0] names expert 99": bad_promote,
    "names layer 3": lambda c: PlanOutput(promote=[(3, 1)]),
    "again": lambda c: PlanOutput(promote=[(0, 1), (0, 1)]),
    "must be a pair": lambda c: PlanOutput(promote=[(0, 1, 2)]),
    "no number of a layer or expert": lambda c: PlanOutput(promote=[(0, 2**70)]),
    "evict has 1 lists": lambda c: PlanOutput(evict=[[1]]),
    "evict[2] names expert 7 twice": lambda c: PlanOutput(evict=[[], [], [7, 7]]),
    "must hold whole numbers, and has a float": lambda c: PlanOutput(evict=[[1.0], [], []]),
    "must be one row of whole numbers": lambda c: PlanOutput(evict=np.zeros((3, 2))),
    "plan returned a NoneType": lambda c: None,
    "plan returned a dict": lambda c: {"promote": []},
    "evict is None": lambda c: PlanOutput(evict=None),  # type: ignore[arg-type]
    "ZeroDivisionError: division by zero (test_policy.py:": lambda c: 1 / 0,
    "KeyError: 'x'": lambda c: {}["x"],
    "SystemExit": lambda c: (_ for _ in ()).throw(SystemExit(3)),
}


@pytest.mark.parametrize("words", BAD)
def test_a_faulty_policy_is_replaced_and_the_run_goes_on(trace: Trace, words: str) -> None:
    class Faulty(Policy):
        asked = 0

        def plan(self, counters: Counters) -> Any:
            self.asked += 1
            return BAD[words](counters) if self.asked == 2 else PlanOutput()

    policy = Faulty()
    done = trace.replay(8, policy)
    assert done.fault is not None and words in done.fault, done.fault
    assert 'policy "Faulty" failed before step 17' in done.fault
    assert "recency took over" in done.fault
    assert policy.asked == 2 and len(done.step_hits) == 100
    # Up to the fault and after it the policy is recency, so nothing else differs.
    assert np.array_equal(done.step_hits, trace.replay(8).step_hits)


def test_a_first_fill_that_fails_is_replaced(trace: Trace) -> None:
    for first, words in (
        (lambda: [[0], [1]], "initial gave 2 lists"),
        (lambda: [[0], [1], [32]], "initial[2] names expert 32"),
        (lambda: None, "initial is None"),
        (lambda: 1 // 0, "ZeroDivisionError"),
    ):

        class Faulty(Policy):
            name = "picky"

            def initial(self, shape: Any, budget: int, profile: Any, first: Any = first) -> Any:
                return first()

        done = trace.replay(8, Faulty())
        assert done.fault is not None and words in done.fault
        assert '"picky" failed at the first fill' in done.fault


def test_a_slow_policy_is_replaced(trace: Trace) -> None:
    import time

    class Slow(Policy):
        def plan(self, counters: Counters) -> PlanOutput:
            time.sleep(0.02)
            return PlanOutput()

    done = trace.replay(8, Slow(), plan_limit=0.001)
    assert (
        done.fault is not None
        and "failed before step 1: " in done.fault
        and "the limit is 1.0 ms" in done.fault
    )
    assert trace.replay(8, Slow(), plan_limit=60).fault is None


def test_ctrl_c_in_a_plan_is_no_fault_of_the_policy(trace: Trace) -> None:
    class Interrupted(Policy):
        def plan(self, counters: Counters) -> PlanOutput:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        for _ in range(2):  # the signal is raised again after the run
            assert trace.replay(8, Interrupted()).fault is None


def test_what_is_no_policy_is_refused(trace: Trace) -> None:
    with pytest.raises(flashnext.InputError, match="a class; give an object"):
        trace.replay(8, Listening)  # type: ignore[arg-type]
    with pytest.raises(flashnext.InputError, match="expected a name or an object"):
        trace.replay(8, 17)  # type: ignore[arg-type]
    with pytest.raises(flashnext.InputError, match=r"newest.*known: recency"):
        trace.replay(8, "newest")


def test_policies_are_let_go(trace: Trace) -> None:
    policy = Listening()
    gone = weakref.ref(policy)
    trace.replay(8, policy)
    del policy
    gc.collect()
    assert gone() is None


def test_every_built_in_policy_runs(trace: Trace) -> None:
    assert policy_names() == ["recency", "frequency", "static", "random"]
    for name in policy_names():
        done = trace.replay(8, name, seed=3)
        assert done.fault is None and done.policy == name
        assert done.hits + done.fetched == 100 * 3 * 4
        again = trace.replay(8, name, seed=3)
        assert np.array_equal(done.step_hits, again.step_hits)
