"""A checkpoint that is cut while a session reads it: the process says which file, then ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import flashnext
from tensors import Edited

SCRIPT = """
import os, sys
import flashnext

folder, victim, before = sys.argv[1:]
exec(before)
session = flashnext.Session(folder, device="host")
print(session.generate("Add 17 and 14.").text, flush=True)
os.truncate(os.path.join(folder, victim), 4096)
print(session.generate("Tell me a story about a fox.").text, flush=True)
"""


def run(demo: Path, folder: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    edited = Edited(demo, folder)
    for file in demo.glob("*.safetensors"):
        edited.own(file.name)
    victim = max(demo.glob("model*.safetensors"), key=lambda f: f.stat().st_size).name
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), victim, before],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def said(result: subprocess.CompletedProcess[str], folder: Path) -> bool:
    assert result.stdout == "17 + 14 = 31.\n", result
    lines = [line for line in result.stderr.splitlines() if line.startswith("flashnext: ")]
    return any(str(folder) in line and "the file was cut" in line for line in lines)


def test_a_file_that_was_cut_is_named(demo: Path, tmp_path: Path) -> None:
    result = run(demo, tmp_path / "model")
    assert result.returncode == -signal.SIGBUS and said(result, tmp_path / "model"), result


def test_other_handlers_are_asked_too(demo: Path, tmp_path: Path) -> None:
    # faulthandler's, installed before ours and after it.
    early = run(demo, tmp_path / "a", "import faulthandler; faulthandler.enable()")
    assert early.returncode == -signal.SIGBUS and said(early, tmp_path / "a"), early
    assert "Fatal Python error: Bus error" in early.stderr


def test_bus_errors_elsewhere_are_not_ours(demo: Path) -> None:
    script = """
import ctypes, mmap, os, tempfile
import flashnext
session = flashnext.Session(flashnext.demo_path(), device="host")
file = tempfile.TemporaryFile()
file.truncate(8192)
other = mmap.mmap(file.fileno(), 8192)
file.truncate(0)
print("ready", flush=True)
other[0]
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == -signal.SIGBUS and result.stdout == "ready\n"
    assert "flashnext" not in result.stderr
    assert flashnext.demo_path() == demo
