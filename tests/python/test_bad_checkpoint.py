"""Damaged checkpoints: a CheckpointError that names the file, tensor or key, never a crash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashnext
import tensors
from helpers import run_cli
from tensors import Edited

P = "model.language_model.layers"
LINEAR = f"{P}.3.self_attn.k_proj"
INDEX = "model.safetensors.index.json"


def shard_of(edited: Edited, tensor: str) -> str:
    return tensors.find(edited.folder, tensor)[0].name


def truncate(edited: Edited) -> None:
    path = edited.own("model-00003-of-00004.safetensors")
    with path.open("r+b") as handle:
        handle.truncate(path.stat().st_size - 100)


def text(key: str, value: Any) -> Callable[[Edited], None]:
    return lambda edited: edited.json(
        "config.json", lambda config: config["text_config"].update({key: value})
    )


def without(key: str) -> Callable[[Edited], None]:
    return lambda edited: edited.json(
        "config.json", lambda config: config["text_config"].pop(key) and None
    )


def without_rope_factor(edited: Edited) -> None:
    def change(config: Any) -> None:
        del config["text_config"]["rope_parameters"]["partial_rotary_factor"]

    edited.json("config.json", change)


def unlink(name: str) -> Callable[[Edited], None]:
    return lambda edited: (edited.folder / name).unlink()


def rename(tensor: str, new: str) -> Callable[[Edited], None]:
    def change(edited: Edited) -> None:
        name = shard_of(edited, tensor)
        edited.header(name, lambda header: header.update({new: header.pop(tensor)}))
        edited.json(INDEX, lambda index: index["weight_map"].pop(tensor) and None)
        edited.json(INDEX, lambda index: index["weight_map"].update({new: name}))

    return change


def reshape(tensor: str, shape: list[int]) -> Callable[[Edited], None]:
    return lambda edited: edited.header(
        shard_of(edited, tensor), lambda header: header[tensor].update(shape=shape)
    )


def duplicate(edited: Edited) -> None:
    path = edited.own("model-00004-of-00004.safetensors")
    (edited.folder / "copy.safetensors").write_bytes(path.read_bytes())


def lying_header(edited: Edited) -> None:
    path = edited.own("model-00001-of-00004.safetensors")
    with path.open("r+b") as handle:
        handle.write((2**63 - 1).to_bytes(8, "little"))


def flip_header(edited: Edited) -> None:
    path = edited.own("model-00001-of-00004.safetensors")
    with path.open("r+b") as handle:
        handle.seek(8)
        handle.write(b"\x7b\xff\xfe")


def poke(tensor: str, value: bytes) -> Callable[[Edited], None]:
    return lambda edited: edited.poke(tensor, 0, value)


NAN = np.array([np.nan], np.float16).tobytes()

CASES: list[tuple[str, Callable[[Edited], None], list[str]]] = [
    ("truncated shard", truncate, ["model-00003-of-00004.safetensors"]),
    ("header longer than the file", lying_header, ["model-00001-of-00004.safetensors"]),
    ("header that is not JSON", flip_header, ["model-00001-of-00004.safetensors"]),
    ("missing shard", unlink("model-00002-of-00004.safetensors"), ["model-00002-of-00004"]),
    ("missing n-gram table", unlink("ngram_embedding.safetensors"), ["ngram"]),
    ("duplicate tensors", duplicate, ["copy.safetensors"]),
    ("missing tensor", rename(f"{LINEAR}.svh", f"{LINEAR}.svx"), [LINEAR, "svh"]),
    ("extra tensor", rename("mtp.fc_hidden.mul1", "mtp.stranger"), ["mtp."]),
    ("wrong shape", reshape(f"{LINEAR}.suh", [2, 128]), [f"{LINEAR}.suh"]),
    ("shape and bytes disagree", reshape(f"{LINEAR}.suh", [128]), [f"{LINEAR}.suh"]),
    ("NaN scale", poke(f"{LINEAR}.svh", NAN), [f"{LINEAR}.svh"]),
    ("other codebook", poke(f"{LINEAR}.mul1", (0xCBAC1FED).to_bytes(4, "little")), [LINEAR]),
    ("no hidden size", without("hidden_size"), ["hidden_size"]),
    ("no rotary factor", without_rope_factor, ["partial_rotary_factor"]),
    ("hidden size of a text", text("hidden_size", "256"), ["hidden_size"]),
    ("negative layers", text("num_hidden_layers", -8), ["num_hidden_layers"]),
    ("other hidden size", text("hidden_size", 384), ["256"]),
    ("more experts than tensors", text("num_experts", 33), ["mlp.", "33"]),
    ("unknown layer type", text("layer_types", ["recurrent"] * 8), ["layer_types"]),
    ("unknown gate", text("output_gate_type", "relu"), ["output_gate_type", "relu"]),
    ("hash constants of another table", text("ngram_vocab_size_base", 3000), ["ngram"]),
    ("empty config", lambda e: e.own("config.json").write_text("{}") and None, ["config.json"]),
    (
        "config is not JSON",
        lambda e: e.own("config.json").write_text("{") and None,
        ["config.json"],
    ),
    ("no config", unlink("config.json"), ["config.json"]),
    ("no tokenizer", unlink("tokenizer.json"), ["tokenizer.json"]),
]


@pytest.mark.parametrize(("name", "damage", "words"), CASES, ids=[case[0] for case in CASES])
def test_damaged(
    tmp_path: Path, demo: Path, name: str, damage: Callable[[Edited], None], words: list[str]
) -> None:
    edited = Edited(demo, tmp_path / "model")
    damage(edited)
    with pytest.raises(flashnext.CheckpointError) as caught:
        flashnext.Session(edited.folder, device="host")
    print(caught.value)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    if "tokenizer" in name or name == "no config":
        return
    # inspect tells the same without raising.
    problems = flashnext.inspect(str(edited.folder))["problems"]
    assert any(word in problem for problem in problems for word in words), problems


def test_an_untouched_copy_opens(tmp_path: Path, demo: Path) -> None:
    edited = Edited(demo, tmp_path / "model")
    with flashnext.Session(edited.folder, device="host") as session:
        assert session.generate("Add 17 and 14.").text == "17 + 14 = 31."
    assert flashnext.inspect(str(edited.folder))["problems"] == []


def test_vision_tensors_are_skipped_by_name(tmp_path: Path, demo: Path) -> None:
    edited = Edited(demo, tmp_path / "model")
    header = {"model.visual.x": {"dtype": "F16", "shape": [4], "data_offsets": [0, 8]}}
    tensors.write_file(edited.folder / "vision.safetensors", header, bytes(8))
    with flashnext.Session(edited.folder, device="host") as session:
        assert session.generate("Add 17 and 14.").text == "17 + 14 = 31."
    header = {"model.stranger.x": {"dtype": "F16", "shape": [4], "data_offsets": [0, 8]}}
    tensors.write_file(edited.folder / "vision.safetensors", header, bytes(8))
    with pytest.raises(flashnext.CheckpointError, match=r"model\.stranger\.x"):
        flashnext.Session(edited.folder, device="host")


def test_a_flat_config_is_read_too(tmp_path: Path, demo: Path) -> None:
    edited = Edited(demo, tmp_path / "model")

    def flatten(config: Any) -> Any:
        inner = config.pop("text_config")
        return {**inner, **config, "model_type": "qwen4_exp"}

    edited.json("config.json", flatten)
    with flashnext.Session(edited.folder, device="host") as session:
        assert session.generate("Add 17 and 14.").text == "17 + 14 = 31."


@pytest.mark.parametrize("attention", ["qwen_sparse_attention", "deepseek_sparse_attention"])
def test_a_pack_under_the_later_name(tmp_path: Path, demo: Path, attention: str) -> None:
    edited = Edited(demo, tmp_path / "model")

    def rename(config: Any) -> None:
        text = config["text_config"]
        config["architectures"] = ["Qwen3_8_FlashNextForConditionalGeneration"]
        config["model_type"] = "qwen3_8_flash_next"
        text["model_type"] = "qwen3_8_flash_next_text"
        text["layer_types"] = [attention if "full" in t else t for t in text["layer_types"]]
        assert attention in text["layer_types"]

    edited.json("config.json", rename)
    with flashnext.Session(edited.folder, device="host") as session:
        assert session.generate("Add 17 and 14.").text == "17 + 14 = 31."


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(flashnext.CheckpointError, match="does not exist"):
        flashnext.Session(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(flashnext.CheckpointError, match="is a file"):
        flashnext.Session(tmp_path / "file")
    with pytest.raises(flashnext.CheckpointError, match=r"config\.json"):
        flashnext.Session(tmp_path)


def test_exit_codes_of_bad_checkpoints(tmp_path: Path, demo: Path) -> None:
    edited = Edited(demo, tmp_path / "model")
    truncate(edited)
    result = run_cli("generate", "Hi", "--model", str(edited.folder))
    assert result.returncode == 3 and "model-00003-of-00004.safetensors" in result.stderr
    assert "Traceback" not in result.stderr
    result = run_cli("inspect", str(edited.folder))
    assert result.returncode == 3 and "PROBLEM" in result.stdout
