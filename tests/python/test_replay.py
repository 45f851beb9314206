"""Routing traces in Python and on the command line: replay, tables, and the map as a PNG."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import flashnext
from flashnext import Trace, heatmap
from helpers import run_cli
from traces import trace_bytes, write_profile, write_trace


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of prompts and steps, in a file."""
    path = tmp_path_factory.mktemp("traces") / "run.trace"
    Trace.synthetic(4, 64, 6, line_bytes=2000, steps=120, rows=2, zipf=0.8, seed=3).save(path)
    return path


def random_steps(seed: int, layers: int, experts: int, top_k: int, steps: int) -> npt.NDArray:
    draw = np.random.default_rng(seed)
    weights = 1 / np.arange(1, experts + 1)
    weights /= weights.sum()
    return np.array(
        [
            [draw.choice(experts, top_k, replace=False, p=weights) for _ in range(layers)]
            for _ in range(steps)
        ]
    )


def test_replay_follows_the_rule(tmp_path: Path) -> None:
    ids = random_steps(4, 2, 20, 3, 150)
    records = [("step", i + 1, 0, step.tolist()) for i, step in enumerate(ids)]
    write_trace(tmp_path / "t", (2, 20, 3), records)
    trace = Trace(tmp_path / "t")
    for lines in (3, 5, 11, 20):
        hits = np.zeros((150, 2), np.int64)
        for layer in range(2):
            # The first fill is 0..lines-1, the best in the highest line.
            held, stamp = list(reversed(range(lines))), [0] * lines
            for i, step in enumerate(ids[:, layer]):
                for line in (held.index(e) for e in step if e in held):
                    stamp[line] = i + 1
                    hits[i, layer] += 1
                for expert in [e for e in step if e not in held]:
                    _, line = min((s, k) for k, s in enumerate(stamp) if s != i + 1)
                    held[line], stamp[line] = expert, i + 1
        done = trace.replay(lines)
        assert np.array_equal(done.step_hits, hits.sum(axis=1))
        assert np.array_equal(done.layer_hits, hits.sum(axis=0))
        assert done.hits + done.fetched == 150 * 6
        assert done.bytes == 100 * done.fetched


def test_the_processor_takes_what_was_seen_longest_ago(tmp_path: Path) -> None:
    ids = random_steps(5, 2, 20, 4, 200)
    write_trace(
        tmp_path / "t", (2, 20, 4), [("step", i + 1, 0, s.tolist()) for i, s in enumerate(ids)]
    )
    trace = Trace(tmp_path / "t")
    for lines, cpu_of in ((5, [0, 0, 1, 2, 3]), (7, [0, 1, 1, 2, 2]), (5, [0, 1, 2, 2, 2])):
        hits = np.zeros(2, np.int64)
        on_cpu = 0
        for layer in range(2):
            held, stamp, seen = list(reversed(range(lines))), [0] * lines, [0] * 20
            for i, step in enumerate(ids[:, layer]):
                for line in (held.index(e) for e in step if e in held):
                    stamp[line] = i + 1
                    hits[layer] += 1
                misses = [e for e in step if e not in held]
                oldest_first = sorted((seen[e], -k, e) for k, e in enumerate(misses))
                coldest = [e for _, _, e in oldest_first[: cpu_of[len(misses)]]]
                on_cpu += len(coldest)
                for expert in [e for e in misses if e not in coldest]:
                    _, line = min((s, k) for k, s in enumerate(stamp) if s != i + 1)
                    held[line], stamp[line] = expert, i + 1
                for expert in step:
                    seen[expert] = i + 1
        done = trace.replay(lines, cpu_of=cpu_of + cpu_of[-1:] * 28)  # of up to 8 rows
        assert done.layer_hits.tolist() == hits.tolist()
        assert done.on_cpu == on_cpu > 100
        assert done.hits + done.fetched + done.on_cpu == 200 * 8


def test_the_map_counts_distinct_experts(tmp_path: Path) -> None:
    write_trace(
        tmp_path / "t",
        (2, 5, 2),
        [
            ("prompt", 0, 0, [[0, 1, 1, 2, 1, 0], [4, 3, 4, 3, 4, 3]]),
            ("step", 1, 0, [[0, 4], [0, 1]]),
            ("step", 2, 1, [[4, 1]]),
        ],
    )
    trace = Trace(tmp_path / "t")
    assert trace.uses().tolist() == [[2, 1, 1, 0, 1], [1, 2, 0, 1, 2]]
    assert (trace.layers, trace.experts, trace.top_k, trace.line_bytes) == (2, 5, 2, 100)
    assert (trace.steps, trace.step_rows, trace.prompt_rows, trace.fingerprint) == (2, 2, 3, 7)
    done = trace.replay(3)
    assert (done.prompt_uses, done.prompt_hits) == (5, 3)
    assert done.layer_hits.tolist() == [1, 3]  # 0; 0, 1; then 4 is missed


def test_a_damaged_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    good = trace_bytes((1, 4, 2), [("step", 1, 0, [[0, 1]]), ("step", 2, 0, [[1, 2]])])
    for bad, words in (
        (good[:-1], "record 1 at byte 84 is cut off; 1 whole records stand before it"),
        (good[:60], "record 0 at byte 48 is cut off"),
        (good[:20], "ends within its head"),
        (good[:108] + b"\3" + good[109:], "record 1 at byte 84 is damaged"),
        (b"PK" + good, "not a routing trace"),
        (trace_bytes((1, 4, 2), [("step", 1, 0, [[0, 4]])]), "names an expert that does not exist"),
    ):
        path.write_bytes(bad)
        with pytest.raises(flashnext.InputError, match=words):
            Trace(path)
    with pytest.raises(flashnext.InputError, match="No such file"):
        Trace(tmp_path / "none")


def test_synthetic_traces(tmp_path: Path, recorded: Path) -> None:
    trace = Trace.synthetic(2, 128, 8, steps=200, tune=(32, 0.62))
    done = trace.replay(32)
    rates = done.step_hits[50:].sum() / (2 * 8 * 150)
    assert rates == pytest.approx(0.62, abs=0.01)
    with pytest.raises(flashnext.InputError, match="out of reach"):
        Trace.synthetic(1, 128, 8, tune=(32, 0.05))
    with pytest.raises(flashnext.InputError, match="zipf"):
        Trace.synthetic(1, 128, 8, zipf=-1)
    Trace(recorded).save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == recorded.read_bytes()


def test_profiles(tmp_path: Path) -> None:
    write_trace(tmp_path / "t", (1, 6, 2), [("step", 1, 0, [[4, 5]])])
    trace, path = Trace(tmp_path / "t"), tmp_path / "uses.profile"
    write_profile(path, [[0, 0, 0, 0, 9, 8]])
    assert trace.replay(2).hits == 0
    assert trace.replay(2, profile=trace.profile(path)).hits == 2
    write_profile(path, [[0, 0, 0, 0, 9, 8]], fingerprint=8)
    with pytest.raises(flashnext.InputError, match="another checkpoint; delete the file"):
        trace.profile(path)
    with pytest.raises(flashnext.InputError, match="no such file"):
        trace.profile(tmp_path / "none")
    with pytest.raises(flashnext.InputError, match="shape"):
        trace.replay(2, profile=np.zeros((2, 6), np.uint64))


def test_replay_on_the_command_line(tmp_path: Path, recorded: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "import flashnext\n"
        "class Frozen(flashnext.Policy):\n"
        "    def plan(self, counters):\n"
        "        return flashnext.PlanOutput(install=False)\n"
        "class Broken(flashnext.Policy):\n"
        "    def plan(self, counters):\n"
        "        raise ValueError('no idea')\n"
    )
    arguments = ["replay", str(recorded), "--lines", "8", "32"]
    policies = ["recency", "static", f"{own}:Frozen", f"{own}:Broken"]
    chosen = [word for name in policies for word in ("--policy", name)]
    result = run_cli(*arguments, *chosen, "--json")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["trace"]["steps"] == 120 and answer["trace"]["experts"] == 64
    rows = {(r["policy"], r["lines"]): r for r in answer["results"]}
    assert len(rows) == 8
    for lines in (8, 32):
        recency, static, frozen, broken = (rows[name, lines] for name in policies)
        assert recency["hits"] == Trace(recorded).replay(lines).hits == broken["hits"]
        assert static["hits"] == frozen["hits"]
        assert frozen["fault"] is None and "no idea (own.py:7)" in broken["fault"]
        assert recency["bytes"] == 2000 * recency["fetched"]
    result = run_cli(*arguments, *chosen, "--plot")
    assert result.returncode == 0 and "no idea" in result.stderr
    assert "120 steps of 240 rows" in result.stdout and "copied/step" in result.stdout
    assert result.stdout.count("▄") + result.stdout.count("▅") > 0
    rate = 100 * rows["recency", 32]["hit_rate"]
    assert f"{rate:.1f} %" in result.stdout
    # All that are built in, when none is named.
    result = run_cli("replay", str(recorded), "--lines", "8")
    assert all(name in result.stdout for name in ("recency", "frequency", "static", "random"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lines", "0"], "lines is 0, expected 1 to 64"),
        (["--lines", "65"], "expected 1 to 64"),
        (["--lines", "8", "--policy", "newest"], "known: recency"),
        (["--lines", "8", "--policy", "no_such_module:X"], "no_such_module"),
        (["--lines", "8", "--policy", "json:loads"], "TypeError"),
        (["--lines", "8", "--policy", "collections:OrderedDict"], "no flashnext.Policy"),
        (["--lines", "8", "--plan-every", "0"], "plan_every is 0"),
        (["--lines", "8", "--profile", "nowhere"], "no such file"),
        (["--lines", "8", "--heatmap", "/no/such/folder/x.png"], "cannot write"),
    ],
)
def test_wrong_arguments(recorded: Path, arguments: list[str], words: str) -> None:
    result = run_cli("replay", str(recorded), *arguments)
    assert result.returncode == 2 and words in result.stderr, result.stderr
    assert "Traceback" not in result.stderr


def decode_png(data: bytes) -> npt.NDArray[np.uint8]:
    """The pixels of a PNG of 8-bit RGB whose rows are not filtered."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, []
    while at < len(data):
        (size,) = struct.unpack_from(">I", data, at)
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack_from(">I", data, at + 8 + size)[0] == zlib.crc32(kind + body)
        chunks.append((kind, body))
        at += size + 12
    assert [kind for kind, _ in chunks] == [b"IHDR", b"IDAT", b"IEND"]
    width, height, depth, colour, *rest = struct.unpack(">IIBBBBB", chunks[0][1])
    assert (depth, colour, rest) == (8, 2, [0, 0, 0])
    rows = np.frombuffer(zlib.decompress(chunks[1][1]), np.uint8).reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3)


def test_the_picture(tmp_path: Path, recorded: Path) -> None:
    out = tmp_path / "map.png"
    result = run_cli("heatmap", str(recorded), str(out))
    assert result.returncode == 0, result.stderr
    pixels = decode_png(out.read_bytes())
    uses = Trace(recorded).uses()
    # The cells, found by the drawing's own measures: 16 pixels wide and 24 high from (70, 40) on.
    cells = pixels[40 + 12 : 40 + 4 * 24 : 24, 70 + 8 : 70 + 64 * 16 : 16]
    assert cells.shape == (4, 64, 3)
    by_use: dict[int, set[tuple[int, ...]]] = {}
    for count, cell in zip(uses.ravel(), cells.reshape(-1, 3), strict=True):
        by_use.setdefault(int(count), set()).add(tuple(int(c) for c in cell))
    assert all(len(colours) == 1 for colours in by_use.values())
    # More uses are brighter, and never is a grey of its own.
    light = [sum(next(iter(by_use[n]))) for n in sorted(by_use) if n > 0]
    assert light == sorted(light) and light[-1] > light[0] + 200
    assert tuple(heatmap.colours(np.array([[0]], np.uint64))[0, 0]) == (222, 222, 226)
    again = tmp_path / "again.png"
    assert run_cli("replay", str(recorded), "--lines", "8", "--heatmap", str(again)).returncode == 0
    assert again.read_bytes() == out.read_bytes()


@pytest.mark.parametrize("shape", [(1, 1), (1, 512), (49, 3), (49, 512), (3, 2000)])
def test_pictures_of_all_shapes(shape: tuple[int, int]) -> None:
    uses = np.random.default_rng(1).integers(0, 10**6, shape).astype(np.uint64)
    for table in (uses, np.zeros(shape, np.uint64)):
        pixels = decode_png(heatmap.png(heatmap.draw(table)))
        assert pixels.shape[0] > 40 and pixels.shape[1] > shape[1]
