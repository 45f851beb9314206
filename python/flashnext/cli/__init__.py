"""The command line ``flashnext``. One module a group of commands; each has ``add(commands)``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from types import ModuleType

import flashnext
from flashnext.cli import (
    bench,
    chat,
    demo,
    gate,
    generate,
    inspect,
    plan,
    receipts,
    replay,
    resources,
    streams,
    synth,
)
from flashnext.errors import CheckpointError, Error, InputError

COMMANDS: tuple[ModuleType, ...] = (
    generate,
    chat,
    inspect,
    plan,
    demo,
    gate,
    bench,
    replay,
    receipts,
    resources,
    synth,
)

OK, FAILED, USAGE, BAD_CHECKPOINT, NO_MEMORY, INTERRUPTED = 0, 1, 2, 3, 4, 130

_DESCRIPTION = """\
Runs EXL3 packs of Qwen3.8-Flash-Next. Without --model it uses the small demo model that is
installed with the program, so this works at once:

  flashnext generate "Tell me a story about a fox and a lamp."
"""

_EPILOG = """\
exit codes: 0 fine, 1 the engine failed, 2 wrong usage, 3 bad checkpoint, 4 out of memory,
130 interrupted with Ctrl-C
"""


def version_text() -> str:
    """Version and what this build can run on."""
    info = flashnext.build_info()
    devices = "host and CUDA" if info["cuda"] else "host only (built without CUDA)"
    return f"flashnext {flashnext.__version__}, devices: {devices}, CPU: {info['isa']}"


def build_parser() -> argparse.ArgumentParser:
    """The parser with all commands."""
    parser = argparse.ArgumentParser(
        prog="flashnext",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=version_text())
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    commands.required = True
    for module in COMMANDS:
        module.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    with streams.standard_streams():
        try:
            try:
                return _run(build_parser().parse_args(argv))
            finally:
                sys.stdout.flush()
        except streams.OutputLost as lost:
            streams.give_up()
            if not lost.reader_left:
                print(f"flashnext: {lost}", file=sys.stderr)
            return FAILED


def _run(options: argparse.Namespace) -> int:
    try:
        result = options.run(options)
        return OK if result is None else int(result)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except CheckpointError as error:
        return _fail(options, "checkpoint", error, BAD_CHECKPOINT)
    except InputError as error:
        return _fail(options, "input", error, USAGE)
    except MemoryError as error:  # OutOfMemory is one
        return _fail(options, "memory", error, NO_MEMORY)
    except Error as error:
        return _fail(options, "engine", error, FAILED)
    except OSError as error:  # of a file that nothing else has looked at
        return _fail(options, "input", error, USAGE)


def _fail(options: argparse.Namespace, kind: str, error: BaseException, code: int) -> int:
    message = str(error) or type(error).__name__
    if getattr(options, "json", False):
        print(json.dumps({"error": {"kind": kind, "message": message}}))
    print(f"flashnext {options.command}: {message}", file=sys.stderr)
    return code
