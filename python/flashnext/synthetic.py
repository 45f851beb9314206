"""Random checkpoints on disk: the real dimensions without the real weights.

Speed, memory and loading do not depend on the values of weights, so a random checkpoint measures
and tests what the published one would. Its text means nothing.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashnext import _core, checks
from flashnext.paths import as_path, demo_path, told

LIKE = ("flash-next", "tiny")

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
_FIRST_SPECIAL = 248044  # of the real model, whose head has rows beyond these


def write(
    folder: str | os.PathLike[str],
    like: str = "flash-next",
    layers: int = 0,
    *,
    seed: int = 1,
    progress: Callable[[str, int, int], None] | None = None,
) -> Path:
    """Writes a random checkpoint into a new or empty folder.

    Args:
        folder: Where to write; nothing is overwritten.
        like: Whose dimensions: ``flash-next`` or ``tiny`` (those of the demo model).
        layers: Number of layers; 0 means all of that model's.
        seed: The same seed writes the same weights.
        progress: Called with ("write", bytes done, bytes in all); may raise to stop, and then
            nothing stays.

    Returns:
        The folder.

    Raises:
        InputError: The folder holds something, or an argument is out of range.
        OutOfMemory: The disk is too small; the message names the bytes needed and free.
    """
    path = as_path("the folder to write to", folder)
    checks.whole("layers", layers, 0, checks.MAX_INT)
    checks.whole("seed", seed, 0, checks.MAX_SEED)
    _core.write_synthetic(str(path), like, layers, seed=seed, progress=progress)
    with told(f"cannot write the tokenizer to {path}"):
        _write_tokenizer(path, like)
    return path


def _write_tokenizer(path: Path, like: str) -> None:
    demo = demo_path()
    if like == "tiny":
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copyfile(demo / name, path / name)
        return
    tokenizer, config = _real_size(demo)
    _write_json(path / "tokenizer.json", tokenizer)
    _write_json(path / "tokenizer_config.json", config)
    stops = [_FIRST_SPECIAL + _SPECIAL.index("<|im_end|>"), _FIRST_SPECIAL]
    _write_json(path / "generation_config.json", {"eos_token_id": stops})


def disk_bytes(like: str = "flash-next", layers: int = 0) -> int:
    """Bytes of disk that :func:`write` takes; the n-gram table is a hole and takes none."""
    return int(_core.synthetic_disk_bytes(like, layers))


def _real_size(demo: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The demo's tokenizer, filled up to the real number of ids, special ids where they belong."""
    tokenizer = json.loads((demo / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((demo / "tokenizer_config.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    for token in _SPECIAL:
        vocabulary.pop(token, None)
    used = set(vocabulary.values())
    for i in range(_FIRST_SPECIAL):
        if i not in used:
            vocabulary[f"<filler_{i}>"] = i
    ids = {token: _FIRST_SPECIAL + i for i, token in enumerate(_SPECIAL)}
    for entry in tokenizer["added_tokens"]:
        entry["id"] = ids[entry["content"]]
    added = config["added_tokens_decoder"].values()
    config["added_tokens_decoder"] = {str(ids[entry["content"]]): entry for entry in added}
    config.pop("model_max_length", None)
    return tokenizer, config


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False) + "\n", encoding="utf-8")
