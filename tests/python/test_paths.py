"""Names of files and folders that cannot be used: an error of the ladder that names them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import flashnext
from flashnext import evidence, heatmap, receipts, synthetic
from flashnext.paths import as_path
from flashnext.traces import Trace
from helpers import run_cli

ODD: list[tuple[Any, str]] = [
    ("~nosuchuser/x", "~nosuchuser has no home"),
    ("a\0b", "NUL"),
    ("\ud800", "not UTF-8"),
    (os.fsdecode(b"caf\xe9"), "not UTF-8"),
    ("x" * 5000, "File name too long"),
    ("", "is ''"),
    (7, "expected the name"),
    (None, "expected the name"),
    (b"x", "expected the name"),
]

USES: dict[str, Callable[[Any], object]] = {
    "Session": lambda name: flashnext.Session(name, device="host"),
    "inspect": flashnext.inspect,
    "profile": lambda name: open_demo(profile=name),
    "trace": lambda name: open_demo(experts="offload", cache_lines=8, trace=name),
    "Trace": Trace,
    "receipts.find": receipts.find,
    "receipts.read": receipts.read,
    "receipts folder": receipts.writable_folder,
    "synthetic": lambda name: synthetic.write(name, "tiny", 1),
    "heatmap": lambda name: heatmap.save(Trace.synthetic(2, 8, 2).uses(), name),
}


def open_demo(**options: Any) -> None:
    flashnext.Session(flashnext.demo_path(), device="host", **options).close()


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("name", "word"), ODD, ids=[word for _, word in ODD])
def test_odd_names(use: str, name: Any, word: str) -> None:
    if use in ("profile", "trace") and name is None:
        pytest.skip("None means that there is none")
    with pytest.raises(flashnext.InputError) as caught:
        USES[use](name)
    assert word in str(caught.value) or "cannot be" in str(caught.value), str(caught.value)


@pytest.mark.parametrize("use", USES)
def test_a_circle_of_links(use: str, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(flashnext.InputError, match="loop"):
        USES[use](str(loop / "x"))


@pytest.mark.parametrize("use", USES)
def test_a_file_where_a_folder_should_be(use: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(flashnext.InputError, match="file"):
        USES[use](str(tmp_path / "file" / "x"))


def test_paths_that_are_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert as_path("x", "~/a b/é") == tmp_path / "a b" / "é"
    assert as_path("x", Path("a/b")) == Path("a/b")
    assert as_path("x", "a~b/~c") == Path("a~b/~c")


# ---- a home that may not be read ----------------------------------------------------------------


def forbid(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Makes a folder one that this process may not look into, which root always may."""
    look = os.stat

    def stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(str(folder) + "/"):
            raise PermissionError(13, "Permission denied", str(path))
        return look(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", stat)


def test_a_forbidden_home_vouches_for_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FLASHNEXT_GATES", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    forbid(monkeypatch, tmp_path)
    assert not any(str(folder).startswith(str(tmp_path)) for folder in evidence.folders())
    assert isinstance(evidence.gate_receipts(), list)


def test_a_forbidden_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forbid(monkeypatch, tmp_path)
    with pytest.raises(flashnext.CheckpointError, match="Permission denied"):
        flashnext.Session(tmp_path / "model", device="host")
    with pytest.raises(flashnext.InputError, match="Permission denied"):
        receipts.find(tmp_path / "receipts")


def test_no_home_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHNEXT_GATES", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)

    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    assert evidence.local_folder() is None
    assert isinstance(evidence.gate_receipts(), list)


def test_variables_that_are_no_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_DATA_HOME", "FLASHNEXT_GATES"):
        monkeypatch.setenv(name, "~nosuchuser/x")
        with pytest.raises(flashnext.InputError, match=f"{name}.*nosuchuser"):
            evidence.folders()


def test_gate_looks_at_its_folder_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    result = run_cli("gate", "--device", "host", "--receipts", str(tmp_path / "file" / "x"))
    assert result.returncode == 2 and "cannot write receipts to" in result.stderr
    assert result.stdout == "" and "Traceback" not in result.stderr


@pytest.fixture
def forbidden(tmp_path: Path) -> Iterator[tuple[Path, list[str]]]:
    """A folder that may not be looked into, and how to start a process that has to obey."""
    as_all: list[str] = []
    if os.geteuid() == 0:
        as_all = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
        if shutil.which("setpriv") is None:
            pytest.skip("root needs setpriv to obey permissions")
    folder = tmp_path / "forbidden"
    folder.mkdir(mode=0)
    yield folder, as_all
    folder.chmod(0o700)


@pytest.mark.parametrize("command", ["generate", "inspect", "gate", "model", "receipts"])
def test_a_home_that_may_not_be_read(command: str, forbidden: tuple[Path, list[str]]) -> None:
    folder, as_all = forbidden
    environment = {**os.environ, "HOME": str(folder)}
    environment.pop("FLASHNEXT_GATES", None)
    environment.pop("XDG_DATA_HOME", None)
    arguments, code = {
        "generate": (["generate", "Add 17 and 14."], 0),
        "inspect": (["inspect"], 0),
        "gate": (["gate", "--device", "host"], 2),
        "model": (["generate", "Hi", "--model", "~/model"], 3),
        "receipts": (["receipts", "~"], 2),
    }[command]
    result = subprocess.run(
        [*as_all, sys.executable, "-m", "flashnext", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == code and "Traceback" not in result.stderr, result
    if code:
        assert "Permission denied" in result.stderr and str(folder) in result.stderr
