"""Receipts: the schema, the rules of citing, and every receipt of this repository."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from flashnext import provenance, receipts
from flashnext.errors import InputError
from helpers import ROOT, run_cli

FOLDER = ROOT / "receipts"
SHIPPED = sorted(FOLDER.glob("*.json"))
ID = re.compile(r"\b\d{8}T\d{6}Z-[a-z0-9_]+-[a-z0-9_]+-[0-9a-f]{8}\b")


def draft(**changes: Any) -> receipts.Receipt:
    """A receipt that says as little as it may."""
    receipt = {
        "utc": "20260101T000000Z",
        "bench": "decode",
        "command": ["flashnext", "bench"],
        "code": {
            "version": "0.1.0",
            "commit": "0" * 40,
            "dirty": False,
            "preset": "Release",
            "compiler": "12",
            "nvcc": None,
            "cuda_archs": "",
            "flags": "-O3",
        },
        "machine": provenance.machine("host"),
        "model": {"name": "m", "checkpoint": "c", "shape": {}, "ranks": 1},
        "requested": {},
        "effective": {},
        "workload": {},
        "protocol": {},
        "samples": {"step_ns": [5, 1, 4, 2, 3]},
        "counters": {"decode_tokens_per_second": 1.0},
        "limit": {},
        "check": {"pass": True},
        "skipped": None,
    }
    return {**receipt, **changes}


def test_a_finished_receipt_is_valid_and_is_found_again(tmp_path: Path) -> None:
    path = receipts.write(draft(), tmp_path)
    receipt = receipts.read(path)
    assert receipts.problems(receipt, path.name) == []
    assert receipts.why_not_citable(receipt) is None
    assert path.name.startswith("20260101T000000Z-decode-host-")
    assert receipts.find(tmp_path) == [path]


def test_a_receipt_is_written_once(tmp_path: Path) -> None:
    receipts.write(draft(), tmp_path)
    with pytest.raises(InputError, match="File exists"):
        receipts.write(draft(), tmp_path)


def test_the_summary_is_that_of_the_samples() -> None:
    summary = receipts.finish(draft())["summary"]["step_ns"]
    assert summary == {
        "n": 5,
        "mean": 3,
        "median": 3,
        "p10": 1,
        "p90": 5,
        "p99": 5,
        "least": 1,
        "most": 5,
        "stdev": pytest.approx(2**0.5),
    }
    hundred = receipts.summarise(range(1, 101))
    assert (hundred["p10"], hundred["p90"], hundred["p99"]) == (10, 90, 99)


def spoil(receipt: receipts.Receipt, path: str, value: Any) -> receipts.Receipt:
    spoilt = copy.deepcopy(receipt)
    *above, last = path.split(".")
    inner = spoilt
    for key in above:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return spoilt


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("code.commit", ..., "code.commit is missing"),
        ("code.dirty", "no", "code.dirty must be bool"),
        ("check.pass", ..., "check.pass is missing"),
        ("machine.cores", True, "machine.cores must be int"),
        ("command", "flashnext", "command must be a list"),
        ("extra", 1, "extra is no field"),
        ("schema", 99, "schema is 99"),
        ("samples.step_ns", [5, 1, 4, 2, 4], "summary.step_ns.mean"),
        ("samples.step_ns", [5, 1, 4, 2, "3"], "list of numbers"),
        ("summary.step_ns.median", 2.0, "summary.step_ns.median is 2.0"),
        ("check.pass", False, "id says hash"),
        ("code.dirty", True, "id says hash"),
        ("bench", "prefill", "id says bench decode"),
        ("utc", "20270101T000000Z", "id says utc"),
        ("skipped", "no GPU", "check.pass is true, but the run was skipped"),
        ("machine.gpu", {"name": "NVIDIA H200"}, "machine.gpu.uuid_hash is missing"),
    ],
)
def test_what_is_wrong_is_named(path: str, value: Any, message: str) -> None:
    found = receipts.problems(spoil(receipts.finish(draft()), path, value))
    assert any(message in problem for problem in found), found


def test_the_file_name_is_the_id() -> None:
    receipt = receipts.finish(draft())
    assert receipts.problems(receipt, "other.json") != []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"check": {"pass": False}}, "check failed"),
        ({"code": {**draft()["code"], "dirty": True}}, "not clean"),
        ({"check": {"pass": False}, "samples": {}, "skipped": "no GPU here"}, "no GPU here"),
    ],
)
def test_what_may_not_be_cited(changes: dict[str, Any], reason: str) -> None:
    assert reason in (receipts.why_not_citable(receipts.finish(draft(**changes))) or "")


def test_an_invalid_draft_is_refused() -> None:
    with pytest.raises(InputError, match=r"model\.ranks is missing"):
        receipts.finish(draft(model={"name": "m", "checkpoint": "c", "shape": {}}))


def test_device_names_become_file_names() -> None:
    assert receipts.slug("NVIDIA H200") == "h200"
    assert receipts.slug("NVIDIA GeForce RTX 5080") == "rtx_5080"


def test_a_copied_tree_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHNEXT_COMMIT", "abc")
    assert provenance.code()["commit"] == "abc"
    assert provenance.code()["dirty"], "without a word a copy counts as changed"
    monkeypatch.setenv("FLASHNEXT_DIRTY", "0")
    assert not provenance.code()["dirty"]


def test_the_command_lists_and_checks(tmp_path: Path) -> None:
    path = receipts.write(draft(), tmp_path)
    listed = run_cli("receipts", str(tmp_path), "--json")
    assert json.loads(listed.stdout)["id"] == path.stem
    assert "citable" in run_cli("receipts", str(tmp_path)).stdout
    assert run_cli("receipts", "--check", str(tmp_path)).returncode == 0
    path.write_text(path.read_text().replace('"pass": true', '"pass": false'))
    spoilt = run_cli("receipts", "--check", str(tmp_path))
    assert spoilt.returncode == 2
    assert "id says hash" in spoilt.stderr
    assert run_cli("receipts", str(tmp_path / "none")).returncode == 2


def test_every_receipt_of_the_repository_is_valid() -> None:
    found = {p.name: receipts.problems(receipts.read(p), p.name) for p in SHIPPED}
    assert {name: problems for name, problems in found.items() if problems} == {}


def test_nothing_but_receipts_lies_in_the_folder() -> None:
    others = [p.name for p in FOLDER.glob("*") if p.suffix != ".json" and p.is_file()]
    assert [name for name in others if name not in ("README.md", ".gitkeep")] == []


def test_the_readme_leans_on_good_receipts_alone() -> None:
    for name in sorted(set(ID.findall((ROOT / "README.md").read_text()))):
        path = FOLDER / f"{name}.json"
        assert path.exists(), f"README.md names {name}, which is not in receipts/"
        receipt = receipts.read(path)
        assert receipts.why_not_citable(receipt) is None, name
