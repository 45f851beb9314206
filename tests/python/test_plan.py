"""``flashnext plan``: what fits, what is refused, and bounds against sums done by hand."""

from __future__ import annotations

import json
import os

import pytest

import flashnext
from flashnext import _core, cards
from flashnext.cli.common import Bar, Pace
from helpers import run_cli

GIB = 2**30
SHAPE = "synthetic:flash-next"
LINE = 1_862_400  # bytes of an expert of the published pack


def planned(*arguments: str) -> dict:
    result = run_cli("plan", *arguments, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_the_published_model_on_a_16_gb_card() -> None:
    report = planned(SHAPE, "--vram", "16", "--ram", "64")
    plan = report["plan"]
    assert plan["experts"] == "offload"
    assert plan["line_bytes_all_layers"] == 48 * LINE
    assert plan["bank_pinned_bytes"] == 48 * 512 * LINE
    assert plan["bank_mapped_bytes"] == 0
    assert 90 <= plan["lines"] <= 130
    assert plan["token"]["expert_bytes"] == 480 * LINE
    # Parts make the sums, and the sums fit.
    sums = {"device": 0, "host": 0}
    for part in plan["parts"]:
        sums["device" if part["space"] == "device" else "host"] += part["bytes"]
    assert sums == {"device": plan["device_bytes"], "host": plan["host_bytes"]}
    assert plan["device_bytes"] <= 15.25 * GIB
    assert plan["host_bytes"] <= 62 * GIB
    # One more line would not have fitted, but for what is left to the system.
    assert plan["device_bytes"] + 48 * LINE > 15.25 * GIB * (1 - 1 / 64)


def test_less_ram_leaves_experts_in_the_files() -> None:
    plan = planned(SHAPE, "--vram", "16", "--ram", "32")["plan"]
    assert plan["bank_pinned_bytes"] + plan["bank_mapped_bytes"] == 48 * 512 * LINE
    assert 20e9 < plan["bank_pinned_bytes"] < 30 * GIB
    text = run_cli("plan", SHAPE, "--vram", "16", "--ram", "32").stdout
    assert "left in the files" in text and "computed by the processor" in text


def test_more_window_leaves_fewer_lines() -> None:
    lines = [
        planned(SHAPE, "--vram", "16", "--ram", "64", "--window", str(window))["plan"]["lines"]
        for window in (2048, 32768, 131072)
    ]
    assert lines[0] > lines[1] > lines[2]


def test_what_does_not_fit_is_refused_with_the_sum() -> None:
    result = run_cli("plan", SHAPE, "--vram", "7", "--ram", "64", "--json")
    assert result.returncode == 4
    message = json.loads(result.stdout)["error"]["message"]
    for part in ("weights", "KV pages", "activations", "expert lines", str(48 * LINE), "Lower"):
        assert part in message, part
    assert "Traceback" not in result.stderr
    assert run_cli("plan", SHAPE, "--vram", "16", "--ram", "3").returncode == 4


def test_the_demo_model_fits_on_any_card() -> None:
    result = run_cli("plan", "--ram", "8")
    assert result.returncode == 0, result.stderr
    assert "all of them on the card" in result.stdout
    plan = planned("--experts", "offload", "--lines", "8")["plan"]
    assert plan["lines"] == 8 and plan["experts"] == "offload"
    session = flashnext.Session(flashnext.demo_path(), device="host")
    assert plan["window"] == session.window
    session.close()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--gpu", "Voodoo 2"], "RTX 5090"),
        (["--vram", "-1"], "vram"),
        (["--link", "0"], "link"),
        (["--window", "99999999"], "window"),
        (["--lines", "1", "--experts", "offload"], "cache_lines"),
        (["synthetic:gpt"], "flash-next"),
        (["synthetic:tiny:x"], "number of layers"),
    ],
)
def test_bad_arguments(arguments: list[str], name: str) -> None:
    result = run_cli("plan", *arguments)
    assert result.returncode == 2, result.stderr
    assert name in result.stderr


def test_a_folder_that_is_no_checkpoint(tmp_path: object) -> None:
    assert run_cli("plan", str(tmp_path)).returncode == 3


def test_cards_by_name() -> None:
    assert cards.card_named("nvidia geforce rtx 5070 ti").memory_rate == 896
    assert cards.card_named("5080").name == "RTX 5080"
    assert cards.card_named("RTX 5060 Ti").memory_gib == 16
    assert cards.card_named("RTX 5070").memory_gib == 12
    # x8 is half of x16, and lines never arrive faster than the lanes carry.
    assert cards.card_named("5060 ti").link_rate * 2 == cards.card_named("5080").link_rate
    assert 45 < cards.card_named("H200").link_rate < 63


def test_bounds_by_hand() -> None:
    token = {
        "dense_bytes": 3_000_000_000,
        "state_bytes": 500_000_000,
        "attention_bytes": 500_000_000,
        "expert_bytes": 1_000_000_000,
    }
    rates = cards.Rates(card=400, link=20, memory=60, cpu=50)
    none, half, all_hit = cards.bounds(token, rates, [0, 0.5, 1])
    # 4 GB at 400 GB/s are 10 ms, before which no token is done.
    assert all_hit.fetch == pytest.approx(1000 / (10 + 2.5))
    assert all_hit.missed_bytes == 0
    assert half.fetch == pytest.approx(1000 / (10 + 25))
    assert half.cpu == pytest.approx(1000 / (10 + 10))
    # 20 + 50 GB/s are more than the memory gives.
    assert half.both == pytest.approx(1000 / (10 + 500 / 60))
    assert none.fetch == pytest.approx(1000 / (10 + 50))
    assert none.both == pytest.approx(1000 / (10 + 1000 / 60))


def test_a_plan_needs_no_memory() -> None:
    before = _rss()
    _core.plan(SHAPE, vram=15 * GIB, ram=62 * GIB)
    assert _rss() - before < GIB


def _rss() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_load_progress_has_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.progress import Progress

    clock = iter(range(1000))
    with Progress(Pace(), get_time=lambda: float(next(clock)), disable=True) as progress:
        for stage, shown in (("experts", True), ("check", False)):
            task_id = progress.add_task(stage, total=10_000_000_000)
            for done in range(1, 4):
                progress.update(task_id, completed=done * 1_000_000_000)
            task = next(t for t in progress.tasks if t.id == task_id)
            text = Pace().render(task).plain
            assert ("B/s" in text and "s left" in text) is shown, text
    Bar(False).update("experts", 1, 2)
    assert capsys.readouterr().err == ""
