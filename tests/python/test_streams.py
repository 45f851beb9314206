"""Standard streams that are closed, full, gone or short of letters: no tracebacks, sound exits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import flashnext
from helpers import ROOT

SUM = "generate 'Add 17 and 14.'"

# Commands of every module that write to stdout, all quick.
WRITERS = {
    "generate": SUM,
    "generate json": f"{SUM} --json",
    "chat": "chat",
    "inspect": "inspect",
    "inspect json": "inspect --json",
    "plan": "plan",
    "demo-path": "demo-path",
    "receipts": f"receipts {ROOT / 'receipts'}",
    "receipts check": f"receipts {ROOT / 'receipts'} --check",
    "help": "--help",
    "version": "--version",
    "help of a command": "bench decode --help",
    "replay": "replay TRACE --lines 4",
    "bench": "bench decode --like tiny --layers 1 --device host --context 8 --tokens 2",
}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "run.trace"
    flashnext.Trace.synthetic(2, 8, 2, steps=20).save(path)
    return path


def shell(command: str, trace: Path, **variables: str) -> subprocess.CompletedProcess[bytes]:
    line = f"{sys.executable} -m flashnext {command}".replace("TRACE", str(trace))
    return subprocess.run(
        ["bash", "-c", line],
        input=b"Add 17 and 14.\n",
        capture_output=True,
        env={**os.environ, **variables},
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("name", WRITERS)
def test_output_that_cannot_be_written(name: str, trace: Path) -> None:
    for to, why in ((">&-", b"stdout is closed"), (">/dev/full", b"No space left")):
        result = shell(f"{WRITERS[name]} {to}", trace)
        assert result.returncode == 1, (to, result)
        assert b"cannot write the output" in result.stderr and why in result.stderr, result
        assert b"Traceback" not in result.stderr and b"Exception ignored" not in result.stderr


@pytest.mark.parametrize("name", ["generate", "inspect", "demo-path", "receipts", "help"])
def test_a_reader_that_left(name: str, trace: Path) -> None:
    # The pipe has no reader by the time that anything is written.
    result = shell(f"{WRITERS[name]} > >(exec true)", trace)
    assert b"Traceback" not in result.stderr and b"Exception ignored" not in result.stderr
    assert result.returncode in (0, 1)  # 0: all was in the pipe before its reader left
    read, write = os.pipe()
    os.close(read)
    quiet = " --quiet" if name == "generate" else ""
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m flashnext {WRITERS[name]}{quiet}"],
        stdout=write,
        stderr=subprocess.PIPE,
        timeout=120,
        check=False,
    )
    os.close(write)
    assert done.returncode == 1 and done.stderr == b""


@pytest.mark.parametrize("to", ["2>&-", "2>/dev/full"])
def test_notes_that_cannot_be_written(to: str, trace: Path) -> None:
    result = shell(f"{SUM} --stats {to}", trace)
    assert result.returncode == 0 and result.stdout == b"17 + 14 = 31.\n"
    # Where nothing can be said, the exit code still says it.
    assert shell(f"generate x --model /nonexistent {to}", trace).returncode == 3


@pytest.mark.parametrize("command", ["generate", "generate -", "chat"])
def test_input_that_is_closed(command: str, trace: Path) -> None:
    result = shell(f"{command} <&-", trace)
    assert b"Traceback" not in result.stderr
    if command == "chat":
        assert result.returncode == 0
    else:
        assert result.returncode == 2 and b"prompt is empty" in result.stderr


def test_all_three_closed(trace: Path, tmp_path: Path) -> None:
    result = shell(f"{SUM} <&- >&- 2>&-", trace)
    assert result.returncode == 1 and result.stdout == result.stderr == b""
    # Files that a command opens do not take the numbers of the streams.
    out = tmp_path / "map.png"
    result = shell(f"heatmap TRACE {out} <&- >&- 2>&-", trace)
    assert result.returncode == 0 and out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_letters_that_a_terminal_lacks(encoding: str, trace: Path, tmp_path: Path) -> None:
    model = tmp_path / "modèle ☃"
    model.symlink_to(flashnext.demo_path())
    result = shell(f"inspect '{model}'", trace, PYTHONIOENCODING=encoding)
    assert result.returncode == 0 and b"Traceback" not in result.stderr
    shown = result.stdout.decode(encoding)
    assert ("☃" if encoding == "utf-8" else r"\u2603") in shown
    result = shell("replay TRACE --lines 4 --plot", trace, PYTHONIOENCODING=encoding)
    assert result.returncode == 0 and b"Traceback" not in result.stderr
    result = shell(f"{SUM} --json --model '{model}'", trace, PYTHONIOENCODING=encoding)
    assert json.loads(result.stdout)["text"] == "17 + 14 = 31."


def test_input_that_is_no_text() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flashnext", "generate"],
        input=b"caf\xe9",
        capture_output=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    assert done.returncode == 2 and b"not UTF-8" in done.stderr


# ---- answers that were cut ----------------------------------------------------------------------


def test_an_answer_that_was_cut_says_so(trace: Path) -> None:
    story = "generate 'Tell me a story about a fox and a lamp.'"
    result = shell(f"{story} --max-new-tokens 7", trace)
    assert b"cut after 7 tokens; --max-new-tokens gives more" in result.stderr
    result = shell(f"{story} --window 64", trace)
    assert b"the window of 64 tokens is full; --window gives more" in result.stderr
    assert b"cut" not in shell(SUM, trace).stderr
    assert shell(f"{story} --max-new-tokens 7 --quiet", trace).stderr == b""
    assert b"cut" not in shell(f"{story} --max-new-tokens 7 --json", trace).stderr
    result = shell("chat --max-new-tokens 2", trace)
    assert b"cut after 2 tokens" in result.stderr and b"cut" not in result.stdout
