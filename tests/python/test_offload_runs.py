"""Experts in host memory over a run: recordings, policies in Python, profiles."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashnext
from flashnext import Counters, InputError, PlanOutput, Policy, Trace
from flashnext.paths import demo_profile
from helpers import checkpoint

Open = Callable[..., flashnext.Session]

STORY = "Tell me a story about a fox and a lamp."
SUM = "Add 17 and 14."


@pytest.fixture
def offload(open_session: Open) -> Open:
    def make(path: Path | None = None, **given: Any) -> flashnext.Session:
        given = {"experts": "offload", "cache_lines": 9, "cpu_misses": "off", **given}
        return open_session(path, window=1024, **given)

    return make


def counts(session: flashnext.Session, name: str) -> list[int]:
    return [layer[name] for layer in session.stats()["cache"]["layers"]]


# ---- recordings ---------------------------------------------------------------------------------


class Favourites(Policy):
    """Promotes what was used most and has no line; copies arrays, so that it is a real one."""

    def plan(self, counters: Counters) -> PlanOutput:
        promote = []
        for layer, uses in enumerate(counters.total):
            held = set(counters.expert_of[layer].tolist())
            best = [int(e) for e in np.argsort(-uses.astype(np.int64), kind="stable")]
            promote += [(layer, e) for e in best[:3] if e not in held]
        return PlanOutput(promote=promote)


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("policy", ["recency", "frequency", "static", "random", "mine"])
def test_a_replay_counts_what_the_engine_did(
    offload: Open, tmp_path: Path, policy: str, lanes: int
) -> None:
    path = tmp_path / "run.trace"

    def asked() -> str | Policy:
        return Favourites() if policy == "mine" else policy

    session = offload(
        lanes=lanes, lockstep=True, policy=asked(), profile=False, seed=3, plan_every=6, trace=path
    )
    for i in range(2):
        batch = [f"Add {i} and {j}." for j in range(3)]
        session.generate_batch([*batch, STORY], max_new_tokens=40)
        session.logits([5, 6, 7] * 20)
    cache = session.stats()["cache"]
    assert cache["fault"] == "" and cache["plans"] > 8 and cache["layers"][-1]["steps"] > 0
    done = {name: counts(session, name) for name in ("hits", "fetched", "promoted")}
    session.close()
    trace = Trace(path)
    assert trace.fingerprint != 0 and trace.line_bytes == 39168 and trace.prompt_rows > 0
    replay = trace.replay(9, asked(), seed=3, plan_every=6)
    assert replay.fault is None
    assert replay.layer_hits.tolist() == done["hits"]
    assert replay.layer_fetched.tolist() == done["fetched"]
    assert replay.layer_promoted.tolist() == done["promoted"]
    if policy in ("frequency", "mine"):
        assert replay.promoted > 0
    other = trace.replay(8, asked(), seed=3, plan_every=6)
    assert other.layer_hits.tolist() != done["hits"]


@pytest.mark.parametrize("cpu_misses", [1, 3, 99])
def test_a_replay_knows_the_processor_s_share(
    offload: Open, tmp_path: Path, cpu_misses: int
) -> None:
    path = tmp_path / "run.trace"
    session = offload(cpu_misses=cpu_misses, lanes=3, profile=False, trace=path)
    session.generate_batch([SUM, STORY, "Count from 7 to 16."])
    share = session.stats()["cache"]["cpu_of"]
    done = {name: counts(session, name) for name in ("hits", "fetched")}
    on_cpu = sum(counts(session, "on_cpu"))
    session.close()
    trace = Trace(path)
    replay = trace.replay(9, cpu_of=share)
    assert replay.layer_hits.tolist() == done["hits"]
    assert replay.layer_fetched.tolist() == done["fetched"]
    assert replay.on_cpu == on_cpu > 0
    assert trace.replay(9).layer_hits.tolist() != done["hits"]
    with pytest.raises(InputError, match="cpu_of has 3 entries, expected 33"):
        trace.replay(9, cpu_of=[0, 0, 1])


def test_a_profile_is_part_of_a_replay(offload: Open, tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    session = offload(lockstep=True, trace=path, policy="static")  # with the shipped profile
    session.generate(STORY)
    hits = counts(session, "hits")
    session.close()
    trace = Trace(path)
    uses = trace.profile(demo_profile())
    assert trace.replay(9, "static", profile=uses).layer_hits.tolist() == hits
    assert trace.replay(9, "static").layer_hits.tolist() != hits


def test_recording_begins_and_ends_when_told(
    session: flashnext.Session, offload: Open, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="experts are resident"):
        session.record(tmp_path / "x")
    mine = offload()
    with pytest.raises(InputError, match="no routing is being recorded"):
        mine.stop_recording()
    with pytest.raises(InputError, match="No such file"):
        mine.record(tmp_path / "no" / "x")
    mine.record(tmp_path / "a")
    with pytest.raises(InputError, match="runs already"):
        mine.record(tmp_path / "b")
    assert mine.stats()["cache"]["recording"]
    mine.generate(SUM)
    records = mine.stop_recording()
    mine.generate(STORY)
    trace = Trace(tmp_path / "a")
    assert records == trace._core.info()["records"] > trace.steps > 0
    mine.record(tmp_path / "a")
    mine.close()  # ends it
    assert Trace(tmp_path / "a").steps == 0


# ---- policies -----------------------------------------------------------------------------------


def run_policy(offload: Open, policy: Policy) -> tuple[str, dict[str, Any], list[str]]:
    session = offload(policy=policy, plan_every=4)
    text = session.generate(STORY).text
    return text, session.stats()["cache"], session.notes


def test_a_policy_in_python_runs(session: flashnext.Session, offload: Open) -> None:
    text, cache, notes = run_policy(offload, Favourites())
    assert text == session.generate(STORY).text
    assert cache["policy"] == "Favourites" and cache["fault"] == "" and cache["plans"] > 20
    assert cache["sum"]["promoted"] > 0
    assert cache["promoted_bytes"] == cache["sum"]["promoted"] * cache["line_bytes"]
    assert not any("policy" in note for note in notes)


def slow(_: Counters) -> PlanOutput:
    time.sleep(0.55)
    return PlanOutput()


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (lambda c: 1 // 0, "ZeroDivisionError"),
        (lambda c: PlanOutput(promote=[(0, 32)]), "names expert 32"),
        (lambda c: PlanOutput(promote=[(9, 0)]), "names layer 9"),
        (lambda c: PlanOutput(evict=[[0]]), "evict has 1 lists"),
        (lambda c: None, "plan returned a NoneType"),
        (slow, "the limit is 50.0 ms"),
    ],
    ids=["exception", "expert", "layer", "evict", "none", "slow"],
)
def test_a_faulty_policy_is_replaced(
    session: flashnext.Session, offload: Open, plan: Any, words: str
) -> None:
    class Faulty(Policy):
        asked = 0

        def plan(self, counters: Counters) -> Any:
            self.asked += 1
            return plan(counters) if self.asked == 2 else PlanOutput()

    policy = Faulty()
    text, cache, notes = run_policy(offload, policy)
    assert text == session.generate(STORY).text
    assert policy.asked == 2
    assert cache["policy"] == "recency" and words in cache["fault"]
    assert any('policy "Faulty" failed' in note and words in note for note in notes)


def test_a_first_fill_that_fails_is_noted_at_open(offload: Open) -> None:
    class Faulty(Policy):
        def initial(self, shape: Any, budget: int, profile: Any) -> Any:
            return [[99]] * shape.layers

    session = offload(policy=Faulty())
    assert any("names expert 99" in note for note in session.notes)
    assert session.generate(SUM).text == "17 + 14 = 31."


def test_a_policy_is_first_asked_about_the_user_s_steps(offload: Open) -> None:
    class Asked(Favourites):
        def __init__(self) -> None:
            self.seen: list[int] = []
            self.recent: list[Any] = []

        def plan(self, counters: Counters) -> PlanOutput:
            self.seen.append(counters.sequence)
            self.recent.append(counters.recent.copy())
            return super().plan(counters)

    policy = Asked()
    session = offload(policy=policy, plan_every=4, cpu_misses="auto")
    assert policy.seen == []  # steps that were measured at open are not the user's
    session.generate(STORY, max_new_tokens=10)
    assert policy.seen == [0, 4, 8]
    # Before the first step it sees what the prompt used, one chunk of it.
    prompt = policy.recent[0]
    assert prompt.max() == 1 and (prompt.sum(axis=1) >= 4).all()


def test_a_static_policy_is_static_from_the_first_step_on(offload: Open) -> None:
    session = offload(policy="static", profile=False)
    session.generate(STORY)
    total = session.stats()["cache"]["sum"]
    assert total["fetched"] > 0 and total["installed"] == total["promoted"] == 0


# ---- profiles -----------------------------------------------------------------------------------


def test_a_profile_is_kept_and_used(offload: Open, tmp_path: Path) -> None:
    path = tmp_path / "uses"

    def run() -> float:
        session = offload(profile=path, policy="static", plan_every=1)
        session.generate(STORY)
        rate = float(session.stats()["cache"]["hit_rate"])
        session.close()
        return rate

    first, first_bytes = run(), path.read_bytes()
    second = run()
    assert second > first + 0.05
    assert path.read_bytes() != first_bytes and len(path.read_bytes()) == len(first_bytes)


@pytest.mark.parametrize("kind", ["corrupt", "cut", "empty", "other"])
def test_a_profile_that_does_not_fit_is_noted_and_left_alone(
    offload: Open, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "uses"
    if kind == "other":
        with offload(checkpoint("B"), profile=path) as other:
            other.generate([5, 6, 7], max_new_tokens=2)
    else:
        good = bytearray(demo_profile().read_bytes())
        good[100] ^= 1
        path.write_bytes({"corrupt": good, "cut": good[:500], "empty": b""}[kind])
    before = path.read_bytes()
    session = offload(profile=path)
    assert any(note.startswith(f"profile {path} is not used") for note in session.notes)
    assert session.generate(SUM).text == "17 + 14 = 31."
    session.close()
    assert path.read_bytes() == before


def test_a_profile_that_cannot_be_written_is_told(offload: Open, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    session = offload(profile=folder / "uses")
    folder.rmdir()
    with pytest.warns(RuntimeWarning, match="was not written"):
        session.close()
    assert "was not written" in session.notes[-1]


def test_the_demo_s_profile_comes_along_and_stays(offload: Open) -> None:
    before = demo_profile().read_bytes()
    rates = {}
    for profile in (None, False):
        session = offload(policy="static", profile=profile, plan_every=1)
        assert not any("profile" in note for note in session.notes)
        session.generate("Tell me a story about a hen and a cart.")
        rates[profile] = session.stats()["cache"]["hit_rate"]
        session.close()
    assert rates[None] > rates[False] + 0.05
    assert demo_profile().read_bytes() == before
