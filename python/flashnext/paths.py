"""Where checkpoints lie: the shipped demo model, and a check of a folder's name."""

from __future__ import annotations

import os
from pathlib import Path

from flashnext.errors import CheckpointError

_DEMO = "tiny-3.05bpw-h5-ng5"


def demo_path() -> Path:
    """Folder of the small demo checkpoint that is installed with the package.

    Raises:
        CheckpointError: the demo is not there (a damaged installation).
    """
    return checkpoint_folder(Path(__file__).parent / "demo" / _DEMO)


def demo_profile() -> Path:
    """The expert uses of the demo model that are installed with it; never written."""
    return Path(__file__).parent / "demo" / "profile.bin"


def checkpoint_folder(path: str | os.PathLike[str]) -> Path:
    """Returns ``path`` as a folder that has a ``config.json``.

    Raises:
        CheckpointError: there is no such folder, or it is not a checkpoint.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        raise CheckpointError(
            f"no checkpoint at {str(folder)!r}: the folder does not exist; give the folder that "
            "holds config.json and the *.safetensors files"
        )
    if not folder.is_dir():
        raise CheckpointError(
            f"{str(folder)!r} is a file: give the folder that holds config.json and the "
            "*.safetensors files"
        )
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{str(folder)!r} has no config.json: it is not a checkpoint folder, or the download "
            "is not complete"
        )
    return folder
