"""Experts in host memory, from Python: the same answers, options, notes, counters."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashnext
from flashnext import InputError, options
from helpers import run_cli

Open = Callable[..., flashnext.Session]

STORY = "Tell me a story about a fox and a lamp."
SUM = "Add 17 and 14."
EXPERTS, TOP_K, LAYERS = 32, 4, 8  # of the demo model


@pytest.fixture(scope="module")
def story(session: flashnext.Session) -> str:
    return session.generate(STORY).text


@pytest.fixture
def offload(open_session: Open) -> Open:
    def make(**given: Any) -> flashnext.Session:
        given = {"experts": "offload", "cache_lines": 8, "cpu_misses": "off", **given}
        return open_session(window=given.pop("window", 1024), **given)

    return make


@pytest.mark.parametrize(
    "given",
    [
        {"cache_lines": EXPERTS},
        {"cache_lines": 16, "cpu_misses": 2},
        {"cache_lines": 8, "cpu_misses": "auto", "cpu_threads": 2},
        {"cache_lines": TOP_K},
        {"cache_lines": TOP_K, "cpu_misses": 99},
        {"policy": "frequency", "plan_every": 3},
        {"policy": "static", "graphs": False},
        {"policy": "random", "seed": 7, "chunk": 7},
    ],
    ids=str,
)
def test_answers_are_those_of_resident_experts(
    session: flashnext.Session, offload: Open, story: str, given: dict[str, Any]
) -> None:
    ids = session.tokenize(story)[:70]
    mine = offload(**given)
    assert mine.generate(STORY).text == story
    assert np.array_equal(mine.logits(ids), session.logits(ids))
    drawn = {"temperature": 0.9, "seed": 5, "max_new_tokens": 24}
    assert mine.generate(STORY, **drawn).tokens == session.generate(STORY, **drawn).tokens


def test_lanes_share_the_lines(session: flashnext.Session, offload: Open) -> None:
    prompts = [SUM, STORY, "Count from 7 to 16.", "What is 20 - 6?", "Name three colors."]
    together = offload(lanes=4).generate_batch(prompts)
    assert [a.text for a in together] == [session.generate(p).text for p in prompts]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"experts": "host"}, "expected auto, resident, offload"),
        ({"experts": None}, "experts is None"),
        ({"vram_gb": 0}, "vram_gb is 0"),
        ({"vram_gb": -3.5}, "vram_gb is -3.5"),
        ({"vram_gb": float("nan")}, "vram_gb is nan"),
        ({"vram_gb": "16"}, "vram_gb is '16'"),
        ({"vram_gb": 1.0, "memory_limit": 5}, "both given"),
        ({"ram_gb": float("inf")}, "ram_gb is inf"),
        ({"ram_gb": -1}, "ram_gb is -1"),
        ({"cache_lines": 0}, "cache_lines is 0"),
        ({"cache_lines": 3}, "cache_lines = 3: a token uses 4"),
        ({"cache_lines": 33}, "cache_lines = 33"),
        ({"cache_lines": 8.0}, "cache_lines is 8.0"),
        ({"cpu_misses": "some"}, "cpu_misses is 'some'"),
        ({"cpu_misses": -1}, "cpu_misses is -1"),
        ({"cpu_misses": 1.5}, "cpu_misses is 1.5"),
        ({"cpu_misses": True}, "cpu_misses is True"),
        ({"cpu_misses": None}, "cpu_misses is None"),
        ({"cpu_threads": -1}, "cpu_threads is -1"),
        ({"cpu_threads": 2000}, "cpu_threads is 2000"),
        ({"policy": "newest"}, "there is no policy"),
        ({"policy": 3}, "expected a name or an object"),
        ({"policy": flashnext.Policy}, "a class; give an object"),
        ({"plan_every": 0}, "plan_every is 0"),
        ({"profile": ""}, "profile is ''"),
        ({"profile": 7}, "profile is 7"),
        ({"profile": "no/such/folder/x"}, "in a folder that exists"),
        ({"trace": ""}, "trace is ''"),
        ({"trace": "no/such/folder/x"}, "No such file or directory"),
        ({"cache_line": 4}, "did you mean cache_lines"),
    ],
    ids=str,
)
def test_bad_options_are_named(offload: Open, given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as error:
        offload(**given)
    assert words in str(error.value)


def test_the_memory_decides_how_many_lines(open_session: Open) -> None:
    small = {"experts": "offload", "cpu_misses": 1, "window": 256, "chunk": 16}

    def taken(session: flashnext.Session) -> int:
        memory = session.stats()["memory"]
        return sum(size for name, size in memory.items() if "routed experts" not in name)

    six = taken(open_session(cache_lines=6, **small))
    for limit, lines in ((six, 6), (six - 1, 5), (six + LAYERS * 39168 + 4096, 7)):
        session = open_session(vram_gb=limit / options.GIB, **small)
        assert session.stats()["cache"]["lines"] == lines
        assert taken(session) <= limit
    with pytest.raises(flashnext.OutOfMemory, match="expert lines"):
        open_session(vram_gb=(six - 3 * LAYERS * 39168) / options.GIB, **small)


def test_what_does_not_fit_into_ram_stays_in_the_files(
    session: flashnext.Session, offload: Open
) -> None:
    mine = offload(ram_gb=0.004, cpu_misses="auto")
    bank = mine.stats()["cache"]["bank"]
    assert bank["pinned_bytes"] == 0  # the host device pins nothing
    assert 0 < bank["pageable_bytes"] <= 0.004 * options.GIB and bank["mapped_bytes"] > 0
    assert bank["pageable_bytes"] + bank["mapped_bytes"] == LAYERS * EXPERTS * 39168
    assert any(f"{bank['mapped_bytes']} left in the files" in note for note in mine.notes)
    assert mine.generate(SUM).text == session.generate(SUM).text
    assert mine.stats()["cache"]["sum"]["on_cpu"] > 0


def test_notes_say_where_the_experts_are(session: flashnext.Session, offload: Open) -> None:
    notes = [n for n in offload().notes if n.startswith("experts in host memory")]
    assert notes == [
        "experts in host memory: 8 of 32 a layer have a line on the device, 39168 bytes each",
        f"experts in host memory: 0 bytes pinned, {LAYERS * EXPERTS * 39168} pageable, "
        "0 left in the files",
        "experts in host memory: misses are fetched, the processor computes none",
    ]
    assert not any("experts" in note for note in session.notes)
    asked = offload(experts="resident", cache_lines=None, policy="static")
    assert any(note.startswith("experts are resident: policy") for note in asked.notes)
    assert "cache" not in asked.stats()


def test_stats_add_up(offload: Open) -> None:
    session = offload(cpu_misses=1)
    session.generate(STORY, max_new_tokens=20)
    cache = session.stats()["cache"]
    total = cache["sum"]
    assert len(cache["layers"]) == LAYERS
    for name, value in total.items():
        assert value == sum(layer[name] for layer in cache["layers"]), name
    # The prompt's end, from the opening of the answer on, is a step of its own; the last token
    # drawn needs none.
    assert [layer["steps"] for layer in cache["layers"]] == [20] * LAYERS
    other = offload(cpu_misses=1)
    opening = len(other.tokenize("<|im_start|>assistant\n"))
    other.generate(STORY, max_new_tokens=1)
    first = other.stats()["cache"]["sum"]
    least = LAYERS * TOP_K
    once = first["hits"] + first["fetched"] + first["on_cpu"]
    assert least <= once <= opening * least and 1 < opening <= 8
    uses = total["hits"] + total["fetched"] + total["on_cpu"]
    assert uses == once + 19 * least
    assert cache["hit_rate"] == pytest.approx(total["hits"] / uses)
    # Steps of one row install what they fetch; the first one may fetch more than it has lines for.
    assert total["fetched"] - total["installed"] == first["fetched"] - first["installed"]
    assert 0 < first["installed"] <= first["fetched"] and total["on_cpu"] > 0
    assert cache["fetched_bytes"] == total["fetched"] * cache["line_bytes"]
    assert cache["cpu_bytes"] == total["on_cpu"] * cache["line_bytes"]
    assert cache["streamed_bytes"] == total["streamed"] * cache["line_bytes"] > 0
    assert cache["policy"] == "recency" and cache["fault"] == "" and cache["stall"] == ""
    assert cache["lines"] == 8 and cache["experts"] == EXPERTS


def test_many_requests_leave_memory_as_it_is(offload: Open) -> None:
    session = offload(policy="frequency", cpu_misses=1, plan_every=4)

    def some(first: int) -> None:
        for i in range(first, first + 100):
            session.generate([5 + i % 90, 7, 9], max_new_tokens=3)

    some(0)
    before = session.stats()["memory"]
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    some(100)
    assert session.stats()["memory"] == before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident < 4096  # KB
    assert session.generate(SUM).text == "17 + 14 = 31."


SCRIPT = """
import flashnext
session = flashnext.Session(
    flashnext.demo_path(), device="host", experts="offload", cache_lines=4, cpu_misses=2,
    policy="frequency", plan_every=2,
)
stops, session.stop_ids = session.stop_ids, []
told = iter([lambda: print("running", flush=True)])
try:
    session.generate("Hi", max_new_tokens=4000, on_token=lambda *_: next(told, lambda: None)())
except KeyboardInterrupt:
    print("stopped", flush=True)
session.stop_ids = stops
print(session.generate("Add 17 and 14.").text, flush=True)
"""


def test_ctrl_c_leaves_the_session_usable() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out == "stopped\n17 + 14 = 31.\n", (out, err)


def test_the_command_line_tells_what_the_cache_did(tmp_path: Path) -> None:
    asked = ("--device", "host", "--experts", "offload", "--lines", "8", "--cpu-misses", "off")
    done = run_cli("generate", SUM, *asked, "--stats", "--policy", "frequency")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "17 + 14 = 31.\n"
    for words in ("note: experts in host memory: 8 of 32", "8 of 32 experts a layer", "frequency"):
        assert words in done.stderr
    talk = run_cli("chat", *asked, "--quiet", stdin=f"{SUM}\n/stats\n")
    assert "17 + 14 = 31." in talk.stdout and "8 of 32 experts a layer" in talk.stderr
    (tmp_path / "mine.py").write_text(
        "import flashnext\nclass Mine(flashnext.Policy):\n    pass\n", encoding="utf-8"
    )
    done = run_cli("generate", SUM, *asked, "--stats", "--policy", f"{tmp_path / 'mine.py'}:Mine")
    assert "Mine, 1 plan " in done.stderr  # before the first step, and the answer is short
    assert run_cli("generate", SUM, *asked, "--vram", "-1").returncode == 2
