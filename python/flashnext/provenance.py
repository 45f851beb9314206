"""Which code ran, on which machine: the parts of a receipt that every run shares."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import flashnext
from flashnext import _core

_UNKNOWN = "unknown"


def code() -> dict[str, Any]:
    """Commit, cleanness, compiler and flags of the code that runs."""
    info = flashnext.build_info()
    commit, dirty = _commit()
    nvcc = None
    if info["cuda"] and _core.devices()[1:]:
        nvcc = _core.cuda_machine(0)["compiler"]
    return {
        "version": info["version"],
        "commit": commit,
        "dirty": dirty,
        "preset": info["build_type"],
        "compiler": info["compiler"],
        "nvcc": nvcc,
        "cuda_archs": info["cuda_archs"],
        "flags": info["flags"],
        "build_id": info["build_id"],
    }


def machine(device: str, link: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """The machine, and its GPU when ``device`` is one (``link`` = measured copy rates)."""
    info = flashnext.build_info()
    gpu = None
    if device.startswith("cuda"):
        found = _core.cuda_machine(int(device.partition(":")[2] or 0))
        gpu = {
            "name": found["name"],
            "uuid_hash": hashlib.sha256(found["uuid"].encode()).hexdigest()[:12],
            "capability": "sm_{}{}".format(*found["capability"]),
            "multiprocessors": found["multiprocessors"],
            "memory_bytes": found["memory_bytes"],
            "driver": _cuda_version(found["driver"]),
            "cuda": _cuda_version(found["runtime"]),
            "clock_khz": found["clock_khz"],
            "memory_clock_khz": found["memory_clock_khz"],
            "ecc": found["ecc"],
            "link": link or [],
        }
    return {
        "gpu": gpu,
        "cpu": _cpu_name(),
        "cores": info["cores"],
        "isa": info["isa"],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def last_level_cache() -> int:
    """Bytes of the largest cache of core 0; 0 when the system does not say."""
    sizes = [0]
    for entry in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = entry.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KMG") or 0) * unit)
    return max(sizes)


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or _UNKNOWN


def _commit() -> tuple[str, bool]:
    """The commit, and whether the code may differ from it.

    A tree without git (a copy on another machine) says so through FLASHNEXT_COMMIT and
    FLASHNEXT_DIRTY; without both the commit is unknown and counts as changed.
    """
    if commit := os.environ.get("FLASHNEXT_COMMIT"):
        return commit, os.environ.get("FLASHNEXT_DIRTY", "1") not in ("0", "false")
    package = Path(flashnext.__file__).resolve().parent
    # os.path: a folder that is gone or may not be read holds no tree.
    for root in (package.parent.parent, Path(".")):
        if not os.path.exists(root / ".git") or not os.path.isdir(root / "python" / "flashnext"):
            continue
        commit = _git(root, "rev-parse", "HEAD")
        # New receipts do not make a tree dirty.
        changes = _git(root, "status", "--porcelain", "--", ".", ":!receipts")
        if commit is None or changes is None:
            continue
        return commit.strip(), bool(changes.strip()) or not _same_code(package, root)
    return _UNKNOWN, True


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout


def _same_code(package: Path, root: Path) -> bool:
    """Whether the package that runs holds the Python files of the tree."""
    tree = root / "python" / "flashnext"
    for source in tree.rglob("*.py"):
        installed = package / source.relative_to(tree)
        if not installed.is_file() or installed.read_bytes() != source.read_bytes():
            return False
    return True
