"""What the kernels take: registers, local and shared memory, read from the compiled library.

``cuobjdump`` of the CUDA toolkit tells it without a card. :func:`report` makes a receipt of it, in
which an architecture that no gate has run on stands as ``not run``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashnext import _core, evidence, provenance, receipts
from flashnext.contracts import ARCHITECTURES
from flashnext.errors import InputError
from flashnext.receipts import Receipt

DECODE, PREFILL, OTHER, MEASURING = "decode", "prefill", "other shapes", "measuring"
COMPILED = tuple(name for name in ARCHITECTURES if name != "host")

# What decode steps of Flash-Next do not launch: by file, kernel, or kernel with its template
# arguments; the longest name decides. Every kernel that is not here counts as decode.
USES = {
    "attention.walk_kernel": PREFILL,
    "dense.split_kernel": PREFILL,
    "dense.tile_kernel": PREFILL,
    "exl3_gemm": PREFILL,
    "exl3_plan.plan_kernel": PREFILL,
    "exl3_transform.transform_kernel<8>": OTHER,
    "gdn.conv_kernel": PREFILL,
    "index_score.many_kernel": PREFILL,
    "moe_route.combine_kernel<false>": PREFILL,
    "moe_route.route_kernel<1>": OTHER,
    "moe_route.route_kernel<128>": OTHER,  # more than 512 experts
    "stream_mix.norm_kernel<0>": OTHER,
    "stream_mix.norm_kernel<1>": OTHER,
    "stream_mix.up_tile_kernel": PREFILL,
    "gdn_recur.recur_kernel": OTHER,
    "gdn_recur.recur_kernel<3, 1>": DECODE,
    "gdn_recur.recur_kernel<3, 2>": DECODE,
    "mix_up.up_kernel<1>": OTHER,
    "mix_up.up_kernel<2>": OTHER,
    "mix_up.up_kernel<8>": OTHER,
    "bounds": MEASURING,
    "cuda_device.probe_kernel": MEASURING,
}

# Bytes of stack that a decode kernel may have, and why; any other may have none.
STACK = {
    "dense.decode_kernel<true>": (16, "sm_90: three registers, so that two blocks fit"),
    "exl3_units.units_kernel<2, 4>": (8, "sm_90: one register, so that 16 warps fit"),
    "exl3_units.units_kernel<2, 8>": (8, "sm_90: one register, so that 16 warps fit"),
    "exl3_units.units_kernel<4, 4>": (72, "sm_90: so that 12 warps fit; the head of 13 rows on"),
    "gdn_recur.recur_kernel<3, 2>": (32, "eight registers, so that two blocks fit"),
    "sample.sample_kernel": (128, "handed to a function by reference; at most 32 bytes spilled"),
}

_MISSING = (
    "cuobjdump was not found: it is a part of the CUDA toolkit; set CUDA_HOME to the folder that "
    "has it under bin/, or put it on the path"
)
_ARCH = re.compile(r"^arch = (sm_\w+)$")
_FUNCTION = re.compile(r"^ Function (\S+):$")
_USAGE = re.compile(r"^  REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+) ")
_FILE = re.compile(r"_GLOBAL__N__[0-9a-f]+_\d+_(\w+)_cu_[0-9a-f]+")
_LENGTH = re.compile(r"\d+")
_LITERAL = re.compile(r"L([a-z])(n?)(\d+)E")
_TOOLS = re.compile(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)")


@dataclass(frozen=True)
class Kernel:
    """What a thread or a block of one kernel takes."""

    name: str  # file.kernel<template arguments>
    use: str
    registers: int
    stack_bytes: int  # a thread: registers that did not fit, arrays, what is handed by reference
    shared_bytes: int  # a block: static and the system's, without what a launch adds


def short_name(mangled: str) -> str:
    """``file.kernel<arguments>`` of a kernel in an unnamed namespace; other names stay."""
    if not mangled.startswith("_ZN"):
        return mangled
    parts: list[str] = []
    at = 3
    while length := _LENGTH.match(mangled, at):
        at = length.end() + int(length[0])
        parts.append(mangled[length.end() : at])
    files = [found[1] for part in parts if (found := _FILE.fullmatch(part))]
    if not files:
        return mangled
    name = f"{files[0]}.{parts[-1]}"
    if mangled[at : at + 1] != "I":
        return name
    at += 1
    arguments = []
    while literal := _LITERAL.match(mangled, at):
        value = ("-" if literal[2] else "") + literal[3]
        arguments.append({"0": "false", "1": "true"}[value] if literal[1] == "b" else value)
        at = literal.end()
    return f"{name}<{', '.join(arguments)}>" if mangled[at : at + 1] == "E" else mangled


def use_of(name: str) -> str:
    """Which steps launch a kernel."""
    for key in (name, name.partition("<")[0], name.partition(".")[0]):
        if key in USES:
            return USES[key]
    return DECODE


def parse(text: str) -> dict[str, list[Kernel]]:
    """The kernels of each architecture, by name, from ``cuobjdump --dump-resource-usage``.

    Raises:
        InputError: a kernel has no numbers, or two have one name.
    """
    found: dict[str, dict[str, Kernel]] = {}
    arch = mangled = ""
    for line in text.splitlines():
        if match := _ARCH.match(line):
            arch = match[1]
        elif match := _FUNCTION.match(line):
            if mangled:
                raise InputError(f"cuobjdump said nothing about {mangled}")
            mangled = match[1]
        elif mangled and (match := _USAGE.match(line)):
            registers, stack, shared, local = map(int, match.groups())
            name, mangled = short_name(mangled), ""
            kernels = found.setdefault(arch, {})
            if name in kernels:
                raise InputError(f"two kernels of {arch} are named {name}")
            kernels[name] = Kernel(name, use_of(name), registers, stack + local, shared)
    if mangled:
        raise InputError(f"cuobjdump said nothing about {mangled}")
    return {arch: sorted(kernels.values(), key=_by_name) for arch, kernels in found.items()}


def judge(found: dict[str, list[Kernel]]) -> dict[str, Any]:
    """Whether all is compiled for both architectures, and no decode kernel spills unannounced."""
    names = {arch: {kernel.name for kernel in kernels} for arch, kernels in found.items()}
    every: set[str] = set().union(*names.values())
    common: set[str] = every.intersection(*names.values())
    known = every | {n.partition("<")[0] for n in every} | {n.partition(".")[0] for n in every}
    decode = {arch: [k for k in kernels if k.use == DECODE] for arch, kernels in found.items()}
    check: dict[str, Any] = {
        "compiled_for": sorted(found, key=_number),
        "not_compiled_for": [arch for arch in COMPILED if arch not in found],
        "not_in_all": sorted(every - common),
        "names_without_kernel": sorted({*USES, *STACK} - known),
        "decode_kernels": sorted({k.name for kernels in decode.values() for k in kernels}),
        "decode_stack": [
            {"arch": arch, "kernel": k.name, "bytes": k.stack_bytes, "why": STACK[k.name][1]}
            for arch, kernels in decode.items()
            for k in kernels
            if k.stack_bytes and k.stack_bytes <= STACK.get(k.name, (0,))[0]
        ],
        "decode_stack_unexpected": [
            {"arch": arch, "kernel": k.name, "bytes": k.stack_bytes}
            for arch, kernels in decode.items()
            for k in kernels
            if k.stack_bytes > STACK.get(k.name, (0,))[0]
        ],
    }
    bad = ("not_compiled_for", "not_in_all", "names_without_kernel", "decode_stack_unexpected")
    check["pass"] = not any(check[name] for name in bad)
    return check


def report(
    library: str | os.PathLike[str] | None = None,
    *,
    command: Iterable[str] = (),
    where: Iterable[Path] | None = None,
) -> Receipt:
    """Inspects a library and returns the finished receipt.

    Args:
        library: an extension module or ``libflashnext_cuda.a``; None: the module of this build.
        command: what was typed, for the receipt.
        where: folders of gate receipts (default: as for the loader).

    Raises:
        InputError: there is no ``cuobjdump``, or it finds no kernels in the library.
    """
    own = library is None
    path = Path(_core.__file__ if library is None else library)
    tool = find_tool()
    found = parse(_run(tool, "--dump-resource-usage", str(path)))
    if not found:
        raise InputError(f"{path}: no CUDA kernels in it; name another library with --library")
    info = _core.build_info()
    gates = evidence.gate_receipts(where)
    states = {arch: _state(arch, own, gates) for arch in sorted(found, key=_number)}
    not_run = [arch for arch, state in states.items() if state["skipped"] is not None]
    code = {**provenance.code(), "nvcc": _compiler(tool, path)}
    code["build_id"] = info["build_id"] if own else None
    if not own:
        code["cuda_archs"] = ",".join(states)
    samples, results = {}, {}
    for arch, state in states.items():
        kernels = found[arch]
        samples[f"{arch}_registers"] = [k.registers for k in kernels]
        samples[f"{arch}_stack_bytes"] = [k.stack_bytes for k in kernels]
        results[arch] = {
            **state,
            "most_registers": _most(kernels),
            "with_stack": [k.name for k in kernels if k.stack_bytes],
            "kernels": [asdict(k) for k in kernels],
        }
    return receipts.finish(
        {
            "bench": "resources",
            "command": list(command) or ["flashnext", "resources"],
            "code": code,
            # The machine of the compiler; no card took part.
            "machine": {**provenance.machine("host"), "target": (not_run or [*states])[-1]},
            "model": {"name": "none", "checkpoint": "none", "shape": {}, "ranks": 1},
            "requested": {"library": "this build" if own else path.name},
            "effective": {"library": path.name, "library_hash": receipts.file_hash(path)},
            "workload": {"decode": "kernels that decode steps of Flash-Next launch"},
            "protocol": {
                "tool": f"cuobjdump {_version(_run(tool, '--version').encode())}",
                "registers": "a thread",
                "stack_bytes": "a thread: registers that did not fit, arrays, what is handed by "
                "reference",
                "shared_bytes": "a block: static and the system's, without what a launch adds",
            },
            "samples": samples,
            "counters": {f"{arch}_kernels": len(found[arch]) for arch in states},
            "limit": {},
            "check": judge(found),
            "results": results,
            "skipped": None,
        }
    )


def find_tool() -> str:
    """``cuobjdump`` of the toolkit at CUDA_HOME, on the path, or where toolkits usually lie."""
    home = os.environ.get("CUDA_HOME")
    named = None if home is None else shutil.which(str(Path(home, "bin", "cuobjdump")))
    found = named or shutil.which("cuobjdump") or shutil.which("/usr/local/cuda/bin/cuobjdump")
    if found is None:
        raise InputError(_MISSING)
    return found


def _run(tool: str, *arguments: str, folder: str | None = None) -> str:
    try:
        done = subprocess.run(
            [tool, *arguments], capture_output=True, text=True, check=False, cwd=folder
        )
    except OSError as error:
        raise InputError(f"{tool} cannot be run ({error})") from error
    if done.returncode != 0:
        raise InputError(f"cuobjdump failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def _compiler(tool: str, library: Path) -> str | None:
    """The compiler as its code names it; None when it does not, or several do."""
    with tempfile.TemporaryDirectory() as folder:
        _run(tool, "--extract-elf", "all", str(library.resolve()), folder=folder)
        versions = {_version(path.read_bytes()) for path in Path(folder).iterdir()}
    return f"nvcc {versions.pop()}" if len(versions) == 1 and None not in versions else None


def _version(text: bytes) -> str | None:
    match = _TOOLS.search(text)
    return None if match is None else match[1].decode()


def _state(arch: str, own: bool, gates: Iterable[Receipt]) -> dict[str, Any]:
    """The gate receipt that covers an architecture, or why there is none."""
    mine = [r for r in gates if (r["machine"]["gpu"] or {}).get("capability") == arch]
    good = [r["id"] for r in mine if own and evidence.why_not_accepted(r) is None]
    why = f"no {arch} card was there" if not mine else f"no gate receipt of {arch} for this code"
    return {
        "gate": good[-1] if good else None,
        "skipped": None if good else f"not run: {why}; compiled and inspected only",
    }


def _most(kernels: list[Kernel]) -> dict[str, Any]:
    most = max(kernels, key=lambda k: k.registers)
    return {"kernel": most.name, "registers": most.registers}


def _by_name(kernel: Kernel) -> str:
    return kernel.name


def _number(arch: str) -> int:
    return int(re.sub(r"\D", "", arch))
