"""The benches themselves."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from flashnext import _core, provenance, receipts
from flashnext.bench import beside, experts
from flashnext.bench.bounds import Bounds
from flashnext.bench.setup import WARMUP_TOKENS, Progress, Setup, drop_page_cache
from flashnext.errors import Error, InputError
from flashnext.receipts import Receipt

_READ_PIECE = 8 << 20
_MOST_READ = 4 << 30  # bytes of a checkpoint that are read to learn the rate of its disk


def run(bench: str, setup: Setup, progress: Progress | None = None) -> Iterator[Receipt]:
    """Runs a bench and yields a finished receipt a hit rate and context (one for ``load``).

    Args:
        bench: ``decode``, ``prefill``, ``beside`` or ``load``.
        setup: What to run.
        progress: Called with (stage, done, total) while weights load.

    Raises:
        InputError: The bench or an option is unknown or out of range.
        OutOfMemory: Weights or window do not fit.
    """
    if bench not in BENCHES:
        raise InputError(f"bench = {bench!r}: choose {', '.join(BENCHES)}")
    for receipt in BENCHES[bench](bench, setup, progress):
        yield receipts.finish(receipt)


def _generation(bench: str, setup: Setup, progress: Progress | None) -> Iterator[Receipt]:
    """Decode and prefill: the same runs, of which the receipt tells another part first."""
    session: _core.Session | None = None
    bounds: Bounds | None = None
    try:
        for rate, length in itertools.product(setup.hit_rate or (None,), setup.context):
            if session is None or setup.cold:
                if session is not None:
                    session.close()
                if setup.cold and setup.model is not None:
                    drop_page_cache(setup.model)
                session, load_ns = setup.open(progress)
            if bounds is None:
                bounds = Bounds(session.device, setup.threads, setup.isa)
            one = replace(setup, hit_rate=() if rate is None else (rate,))
            yield _one_context(bench, one, session, bounds, length, load_ns)
    finally:
        if session is not None:
            session.close()


def _one_context(
    bench: str, setup: Setup, session: _core.Session, bounds: Bounds, length: int, load_ns: int
) -> Receipt:
    prompt = setup.prompt(session, length)
    steps = WARMUP_TOKENS + setup.tokens if bench == "decode" else 1
    offload = experts.offloaded(session)
    routing = experts.replayed(setup, session, steps)
    if offload and setup.lanes > 1 and setup.profile:
        raise InputError(
            f"lanes is {setup.lanes}: with experts in host memory there is a profile of one lane "
            "alone, whose steps can be made to miss nothing; add --profile 0"
        )
    given: dict[str, Any] = {
        "routing": None if routing is None else routing.timed,
        "lanes": setup.lanes,
    }
    if setup.random_ids:
        fed = setup.prompt(session, length + steps * setup.lanes)
        given["feed"] = np.array(fed[length:], np.int32)
    cold = _core.measure(session, prompt, new_tokens=steps, **given)
    warm = []
    for _ in range(setup.repeats):
        if routing is not None:
            _core.warm_cache(session, routing.warm)
        warm.append(_core.measure(session, prompt, new_tokens=steps, **given))
    eager = _core.measure(session, prompt, new_tokens=min(steps, 8), graphs=False, **given)
    receipt = _start(bench, setup, session, bounds)
    receipt["workload"] = {
        "prompt_tokens": length,
        "new_tokens": steps,
        "batch": setup.lanes,
        "seed": setup.seed,
        "prompt_hash": receipts.token_hash(prompt),
        "decoded": "random ids" if setup.random_ids else "each drawn token",
        "experts": {"routing": "the model's own"} if routing is None else routing.facts,
    }
    receipt["protocol"] = {
        "warmup_runs": 1,
        "warmup_tokens": WARMUP_TOKENS if bench == "decode" else 0,
        "repeats": setup.repeats,
        "timer": "steady clock of the host around a step: inputs in to token out",
        "cold": "the first run of this context"
        + (" after opening the session anew" if setup.cold else ""),
        "stages": "all ops of a family in one graph, replayed alone on one stream",
    }
    samples: dict[str, list[int]] = {
        "load_ns": [load_ns],
        "first_token_cold_ns": [sum(cold["chunk_ns"])],
        "first_token_ns": [sum(r["chunk_ns"]) for r in warm],
        "chunk_ns": [ns for r in warm for ns in r["chunk_ns"]],
    }
    if bench == "decode":
        samples["step_cold_ns"] = cold["decode_ns"]
        samples["step_ns"] = [ns for r in warm for ns in r["decode_ns"][WARMUP_TOKENS:]]
        if offload:
            samples |= experts.samples(warm, WARMUP_TOKENS)
        if offload and setup.lanes == 1:
            if setup.trace is not None:
                session.stop_recording()  # what follows is no run of the model's own
            resident = {**given, "routing": None, "resident_sets": experts.RESIDENT_SETS}
            hits = _core.measure(session, prompt, new_tokens=steps, **resident)
            samples["all_hit_ns"] = hits["decode_ns"][WARMUP_TOKENS:]
    receipt["samples"] = samples
    receipt["check"] = _check(cold, warm, eager)
    if setup.memory_limit and session.device != "host":
        # The host device's limit leaves out the experts in host memory.
        fits = receipt["effective"]["device_bytes"] <= setup.memory_limit
        receipt["check"] |= {"within_budget": fits, "pass": receipt["check"]["pass"] and fits}
    first = receipts.summarise(samples["first_token_ns"])["median"]
    counters = receipt["counters"]
    counters["prefill_tokens_per_second"] = length / first * 1e9
    counters["weights_from"] = "files" if setup.model is not None else "memory"
    if bench == "decode":
        mean = receipts.summarise(samples["step_ns"])["mean"]
        counters["decode_tokens_per_second"] = setup.lanes * 1e9 / mean
    if offload:
        counters["streamed_bytes"] = warm[-1]["streamed_bytes"]
        if bench == "decode":
            counters["experts"] = experts.counts(warm, WARMUP_TOKENS)
            if setup.lanes == 1:
                counters["experts_all_hit"] = experts.counts([hits], WARMUP_TOKENS)
    if setup.profile:
        receipt["limit"] = _limit(bench, setup, session, bounds, prompt, receipt)
    counters["stats"] = session.stats()
    return receipt


def _limit(
    bench: str,
    setup: Setup,
    session: _core.Session,
    bounds: Bounds,
    prompt: list[int],
    receipt: Receipt,
) -> dict[str, Any]:
    layers, samples, counters = session.shape["layers"], receipt["samples"], receipt["counters"]
    cache = session.stats().get("cache")
    if bench == "decode":
        # With experts in host memory: of a step that misses nothing, which leaves the cache alone.
        profiled = _core.measure(
            session,
            prompt,
            new_tokens=2,
            profile=setup.profile,
            lanes=setup.lanes,
            resident_sets=1 if cache else 0,
        )
        limit = bounds.limit(profiled["profile"], layers)
        reached = receipts.summarise(samples["step_ns"])["median"] * 1e-9
        limit["bytes_a_token"] = limit["bytes"] / setup.lanes
        if cache:
            means = [receipts.summarise(samples[n])["mean"] for n in ("step_ns", "all_hit_ns")]
            times = {"step": means[0] * 1e-9, "all_hit": means[1] * 1e-9}
            experts.decode_limit(setup, bounds, limit, cache, counters["experts"], times)
    else:
        # The last full chunk stands for all: later ones attend to more, but within the budget.
        chunk = min(setup.chunk, len(prompt))
        whole = prompt[: len(prompt) // chunk * chunk]
        profiled = _core.measure(session, whole, new_tokens=0, profile=setup.profile)
        limit = bounds.limit(profiled["profile"], layers)
        limit["chunks"] = len(prompt) / chunk
        limit["bound_seconds"] *= limit["chunks"]
        limit["bytes_a_token"] = limit["bytes"] / chunk
        if cache:
            experts.prefill_limit(setup, bounds, limit, session, counters["streamed_bytes"])
        reached = receipts.summarise(samples["first_token_ns"])["median"] * 1e-9
    limit["reached_seconds"] = reached
    limit["fraction"] = limit["bound_seconds"] / reached
    return limit


def _check(
    cold: dict[str, Any], warm: list[dict[str, Any]], eager: dict[str, Any]
) -> dict[str, Any]:
    """The same ids again, and op by op without graphs, must draw the same tokens."""
    tokens = cold["tokens"]
    repeated = all(run["tokens"] == tokens for run in warm)
    same_eager = eager["tokens"] == tokens[: len(eager["tokens"])]
    return {
        "token_hash": receipts.token_hash(tokens),
        "reference_hash": receipts.token_hash(warm[-1]["tokens"]),
        "eager_hash": receipts.token_hash(eager["tokens"]),
        "eager_tokens": len(eager["tokens"]),
        "repeated": repeated,
        "eager": same_eager,
        "pass": repeated and same_eager,
    }


def _beside(bench: str, setup: Setup, progress: Progress | None) -> Iterator[Receipt]:
    """A prompt beside a decoding request."""
    return beside.run(bench, setup, progress, _start)


def _load(bench: str, setup: Setup, progress: Progress | None) -> Iterator[Receipt]:
    """Opening a session: first with an empty page cache, then with a full one."""
    samples: dict[str, list[int]] = {"cold_ns": [], "warm_ns": []}
    counters: dict[str, Any] = {}
    if setup.model is not None:
        counters["dropped_bytes"] = drop_page_cache(setup.model)
        session, ns = setup.open(progress)
        samples["cold_ns"].append(ns)
        session.close()
    hashes = []
    for i in range(setup.repeats):
        session, ns = setup.open(progress)
        samples["warm_ns"].append(ns)
        drawn = _core.measure(session, setup.prompt(session, 16), new_tokens=4)
        hashes.append(receipts.token_hash(drawn["tokens"]))
        if i + 1 < setup.repeats:
            session.close()
    bounds = Bounds(session.device, setup.threads, setup.isa)
    receipt = _start(bench, setup, session, bounds)
    receipt["samples"] = samples
    receipt["workload"] = {"window": setup.window, "seed": setup.seed}
    receipt["protocol"] = {
        "repeats": setup.repeats,
        "timer": "steady clock of the host around opening a session",
        "cold": "after asking the system to drop the files from the page cache"
        if setup.model is not None
        else "not measured: random weights have no files",
    }
    receipt["check"] = {
        "token_hash": hashes[0],
        "reference_hash": hashes[-1],
        "pass": len(set(hashes)) == 1,
    }
    stats = session.stats()
    session.close()
    weights = sum(b for name, b in stats["memory"].items() if "weights" in name)
    counters["weight_bytes_copied"] = weights
    warm = receipts.summarise(samples["warm_ns"])["median"] * 1e-9
    counters["bytes_per_second"] = weights / warm
    counters["stats"] = stats
    receipt["counters"] = counters
    receipt["limit"] = _load_limit(setup, bounds, weights, warm)
    yield receipt


def _load_limit(setup: Setup, bounds: Bounds, weights: int, warm: float) -> dict[str, Any]:
    limit: dict[str, Any] = {"rates": bounds.rates, "reached_seconds": warm}
    if bounds.cuda:
        rate = max(step["to_device"] for step in bounds.link)
        limit["model"] = "bytes of the weights / host to device copy rate"
    else:
        rate = bounds.rates["all_read"]
        limit["model"] = "bytes copied (the rest stays in place) / read rate"
    limit["bound_seconds"] = weights / rate
    limit["fraction"] = limit["bound_seconds"] / warm
    if setup.model is not None:
        limit["file_bytes_per_second"] = _read_rate(setup.model)
    return limit


def _read_rate(folder: str) -> float:
    """Bytes a second of reading the files from front to back, with an empty page cache."""
    drop_page_cache(folder)
    buffer = bytearray(_READ_PIECE)
    total = 0
    start = time.perf_counter_ns()
    for path in sorted(Path(folder).glob("model*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while total < _MOST_READ and (n := file.readinto(buffer)):
                total += n
    return total / max(1, time.perf_counter_ns() - start) * 1e9


def _start(bench: str, setup: Setup, session: _core.Session, bounds: Bounds) -> Receipt:
    """The fields that every bench fills alike."""
    stats = session.stats()
    return {
        "utc": receipts.utc_now(),
        "bench": bench,
        "command": list(setup.command),
        "code": provenance.code(),
        "machine": provenance.machine(session.device, bounds.link),
        "model": {
            "name": setup.name(),
            "checkpoint": setup.checkpoint(),
            "shape": session.shape,
            "ranks": 1,
        },
        "requested": setup.requested(),
        "effective": {
            "device": session.device,
            "description": stats["device"],
            "window": session.window,
            "lanes": session.lanes,
            "graphs": stats["graphs"],
            "memory": stats["memory"],
            "threads": bounds.rates.get("threads", 0),
            "notes": session.notes,
            **experts.effective(setup, stats),
        },
        "samples": {},
        "counters": {},
        "limit": {},
        "check": {"pass": False},
        "skipped": None,
    }


def skipped(bench: str, setup: Setup, error: Error) -> Receipt:
    """The receipt of a run that could not be made, with the reason."""
    device = "host" if setup.device in ("auto", "host") else setup.device
    with_gpu = device.startswith("cuda") and len(_core.devices()) > 1
    return receipts.finish(
        {
            "bench": bench,
            "command": list(setup.command),
            "code": provenance.code(),
            "machine": provenance.machine(device if with_gpu else "host"),
            "model": {
                "name": setup.name(),
                "checkpoint": "not opened",
                "shape": {},
                "ranks": 1,
            },
            "requested": setup.requested(),
            "effective": {},
            "workload": {},
            "protocol": {},
            "samples": {},
            "counters": {},
            "limit": {},
            "check": {"pass": False},
            "skipped": f"{type(error).__name__}: {error}".replace(os.getcwd(), "."),
        }
    )


BENCHES: dict[str, Callable[[str, Setup, Progress | None], Iterator[Receipt]]] = {
    "beside": _beside,
    "decode": _generation,
    "prefill": _generation,
    "load": _load,
}
