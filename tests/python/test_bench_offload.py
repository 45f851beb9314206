"""Benches with experts in host memory: their counts add up, their routing is what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext import Trace, _core, bench, receipts
from flashnext.bench import experts
from flashnext.cli.bench import describe
from flashnext.errors import InputError
from test_bench import TINY, run_one, small_bounds  # noqa: F401 (a fixture)

OFFLOAD: dict[str, Any] = {
    **TINY,
    "experts": "offload",
    "lines": 8,
    "cpu_misses": "off",
    "tokens": 12,
    "profile": 1,
}
LAYERS, TOP_K, LINE = 4, 4, 39168


def test_decode_counts_its_misses() -> None:
    receipt = run_one("decode", **OFFLOAD)
    assert receipts.problems(receipt) == [] and receipt["check"]["pass"]
    done, hits = receipt["counters"]["experts"], receipt["counters"]["experts_all_hit"]
    assert done["steps"] == 2 * 12
    assert done["hits"] + done["fetched"] == 2 * 12 * LAYERS * TOP_K
    assert done["hit_rate"] == pytest.approx(done["hits"] / (2 * 12 * LAYERS * TOP_K))
    assert done["fetched_bytes"] == done["fetched"] * LINE and done["on_cpu"] == 0
    assert sum(receipt["samples"]["step_fetched"]) == done["fetched"]
    assert len(receipt["samples"]["step_hits"]) == 2 * 12
    # The same run with experts that have lines misses nothing at all.
    assert hits["hit_rate"] == 1.0 and hits["fetched_bytes"] == 0
    assert len(receipt["samples"]["all_hit_ns"]) == 12
    assert receipt["workload"]["experts"] == {"routing": "the model's own"}
    effective = receipt["effective"]
    assert effective["experts"] == "host memory" and effective["lines"] == 8
    assert effective["policy"] == "recency" and effective["link_bytes_per_second"] is None
    bank = effective["bank"]
    assert bank["pageable_bytes"] == LAYERS * 32 * LINE and bank["pinned_bytes"] == 0
    memory = receipt["counters"]["stats"]["memory"]
    assert effective["device_bytes"] == sum(n for k, n in memory.items() if k.startswith("device"))
    assert "8 of 32 a layer have lines" in "\n".join(describe(receipt))


def test_lanes_share_their_misses() -> None:
    receipt = run_one("decode", **{**OFFLOAD, "profile": 0, "lanes": 12})
    assert receipts.problems(receipt) == [] and receipt["check"]["pass"]
    assert any("experts:" in line for line in describe(receipt))
    done = receipt["counters"]["experts"]
    # Distinct experts: at most all of a layer, and more than one row chooses.
    assert 2 * 12 * LAYERS * TOP_K < done["hits"] + done["fetched"] <= 2 * 12 * LAYERS * 32
    assert "experts_all_hit" not in receipt["counters"]
    with pytest.raises(InputError, match="--profile 0"):
        run_one("decode", **{**OFFLOAD, "lanes": 2})


def test_the_limit_is_the_slowest_of_card_link_and_processor() -> None:
    plain = run_one("decode", **OFFLOAD)["limit"]
    misses = plain["misses"]
    # Rates of 1e9 are made up: see small_bounds.
    assert misses["link_seconds"] == pytest.approx(misses["fetched_bytes_a_token"] / 1e9)
    assert plain["bound_seconds"] == max(misses["card_seconds"], misses["link_seconds"])
    slow = run_one("decode", **OFFLOAD, link=0.05)
    misses, limit = slow["limit"]["misses"], slow["limit"]
    assert misses["line_rate"] == 0.05e9
    assert limit["bound_seconds"] == misses["fetched_bytes_a_token"] / 0.05e9
    assert limit["fraction"] == pytest.approx(limit["bound_seconds"] / limit["reached_seconds"])
    # The link that is played holds: no step is faster than its misses allow.
    samples = slow["samples"]
    for ns, fetched in zip(samples["step_ns"], samples["step_fetched"], strict=True):
        assert ns >= 0.95 * fetched * LINE / 0.05
    over = misses["over_all_hit_seconds"] / misses["missed_bytes_over_line_rate_seconds"]
    assert misses["over_all_hit_of_missed"] == pytest.approx(over)
    assert (
        slow["effective"]["link_bytes_per_second"] == 0.05e9 and slow["requested"]["link"] == 0.05
    )


def test_the_processor_s_share_is_counted() -> None:
    receipt = run_one("decode", **{**OFFLOAD, "cpu_misses": "1", "cpu_threads": 1})
    done, misses = receipt["counters"]["experts"], receipt["limit"]["misses"]
    assert 0 < done["on_cpu"] <= 2 * 12 * LAYERS
    assert misses["cpu_bytes_a_token"] == pytest.approx(done["on_cpu"] * LINE / 24)
    assert misses["processor_seconds"] == pytest.approx(misses["cpu_bytes_a_token"] / 1e9)
    assert receipt["counters"]["experts_all_hit"]["on_cpu"] == 0
    assert receipt["effective"]["cpu_threads"] == 1
    assert "up to 1" in receipt["effective"]["cpu_share_text"]


def test_replayed_routing_reaches_its_hit_rate() -> None:
    """Also when one session runs one rate after the other."""
    given = {**OFFLOAD, "context": (70,), "lines": 12, "tokens": 60}
    rates = (0.45, 0.8)
    found = list(bench.run("decode", bench.Setup(**given, hit_rate=rates)))
    assert len(found) == len(rates)
    for rate, receipt in zip(rates, found, strict=True):
        assert receipt["check"]["pass"] and receipt["requested"]["hit_rate"] == [rate]
        facts = receipt["workload"]["experts"]
        assert facts["routing"] == "replayed from a synthetic trace"
        assert facts["wanted_hit_rate"] == rate and facts["warm_steps"] >= 32
        assert facts["recency_policy_hit_rate"] == pytest.approx(rate, abs=0.03)
        assert receipt["counters"]["experts"]["hit_rate"] == pytest.approx(rate, abs=0.06)
        again = run_one("decode", **{**given, "hit_rate": (rate,)})
        assert again["workload"]["experts"]["hash"] == facts["hash"]
        assert again["check"]["token_hash"] == receipt["check"]["token_hash"]


def test_the_replayed_experts_are_those_of_the_trace(tmp_path: Path) -> None:
    """Recorded again, a run with forced routing holds what it was given."""
    path = tmp_path / "run.trace"
    options = {"device": "host", "window": 256, "experts": "offload", "cache_lines": 8}
    session = _core.synthetic_session(
        "tiny", 4, cpu_misses="off", forced_routing=True, trace=str(path), **options
    )
    trace, _, _ = _core.Trace.synthetic(4, 32, 4, steps=20, seed=3)
    ids = _core.routing_of(trace)
    assert ids.shape == (20, 4, 4)
    _core.warm_cache(session, ids[:8])
    _core.measure(session, [5, 6, 7] * 12, new_tokens=12, routing=ids[8:])
    session.close()
    recorded = Trace(path)
    assert recorded.layers == 4
    assert recorded.steps == 20
    expected = np.zeros((4, 32), np.uint64)
    for step in ids:
        for layer, chosen in enumerate(step):
            expected[layer, chosen] += 1
    whole = recorded.uses()
    prompt = whole.astype(np.int64) - expected.astype(np.int64)
    assert prompt.min() >= 0 and prompt.max() <= 1  # the rest is the prompt, one step a layer


def test_random_ids_are_fed() -> None:
    fed = run_one("decode", **OFFLOAD, random_ids=True)
    assert fed["workload"]["decoded"] == "random ids" and fed["check"]["pass"]
    drawn = run_one("decode", **OFFLOAD)
    assert drawn["workload"]["decoded"] == "each drawn token"
    assert drawn["check"]["token_hash"] != fed["check"]["token_hash"]


def test_prefill_counts_what_it_streams() -> None:
    receipt = run_one("prefill", **{**OFFLOAD, "context": (64,), "chunk": 64})
    limit = receipt["limit"]
    streamed = receipt["counters"]["streamed_bytes"]
    assert 0 < streamed <= LAYERS * 32 * LINE and streamed % LINE == 0
    assert limit["streaming"]["link_seconds"] == pytest.approx(streamed / 1e9)
    assert limit["bound_seconds"] == max(
        limit["streaming"]["compute_seconds"], limit["streaming"]["link_seconds"]
    )


def test_a_bench_records_its_steps(tmp_path: Path) -> None:
    path = tmp_path / "bench.trace"
    receipt = run_one("decode", **OFFLOAD, trace=str(path))
    assert receipt["requested"]["trace"] == "bench.trace"
    trace = Trace(path)
    # Cold, two warm ones and a short one without graphs; not the run that misses nothing. The last
    # 6 of the 70 tokens of a prompt are a step of few rows.
    assert trace.steps == 3 * 16 + 8 + 4
    assert trace.fingerprint != 0


def test_a_policy_and_a_budget() -> None:
    receipt = run_one("decode", **{**OFFLOAD, "policy": "frequency", "lines": None, "vram": 0.5})
    assert receipt["effective"]["policy"] == "frequency"
    assert receipt["effective"]["lines"] == 32
    assert receipt["effective"]["budget_bytes"] == 2**29 > receipt["effective"]["device_bytes"]


@pytest.mark.parametrize(
    "options",
    [
        {"link": -1.0},
        {"link": float("nan")},
        {"hit_rate": (0.0,)},
        {"hit_rate": (0.5, 1.5)},
        {"vram": -2.0},
        {"vram": 1.0, "memory_budget": 5},
        {"ram": float("nan")},
        {"cpu_misses": "few"},
        {"trace": "x", "context": (10, 20)},
        {"trace": "x", "hit_rate": (0.5, 0.6)},
    ],
    ids=str,
)
def test_senseless_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        bench.Setup(**{**OFFLOAD, **options})


def test_what_needs_experts_in_host_memory_says_so() -> None:
    with pytest.raises(InputError, match="needs experts in host memory"):
        run_one("decode", **TINY, hit_rate=(0.5,))
    with pytest.raises(InputError, match="hit rate"):
        run_one("decode", **OFFLOAD, hit_rate=(0.05,))


def test_the_nearest_size_of_the_link_is_taken() -> None:
    class Card:
        cuda = True
        link = [  # noqa: RUF012
            {"bytes": 1 << 20, "to_device": 40e9, "to_host": 1.0},
            {"bytes": 1862400, "to_device": 50e9, "to_host": 1.0},
            {"bytes": 64 << 20, "to_device": 55e9, "to_host": 1.0},
        ]

    card: Any = Card()
    assert experts.line_rate(card, 1862400, 0.0) == 50e9
    assert experts.line_rate(card, 1862400, 14e9) == 14e9
    assert experts.peak_rate(card, 0.0) == 55e9
