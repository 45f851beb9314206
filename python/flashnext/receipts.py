"""Receipts: what was run, on what, how, and what came out, as one JSON file a run.

A receipt is written once and never edited. Its id, which is also its file name, ends with a hash of
its content. It is *citable* when its check passed, its tree was clean and nothing was skipped.

Raw samples are kept; the summary is computed from them and checked against them. What was asked for
(``requested``) and what ran (``effective``) are different fields.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import statistics
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flashnext.errors import InputError
from flashnext.paths import as_path, is_folder, told

SCHEMA = 1

Receipt = dict[str, Any]

# The shape of a receipt: a type, a tuple of types, a list of one shape, or a dict of shapes. Keys
# that end with "?" may be absent; dicts without keys may hold anything.
_OPTIONAL_TEXT = (str, type(None))
_SHAPE: dict[str, Any] = {
    "schema": int,
    "id": str,
    "utc": str,
    "bench": str,
    "command": [str],
    "code": {
        "version": str,
        "commit": str,
        "dirty": bool,
        "preset": str,
        "compiler": str,
        "nvcc": _OPTIONAL_TEXT,
        "cuda_archs": str,
        "flags": str,
    },
    "machine": {
        "gpu": (dict, type(None)),
        "cpu": str,
        "cores": int,
        "isa": str,
        "memory_bytes": int,
        "numa_nodes": int,
        "system": str,
        "target?": str,  # without a GPU: the architecture of the code that was inspected
    },
    "model": {"name": str, "checkpoint": str, "shape": dict, "ranks": int},
    "requested": dict,
    "effective": dict,
    "workload": dict,
    "protocol": dict,
    "samples": dict,
    "summary": dict,
    "counters": dict,
    "limit": dict,
    "check": {"pass": bool},
    "results?": (dict, list),
    "skipped": (str, type(None)),
}
_GPU_SHAPE: dict[str, Any] = {
    "name": str,
    "uuid_hash": str,
    "capability": str,
    "multiprocessors": int,
    "memory_bytes": int,
    "driver": str,
    "cuda": str,
    "clock_khz": int,
    "memory_clock_khz": int,
    "ecc": bool,
    "link": list,
}
_ID = re.compile(r"(\d{8}T\d{6}Z)-([a-z0-9_]+)-([a-z0-9_]+)-([0-9a-f]{8})")


def summarise(values: Sequence[int | float]) -> dict[str, float | int]:
    """Count, mean, median, p10, p90, p99, least, most and deviation of raw samples."""
    ordered = sorted(values)
    if not ordered:
        return {"n": 0}

    def quantile(share: float) -> float:
        return float(ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)])

    return {
        "n": len(ordered),
        "mean": statistics.fmean(ordered),
        "median": float(statistics.median(ordered)),
        "p10": quantile(0.10),
        "p90": quantile(0.90),
        "p99": quantile(0.99),
        "least": float(ordered[0]),
        "most": float(ordered[-1]),
        "stdev": statistics.pstdev(ordered),
    }


def token_hash(tokens: Iterable[int]) -> str:
    """A short name for a list of token ids."""
    return hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()[:16]


def file_hash(path: str | os.PathLike[str]) -> str:
    """A short name for the bytes of a file."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def slug(name: str) -> str:
    """A device's name as it stands in file names: "NVIDIA H200" is h200."""
    words = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    return words.removeprefix("nvidia_").removeprefix("geforce_") or "unknown"


def utc_now() -> str:
    """The present, as it stands in ids."""
    return datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")


def content_hash(receipt: Receipt) -> str:
    """Eight hex digits over everything but the id."""
    content = {key: value for key, value in receipt.items() if key != "id"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def finish(receipt: Receipt) -> Receipt:
    """Fills schema, summary and id of a receipt that is otherwise complete.

    Raises:
        InputError: the receipt is not valid; the message lists every problem.
    """
    receipt["schema"] = SCHEMA
    receipt.setdefault("utc", utc_now())
    # A folder of one machine says nothing to a reader elsewhere: its last part stays.
    receipt["command"] = [
        os.path.basename(word) if os.path.isabs(word) else word for word in receipt["command"]
    ]
    receipt["summary"] = {name: summarise(values) for name, values in receipt["samples"].items()}
    device = _device(receipt["machine"])
    # As it will be read back: tuples become lists, keys become text.
    receipt = json.loads(json.dumps(receipt, allow_nan=False))
    receipt["id"] = f"{receipt['utc']}-{receipt['bench']}-{device}-{content_hash(receipt)}"
    if found := problems(receipt):
        raise InputError("receipt is not valid: " + "; ".join(found))
    return receipt


def write(receipt: Receipt, folder: str | os.PathLike[str]) -> Path:
    """Finishes a receipt and writes it as a new file of ``folder``."""
    return save(finish(receipt), folder)


def save(receipt: Receipt, folder: str | os.PathLike[str]) -> Path:
    """Writes a finished receipt as a new file of ``folder``.

    Raises:
        InputError: it cannot be written there.
    """
    path = writable_folder(folder) / f"{receipt['id']}.json"
    with told(f"cannot write the receipt {path}"), path.open("x", encoding="utf-8") as file:
        json.dump(receipt, file, indent=1, sort_keys=True, allow_nan=False)
        file.write("\n")
    return path


def writable_folder(folder: str | os.PathLike[str]) -> Path:
    """A folder that receipts can be written to, made if need be; worth a look before a long run.

    Raises:
        InputError: it cannot be.
    """
    path = as_path("the folder of receipts", folder)
    with told(f"cannot write receipts to {path}"):
        path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK | os.X_OK):
        raise InputError(f"cannot write receipts to {path}: it may not be written to")
    return path


def read(path: str | os.PathLike[str]) -> Receipt:
    """Reads a receipt without judging it, except that it must be a JSON object."""
    try:
        receipt = json.loads(as_path("the receipt", path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as a receipt ({error})") from error
    if not isinstance(receipt, dict):
        raise InputError(f"{path}: a receipt is a JSON object")
    return receipt


def find(folder: str | os.PathLike[str]) -> list[Path]:
    """The receipt files of a folder, oldest first.

    Raises:
        InputError: there is no such folder.
    """
    path = as_path("the folder of receipts", folder)
    if not is_folder(path):
        raise InputError(f"{path}: no such folder; name one that holds receipts")
    with told(f"cannot read the folder {path}"):
        return sorted(path / name for name in os.listdir(path) if name.endswith(".json"))


def problems(receipt: Receipt, file_name: str | None = None) -> list[str]:
    """What is wrong with a receipt; nothing for a valid one."""
    found: list[str] = []
    _compare(receipt, _SHAPE, "", found)
    if found:
        return found
    if receipt["schema"] != SCHEMA:
        found.append(f"schema is {receipt['schema']}, this program knows {SCHEMA}")
    gpu = receipt["machine"]["gpu"]
    if gpu is not None:
        _compare(gpu, _GPU_SHAPE, "machine.gpu.", found)
    _check_id(receipt, file_name, found)
    _check_samples(receipt, found)
    if receipt["skipped"] is not None and receipt["check"]["pass"]:
        found.append("check.pass is true, but the run was skipped")
    if receipt["skipped"] == "":
        found.append("skipped must say why")
    return found


def why_not_citable(receipt: Receipt) -> str | None:
    """Why no sentence may lean on this receipt; None when one may."""
    if receipt["skipped"] is not None:
        return f"skipped: {receipt['skipped']}"
    if not receipt["check"]["pass"]:
        return "its check failed"
    if receipt["code"]["dirty"]:
        return "the tree was not clean"
    return None


def _compare(value: Any, shape: Any, where: str, found: list[str]) -> None:
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            found.append(f"{where.rstrip('.') or 'the receipt'} must be an object")
            return
        for key, inner in shape.items():
            name = key.rstrip("?")
            if name in value:
                _compare(value[name], inner, f"{where}{name}.", found)
            elif not key.endswith("?"):
                found.append(f"{where}{name} is missing")
        if not where:
            known = {key.rstrip("?") for key in shape}
            found.extend(f"{key} is no field of a receipt" for key in value if key not in known)
        return
    name = where.rstrip(".")
    if isinstance(shape, list):
        if not isinstance(value, list) or not all(isinstance(v, shape[0]) for v in value):
            found.append(f"{name} must be a list of {shape[0].__name__}")
        return
    types = shape if isinstance(shape, tuple) else (shape,)
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        names = " or ".join("null" if t is type(None) else t.__name__ for t in types)
        found.append(f"{name} must be {names}, not {type(value).__name__}")


def _device(machine: dict[str, Any]) -> str:
    """The machine as it stands in ids."""
    if machine["gpu"] is not None:
        return slug(str(machine["gpu"].get("name", "")))
    return str(machine.get("target", "host")).replace("_", "")


def _check_id(receipt: Receipt, file_name: str | None, found: list[str]) -> None:
    match = _ID.fullmatch(receipt["id"])
    if match is None:
        found.append(f"id {receipt['id']!r} is not UTC-bench-device-hash")
        return
    device = _device(receipt["machine"])
    for what, stated, true in (
        ("utc", match[1], receipt["utc"]),
        ("bench", match[2], receipt["bench"]),
        ("device", match[3], device),
        ("hash", match[4], content_hash(receipt)),
    ):
        if stated != true:
            found.append(f"id says {what} {stated}, the content says {true}")
    if file_name is not None and file_name != f"{receipt['id']}.json":
        found.append(f"the file is named {file_name}, the id is {receipt['id']}")


def _check_samples(receipt: Receipt, found: list[str]) -> None:
    samples, summary = receipt["samples"], receipt["summary"]
    if receipt["skipped"] is None and not samples and not receipt.get("results"):
        found.append("samples are empty, though the run was not skipped")
    if set(samples) != set(summary):
        found.append("summary and samples have different names")
        return
    for name, values in samples.items():
        if not isinstance(values, list) or not all(
            isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v)
            for v in values
        ):
            found.append(f"samples.{name} must be a list of numbers")
            continue
        for key, true in summarise(values).items():
            stated = summary[name].get(key) if isinstance(summary[name], dict) else None
            if not isinstance(stated, (int, float)) or not math.isclose(
                stated, true, rel_tol=1e-9, abs_tol=1e-9
            ):
                found.append(f"summary.{name}.{key} is {stated}, the samples give {true}")
