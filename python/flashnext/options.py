"""Options of a session that say where the experts live, checked and as the engine takes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from flashnext import checks
from flashnext.errors import InputError
from flashnext.paths import as_path, demo_path, demo_profile, is_folder
from flashnext.policy import Policy

GIB = 2**30  # cards and RAM are sold by it: 1 GB of vram_gb and ram_gb
_MAX = 2**31 - 1
_PLACES = ("auto", "resident", "offload")

CpuMisses = str | int
ProfilePath = str | os.PathLike[str] | Literal[False] | None


def memory_bytes(name: str, size: Any) -> int:
    """Bytes of so many GB; 0 for None, which means that no limit was given."""
    if size is None:
        return 0
    number = checks.real(name, size, "a number of GB above 0")
    if number <= 0 or number * GIB >= 2**62:
        raise InputError(f"{name} is {size!r}, expected a number of GB above 0")
    return max(1, int(number * GIB))


def limit_bytes(vram_gb: Any, memory_limit: Any) -> int:
    """The limit on memory from its two options, in bytes; 0: none."""
    limit = checks.whole("memory_limit", memory_limit, 0, 2**63 - 1)
    if vram_gb is not None and limit:
        raise InputError("vram_gb and memory_limit are both given; they mean the same, give one")
    return limit or memory_bytes("vram_gb", vram_gb)


def misses_word(value: Any) -> str:
    """The option cpu_misses: off, auto or a number."""
    if isinstance(value, str):
        if value in ("off", "auto") or value.isdecimal():
            return value
    elif not isinstance(value, (bool, float)) and value is not None:
        return str(checks.whole("cpu_misses", value, 0, _MAX))
    raise InputError(
        f"cpu_misses is {value!r}, expected 'off', 'auto', or how many of a layer's misses the "
        "processor computes at most"
    )


def profile_options(folder: Path, profile: ProfilePath) -> dict[str, Any]:
    """The file of expert uses: the one asked for, else that which came with the demo model."""
    if profile is False:
        return {}
    if profile is None:
        shipped = demo_profile()
        if shipped.is_file() and folder.resolve() == demo_path().resolve():
            return {"profile": str(shipped), "keep_profile": False}
        return {}
    path = as_path("profile", profile)
    if is_folder(path) or not is_folder(path.parent):
        raise InputError(f"profile {path}: it must be a file in a folder that exists")
    return {"profile": str(path)}


def expert_options(
    folder: Path,
    *,
    experts: str,
    ram_gb: float | None,
    cache_lines: int | None,
    cpu_misses: CpuMisses,
    cpu_threads: int,
    policy: str | Policy | None,
    profile: ProfilePath,
    plan_every: int,
    lockstep: bool,
    trace: str | os.PathLike[str] | None,
) -> dict[str, Any]:
    """What ``_core.Session`` is told about experts.

    Raises:
        InputError: an option has the wrong type or is out of range.
    """
    if experts not in _PLACES:
        raise InputError(f"experts is {experts!r}, expected {', '.join(_PLACES)}")
    if isinstance(policy, str):
        checks.word("policy", policy)
    found = profile_options(folder, profile) if experts != "resident" or profile else {}
    return {
        "experts": experts,
        "host_limit": memory_bytes("ram_gb", ram_gb),
        "cache_lines": 0 if cache_lines is None else checks.whole("cache_lines", cache_lines, 1),
        "cpu_misses": misses_word(cpu_misses),
        "cpu_threads": checks.whole("cpu_threads", cpu_threads, 0, 1024),
        "policy": policy,
        "plan_every": checks.whole("plan_every", plan_every, 1, _MAX),
        "lockstep": checks.flag("lockstep", lockstep),
        "trace": "" if trace is None else trace_file(trace),
        **found,
    }


def trace_file(path: Any) -> str:
    """The name of a file that may be written."""
    return str(as_path("trace", path))
