"""Random checkpoints written by the command line: they open, run, and refuse what they must."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import flashnext
from flashnext import synthetic
from flashnext.errors import InputError
from helpers import run_cli


def test_tiny_opens_runs_and_repeats(tmp_path: Path) -> None:
    done = run_cli("synth", str(tmp_path / "a"), "--like", "tiny", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["bytes"] == synthetic.disk_bytes("tiny")
    found = flashnext.inspect(str(tmp_path / "a"))
    assert found["problems"] == []
    assert found["shape"]["layers"] == 8
    synthetic.write(tmp_path / "b", "tiny")
    texts = []
    for name in "ab":
        with flashnext.Session(tmp_path / name, device="host") as session:
            texts.append(session.generate("Hello", max_new_tokens=8).tokens)
    assert texts[0] == texts[1]
    assert len(texts[0]) > 1


def test_the_number_of_layers_is_an_option(tmp_path: Path) -> None:
    synthetic.write(tmp_path / "one", "tiny", 1, seed=3)
    found = flashnext.inspect(str(tmp_path / "one"))
    assert found["problems"] == []
    assert found["shape"]["layers"] == 1
    assert found["shape"]["ple_layer"] == -1


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    done = run_cli("synth", str(tmp_path), "--like", "tiny")
    assert done.returncode == 2
    assert "not empty" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_unknown_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="flash-next or tiny"):
        synthetic.write(tmp_path / "x", "huge")
    with pytest.raises(InputError, match="layers is -1, expected 0"):
        synthetic.write(tmp_path / "x", "tiny", -1)


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    def stop(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthetic.write(tmp_path / "x", "tiny", progress=stop)
    assert list((tmp_path / "x").iterdir()) == []


@pytest.mark.slow
def test_the_real_dimensions_open_and_run(tmp_path: Path) -> None:
    """Two layers: 2.5 GB of experts and embedding, and a table of 32 GB that is a hole."""
    folder = synthetic.write(tmp_path / "slice", "flash-next", 2)
    table = (folder / "ngram_embedding.safetensors").stat()
    assert table.st_size > 32e9
    assert table.st_blocks * 512 < 1e6
    written = sum(p.stat().st_size for p in folder.glob("model-*.safetensors"))
    assert written == pytest.approx(synthetic.disk_bytes("flash-next", 2), rel=0.01)
    with flashnext.Session(folder, device="host", window=256) as session:
        assert session.tokenizer.size == 248049
        assert session.generate("Hello", max_new_tokens=4).tokens
