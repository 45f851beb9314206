"""Options and helpers that several commands share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from flashnext import checks
from flashnext.paths import demo_path
from flashnext.session import Session

# Stages whose progress is in bytes.
_BYTE_STAGES = frozenset({"embedding", "experts", "lines", "weights", "write"})
_TOLD = (
    "device",
    "experts",
    "no chat template",
    "no stop id",
    "policy",
    "profile",
)  # notes that begin so are told at once
_LONG_PREFILL = 512  # tokens; shorter prompts are read before a bar could be


def error_console() -> Console:
    """Console on stderr: progress and notes never mix with the output."""
    return Console(stderr=True, highlight=False)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Which model, on what."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", metavar="PATH", help="checkpoint folder (default: the installed demo model)"
    )
    group.add_argument(
        "--device",
        default="auto",
        metavar="NAME",
        help="auto, host, cuda or cuda:N (default: auto, a supported GPU or else the host)",
    )
    group.add_argument(
        "--window",
        type=int,
        metavar="N",
        help="most tokens of prompt and answer together (default: 32768 or the model's limit)",
    )
    group.add_argument(
        "--threads", type=int, default=0, metavar="N", help="CPU threads (default: all)"
    )
    group.add_argument(
        "--levels",
        type=int,
        default=32258,
        choices=(32258, 127),
        help="activation levels of the integer linears (default: 32258)",
    )
    group.add_argument("--quiet", action="store_true", help="no progress and no notes on stderr")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """How the answer is chosen."""
    group = parser.add_argument_group("answer")
    group.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="most tokens of an answer (default: 256)"
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="X",
        help="0 takes the likeliest token each time (default); higher is more varied",
    )
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="X", help="keep this share of likely tokens"
    )
    group.add_argument(
        "--top-k", type=int, default=0, metavar="N", help="keep the N likeliest tokens (0: all)"
    )
    group.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="X",
        help="drop tokens less likely than this share of the likeliest",
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the draws (default: 0)"
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the answer before this text (may be given several times)",
    )
    group.add_argument(
        "--think",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="switch thinking on or off, for templates that know enable_thinking",
    )
    group.add_argument("--system", metavar="TEXT", help="system message before the conversation")


def sampling_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """The answer options as arguments of ``Session.generate``, checked before a model loads."""
    checks.sampling(
        options.temperature,
        options.top_p,
        options.top_k,
        options.min_p,
        options.seed,
        options.stop,
    )
    if options.max_new_tokens is not None:
        checks.whole("max_new_tokens", options.max_new_tokens, 1)
    return {
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "min_p": options.min_p,
        "seed": options.seed,
        "stop": options.stop,
        "enable_thinking": options.think,
    }


class Pace(ProgressColumn):
    """Bytes a second and the seconds that are left, for stages that count bytes."""

    def render(self, task: Task) -> Text:
        """What the column shows for a stage."""
        speed = task.finished_speed or task.speed
        if task.description not in _BYTE_STAGES or not speed:
            return Text("")
        text = f"{size_text(speed)}/s"
        if not task.finished and task.time_remaining is not None:
            text += f", {task.time_remaining:.0f} s left"
        return Text(text)


class Bar:
    """Progress on stderr, and only where a person may see it."""

    def __init__(self, show: bool) -> None:
        self._show = show
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def update(self, stage: str, done: int, total: int) -> None:
        """Shows ``done`` of ``total`` for a stage."""
        if not self._show:
            return
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:3.0f}%"),
                TimeElapsedColumn(),
                Pace(),
                console=error_console(),
                transient=True,
            )
            self._progress.start()
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total)
        self._progress.update(self._tasks[stage], completed=done, total=total)

    def prefill(self, done: int, total: int) -> None:
        """Shows how much of a long prompt has been read."""
        if total > _LONG_PREFILL:
            self.update("reading the prompt", done, total)
        if done >= total:
            self.close()

    def close(self) -> None:
        """Takes the bar away."""
        if self._progress is not None:
            self._progress.stop()
        self._progress = None
        self._tasks = {}


def new_bar(options: argparse.Namespace) -> Bar:
    """A bar that shows if stderr is a terminal and ``--quiet`` was not given."""
    return Bar(sys.stderr.isatty() and not options.quiet)


@contextmanager
def open_session(options: argparse.Namespace, **more: Any) -> Iterator[Session]:
    """Opens the model that the options name, with a progress bar; ``more`` goes to Session."""
    bar = new_bar(options)
    try:
        session = Session(
            demo_path() if options.model is None else options.model,
            device=options.device,
            window=options.window,
            threads=options.threads,
            levels=options.levels,
            progress=bar.update,
            **more,
        )
    finally:
        bar.close()
    with session:
        if not options.quiet:
            # What is odd about the checkpoint is told by `flashnext inspect`.
            for note in session.notes:
                if note.startswith(_TOLD):
                    print(f"note: {note}", file=sys.stderr)
        yield session


def size_text(size: float) -> str:
    """Bytes for people: 1 KB is 1000 bytes."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"
