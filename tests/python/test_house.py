"""The house rules that a program can check: format, lint, types, sizes, nothing of one machine."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import flashnext
from flashnext import _core
from helpers import ROOT

MAX_LINES = 500
CODE = {".h", ".cpp", ".inc", ".cu", ".cuh", ".py", ".pyi", ".sh"}


@cache
def tracked() -> tuple[Path, ...]:
    """Files of the repository; the test is skipped outside of one."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    files = (ROOT / name for name in listed.stdout.split("\0") if name)
    return tuple(path for path in files if path.is_file())


def texts() -> list[tuple[Path, str]]:
    found = []
    for path in tracked():
        try:
            found.append((path.relative_to(ROOT), path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue  # a binary file
    return found


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command[:4])}\n{done.stdout}\n{done.stderr}"


def test_clang_format() -> None:
    program = Path(sys.executable).with_name("clang-format")
    found = str(program) if program.exists() else shutil.which("clang-format")
    if found is None:
        pytest.skip("clang-format is not installed (pip install .[dev])")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True)
    if " 14." not in version.stdout:
        pytest.skip(f"clang-format 14 formats this code, here is {version.stdout.strip()}")
    files = [str(p) for p in tracked() if p.suffix in {".h", ".cpp", ".cu", ".cuh"}]
    assert files
    run(found, "--dry-run", "-Werror", *files)


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff(command: list[str]) -> None:
    pytest.importorskip("ruff", reason="ruff is not installed (pip install .[dev])")
    run(sys.executable, "-m", "ruff", *command, "python", "tests/python")


def test_mypy() -> None:
    pytest.importorskip("mypy", reason="mypy is not installed (pip install .[dev])")
    run(sys.executable, "-m", "mypy")


def test_files_are_short_or_say_why() -> None:
    for path, text in texts():
        lines = text.splitlines()
        if path.suffix in CODE and len(lines) > MAX_LINES:
            head = "\n".join(lines[:12]).lower()
            assert "long because" in head, f"{path} has {len(lines)} lines and no reason for it"


def test_test_files_are_short() -> None:
    for path, text in texts():
        if path.suffix == ".py" and path.parts[:2] == ("tests", "python"):
            assert len(text.splitlines()) <= 350, path


def test_nothing_of_one_machine_is_committed() -> None:
    # Put together from parts, so that this file does not find itself.
    folders = "|".join(("work", "root", "farm", "workspace"))
    hosts = "|".join(
        ("pypi" + r"\.org", "python" + "hosted", "--index" + "-url", "deb" + r"\.debian")
    )
    pattern = re.compile(rf"(?<![\w.])/(?:{folders})/|/home/\w+/|{hosts}")
    for path, text in texts():
        if found := pattern.search(text):
            pytest.fail(f"{path}: {found[0]!r} belongs to a machine")


def test_nothing_is_left_unfinished() -> None:
    pattern = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX|Not" + r"ImplementedError)\b")
    for path, text in texts():
        if path.suffix in CODE and (found := pattern.search(text)):
            pytest.fail(f"{path}: {found[0]}")


def test_one_version() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    cmake = (ROOT / "CMakeLists.txt").read_text()
    versions = {
        re.search(r'^version = "([^"]+)"', project, re.MULTILINE)[1],  # type: ignore[index]
        re.search(r"project\(flashnext VERSION (\S+)", cmake)[1],  # type: ignore[index]
        flashnext.__version__,
        flashnext.build_info()["version"],
    }
    assert len(versions) == 1, versions


def test_the_stub_names_what_the_module_has() -> None:
    stub = ast.parse((ROOT / "python" / "flashnext" / "_core.pyi").read_text())
    names = {n.name for n in stub.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    assert names == {name for name in dir(_core) if not name.startswith("_")}
    session = next(n for n in stub.body if isinstance(n, ast.ClassDef) and n.name == "Session")
    members = {n.name for n in session.body if isinstance(n, ast.FunctionDef)} - {"__init__"}
    assert members == {name for name in dir(_core.Session) if not name.startswith("_")}


def test_the_package_is_whole() -> None:
    """The installed package has every file of the source package, the demo model included."""
    source, installed = ROOT / "python" / "flashnext", Path(flashnext.__file__).parent
    names = [p.relative_to(source) for p in tracked() if source in p.parents]
    assert any("demo" in name.parts for name in names)
    for name in names:
        assert (installed / name).is_file(), f"{name} is not installed"
        if "demo" in name.parts:
            assert (installed / name).read_bytes() == (source / name).read_bytes(), name
