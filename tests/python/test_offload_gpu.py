"""Experts in host memory on a GPU, from Python."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashnext
from flashnext import Trace, bench, evidence, receipts
from helpers import capability

pytestmark = pytest.mark.gpu

STORY = "Tell me a story about a fox and a lamp."


@pytest.fixture(autouse=True)
def accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate has its own tests; here any compiled architecture will do."""
    monkeypatch.setattr(evidence, "accepted_capabilities", lambda: [capability()])


@pytest.fixture
def resident() -> Iterator[flashnext.Session]:
    with flashnext.Session(flashnext.demo_path(), device="cuda", window=1024) as session:
        yield session


@pytest.mark.parametrize(
    "given",
    [
        {"cache_lines": 32, "cpu_misses": "off"},
        {"cache_lines": 8, "cpu_misses": "off"},
        {"cache_lines": 8, "cpu_misses": 2},
        {"cache_lines": 4, "cpu_misses": 99},
        {"cache_lines": 9, "cpu_misses": "auto", "policy": "frequency", "plan_every": 2},
        {"cache_lines": 9, "cpu_misses": "off", "policy": "random", "graphs": False},
    ],
    ids=str,
)
def test_answers_are_those_of_resident_experts(
    resident: flashnext.Session, given: dict[str, Any]
) -> None:
    text = resident.generate(STORY).text
    ids = resident.tokenize(text)[:70]
    with flashnext.Session(
        flashnext.demo_path(), device="cuda", window=1024, experts="offload", **given
    ) as mine:
        assert mine.generate(STORY).text == text
        assert np.array_equal(mine.logits(ids), resident.logits(ids))
        assert mine.stats()["cache"]["stall"] == ""


@pytest.mark.parametrize("policy", ["recency", "frequency", "random"])
def test_a_replay_counts_what_the_engine_did(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "run.trace"
    with flashnext.Session(
        flashnext.demo_path(),
        device="cuda",
        window=1024,
        lanes=4,
        experts="offload",
        cache_lines=9,
        cpu_misses=1,
        lockstep=True,
        policy=policy,
        profile=False,
        trace=path,
    ) as session:
        session.generate_batch([STORY, "Add 17 and 14.", "Count from 7 to 16.", "Name a color."])
        cache = session.stats()["cache"]
    replay = Trace(path).replay(9, policy, cpu_of=cache["cpu_of"])
    assert replay.layer_hits.tolist() == [layer["hits"] for layer in cache["layers"]]
    assert replay.layer_promoted.tolist() == [layer["promoted"] for layer in cache["layers"]]
    assert replay.on_cpu == cache["sum"]["on_cpu"]


def test_a_bench_stays_within_its_budget() -> None:
    setup = bench.Setup(
        like="tiny",
        layers=4,
        device="cuda",
        context=(70,),
        chunk=32,
        tokens=20,
        repeats=2,
        profile=1,
        experts="offload",
        lines=12,
        vram=0.5,
        cpu_misses="off",
        hit_rate=(0.6,),
        capabilities=(capability(),),
    )
    (receipt,) = bench.run("decode", setup)
    assert receipts.problems(receipt) == [] and receipt["check"]["pass"]
    assert receipt["check"]["within_budget"]
    assert receipt["counters"]["experts"]["hit_rate"] == pytest.approx(0.6, abs=0.12)
    assert receipt["counters"]["experts_all_hit"]["hit_rate"] == 1.0
    misses = receipt["limit"]["misses"]
    assert misses["line_rate"] > 1e9 and misses["link_seconds"] > 0
