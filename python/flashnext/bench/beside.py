"""A prompt that is read beside a request that decodes: what each costs the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from flashnext import _core, receipts
from flashnext.bench.bounds import Bounds
from flashnext.bench.setup import Progress, Setup
from flashnext.errors import Error
from flashnext.receipts import Receipt
from flashnext.requests import TOKEN

_TALKER_PROMPT = 2048  # tokens of the request that decodes
_BEFORE = 8  # tokens that it draws before the prompt comes

Start = Callable[[str, Setup, _core.Session, Bounds], Receipt]


def run(bench: str, setup: Setup, progress: Progress | None, start: Start) -> Iterator[Receipt]:
    """Yields a receipt a context: the prompt alone, and beside a decoding neighbour."""
    setup = replace(setup, lanes=max(2, setup.lanes))
    session, load_ns = setup.open(progress)
    try:
        bounds = Bounds(session.device, setup.threads, setup.isa)
        for length in setup.context:
            yield _one_context(bench, setup, session, bounds, length, load_ns, start)
    finally:
        session.close()


def _one_context(
    bench: str,
    setup: Setup,
    session: _core.Session,
    bounds: Bounds,
    length: int,
    load_ns: int,
    start: Start,
) -> Receipt:
    prompt = setup.prompt(session, length)
    talk = setup.prompt(session, min(_TALKER_PROMPT, length) + 1)
    most = session.window - len(talk)
    alone = [_read(session, prompt) for _ in range(setup.repeats + 1)][1:]
    beside: list[int] = []
    waits: list[int] = []
    drawn: list[list[int]] = []  # by the neighbour, a run each
    for _ in range(setup.repeats):
        talker = session.submit([{"prompt": talk, "max_new_tokens": most}])
        tokens = 0
        while tokens < _BEFORE:
            tokens += sum(kind == TOKEN for _, kind, _, _ in talker.updates())
        beside.append(_read(session, prompt))
        talker.cancel()
        fields = _wait(talker)
        waits.append(int(fields["longest_wait"] * 1e9))
        drawn.append(fields["tokens"])
    longest = max(drawn, key=len)
    want = _wait(session.submit([{"prompt": talk, "max_new_tokens": len(longest)}]))
    same = all(tokens == want["tokens"][: len(tokens)] for tokens in drawn)
    receipt = start(bench, setup, session, bounds)
    receipt["workload"] = {
        "prompt_tokens": length,
        "neighbour_prompt_tokens": len(talk),
        "batch": 2,
        "seed": setup.seed,
        "prompt_hash": receipts.token_hash(prompt),
    }
    receipt["protocol"] = {
        "warmup_runs": 1,
        "repeats": setup.repeats,
        "timer": "the engine's clock: first step of the prompt to its first token, and between two "
        "tokens of the neighbour",
    }
    receipt["samples"] = {
        "load_ns": [load_ns],
        "alone_ns": alone,
        "beside_ns": beside,
        "longest_wait_ns": waits,
    }
    receipt["check"] = {
        "token_hash": receipts.token_hash(longest),
        "reference_hash": receipts.token_hash(want["tokens"]),
        "pass": same,
    }
    first, second = (receipts.summarise(samples)["median"] for samples in (alone, beside))
    receipt["counters"] = {
        "slower": second / first,
        "token_wait_seconds": setup.token_wait,
        "longest_wait_seconds": max(waits) * 1e-9,
        "neighbour_tokens": [len(tokens) for tokens in drawn],
        "stats": session.stats(),
    }
    receipt["limit"] = {
        "model": "the prompt alone, in the same session",
        "bound_seconds": first * 1e-9,
        "reached_seconds": second * 1e-9,
        "fraction": first / second,
        "rates": bounds.rates,
    }
    return receipt


def _read(session: _core.Session, prompt: list[int]) -> int:
    """Nanoseconds from the prompt's first step to its first token."""
    fields = _wait(session.submit([{"prompt": prompt, "max_new_tokens": 1}]))
    return int(fields["prefill_seconds"] * 1e9)


def _wait(run: _core.Submission) -> dict[str, Any]:
    while not run.ended:
        run.updates()
    fields = run.completion()
    if fields["finish"] == "failed":
        raise Error(f"a request of the bench failed: {fields['reason']}")
    return fields


def describe(receipt: Receipt) -> list[str]:
    """The lines that a person wants of it."""
    counters = receipt["counters"]
    alone, beside = (receipt["summary"][n]["median"] / 1e6 for n in ("alone_ns", "beside_ns"))
    return [
        f"  prompt of {receipt['workload']['prompt_tokens']}: alone {alone:.1f} ms, beside a "
        f"decoding request {beside:.1f} ms ({counters['slower']:.2f} times)",
        "  the neighbour's longest wait for a token: "
        f"{counters['longest_wait_seconds'] * 1e3:.1f} ms "
        f"(asked: {counters['token_wait_seconds'] * 1e3:.0f} ms)",
    ]
