"""Benches on the host device: what they measure adds up, and what they check can fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flashnext import _core, bench, receipts
from flashnext.bench import runs
from flashnext.errors import InputError
from helpers import run_cli

TINY = {"like": "tiny", "layers": 4, "device": "host", "chunk": 32, "tokens": 6, "repeats": 2}


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of made-up rates: measuring them takes seconds."""
    names = ("core", "all")
    rates = {f"{n}_{what}": 1e9 for n in names for what in ("read", "exl3", "exl3_macs")}
    rates |= {f"{n}_{what}_cached": 2e9 for n in names for what in ("read", "exl3")}
    monkeypatch.setattr(_core, "host_bounds", lambda threads, isa: {"threads": 1, **rates})


def run_one(name: str, **options: Any) -> receipts.Receipt:
    (receipt,) = bench.run(name, bench.Setup(**{**TINY, "context": (70,), **options}))
    return receipt


def test_decode_measures_every_token() -> None:
    receipt = run_one("decode")
    assert receipts.problems(receipt) == []
    assert receipt["check"]["pass"]
    samples = receipt["samples"]
    assert len(samples["step_ns"]) == 2 * 6
    assert len(samples["step_cold_ns"]) == 6 + bench.setup.WARMUP_TOKENS
    assert len(samples["chunk_ns"]) == 2 * 3  # 70 tokens in chunks of 32
    assert len(samples["first_token_ns"]) == 2
    rate = receipt["counters"]["decode_tokens_per_second"]
    assert rate == pytest.approx(1e9 / receipt["summary"]["step_ns"]["mean"])
    assert receipt["effective"]["device"] == "host"
    assert receipt["requested"]["chunk"] == 32


def test_the_stages_name_the_bytes_of_the_model() -> None:
    limit = run_one("decode")["limit"]
    stages = {stage["name"]: stage for stage in limit["stages"]}
    # spec: in * out * K / 8 + 2 (in + out), the head at K = 5 and an expert's three at K = 3.
    assert stages["head"]["weight_bytes"] == 256 * 1536 * 5 // 8 + 2 * (256 + 1536)
    one = 3 * (256 * 128 * 3 // 8 + 2 * (256 + 128))
    shared = 3 * (256 * 128 * 5 // 8 + 2 * (256 + 128))
    # 4 layers, each with 4 experts a token and the shared one.
    assert stages["experts"]["weight_bytes"] == 4 * (4 * one + shared)
    assert stages["experts"]["exl3_macs"] == 4 * (4 + 1) * 3 * 256 * 128
    # The recurrent state of 3 DeltaNet layers is read and written once.
    state = 6 * 128 * 128 * 4
    rows = (2 * 2 + 2 * 6) * 128 * 4
    assert stages["gdn_recur"]["other_bytes"] == 3 * (2 * state + rows)
    assert stages["route"]["launches"] == 4
    assert limit["experts_a_layer"] == 4
    assert limit["bound_seconds"] == pytest.approx(sum(s["bound_seconds"] for s in stages.values()))
    assert limit["fraction"] == pytest.approx(limit["bound_seconds"] / limit["reached_seconds"])


def test_prefill_counts_weights_once_a_chunk() -> None:
    limit = run_one("prefill", context=(64,), chunk=64)["limit"]
    stages = {stage["name"]: stage for stage in limit["stages"]}
    assert limit["rows"] == 64
    assert stages["head"]["weight_bytes"] == 256 * 1536 * 5 // 8 + 2 * (256 + 1536)
    assert stages["experts"]["exl3_macs"] == 64 * 4 * (4 + 1) * 3 * 256 * 128
    # 64 rows of 4 choices among 32 experts: random routers touch most of them, never more.
    assert 16 < limit["experts_a_layer"] <= 32
    assert limit["bytes_a_token"] == limit["bytes"] / 64


def test_attention_reads_no_more_than_its_budget() -> None:
    """Beyond the budget of 64 tokens the cost of a row stops growing."""
    costs = []
    for length in (40, 200, 400):
        stages = run_one("decode", context=(length,), tokens=1)["limit"]["stages"]
        costs.append(next(s for s in stages if s["name"] == "attention")["half_macs"])
    # The profiled row is the second after the prompt: positions 41, 201 and 401 are its past.
    heads = 4 * 256 * 2
    assert costs == [42 * heads, (64 + 202 % 4) * heads, (64 + 402 % 4) * heads]


def test_contexts_give_a_receipt_each() -> None:
    found = list(bench.run("prefill", bench.Setup(**{**TINY, "context": (10, 20), "cold": True})))
    assert [r["workload"]["prompt_tokens"] for r in found] == [10, 20]
    assert all(r["check"]["pass"] for r in found)


def test_load_compares_the_tokens_of_its_sessions(demo: Path) -> None:
    receipt = run_one("load", model=str(demo), like="tiny")
    assert receipt["check"]["pass"]
    assert len(receipt["samples"]["cold_ns"]) == 1
    assert len(receipt["samples"]["warm_ns"]) == 2
    assert receipt["limit"]["file_bytes_per_second"] > 0


def test_different_tokens_fail_the_check() -> None:
    good = {"tokens": [1, 2, 3]}
    assert runs._check(good, [good], {"tokens": [1, 2]})["pass"]
    assert not runs._check(good, [{"tokens": [1, 2, 4]}], {"tokens": [1, 2]})["pass"]
    assert not runs._check(good, [good], {"tokens": [1, 3]})["pass"]


def test_the_same_seed_runs_the_same_tokens() -> None:
    first, second = run_one("decode", profile=0), run_one("decode", profile=0)
    assert first["check"]["token_hash"] == second["check"]["token_hash"]
    assert first["model"]["checkpoint"] == second["model"]["checkpoint"]
    other = run_one("decode", profile=0, seed=2)
    assert other["check"]["token_hash"] != first["check"]["token_hash"]
    assert other["model"]["checkpoint"] != first["model"]["checkpoint"]


def test_lanes_decode_together() -> None:
    receipt = run_one("decode", lanes=9)
    assert receipts.problems(receipt) == [] and receipt["check"]["pass"]
    assert len(receipt["samples"]["step_ns"]) == 2 * 6
    rate = receipt["counters"]["decode_tokens_per_second"]
    assert rate == pytest.approx(9e9 / receipt["summary"]["step_ns"]["mean"])
    assert receipt["workload"]["batch"] == 9 and receipt["effective"]["lanes"] == 9
    limit = receipt["limit"]
    assert limit["rows"] == 9
    assert limit["bytes_a_token"] == pytest.approx(limit["bytes"] / 9)
    # Every row chooses for itself.
    assert 4 < limit["experts_a_layer"] <= 32


@pytest.mark.parametrize(
    "options",
    [
        {"context": (0,)},
        {"context": ()},
        {"tokens": 0},
        {"chunk": 0},
        {"repeats": 0},
        {"lanes": 0},
        {"lanes": 2, "hit_rate": (0.5,)},
    ],
)
def test_senseless_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        bench.Setup(**{**TINY, **options})


def test_a_run_that_cannot_be_made_is_recorded() -> None:
    error = _core.OutOfMemory("device memory: 10 bytes of 5")
    receipt = runs.skipped("decode", bench.Setup(**TINY), error)
    assert receipts.problems(receipt) == []
    assert receipt["skipped"] == "OutOfMemory: device memory: 10 bytes of 5"


def test_the_command_writes_receipts(tmp_path: Path, demo: Path) -> None:
    arguments = ("--model", str(demo), "--device", "host", "--context", "24", "--tokens", "4")
    done = run_cli("bench", "decode", *arguments, "--repeats", "1", "--receipt", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout
    assert "check of the tokens: passed" in done.stdout
    (path,) = receipts.find(tmp_path)
    receipt = json.loads(path.read_text())
    assert receipt["command"][:3] == ["flashnext", "bench", "decode"]
    assert receipt["limit"]["rates"]["core_read"] > 1e8  # measured here, not made up


def test_the_command_names_bad_options() -> None:
    assert run_cli("bench", "decode", "--like", "tiny", "--context", "ten").returncode == 2
    done = run_cli("bench", "decode", "--like", "tiny", "--layers", "4", "--device", "cuda:99")
    assert done.returncode == 2
    assert "CUDA" in done.stderr
