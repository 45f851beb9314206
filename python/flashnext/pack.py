"""The Python side of a checkpoint: tokenizer, stop ids, chat template.

Sessions open it, and :func:`inspect` lists what is wrong with it beside what is wrong with the
weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from flashnext import _core
from flashnext.errors import CheckpointError, InputError
from flashnext.paths import checkpoint_folder
from flashnext.template import ChatTemplate
from flashnext.tokenizer import Tokenizer, read_object, stop_ids

T = TypeVar("T")


@dataclass(frozen=True)
class TextSide:
    """What turns text into ids and back.

    Attributes:
        tokenizer: the checkpoint's tokenizer.
        stop_ids: ids that end an answer.
        template: the chat template; None without one.
        notes: what is odd about them.
    """

    tokenizer: Tokenizer
    stop_ids: list[int]
    template: ChatTemplate | None
    notes: list[str]


def open_text_side(folder: Path) -> TextSide:
    """Reads tokenizer, stop ids and chat template.

    Raises:
        CheckpointError: the first thing that is wrong.
    """
    tokenizer = Tokenizer(folder)
    stops = stop_ids(folder, tokenizer)
    template = ChatTemplate.from_folder(folder, tokenizer.config)
    check_vocabulary(folder, tokenizer)
    return TextSide(tokenizer, stops, template, _notes(stops, template))


def check_vocabulary(folder: Path, tokenizer: Tokenizer) -> None:
    """Raises CheckpointError when the tokenizer has ids that the model has no rows for."""
    try:
        config = read_object(folder / "config.json")
    except CheckpointError:  # the engine says it better
        return
    inner = config.get("text_config")
    vocab = (inner if isinstance(inner, dict) else config).get("vocab_size")
    if isinstance(vocab, int) and tokenizer.size > vocab:
        raise CheckpointError(
            f"{folder}: the tokenizer has ids up to {tokenizer.size - 1} and the model "
            f"only {vocab} rows; tokenizer.json belongs to another model"
        )


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What is in a checkpoint folder, and every problem that a session would refuse it for.

    Returns:
        ``folder``, ``files``, ``shape``, ``families``, ``places``, ``parameters``, ``bytes``,
        ``notes`` and ``problems``; of the text side ``tokenizer_size``, ``stop_ids`` and
        ``chat_template`` (whether there is one).

    Raises:
        CheckpointError: there is no such folder.
    """
    folder = checkpoint_folder(path)
    report = _core.inspect(str(folder))
    problems = report["problems"]

    def attempt(read: Callable[[], T]) -> T | None:
        try:
            return read()
        except CheckpointError as error:
            problems.append(str(error))
            return None

    tokenizer = attempt(lambda: Tokenizer(folder))
    stops = template = None
    if tokenizer is not None:
        stops = attempt(lambda: stop_ids(folder, tokenizer))
        template = attempt(lambda: ChatTemplate.from_folder(folder, tokenizer.config))
        attempt(lambda: check_vocabulary(folder, tokenizer))
    if not problems:
        report["notes"] += _notes(stops or [], template)
        if template is not None and (why := _refusal(template)) is not None:
            report["notes"].append(f"the chat template cannot render one user message: {why}")
    report["tokenizer_size"] = None if tokenizer is None else tokenizer.size
    report["stop_ids"] = stops
    report["chat_template"] = template is not None
    return report


def _notes(stops: list[int], template: ChatTemplate | None) -> list[str]:
    notes = []
    if template is None:
        notes.append(
            "no chat template: texts are continued as they stand, and messages are refused; add "
            "chat_template.jinja for conversations"
        )
    if not stops:
        notes.append(
            "no stop id: answers end at their limit; add eos_token_id to generation_config.json"
        )
    return notes


def _refusal(template: ChatTemplate) -> str | None:
    try:
        template.render([{"role": "user", "content": "Hello"}])
    except InputError as error:
        return str(error)
    return None
