"""Checks of a request: every error names the thing, its value and the remedy."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashnext.errors import InputError

DEFAULT_NEW_TOKENS = 256
MAX_SEED = 2**64 - 1
MAX_INT = 2**31 - 1  # of the engine's counts


@dataclass(frozen=True)
class Sampling:
    """Checked sampling options of a request."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop: tuple[str, ...]


def unknown_options(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raises InputError for option names that do not exist, with near matches."""
    choices = sorted(set(known) - {"self"})
    for name in given:
        near = difflib.get_close_matches(name, choices, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(choices)}"
        raise InputError(f"{where} has no option {name!r}; {hint}")


def whole(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Returns ``value`` as an int in ``low..high``."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise InputError(f"{name} is {value!r}, expected a whole number")
    if number < low or (high is not None and number > high):
        limits = f"at least {low}" if high is None else f"{low} to {high}"
        raise InputError(f"{name} is {number}, expected {limits}")
    return number


def real(name: str, value: Any, expected: str) -> float:
    """Returns ``value`` as a finite float; ``expected`` words the range for the message."""
    if isinstance(value, (bool, str, bytes)):
        raise InputError(f"{name} is {value!r}, expected {expected}")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InputError(f"{name} is {value!r}, expected {expected}") from None
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InputError(f"{name} is {number}, expected {expected}")
    return number


def seconds(name: str, value: Any) -> float:
    """Returns ``value`` if it is a time above 0."""
    number = real(name, value, "seconds, more than 0")
    if number <= 0:
        raise InputError(f"{name} is {number}, expected seconds, more than 0")
    return number


def word(name: str, value: Any) -> str:
    """Returns ``value`` if it is a text."""
    if not isinstance(value, str):
        raise InputError(f"{name} is {value!r}, expected a text")
    if "\0" in value or not is_utf8(value):
        raise InputError(f"{name} is {value!r}, which is no word")
    return value


def flag(name: str, value: Any) -> bool:
    """Returns ``value`` if it is True or False; a text such as "no" would count as true."""
    if not isinstance(value, (bool, np.bool_)):
        raise InputError(f"{name} is {value!r}, expected True or False")
    return bool(value)


def callback(name: str, value: Any) -> None:
    """Raises InputError for what is neither None nor can be called."""
    if value is not None and not callable(value):
        raise InputError(f"{name} is {value!r}, expected a function or None")


def is_utf8(text: str) -> bool:
    """False for a text with lone surrogates, which is none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def sampling(
    temperature: Any, top_p: Any, top_k: Any, min_p: Any, seed: Any, stop: Any
) -> Sampling:
    """Checks the sampling options of a request."""
    temperature = real("temperature", temperature, "0 (greedy) or a positive number")
    if temperature < 0:
        raise InputError(f"temperature is {temperature}, expected 0 (greedy) or a positive number")
    top_p = real("top_p", top_p, "more than 0 and at most 1 (1 = off)")
    if not 0 < top_p <= 1:
        raise InputError(f"top_p is {top_p}, expected more than 0 and at most 1 (1 = off)")
    min_p = real("min_p", min_p, "0 to 1 (0 = off)")
    if not 0 <= min_p <= 1:
        raise InputError(f"min_p is {min_p}, expected 0 to 1 (0 = off)")
    return Sampling(
        temperature,
        top_p,
        whole("top_k", top_k, 0, 2**31 - 1),
        min_p,
        whole("seed", seed, 0, MAX_SEED),
        stop_strings(stop),
    )


def stop_strings(stop: Any) -> tuple[str, ...]:
    """Checks ``stop``: a string or several, none of them empty."""
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if is_list(stop) else None
    if stops is None or not all(isinstance(s, str) for s in stops):
        raise InputError(f"stop is {stop!r}, expected a string or a list of strings")
    for text in stops:
        if not is_utf8(text):
            raise InputError(f"stop has {text!r}: lone surrogates are no text")
    if "" in stops:
        raise InputError("stop has an empty string, which would end every answer at once")
    return stops


def token_ids(ids: Any, vocab: int, name: str = "token ids") -> list[int]:
    """Returns ``ids`` as a list of ints in the vocabulary.

    Raises:
        InputError: empty, not whole numbers, or out of range (the position is named).
    """
    values = ids.tolist() if isinstance(ids, np.ndarray) else ids
    if not is_list(values):  # an array without dimensions becomes a number
        raise InputError(f"{name} is a {type(ids).__name__}, expected a list of whole numbers")
    if len(values) == 0:
        raise InputError(f"{name} is empty: the model needs at least one token to start from")
    checked = []
    for position, value in enumerate(values):
        try:
            token = operator.index(value)
        except TypeError:
            token = -1
        if isinstance(value, bool) or not 0 <= token < vocab:
            raise InputError(
                f"{name}: {value!r} at position {position} is not a token id of this model "
                f"(0..{vocab - 1})"
            )
        checked.append(token)
    return checked


def window_room(prompt: int, max_new_tokens: Any, window: int) -> int:
    """Returns how many tokens may be generated after a prompt of so many tokens.

    Without ``max_new_tokens`` it is 256, or less where the window has less room.

    Raises:
        InputError: prompt and answer do not fit into the window together.
    """
    if max_new_tokens is None:
        room = min(DEFAULT_NEW_TOKENS, window - prompt)
        if room >= 1:
            return room
        wanted = 1
    else:
        wanted = whole("max_new_tokens", max_new_tokens, 1)
    if prompt + wanted > window:
        raise InputError(
            f"the prompt has {prompt} tokens and max_new_tokens is {wanted}: together "
            f"{prompt + wanted}, more than the window of {window}; shorten the prompt, lower "
            "max_new_tokens, or open the session with a larger window"
        )
    return wanted


def check_length(ids: Sequence[int], window: int) -> None:
    """Raises InputError when a sequence alone does not fit into the window."""
    if len(ids) > window:
        raise InputError(
            f"{len(ids)} tokens are more than the window of {window}; shorten the sequence or "
            "open the session with a larger window"
        )


def is_messages(prompt: Any) -> bool:
    """True for a list of messages (dicts with a role)."""
    return is_list(prompt) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def is_batch(prompt: Any) -> bool:
    """True for a list of prompts: texts, or lists."""
    return (
        is_list(prompt) and len(prompt) > 0 and (isinstance(prompt[0], str) or is_list(prompt[0]))
    )


def is_list(value: Any) -> bool:
    """True for a sequence or array that is not text."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
