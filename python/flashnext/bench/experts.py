"""Benches with experts in host memory: routing that is replayed, what the cache did, the bound."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flashnext import _core
from flashnext.bench.bounds import Bounds
from flashnext.bench.setup import Setup
from flashnext.errors import InputError

Routing = npt.NDArray[np.int32]

RESIDENT_SETS = 8  # disjoint choices of experts of the steps that miss nothing
_MOST_WARM = 512  # untimed steps before a run
_COUNTS = ("hits", "fetched", "installed", "on_cpu", "promoted")
_BYTES = ("fetched_bytes", "cpu_bytes")
_TIMES = ("fetch_ns", "wait_ns")


@dataclass(frozen=True)
class Replayed:
    """A synthetic trace: its steps before the measurement, its measured ones, and its words."""

    warm: Routing
    timed: Routing
    facts: dict[str, Any]


def offloaded(session: _core.Session) -> bool:
    """Whether the session's experts live in host memory."""
    return "cache" in session.stats()


def replayed(setup: Setup, session: _core.Session, steps: int) -> Replayed | None:
    """The routing of a run of ``steps`` decode steps; None: the model's own.

    ``setup`` asks for one hit rate at most.
    """
    if not setup.hit_rate:
        return None
    (wanted,) = setup.hit_rate
    if not offloaded(session):
        raise InputError("hit_rate needs experts in host memory: add --experts offload")
    shape, cache = session.shape, session.stats()["cache"]
    # A miss fills a line: after so many steps every line has changed about twice.
    misses = max(shape["top_k"] * (1 - wanted), 0.1)
    warm = min(_MOST_WARM, math.ceil(2 * cache["lines"] / misses))
    warm = max(warm, 32, steps // 3 + 1)  # the trace's rate holds after its first quarter
    trace, recency, rate = _core.Trace.synthetic(
        shape["layers"],
        shape["experts"],
        shape["top_k"],
        line_bytes=cache["line_bytes"],
        steps=warm + steps,
        zipf=setup.zipf,
        seed=setup.seed,
        lines=cache["lines"],
        hit_rate=wanted,
    )
    ids = _core.routing_of(trace)
    facts = {
        "routing": "replayed from a synthetic trace",
        "zipf": setup.zipf,
        "recency": recency,
        "seed": setup.seed,
        "lines": cache["lines"],
        "wanted_hit_rate": wanted,
        "recency_policy_hit_rate": rate,
        "warm_steps": warm,
        "steps": steps,
        "hash": hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()[:16],
    }
    return Replayed(ids[:warm], ids[warm:], facts)


def effective(setup: Setup, stats: dict[str, Any]) -> dict[str, Any]:
    """Where the experts are, for the receipt."""
    memory = stats["memory"]
    device = sum(size for name, size in memory.items() if name.startswith("device"))
    found: dict[str, Any] = {"device_bytes": device, "budget_bytes": setup.memory_limit}
    cache = stats.get("cache")
    if cache is None:
        return {**found, "experts": "resident"}
    return {
        **found,
        "experts": "host memory",
        "lines": cache["lines"],
        "experts_a_layer": cache["experts"],
        "line_bytes": cache["line_bytes"],
        "staging_lines": cache["staging_lines"],
        "bank": cache["bank"],
        "policy": cache["policy"],
        "cpu_share": cache["cpu_share"],
        "cpu_share_text": cache["cpu_share_text"],
        "cpu_share_trials": cache["cpu_share_trials"],
        "cpu_threads": cache.get("cpu", {}).get("threads", 0),
        "link_bytes_per_second": setup.link * 1e9 if setup.link else None,
    }


def counts(runs: list[dict[str, Any]], skip: int) -> dict[str, Any]:
    """What the timed decode steps of these runs did, in sum."""
    found: dict[str, Any] = {"steps": sum(len(run["experts"]["hits"]) - skip for run in runs)}
    for name in (*_COUNTS, *_BYTES, *_TIMES):
        found[name] = sum(sum(run["experts"][name][skip:]) for run in runs)
    wanted = found["hits"] + found["fetched"] + found["on_cpu"]
    found["hit_rate"] = found["hits"] / wanted if wanted else 0.0
    return found


def samples(runs: list[dict[str, Any]], skip: int) -> dict[str, list[int]]:
    """Of every timed step: experts by where they came from."""
    return {
        f"step_{name}": [n for run in runs for n in run["experts"][name][skip:]]
        for name in ("hits", "fetched", "on_cpu", "wait_ns")
    }


def line_rate(bounds: Bounds, line_bytes: int, link_limit: float) -> float:
    """Bytes a second from host memory to lines, copied one by one."""
    if bounds.cuda:
        sizes = bounds.link
        nearest = min(sizes, key=lambda s: abs(math.log(s["bytes"] / max(1, line_bytes))))
        rate = float(nearest["to_device"])
    else:
        rate = float(bounds.rates["all_read"])
    return min(rate, link_limit) if link_limit else rate


def peak_rate(bounds: Bounds, link_limit: float) -> float:
    """Bytes a second from host memory to the device in copies of the best size."""
    if bounds.cuda:
        rate = max(float(size["to_device"]) for size in bounds.link)
    else:
        rate = float(bounds.rates["all_read"])
    return min(rate, link_limit) if link_limit else rate


def decode_limit(
    setup: Setup,
    bounds: Bounds,
    limit: dict[str, Any],
    cache: dict[str, Any],
    done: dict[str, Any],
    times: dict[str, float],
) -> None:
    """Adds the misses to the limit of a step that has none.

    Args:
        setup: What was asked for.
        bounds: Rates of this machine.
        limit: Of a step whose experts all have lines; changed.
        cache: The session's cache, from its stats.
        done: What the timed steps did, from :func:`counts`.
        times: Mean seconds of a step: ``step`` and ``all_hit``.
    """
    steps = max(1, done["steps"])
    rate = line_rate(bounds, cache["line_bytes"], setup.link * 1e9)
    fetched, on_cpu = done["fetched_bytes"] / steps, done["cpu_bytes"] / steps
    cpu_rate = 0.0
    if on_cpu:
        host = bounds.rates
        if bounds.cuda:
            host = _core.host_bounds(cache["cpu"]["threads"], setup.isa)
        cpu_rate = float(min(host["all_read"], host["all_exl3"]))
    parts = {
        "card_seconds": limit["bound_seconds"],
        "link_seconds": fetched / rate,
        "processor_seconds": on_cpu / cpu_rate if cpu_rate else 0.0,
    }
    limit["model"] = (
        "the largest of: a step whose experts all have lines (" + limit["model"] + "); bytes"
        " fetched / copy rate at the size of a line; bytes of experts computed by the processor /"
        " the lower of its read rate and its rate of one-row products"
    )
    limit["all_hit_bound_seconds"] = limit["bound_seconds"]
    limit["bound_seconds"] = max(parts.values())
    missed = (fetched + on_cpu) / rate
    limit["misses"] = {
        **parts,
        "fetched_bytes_a_token": fetched,
        "cpu_bytes_a_token": on_cpu,
        "line_bytes": cache["line_bytes"],
        "line_rate": rate,
        "processor_rate": cpu_rate,
        "all_hit_seconds": times["all_hit"],
        "over_all_hit_seconds": times["step"] - times["all_hit"],
        "missed_bytes_over_line_rate_seconds": missed,
        "over_all_hit_of_missed": (times["step"] - times["all_hit"]) / missed if missed else 0.0,
    }


def prefill_limit(
    setup: Setup,
    bounds: Bounds,
    limit: dict[str, Any],
    session: _core.Session,
    streamed: float,
) -> None:
    """Adds the streamed experts to the limit of a prompt's step, which knows only the other ops.

    Args:
        setup: What was asked for.
        bounds: Rates of this machine.
        limit: Of all chunks, without experts; changed.
        session: The session.
        streamed: Bytes that one prompt streamed.
    """
    shape, rows = session.shape, limit["rows"]
    line = session.stats()["cache"]["line_bytes"]
    expert = 3 * shape["hidden"] * shape["expert_inner"]
    shared = 3 * shape["hidden"] * shape["shared_inner"]
    experts = bounds.seconds(
        {
            "weight_bytes": limit["experts_a_layer"] * shape["layers"] * line,
            "other_bytes": 0,
            "exl3_macs": rows * shape["layers"] * (shape["top_k"] * expert + shared),
            "half_macs": 0,
        },
        rows,
    )
    compute = limit["bound_seconds"] + experts * limit["chunks"]
    rate = peak_rate(bounds, setup.link * 1e9)
    limit["model"] = (
        "the larger of: all ops of the prompt with every expert on the device ("
        + limit["model"]
        + ", the experts included); bytes streamed / the best copy rate"
    )
    limit["bound_seconds"] = max(compute, streamed / rate)
    limit["streaming"] = {
        "compute_seconds": compute,
        "link_seconds": streamed / rate,
        "streamed_bytes": streamed,
        "link_rate": rate,
    }
