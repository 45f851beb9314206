"""Where the judges lie, and how the tests run the program."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashnext

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
GOLDEN = ROOT / "tests" / "golden"


def load_golden(name: str) -> Any:
    """A golden file: from the repo, else from the folder of judges beside it."""
    for folder in (GOLDEN, SHARED / "golden"):
        path = folder / name
        if path.exists():
            return json.loads(path.read_text()) if path.suffix == ".json" else np.load(path)
    pytest.skip(f"{name} is neither in tests/golden nor in ../shared/golden")


def checkpoint(letter: str) -> Path:
    """Folder of small checkpoint A (the shipped demo), B, or C with tools (beside the repo)."""
    if letter == "A":
        return flashnext.demo_path()
    name = {"B": "tiny-2.05bpw-h4-ng4", "C": "tiny-tools-3.05bpw-h5-ng5"}[letter]
    path = SHARED / "models" / name
    if not path.exists():
        pytest.skip(f"checkpoint {letter} is not in ../shared/models")
    return path


def capability() -> str:
    """Of the first GPU, as sm_90."""
    major, minor = flashnext.devices()[1]["capability"]
    return f"sm_{major}{minor}"


def run_cli(
    *arguments: str, stdin: str | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a process of its own, outside the source tree's packages."""
    return subprocess.run(
        [sys.executable, "-m", "flashnext", *arguments],
        input=stdin if stdin is not None else "",
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_python(script: str, *, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Runs a script in an interpreter of its own."""
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def endless(session: flashnext.Session) -> flashnext.Session:
    """The session, without ids that end an answer: only limits and cancels do."""
    session.stop_ids = []
    return session


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Return as soon as the condition holds; fail when it does not in time."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it does not happen"
        time.sleep(0.005)


def run_async(work: Coroutine[Any, Any, Any]) -> Any:
    """The value of a coroutine, run in an event loop of its own for a minute at most."""
    return asyncio.run(asyncio.wait_for(work, 60))
