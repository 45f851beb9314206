"""Odd values on the command line: the exit code of a wrong usage and one line, no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers import run_cli

BIG = "9" * 25
BENCH = ["bench", "decode", "--like", "tiny", "--device", "host"]


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["synth", "x", "--layers", BIG], 2, "layers"),
        (["synth", "x", "--seed", "-1"], 2, "seed"),
        (["synth", "FILE/x"], 2, "FILE/x"),
        (["plan", "--window", BIG], 2, "window"),
        (["plan", "--lanes", BIG], 2, "lanes"),
        (["plan", "--chunk", BIG], 2, "chunk"),
        (["plan", "--snapshots", BIG], 2, "snapshots"),
        (["plan", "--lines", BIG], 2, "lines"),
        (["plan", "--vram", "nan"], 2, "vram"),
        (["plan", "--ram", "1e999"], 2, "ram"),
        (["plan", "FILE"], 3, "is a file"),
        ([*BENCH, "--layers", BIG], 2, "layers"),
        ([*BENCH, "--seed", "-1"], 2, "seed"),
        ([*BENCH, "--tokens", BIG], 2, "tokens"),
        ([*BENCH, "--context", BIG], 2, "window"),
        (["bench", "decode", "--model", "~nosuchuser/x"], 3, "nosuchuser"),
        (["bench", "decode", "--model", "FILE"], 3, "is a file"),
        ([*BENCH, "--receipt", "FILE/x"], 2, "cannot write receipts"),
        (["replay", "FILE", "--lines", "4"], 2, "not a routing trace"),
        (["replay", "/dev/zero", "--lines", "4"], 2, "not a routing trace"),
        (["heatmap", "FILE", "x.png"], 2, "not a routing trace"),
        (["receipts", "FILE"], 2, "no such folder"),
        (["gate", "--no-run", "--contracts", "FILE/x"], 2, "cannot write"),
        (["gate", "--device", "host", "--receipts", "FILE"], 2, "cannot write receipts"),
        (["generate", "x", "--model", ""], 3, "''"),
        (["generate", "x", "--seed", BIG], 2, "seed"),
        (["generate", "x", "--threads", BIG], 2, "threads"),
        (["generate", "x", "--lines", "0"], 2, "cache_lines"),
        (["generate", "x", "--policy", ":"], 2, "policy :"),
        (["generate", "x", "--policy", "EXIT.py:A"], 2, "SystemExit"),
        (["generate", "x", "--stop", "\udcff"], 2, "surrogates"),
        (["generate", "\udcff"], 2, "surrogates"),
    ],
)
def test_odd_values(tmp_path: Path, arguments: list[str], code: int, word: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "exit.py").write_text("raise SystemExit(0)")
    names = {"FILE": str(tmp_path / "file"), "EXIT": str(tmp_path / "exit")}
    for name, path in names.items():
        arguments = [argument.replace(name, path) for argument in arguments]
        word = word.replace(name, path)
    result = run_cli(*arguments)
    assert result.returncode == code and word in result.stderr, result
    assert "Traceback" not in result.stderr and "Invoked with" not in result.stderr
