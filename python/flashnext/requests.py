"""Running requests on the engine: token callbacks to text, counters to results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from flashnext import _core, checks
from flashnext.generation import FinishReason, Generation, make_timings
from flashnext.text import TextStream
from flashnext.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashnext.template import Message

OnToken = Callable[[int | None, str], object]
OnRequestToken = Callable[[int, int | None, str], object]
OnPrefill = Callable[[int, int], object]
OnRequestPrefill = Callable[[int, int, int], None]


class GenerateOptions(TypedDict, total=False):
    """Options of ``Session.generate`` for type checkers; their meaning stands there."""

    messages: Sequence[Message] | None
    max_new_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: str | Sequence[str] | None
    on_token: OnToken | None
    on_prefill: OnPrefill | None
    chat: bool | None
    add_generation_prompt: bool
    enable_thinking: bool | None
    tools: Sequence[Any] | None
    template_arguments: Mapping[str, Any] | None


class _Answer:
    """One request while it runs."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.text = TextStream(stops)
        self.first_token: float | None = None  # seconds from the call
        self.ended: FinishReason | None = None  # ended by this side, not by the engine


def run_requests(
    core: _core.Session,
    tokenizer: Tokenizer,
    stop_ids: list[int],
    prompts: list[list[int]],
    limit: int,
    sampling: checks.Sampling,
    each: OnRequestToken | None,
    prefill: OnRequestPrefill | None,
) -> list[Generation]:
    """Runs the requests together and returns their answers in order.

    Args:
        core: the engine's session.
        tokenizer: gives the bytes of tokens.
        stop_ids: ids that end an answer.
        prompts: token ids of each request.
        limit: most new tokens of each request.
        sampling: checked options.
        each: called as ``each(request, token, piece)``; True cancels the request.
        prefill: called as ``prefill(request, done, total)``.
    """
    start = time.perf_counter()
    answers = [_Answer(sampling.stop) for _ in prompts]

    def on_token(request: int, token: int) -> bool:
        answer = answers[request]
        if answer.first_token is None:
            answer.first_token = time.perf_counter() - start
        piece = answer.text.feed(tokenizer.token_bytes(token))
        if answer.text.stopped:
            answer.ended = "stop"
        # An exception goes through the engine, which ends the other requests too.
        if each is not None and each(request, token, piece) is True and answer.ended is None:
            answer.ended = "cancelled"
        return answer.ended is not None

    raw = core.generate(
        prompts,
        max_new_tokens=limit,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        stop_ids=stop_ids,
        on_token=on_token,
        on_prefill=prefill,
    )
    results = []
    for request, (answer, fields) in enumerate(zip(answers, raw, strict=True)):
        tail = answer.text.finish()
        if tail and each is not None:
            each(request, None, tail)
        finish = fields["finish"]
        if finish == "stop_callback":
            finish = answer.ended
        results.append(
            Generation(
                text=answer.text.text,
                tokens=list(fields["tokens"]),
                finish_reason=finish,
                prompt_tokens=fields["prompt_tokens"],
                reused_tokens=fields["reused_tokens"],
                timings=make_timings(fields, answer.first_token, fields["finish"] == "stop"),
            )
        )
    return results
