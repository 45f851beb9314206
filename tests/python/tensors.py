"""A small reader and writer of safetensors for the tests, independent of the engine's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

NUMPY = {"I64": "<i8", "I32": "<i4", "F32": "<f4", "I16": "<i2", "F16": "<f2", "U8": "<u1"}


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """The header's entries and the byte where the data begins."""
    with file.open("rb") as handle:
        size = int.from_bytes(handle.read(8), "little")
        return json.loads(handle.read(size)), 8 + size


def find(folder: Path, name: str) -> tuple[Path, dict[str, Any], int]:
    """File, header entry and data start of a tensor."""
    for file in sorted(folder.glob("*.safetensors")):
        header, start = read_header(file)
        if name in header:
            return file, header[name], start
    raise KeyError(name)


def read(folder: Path, name: str) -> np.ndarray:
    """One tensor; BF16 is widened to float32."""
    file, entry, start = find(folder, name)
    lo, hi = entry["data_offsets"]
    with file.open("rb") as handle:
        handle.seek(start + lo)
        raw = handle.read(hi - lo)
    if entry["dtype"] == "BF16":
        wide = np.frombuffer(raw, "<u2").astype("<u4") << np.uint32(16)
        return wide.view("<f4").reshape(entry["shape"])
    return np.frombuffer(raw, NUMPY[entry["dtype"]]).reshape(entry["shape"]).copy()


def write_file(file: Path, header: dict[str, Any], data: bytes) -> None:
    """Writes a file with that header, as it is."""
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


class Edited:
    """A copy of a checkpoint to be damaged: links to the original until a file is rewritten."""

    def __init__(self, original: Path, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for file in original.iterdir():
            (folder / file.name).symlink_to(file)

    def own(self, name: str) -> Path:
        """A file that may be changed: the link becomes a copy."""
        path = self.folder / name
        if path.is_symlink():
            target = path.resolve()
            path.unlink()
            shutil.copyfile(target, path)
            path.chmod(0o644)
        return path

    def json(self, name: str, change: Any) -> None:
        """Applies ``change`` to the content of a JSON file."""
        path = self.own(name)
        content = json.loads(path.read_text())
        changed = change(content)
        path.write_text(json.dumps(content if changed is None else changed))

    def header(self, name: str, change: Any) -> None:
        """Applies ``change`` to a safetensors header; the data stays."""
        path = self.own(name)
        header, start = read_header(path)
        data = path.read_bytes()[start:]
        change(header)
        write_file(path, header, data)

    def poke(self, tensor: str, at: int, value: bytes) -> None:
        """Overwrites bytes of a tensor's data."""
        file, entry, start = find(self.folder, tensor)
        path = self.own(file.name)
        with path.open("r+b") as handle:
            handle.seek(start + entry["data_offsets"][0] + at)
            handle.write(value)
