"""Writes routing traces and profiles from the description of their formats alone."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = tuple[str, int, int, Sequence[Sequence[int]]]  # kind, sequence, first layer, ids a layer


def fnv(data: bytes) -> int:
    h = 0xCBF29CE484222325
    for byte in data:
        h = (h ^ byte) * 0x100000001B3 % 2**64
    return h


def summed(data: bytes) -> bytes:
    return data + struct.pack("<Q", fnv(data))


def trace_bytes(
    shape: tuple[int, int, int],
    records: Sequence[Record],
    line_bytes: int = 100,
    fingerprint: int = 7,
) -> bytes:
    """A trace of `shape` = (layers, experts, top_k)."""
    head = b"FNROUTES" + struct.pack("<Iiiiqq", 1, *shape, line_bytes, fingerprint)
    out = summed(head)
    for kind, sequence, first, layers in records:
        rows = len(layers[0]) // shape[2]
        record = struct.pack(
            "<iiiiII", sequence, rows, first, len(layers), 1 if kind == "prompt" else 0, 0
        )
        ids = [i for layer in layers for i in layer]
        out += summed(record + struct.pack(f"<{len(ids)}H", *ids))
    return out


def write_trace(path: Path, shape: tuple[int, int, int], records: Sequence[Record]) -> None:
    path.write_bytes(trace_bytes(shape, records))


def write_profile(path: Path, uses: Any, fingerprint: int = 7) -> None:
    layers, experts = len(uses), len(uses[0])
    counts = [int(n) for layer in uses for n in layer]
    head = b"FNPROFIL" + struct.pack("<IiiIQ", 1, layers, experts, 0, fingerprint)
    path.write_bytes(summed(head + struct.pack(f"<{len(counts)}Q", *counts)))
