"""Who may include whom: every #include held against the table in cpp/README.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers import ROOT

SUFFIXES = {".h", ".cpp", ".inc", ".cu", ".cuh"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
# Headers of the CUDA toolkit and its libraries.
CUDA = re.compile(
    r"^(cuda|cooperative_groups|cub/|thrust/|nv|mma\.h|sm_|device_launch|driver_types)"
)
# cuda/ sees these rooms, and of exl3 the weight's description alone.
CUDA_MAY = {"base", "sample", "device"}
CUDA_MAY_FILES = {"cpp/exl3/weight.h"}


def sources(folder: str) -> list[Path]:
    return sorted(p for p in (ROOT / folder).rglob("*") if p.suffix in SUFFIXES)


def includes(path: Path) -> list[tuple[str, str]]:
    """(bracket, name) of every include of a file."""
    return INCLUDE.findall(path.read_text(encoding="utf-8"))


def table() -> dict[str, set[str]]:
    """room -> rooms it may include, from the map."""
    rooms: dict[str, set[str]] = {}
    for line in (ROOT / "cpp" / "README.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 4 or cells[0] == "room" or not re.fullmatch(r"[a-z0-9_]+", cells[0]):
            continue
        rooms[cells[0]] = {r.strip() for r in cells[3].split(",") if r.strip()}
    return rooms


def test_the_table_is_complete_and_has_no_cycle() -> None:
    rooms = table()
    folders = {p.name for p in (ROOT / "cpp").iterdir() if p.is_dir()}
    assert rooms.keys() == folders
    for room, may in rooms.items():
        assert may <= rooms.keys(), room
    placed: set[str] = set()
    while len(placed) < len(rooms):
        free = {room for room, may in rooms.items() if room not in placed and may <= placed}
        assert free, f"a cycle among {sorted(rooms.keys() - placed)}"
        placed |= free


@pytest.mark.parametrize("room", sorted(table()))
def test_rooms_include_what_they_may(room: str) -> None:
    allowed = table()[room] | {room}
    for path in sources(f"cpp/{room}"):
        for bracket, name in includes(path):
            where = f"{path.relative_to(ROOT)}: {name}"
            assert not CUDA.match(name), f"CUDA header in cpp/: {where}"
            if bracket == "<":
                assert not name.startswith(("cpp/", "cuda/")), f"project header in <>: {where}"
                continue
            assert name.startswith("cpp/"), f"not a path from the root: {where}"
            assert (ROOT / name).is_file(), f"no such file: {where}"
            assert name.split("/")[1] in allowed, f"{room} may not include that: {where}"


def test_cuda_files_live_in_cuda_alone() -> None:
    for folder in ("cpp", "python", "tests/cpp"):
        for path in (ROOT / folder).rglob("*.cu*"):
            pytest.fail(f"CUDA source outside cuda/: {path.relative_to(ROOT)}")


def test_cuda_includes_what_it_may() -> None:
    for path in sources("cuda"):
        for bracket, name in includes(path):
            if bracket == "<" or name.startswith("cuda/"):
                continue
            where = f"{path.relative_to(ROOT)}: {name}"
            parts = name.split("/")
            assert parts[0] == "cpp", f"not a path from the root: {where}"
            assert parts[1] in CUDA_MAY or name in CUDA_MAY_FILES, f"cuda/ may not: {where}"


def test_headers_are_guarded_and_say_what_they_are() -> None:
    for path in sources("cpp"):
        if path.suffix == ".h":
            text = path.read_text(encoding="utf-8")
            name = path.relative_to(ROOT)
            assert "#pragma once" in text, f"{name}: no #pragma once"
            assert text.startswith("//"), f"{name}: no head comment"
