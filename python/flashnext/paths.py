"""Names of files and folders: what a path may look like, and errors that name it.

All that a path can do wrong (no such user, a folder that may not be read, a name that no file can
have) ends in :class:`flashnext.InputError`, or CheckpointError where a checkpoint is meant.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flashnext.errors import CheckpointError, InputError

_DEMO = "tiny-3.05bpw-h5-ng5"


def as_path(name: str, value: Any, kind: type[InputError] = InputError) -> Path:
    """Returns ``value`` as a path with ``~`` expanded.

    Args:
        name: how messages call it.
        value: what the caller gave.
        kind: the error to raise.
    """
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise kind(f"{name} is {value!r}, expected the name of a file or folder as a text")
    text = os.fspath(value)
    if not text:
        raise kind(f"{name} is '', expected the name of a file or folder")
    if "\0" in text:
        raise kind(f"{name} is {text!r}: no name has a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise kind(f"{name} is {text!r}, which is not UTF-8; rename the file or folder") from None
    try:
        return Path(text).expanduser()
    except RuntimeError:  # no such user, or a user without a home
        user = text.split("/")[0]
        raise kind(f"{name} is {text!r}: {user} has no home folder; write the path out") from None


@contextmanager
def told(what: str, kind: type[InputError] = InputError) -> Iterator[None]:
    """Turns an OSError inside into an error that says ``what`` could not be done, and why."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}") from error


def is_file(path: Path, kind: type[InputError] = InputError) -> bool:
    """Whether it is a file. Raises ``kind`` where that cannot be told."""
    return stat.S_ISREG(_mode(path, kind))


def is_folder(path: Path, kind: type[InputError] = InputError) -> bool:
    """Whether it is a folder. Raises ``kind`` where that cannot be told."""
    return stat.S_ISDIR(_mode(path, kind))


def exists(path: Path, kind: type[InputError] = InputError) -> bool:
    """Whether it is there. Raises ``kind`` where that cannot be told."""
    return _mode(path, kind) != 0


def _mode(path: Path, kind: type[InputError]) -> int:
    """The kind of file; 0: there is none."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError as error:
        raise kind(f"{str(path)!r} cannot be looked at: {error.strerror or error}") from error


def home() -> Path | None:
    """The user's home folder; None for a user who has none."""
    try:
        return Path.home()
    except RuntimeError:
        return None


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
    folder = as_path("the checkpoint's path", path, CheckpointError)
    if not exists(folder, CheckpointError):
        raise CheckpointError(
            f"no checkpoint at {str(folder)!r}: the folder does not exist; give the folder that "
            "holds config.json and the *.safetensors files"
        )
    if not is_folder(folder, CheckpointError):
        raise CheckpointError(
            f"{str(folder)!r} is a file: give the folder that holds config.json and the "
            "*.safetensors files"
        )
    if not is_file(folder / "config.json", CheckpointError):
        raise CheckpointError(
            f"{str(folder)!r} has no config.json: it is not a checkpoint folder, or the download "
            "is not complete"
        )
    return folder
