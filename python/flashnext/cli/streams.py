"""Standard streams that may be closed, full, or of a terminal that lacks letters.

Output that cannot be written ends the program with a line on stderr; what goes to stderr is never
worth an error; a closed stdin is an empty one; letters that the terminal lacks are escaped.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class OutputLost(Exception):
    """The output cannot be written.

    Attributes:
        reader_left: the other end of the pipe was closed, which is no fault.
    """

    def __init__(self, reason: str, reader_left: bool = False) -> None:
        super().__init__(f"cannot write the output: {reason}")
        self.reader_left = reader_left


class _Output(io.TextIOWrapper):
    """stdout. Not an OSError is raised: argparse and others would swallow it."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise _lost(error) from error

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise _lost(error) from error


class _ClosedOutput(io.TextIOBase):
    """stdout that was closed before the start."""

    def write(self, text: str) -> int:
        del text
        raise OutputLost("stdout is closed")


class _Notes(io.TextIOWrapper):
    """stderr. What cannot be written is dropped."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            return


def _lost(error: OSError) -> OutputLost:
    return OutputLost(error.strerror or str(error), error.errno == errno.EPIPE)


def _wrapped(stream: Any, kind: type[io.TextIOWrapper], line_buffering: bool) -> Any:
    """A stream of ``kind`` over the same descriptor; as it is where there is none below it."""
    try:
        stream.fileno()
        return kind(
            stream.buffer,
            encoding=stream.encoding,
            errors="backslashreplace",
            line_buffering=line_buffering,
        )
    except (AttributeError, OSError):
        return stream


@contextmanager
def standard_streams() -> Iterator[None]:
    """Replaces the three streams by ones that are there, and puts the old ones back."""
    before = sys.stdin, sys.stdout, sys.stderr
    _occupy()
    # They are None where the descriptor was closed at the start.
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    else:
        sys.stderr = _wrapped(sys.stderr, _Notes, True)
    if sys.stdout is None:
        sys.stdout = _ClosedOutput()
    else:
        sys.stdout = _wrapped(sys.stdout, _Output, sys.stdout.isatty())
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, (_Output, _Notes)):
                stream.detach()  # or it would close the descriptor when it goes
        sys.stdin, sys.stdout, sys.stderr = before


def give_up() -> None:
    """Lets go of what is still in the buffers of stdout: nobody can have it."""
    if isinstance(sys.stdout, _Output):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)


def _occupy() -> None:
    """Opens the null device where 0, 1 or 2 is closed, or a file of ours would get the number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
