"""What a generation returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "cancelled", "failed"]


@dataclass(frozen=True)
class Timings:
    """Where the time of one generation went.

    Attributes:
        time_to_first_token: seconds from the call to the first new token, as the caller saw it;
            None without one.
        queued_seconds: seconds that the request waited for a lane.
        prefill_seconds: seconds spent on the prompt.
        decode_seconds: seconds spent on new tokens after the first.
        prefill_tokens_per_second: prompt tokens computed (reused ones not counted) a second; None
            when nothing was measured.
        decode_tokens_per_second: decode steps a second; None without a decode step.
        longest_wait: most seconds between two of the new tokens, other requests' prompts included.
    """

    time_to_first_token: float | None = None
    queued_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    longest_wait: float = 0.0


@dataclass(frozen=True)
class Generation:
    """One finished answer.

    Attributes:
        text: the answer, without the stop string that ended it.
        tokens: ids sampled, without the stop id. With a stop string they include the tokens that
            complete it, so ``detokenize(tokens)`` can be longer than ``text``.
        finish_reason: ``stop`` (a stop id or stop string), ``length`` (``max_new_tokens`` reached),
            ``cancelled``, or ``failed`` (in a batch; else the failure is raised).
        prompt_tokens: length of the prompt in tokens.
        reused_tokens: how many of them came from an earlier call's state.
        timings: where the time went.
        error: why a request failed; None for the others.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    reused_tokens: int = 0
    timings: Timings = field(default_factory=Timings)
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values, for JSON."""
        return asdict(self)


def make_timings(raw: Mapping[str, Any], first_token: float | None) -> Timings:
    """Rates from the engine's counters of one request.

    Args:
        raw: what the engine returned for the request.
        first_token: seconds from the call to the first token.
    """
    prefill, decode = float(raw["prefill_seconds"]), float(raw["decode_seconds"])
    computed = int(raw["prompt_tokens"]) - int(raw["reused_tokens"])
    steps = int(raw["decode_steps"])
    return Timings(
        time_to_first_token=first_token,
        queued_seconds=float(raw["queued_seconds"]),
        prefill_seconds=prefill,
        decode_seconds=decode,
        prefill_tokens_per_second=computed / prefill if prefill > 0 and computed > 0 else None,
        decode_tokens_per_second=steps / decode if decode > 0 and steps > 0 else None,
        longest_wait=float(raw["longest_wait"]),
    )
