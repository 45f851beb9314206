"""The gate: it passes the host device, fails what is wrong, and enables what it may."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashnext
from flashnext import _core, contracts, evidence, gate, receipts
from flashnext.cli import gate as command
from flashnext.errors import InputError
from helpers import ROOT, load_golden, run_cli

THIS_BUILD = flashnext.build_info()["build_id"]
GPU = {
    "name": "NVIDIA H200",
    "uuid_hash": "0" * 12,
    "capability": "sm_90",
    "multiprocessors": 132,
    "memory_bytes": 150_000_000_000,
    "driver": "12.8",
    "cuda": "12.8",
    "clock_khz": 1_980_000,
    "memory_clock_khz": 3_201_000,
    "ecc": True,
    "link": [],
}


@pytest.fixture(scope="module")
def passed() -> receipts.Receipt:
    """What the gate says about the host device: the whole run, once."""
    return gate.run("host", command=["flashnext", "gate"])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates of ops and engine that say what is expected of them, without running."""

    def result(name: str, op: str) -> dict[str, Any]:
        return {
            "gate": name,
            "op": op,
            "case": f"{name} of {op}",
            "rows": 1,
            "passed": True,
            "max_error": 0.0,
            "tolerance": 0.0,
            "detail": "",
            "seconds": 0.001,
        }

    names = _core.gate_names()
    monkeypatch.setattr(
        _core,
        "run_op_gates",
        lambda device, gate: [result(gate, op) for op in _core.op_names()],
    )
    monkeypatch.setattr(
        _core, "run_engine_gates", lambda session: [result(name, "") for name in names["engine"]]
    )


@pytest.fixture
def with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that says it has CUDA."""
    info = {**_core.build_info(), "cuda": True}
    monkeypatch.setattr(_core, "build_info", lambda: info)


def of_gpu(receipt: receipts.Receipt, **code: Any) -> receipts.Receipt:
    """The host's receipt, as if a GPU had earned it."""
    draft = json.loads(json.dumps(receipt))
    draft["machine"]["gpu"] = dict(GPU)
    draft["code"] |= code
    return receipts.finish(draft)


@pytest.mark.slow
def test_the_host_passes(passed: receipts.Receipt) -> None:
    assert receipts.problems(passed) == []
    assert passed["check"] == {"pass": True, "failed": [], "not_run": [], "failures": []}
    assert passed["code"]["build_id"] == THIS_BUILD
    assert [g["gate"] for g in passed["results"]["gates"]] == list(gate.GATES)
    assert all(g["passed"] is True and g["cases"] > 0 for g in passed["results"]["gates"])
    ops = {entry["op"]: entry for entry in passed["results"]["ops"]}
    assert list(ops) == _core.op_names()
    assert all(entry["passed"] is True for entry in ops.values())
    for exact in ("exl3_linear", "experts", "route", "index_select", "sample", "ngram_decode"):
        assert ops[exact]["tolerance"] == 0, exact
    assert {*range(1, 9), 64, 200} <= set(ops["exl3_linear"]["rows"])
    assert {*range(1, 9), 64, 200} <= set(ops["experts"]["rows"])


@pytest.mark.gpu
def test_the_gpu_passes(tmp_path: Path) -> None:
    done = run_cli("gate", "--device", "cuda:0", "--receipts", str(tmp_path), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (receipt,) = evidence.gate_receipts([tmp_path])
    assert evidence.why_not_accepted(receipt) is None
    assert receipt["counters"]["seconds"] < 120


def test_the_reference_is_that_of_the_goldens() -> None:
    golden = load_golden("A_visible.npz")
    by_tokens = {
        golden[f"{p}/tokens"].tobytes(): p for p in range(20) if f"{p}/logits" in golden.files
    }
    assert gate.reference_path().stat().st_size < 400_000
    with np.load(gate.reference_path()) as reference:
        keys = [n.removesuffix("/logits") for n in reference.files if n.endswith("/logits")]
        assert len(keys) == 3
        for key in keys:
            prompt = by_tokens[reference[f"{key}/tokens"].tobytes()]
            np.testing.assert_array_equal(reference[f"{key}/pos"], golden[f"{prompt}/pos"])
            want = reference[f"{key}/logits"]
            np.testing.assert_array_equal(want, golden[f"{prompt}/logits"][:, : want.shape[1]])
        texts = {entry["prompt"]: entry["plain"] for entry in load_golden("A_generations.json")}
        with flashnext.Session(flashnext.demo_path(), device="host") as session:
            for n in range(2):
                asked = session.detokenize(reference[f"text/{n}/prompt"].tolist())
                answer = session.detokenize(reference[f"text/{n}/tokens"].tolist())
                assert any(p in asked and answer == text for p, text in texts.items())


@pytest.mark.parametrize("what", ["logits", "best token", "tokens"])
def test_a_doctored_reference_fails(quick: None, tmp_path: Path, what: str) -> None:
    with np.load(gate.reference_path()) as data:
        reference = {name: data[name].copy() for name in data.files}
    if what == "logits":
        reference["0/logits"][3, 5] += 5.0  # one number of one row
    elif what == "best token":
        row = reference["1/logits"][2]
        row[[row.argmax(), 7]] = row[[7, row.argmax()]]
    else:
        reference["text/1/tokens"][-1] ^= 1
    doctored = tmp_path / "reference.npz"
    np.savez_compressed(doctored, **reference)
    shown: list[gate.Gate] = []
    receipt = gate.run("host", reference=doctored, on_gate=shown.append)
    assert [g.name for g in shown] == list(gate.GATES)
    assert not receipt["check"]["pass"]
    assert receipt["check"]["failed"] == [gate.REFERENCE_GATE]
    (failure,) = receipt["check"]["failures"]
    wanted = {"logits": "KL", "best token": "KL", "tokens": "greedy"}[what]
    assert wanted in failure["detail"]
    assert "FAIL" in command.line(shown[-1])
    assert command.verdict(receipt)[0].startswith("FAILED")


def test_one_wrong_op_fails_and_what_did_not_run_is_no_pass(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ops, run_engine = _core.run_op_gates, _core.run_engine_gates

    def wrong(device: str, gate: str) -> list[dict[str, Any]]:
        results = run_ops(device, gate=gate)
        if gate == "ops":
            results[4] |= {"passed": False, "max_error": float("inf"), "detail": "y is too far off"}
        return results

    monkeypatch.setattr(_core, "run_op_gates", wrong)
    monkeypatch.setattr(
        _core,
        "run_engine_gates",
        lambda session: [r for r in run_engine(session) if r["gate"] != "rewind"],
    )
    receipt = gate.run("host")
    assert receipt["check"]["failed"] == ["ops"]
    assert receipt["check"]["not_run"] == ["rewind"]
    assert not receipt["check"]["pass"]
    assert "rewind (not run)" in command.verdict(receipt)[0]
    table = {record["name"]: record for record in contracts.records([receipt])}
    bad = next(f for f in contracts.FAMILIES if _core.op_names()[4] in f.ops)
    assert table[bad.name]["evidence"]["host"]["state"] == "failed"
    assert table[bad.name]["evidence"]["host"]["max_error"] is None


def test_a_device_error_fails_the_gate(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(session: _core.Session) -> list[dict[str, Any]]:
        raise flashnext.DeviceError("cuda: an illegal address was encountered")

    monkeypatch.setattr(_core, "run_engine_gates", broken)
    receipt = gate.run("host")
    assert receipt["check"]["failed"] == _core.gate_names()["engine"]


def test_a_device_that_is_not_there() -> None:
    for device in ("cuda:77", "tpu"):
        with pytest.raises(InputError, match="device"):
            gate.run(device)


def test_receipts_enable_a_capability_of_this_build(
    quick: None, with_cuda: None, tmp_path: Path
) -> None:
    host = gate.run("host")
    assert "host" in str(evidence.why_not_accepted(host))
    other = of_gpu(host, build_id="0123456789abcdef")
    assert "build" in str(evidence.why_not_accepted(other))
    receipts.save(host, tmp_path)
    receipts.save(other, tmp_path)
    assert evidence.accepted_capabilities([tmp_path]) == {}
    good = of_gpu(host)
    path = receipts.save(good, tmp_path)
    assert evidence.accepted_capabilities([tmp_path]) == {"sm_90": good["id"]}
    # Edited by hand, it is no receipt any more.
    path.write_text(path.read_text().replace("sm_90", "sm_120"))
    assert evidence.accepted_capabilities([tmp_path]) == {}
    path.write_text("{")
    assert evidence.accepted_capabilities([tmp_path]) == {}


def test_a_failed_receipt_enables_nothing(quick: None, with_cuda: None, tmp_path: Path) -> None:
    draft = gate.run("host")
    draft["check"] = {"pass": False, "failed": ["ops"], "not_run": ["rewind"], "failures": []}
    bad = of_gpu(draft)
    receipts.save(bad, tmp_path)
    assert evidence.accepted_capabilities([tmp_path]) == {}
    assert "ops, rewind" in str(evidence.why_not_accepted(bad))


def test_where_receipts_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FLASHNEXT_GATES", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert evidence.local_folder() == Path.home() / ".local/share/flashnext/gates"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert evidence.local_folder() == tmp_path / "flashnext" / "gates"
    monkeypatch.setenv("FLASHNEXT_GATES", str(tmp_path / "mine"))
    assert evidence.local_folder() == tmp_path / "mine"
    assert tmp_path / "mine" not in evidence.folders()  # not there yet


@pytest.fixture
def core_options(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The options that a Session hands to the core."""
    seen: dict[str, Any] = {}

    def core(path: str, **options: Any) -> Any:
        seen.update(options)
        return original(path, **{**options, "capabilities": [], "device": "host"})

    original = _core.Session
    monkeypatch.setattr(_core, "Session", core)
    yield seen


def test_a_session_passes_on_what_receipts_vouch_for(
    quick: None,
    with_cuda: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    core_options: dict[str, Any],
) -> None:
    monkeypatch.setenv("FLASHNEXT_GATES", str(tmp_path))
    receipts.save(of_gpu(gate.run("host")), tmp_path)
    for device, wanted in (("auto", True), ("cuda", True), ("host", False)):
        flashnext.Session(flashnext.demo_path(), device=device).close()
        assert ("sm_90" in core_options["capabilities"]) is wanted, device


def test_without_cuda_no_receipt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    if flashnext.build_info()["cuda"]:
        pytest.skip("this build has CUDA")
    monkeypatch.setattr(evidence, "folders", lambda: pytest.fail("receipts were looked for"))
    with flashnext.Session(flashnext.demo_path(), device="auto") as session:
        assert session.device == "host"
        assert any("built without CUDA" in note for note in session.notes)
    with pytest.raises(InputError, match="built without CUDA"):
        flashnext.Session(flashnext.demo_path(), device="cuda")


@pytest.mark.gpu
def test_a_gpu_without_a_receipt_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(evidence, "folders", lambda: [tmp_path])
    with pytest.raises(InputError, match=r"sm_\d+.*gate \"device\".*flashnext gate"):
        flashnext.Session(flashnext.demo_path(), device="cuda")
    with flashnext.Session(flashnext.demo_path(), device="auto") as session:
        assert session.device == "host"
        assert any("flashnext gate" in note for note in session.notes)


def test_contracts_name_every_op_once_and_what_was_not_run(quick: None, tmp_path: Path) -> None:
    assert contracts.uncovered() == []
    named = [op for family in contracts.FAMILIES for op in family.ops]
    assert len(named) == len(set(named)) == len(_core.op_names())
    receipt = of_gpu(gate.run("host"))
    page = contracts.markdown(contracts.records([receipt]))
    sections = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    assert receipt["id"] in sections["sm_90"] and THIS_BUILD in sections["sm_90"]
    assert sections["sm_90"].count("| passed |") == len(contracts.FAMILIES)
    assert sections["sm_120"].strip() == "Not run."
    receipts.save(receipt, tmp_path)
    target = tmp_path / "records.json"
    done = run_cli(
        "gate", "--no-run", "--contracts", str(target), "--receipts", str(tmp_path), timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(target.read_text()) == contracts.records([receipt])


def test_the_records_of_the_repository_are_those_of_its_receipts() -> None:
    page = ROOT / "docs" / "kernel_contracts.md"
    shipped = evidence.gate_receipts([ROOT / "receipts"])
    good = [receipt for receipt in shipped if receipt["check"]["pass"]]
    assert page.read_text(encoding="utf-8") == contracts.markdown(contracts.records(good))
