"""From updates of the engine to answers: one request, and several that were submitted together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from flashnext import _core
from flashnext.generation import FinishReason, Generation, make_timings
from flashnext.text import TextStream
from flashnext.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashnext.messages import Message

OnToken = Callable[[int | None, str], object]
OnRequestToken = Callable[[int, int | None, str], object]
OnPrefill = Callable[[int, int], object]

PREFILL, TOKEN, END = range(3)  # kinds of _core.Submission.updates


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


class Answer:
    """One request while it runs: its tokens become text."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._text = TextStream(stops)
        self._start = time.perf_counter()
        self._first_token: float | None = None
        self._count = 0
        self.ended: FinishReason | None = None  # by this side: later tokens do not count
        self.error: str | None = None

    def token(self, token: int) -> str:
        """Takes the next token; returns the text that is now certain (maybe empty)."""
        if self._first_token is None:
            self._first_token = time.perf_counter() - self._start
        self._count += 1
        return self._text.feed(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """Ends the text; returns the rest of it."""
        return self._text.finish()

    def generation(self, fields: Mapping[str, Any]) -> Generation:
        """The result, from what the engine says of the request's end."""
        finish = self.ended or fields["finish"]
        return Generation(
            text=self._text.text,
            tokens=list(fields["tokens"][: self._count]),
            finish_reason=finish,
            prompt_tokens=fields["prompt_tokens"],
            reused_tokens=fields["reused_tokens"],
            timings=make_timings(fields, self._first_token),
            error=self.error or fields["reason"] or None,
        )


def run_batch(
    core: _core.Session,
    tokenizer: Tokenizer,
    requests: list[dict[str, Any]],
    stops: Sequence[str],
    on_token: OnRequestToken | None,
) -> list[Generation]:
    """Runs requests together and returns their answers in order.

    Args:
        core: the engine's session.
        tokenizer: gives the bytes of tokens.
        requests: fields of each, as ``_core.Session.submit`` takes them.
        stops: texts that end an answer.
        on_token: called as ``on_token(request, token, piece)``; a true value cancels the request,
            and what it raises makes it fail.
    """
    answers = [Answer(tokenizer, stops) for _ in requests]
    submission = core.submit(requests)

    def tell(request: int, token: int | None, piece: str) -> None:
        answer = answers[request]
        if on_token is None or answer.ended is not None:
            return
        try:
            if on_token(request, token, piece):
                answer.ended = "cancelled"
        except Exception as error:
            answer.ended = "failed"
            answer.error = f"on_token raised {type(error).__name__}: {error}"
        if answer.ended is not None:
            submission.cancel(request)

    running = len(requests)
    try:
        while running:
            for request, kind, value, _ in submission.updates():
                answer = answers[request]
                if kind == TOKEN and answer.ended is None:
                    tell(request, value, answer.token(value))
                elif kind == END:
                    running -= 1
                    if tail := answer.finish():
                        tell(request, None, tail)
    except BaseException:  # Ctrl-C: nobody will read the answers
        submission.cancel()
        raise
    return [answer.generation(submission.completion(i)) for i, answer in enumerate(answers)]
