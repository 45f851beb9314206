"""Routing traces: what experts a run asked for, and what a cache would have made of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flashnext import _core, checks
from flashnext.errors import InputError
from flashnext.paths import as_path, exists
from flashnext.policy import Policy

Counts = npt.NDArray[np.int64]
_MAX = 2**31 - 1
_DECODE_ROWS = 8  # most rows of a step whose misses are resolved


@dataclass(frozen=True)
class Replay:
    """What a cache would have done.

    Attributes:
        policy: that was asked for.
        lines: experts that a layer could hold.
        hits: distinct experts of all steps and layers that had a line.
        fetched: those that were copied in because a step missed them.
        on_cpu: those that the processor computed.
        promoted: copies that the policy asked for.
        bytes: of all copies.
        hit_rate: hits of all distinct experts, 0 to 1.
        layer_hits: (layers); ``layer_fetched`` and ``layer_promoted`` likewise.
        layer_fetched: see there.
        layer_promoted: see there.
        step_hits: (steps); ``step_fetched`` likewise.
        step_fetched: see there.
        prompt_uses: distinct experts of all prompts' steps, which stream what has no line.
        prompt_hits: those of them that had a line.
        plan_seconds: mean time of a plan.
        fault: what the policy did wrong, when recency took over; else None.
    """

    policy: str
    lines: int
    hits: int
    fetched: int
    on_cpu: int
    promoted: int
    bytes: int
    hit_rate: float
    layer_hits: Counts
    layer_fetched: Counts
    layer_promoted: Counts
    step_hits: Counts
    step_fetched: Counts
    prompt_uses: int
    prompt_hits: int
    plan_seconds: float
    fault: str | None


class Trace:
    """A routing trace, read from a file that ``flashnext bench --trace FILE`` wrote.

    Args:
        path: the file.

    Attributes:
        layers: layers with experts.
        experts: experts of a layer.
        top_k: experts that a token uses in a layer.
        line_bytes: bytes of one expert.
        fingerprint: of the checkpoint; 0 for a synthetic trace.
        steps: decode steps, whose misses are found within them.
        step_rows: rows of those steps together.
        prompt_rows: tokens of prompts, summed over what was recorded of them.

    Raises:
        InputError: the file is no trace, or is damaged; the message says where.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._take(_core.Trace(str(as_path("trace", path))))

    def _take(self, core: _core.Trace) -> None:
        self._core = core
        info = core.info()
        self.layers: int = info["layers"]
        self.experts: int = info["experts"]
        self.top_k: int = info["top_k"]
        self.line_bytes: int = info["line_bytes"]
        self.fingerprint: int = info["fingerprint"]
        self.steps: int = info["steps"]
        self.step_rows: int = info["step_rows"]
        self.prompt_rows: int = info["prompt_rows"]

    @classmethod
    def synthetic(
        cls,
        layers: int,
        experts: int,
        top_k: int,
        *,
        line_bytes: int = 0,
        steps: int = 256,
        rows: int = 1,
        zipf: float = 0.6,
        recency: float = 0.5,
        window: int = 8,
        seed: int = 1,
        tune: tuple[int, float] | None = None,
    ) -> Trace:
        """Makes a trace up.

        Args:
            layers: layers with experts.
            experts: experts of a layer.
            top_k: distinct experts that a row uses.
            line_bytes: bytes of one expert.
            steps: how many.
            rows: of a step.
            zipf: exponent of the popularity of experts, in an order of its own in every layer; 0:
                all alike.
            recency: probability that a choice repeats one of the last ``window`` steps.
            window: see there.
            seed: of the draws.
            tune: ``(lines, hit_rate)``: chooses ``recency`` such that a cache of so many lines
                gets this hit rate under the recency policy, after the first quarter of the steps.

        Raises:
            InputError: an argument is out of range, or the hit rate out of reach.
        """
        lines, hit_rate = (0, 0.0) if tune is None else tune
        core, _, _ = _core.Trace.synthetic(
            checks.whole("layers", layers, 1, _MAX),
            checks.whole("experts", experts, 1, _MAX),
            checks.whole("top_k", top_k, 1, _MAX),
            line_bytes=checks.whole("line_bytes", line_bytes, 0),
            steps=checks.whole("steps", steps, 1, _MAX),
            rows=checks.whole("rows", rows, 1, _MAX),
            zipf=float(zipf),
            recency=float(recency),
            window=checks.whole("window", window, 1, _MAX),
            seed=checks.whole("seed", seed, 0, checks.MAX_SEED),
            lines=checks.whole("lines", lines, 0 if tune is None else 1, _MAX),
            hit_rate=float(hit_rate),
        )
        trace = cls.__new__(cls)
        trace._take(core)
        return trace

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace to a file."""
        self._core.save(str(as_path("trace", path)))

    def uses(self) -> npt.NDArray[np.uint64]:
        """(layers, experts): in how many steps, prompts' included, an expert was used."""
        return self._core.uses()

    def replay(
        self,
        lines: int,
        policy: str | Policy | None = None,
        *,
        seed: int = 0,
        plan_every: int = 16,
        plan_limit: float = 0.05,
        profile: npt.NDArray[np.uint64] | None = None,
        cpu_of: Sequence[int] = (),
    ) -> Replay:
        """Plays the trace through a cache, as the engine would.

        Args:
            lines: experts that a layer can hold.
            policy: a name or an object; None: recency.
            seed: of the policy ``random``.
            plan_every: steps between plans; the first is made before step 1.
            plan_limit: seconds that a plan may take.
            profile: (layers, experts) uses of earlier runs, for the first fill.
            cpu_of: of m misses of a layer the processor computes ``cpu_of[m]``, which take no line:
                ``stats()["cache"]["cpu_of"]`` of a session; empty: all are fetched.

        Raises:
            InputError: an argument is out of range.
        """
        if profile is not None and np.shape(profile) != (self.layers, self.experts):
            raise InputError(
                f"profile has the shape {np.shape(profile)}, expected "
                f"({self.layers}, {self.experts})"
            )
        most = _DECODE_ROWS * self.top_k
        if 0 < len(cpu_of) <= most:
            raise InputError(
                f"cpu_of has {len(cpu_of)} entries, expected {most + 1}, for 0 to {most} misses"
            )
        found: dict[str, Any] = self._core.replay(
            checks.whole("lines", lines, 1, self.experts),
            policy,
            seed=checks.whole("seed", seed, 0, checks.MAX_SEED),
            plan_every=checks.whole("plan_every", plan_every, 1, _MAX),
            plan_limit=float(plan_limit),
            profile=profile,
            cpu_of=[checks.whole("cpu_of", n, 0, _MAX) for n in cpu_of],
        )
        layers, steps = found["layers"], found["steps"]
        name = policy if isinstance(policy, str) else getattr(policy, "name", "recency")
        return Replay(
            policy=str(name),
            lines=lines,
            hits=int(layers["hits"].sum()),
            fetched=int(layers["fetched"].sum()),
            on_cpu=int(layers["on_cpu"].sum()),
            promoted=int(layers["promoted"].sum()),
            bytes=found["bytes"],
            hit_rate=found["hit_rate"],
            layer_hits=layers["hits"],
            layer_fetched=layers["fetched"],
            layer_promoted=layers["promoted"],
            step_hits=steps["hits"],
            step_fetched=steps["fetched"],
            prompt_uses=int(layers["prompt_uses"].sum()),
            prompt_hits=int(layers["prompt_hits"].sum()),
            plan_seconds=found["plan_seconds"] / max(1, found["plans"]),
            fault=found["fault"],
        )

    def profile(self, path: str | os.PathLike[str]) -> npt.NDArray[np.uint64]:
        """Reads a profile of the trace's checkpoint, for :meth:`replay`.

        Raises:
            InputError: there is none, or it is damaged or of another checkpoint.
        """
        file = as_path("profile", path)
        if not exists(file):
            raise InputError(f"profile {path}: there is no such file")
        uses, note = _core.load_profile(str(file), self.fingerprint, self.layers, self.experts)
        if uses is None:
            raise InputError(note)
        return uses
