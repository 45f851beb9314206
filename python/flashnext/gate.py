"""The gate: whether a device may run a model, tried out on the machine at hand.

Ops against the host device, the integer path and every choice bit for bit, the promise on whole
sequences, and the demo checkpoint against reference answers. :func:`run` ends in a receipt;
:mod:`flashnext.evidence` says which receipts enable a device.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import flashnext
from flashnext import _core, provenance, receipts
from flashnext.bench.setup import Setup
from flashnext.errors import Error, InputError
from flashnext.paths import demo_path
from flashnext.receipts import Receipt

REFERENCE_GATE = "reference"
MAX_MEAN_KL = 1e-6
MARGIN = 1e-3  # where the reference's best token leads by more, it must be ours

# What each gate holds, for people.
GATES = {
    "integer": "EXL3 linears and experts, every rate, bit for bit",
    "choice": "router, block selection and sampler, exactly",
    "functions": "exp, sigmoid, silu, softplus, bit for bit",
    "ops": "every other op, by bits or a tolerance",
    "runs": "the same sequence twice, ==",
    "graphs": "eager against graphs, ==",
    "chunks": "prefill chunks of 7, 64 and 512, ==",
    "rows": "1 to 32 rows in a step against one, ==",
    "prefix": "a reused prefix against a cold one, ==",
    "rewind": "rejected rows undone, ==",
    REFERENCE_GATE: "demo checkpoint against reference logits and tokens",
}

_SESSION = {"window": 1024, "lanes": 32, "chunk": 512, "prefix_snapshots": 2}


@dataclass
class Gate:
    """One gate's outcome. ``passed`` is None when it was not run."""

    name: str
    passed: bool | None = None
    cases: int = 0
    failed: int = 0
    seconds: float = 0.0
    max_error: float = 0.0
    tolerance: float = 0.0
    detail: str = ""
    results: list[dict[str, Any]] = field(default_factory=list, repr=False)

    def add(self, result: dict[str, Any]) -> None:
        """Counts one case."""
        self.results.append(result)
        self.cases += 1
        self.seconds += result["seconds"]
        self.max_error = max(self.max_error, result["max_error"])
        self.tolerance = max(self.tolerance, result["tolerance"])
        self.passed = self.passed is not False and bool(result["passed"])
        if not result["passed"]:
            self.failed += 1
            self.detail = self.detail or f"{result['case']}, {result['rows']} rows: " + str(
                result["detail"]
            )

    def as_dict(self) -> dict[str, Any]:
        """For the receipt."""
        return {
            "gate": self.name,
            "passed": self.passed,
            "cases": self.cases,
            "failed": self.failed,
            "seconds": self.seconds,
            "max_error": _finite(self.max_error),
            "tolerance": self.tolerance,
            "detail": self.detail,
        }


OnGate = Callable[[Gate], None]


# ---- running ------------------------------------------------------------------------------------


def default_device() -> str:
    """The first GPU when there is one, else the host."""
    return "cuda:0" if len(_core.devices()) > 1 else "host"


def run(
    device: str | None = None,
    *,
    on_gate: OnGate | None = None,
    reference: str | os.PathLike[str] | None = None,
    command: Iterable[str] = (),
) -> Receipt:
    """Runs every gate on a device and returns the finished receipt, passed or not.

    Args:
        device: ``host``, ``cuda`` or ``cuda:N``; None: the first GPU, or the host.
        on_gate: called with each :class:`Gate` when it is done.
        reference: another file of reference answers (for tests).
        command: what was typed, for the receipt.

    Raises:
        InputError: there is no such device, or this build has no code for it.
    """
    device = default_device() if device is None else device
    capability = capability_of(device)
    start = time.perf_counter()
    session = _core.Session(
        str(demo_path()),
        device=device,
        capabilities=[] if capability is None else [capability],
        **_SESSION,  # type: ignore[arg-type]
    )
    gates = {name: Gate(name) for name in GATES}
    try:
        for name in _core.gate_names()["ops"]:
            _run_gate(gates[name], on_gate, lambda n: _core.run_op_gates(device, gate=n))
        _run_engine_gates(session, gates, on_gate)
        path = reference_path() if reference is None else Path(reference)
        _run_gate(
            gates[REFERENCE_GATE], on_gate, lambda _: list(compare_with_reference(session, path))
        )
        return _receipt(session, device, gates, time.perf_counter() - start, path, command)
    finally:
        session.close()


def _run_gate(
    gate: Gate, on_gate: OnGate | None, results: Callable[[str], list[dict[str, Any]]]
) -> None:
    start = time.perf_counter()
    try:
        for result in results(gate.name):
            gate.add(result)
    except Error as error:
        if isinstance(error, InputError):
            raise
        gate.passed, gate.detail = False, str(error)
    gate.seconds = time.perf_counter() - start
    if on_gate is not None:
        on_gate(gate)


def _run_engine_gates(
    session: _core.Session, gates: dict[str, Gate], on_gate: OnGate | None
) -> None:
    failure = ""
    try:
        for result in _core.run_engine_gates(session):
            gates[result["gate"]].add(result)
    except Error as error:
        failure = str(error)
    for name in _core.gate_names()["engine"]:
        if failure and gates[name].passed is None:
            gates[name].passed, gates[name].detail = False, failure
        if on_gate is not None:
            on_gate(gates[name])


def capability_of(device: str) -> str | None:
    """``sm_NN`` of a CUDA device; None for the host (and for what the core will refuse)."""
    name = "cuda:0" if device == "cuda" else device
    for found in _core.devices():
        if found["name"] == name and "capability" in found:
            return "sm_{}{}".format(*found["capability"])
    return None


# ---- the reference ------------------------------------------------------------------------------


def reference_path() -> Path:
    """The shipped answers: ``I/tokens``, ``I/pos``, ``I/logits`` (fp32, of an independent
    implementation) and ``text/I/prompt``, ``text/I/tokens`` (greedy).
    """  # noqa: D205
    return Path(__file__).parent / "demo" / "reference.npz"


def compare_with_reference(session: _core.Session, path: Path) -> Iterable[dict[str, Any]]:
    """Logits by KL divergence and best token, greedy texts token by token."""
    with np.load(path) as data:
        reference = {name: data[name] for name in data.files}
    for name in sorted(n for n in reference if n.endswith("/logits")):
        key = name.removesuffix("/logits")
        tokens, at = reference[f"{key}/tokens"], reference[f"{key}/pos"]
        want = reference[name].astype(np.float64)
        start = time.perf_counter()
        own = session.logits(tokens.tolist())[at, : want.shape[1]].astype(np.float64)
        detail = ""
        mean = float("inf")
        if not np.isfinite(own).all():
            detail = "a logit is not a finite number"
        else:
            mean = float(_kl(want, own).mean())
            best = np.sort(want, 1)
            clear = best[:, -1] - best[:, -2] > MARGIN
            wrong = at[clear & (want.argmax(1) != own.argmax(1))]
            if not mean < MAX_MEAN_KL:
                detail = f"mean KL {mean:.2e} is not below {MAX_MEAN_KL:.0e}"
            elif wrong.size:
                detail = f"another best token at position {wrong[0]}"
        yield _result(f"logits of sequence {key}", len(tokens), detail, start, mean, MAX_MEAN_KL)
    for name in sorted(n for n in reference if n.startswith("text/") and n.endswith("/tokens")):
        want = reference[name].tolist()
        start = time.perf_counter()
        prompt = reference[name.removesuffix("tokens") + "prompt"].tolist()
        run = session.submit([{"prompt": prompt, "max_new_tokens": len(want)}])
        while not run.ended:
            run.updates()
        answer = run.completion()["tokens"]
        detail = "" if answer == want else "the greedy tokens differ"
        yield _result(f"greedy answer {name.split('/')[1]}", len(want), detail, start, 0.0, 0.0)


def _kl(reference: np.ndarray[Any, Any], own: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    def log_softmax(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        x = x - x.max(1, keepdims=True)
        return np.asarray(x - np.log(np.exp(x).sum(1, keepdims=True)))

    p, q = log_softmax(reference), log_softmax(own)
    return np.asarray((np.exp(p) * (p - q)).sum(1))


def _result(
    case: str, rows: int, detail: str, start: float, error: float, tolerance: float
) -> dict[str, Any]:
    return {
        "gate": REFERENCE_GATE,
        "op": "",
        "case": case,
        "rows": rows,
        "passed": not detail,
        "max_error": error,
        "tolerance": tolerance,
        "detail": detail,
        "seconds": time.perf_counter() - start,
    }


# ---- the receipt --------------------------------------------------------------------------------


def _receipt(
    session: _core.Session,
    device: str,
    gates: dict[str, Gate],
    seconds: float,
    reference: Path,
    command: Iterable[str],
) -> Receipt:
    info = flashnext.build_info()
    stats = session.stats()
    every = [result for gate in gates.values() for result in gate.results]
    failed = [name for name, gate in gates.items() if gate.passed is False]
    not_run = [name for name, gate in gates.items() if gate.passed is None]
    return receipts.finish(
        {
            "bench": "gate",
            "command": list(command) or ["flashnext", "gate"],
            "code": {**provenance.code(), "build_id": info["build_id"]},
            "machine": provenance.machine(session.device),
            "model": {
                "name": demo_path().name,
                "checkpoint": Setup(model=str(demo_path())).checkpoint(),
                "shape": session.shape,
                "ranks": 1,
            },
            "requested": {"device": device, **_SESSION},
            "effective": {
                "device": session.device,
                "description": stats["device"],
                "graphs": stats["graphs"],
                "lanes": session.lanes,
            },
            "workload": {"cases": len(every), "reference": receipts.file_hash(reference)},
            "protocol": {
                "oracle": "host device"
                if session.device != "host"
                else "host device, scalar code, one thread",
                "timer": "steady clock around a case, its random values included",
            },
            "samples": {"case_ns": [int(result["seconds"] * 1e9) for result in every]},
            "counters": {"seconds": seconds},
            "limit": {},
            "check": {
                "pass": not failed and not not_run,
                "failed": failed,
                "not_run": not_run,
                "failures": [
                    {k: _finite(v) for k, v in result.items()}
                    for result in every
                    if not result["passed"]
                ][:50],
            },
            "results": {
                "gates": [gate.as_dict() for gate in gates.values()],
                "ops": _by_op(every),
            },
            "skipped": None,
        }
    )


def _by_op(every: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was found for each op, in the order of the op table."""
    found = []
    for op in _core.op_names():
        mine = [result for result in every if result["op"] == op]
        found.append(
            {
                "op": op,
                "passed": all(result["passed"] for result in mine) if mine else None,
                "cases": len(mine),
                "rows": sorted({result["rows"] for result in mine}),
                "max_error": _finite(max((r["max_error"] for r in mine), default=0.0)),
                "tolerance": max((r["tolerance"] for r in mine), default=0.0),
            }
        )
    return found


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    return value if not isinstance(value, float) or np.isfinite(value) else None
