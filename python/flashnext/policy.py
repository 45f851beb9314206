"""Policies: which experts lie on the device, and which go first when others are needed.

A policy is asked before the first step, when it sees what the prompt used, and then every sixteen
steps or so, never inside one. It changes no bit of any answer: only how many experts have to be
fetched. Built in are ``recency`` (the default),
``frequency``, ``static`` and ``random``; a class of your own derives from :class:`Policy`.

A policy that raises, names what does not exist, or takes too long (two plans in a row over 50 ms,
or one over 500 ms) is replaced by ``recency`` for the rest of the run, and the session's notes say
why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flashnext._core import policy_names

__all__ = ["CacheShape", "Counters", "PlanOutput", "Policy", "policy_names"]

ExpertLists = Sequence[Sequence[int]] | npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class CacheShape:
    """What is cached.

    Attributes:
        layers: layers with experts: the trunk's, then that of the MTP head when there is one.
        experts: experts of a layer.
        top_k: experts that a token uses in a layer.
        line_bytes: bytes of one expert, which one fetch moves.
    """

    layers: int
    experts: int
    top_k: int
    line_bytes: int


@dataclass(frozen=True)
class Counters:
    """What a policy sees.

    A use is one expert in one step: eight rows that all pick it use it once. The arrays are
    read-only, and the next plan overwrites them: copy what you keep.

    Attributes:
        shape: layers, experts and so on.
        budget: lines of a layer: experts that it can hold.
        sequence: steps so far; 0 when asked before the first one.
        recent: uint32 (layers, experts), uses since the plan before, prompts' included.
        total: uint64 (layers, experts), uses so far, on top of the profile's.
        last: int32 (layers, experts), the step that used the expert last; 0: never.
        expert_of: int32 (layers, budget), the expert in each line; negative: none, or one that is
            on its way.
    """

    shape: CacheShape
    budget: int
    sequence: int
    recent: npt.NDArray[np.uint32]
    total: npt.NDArray[np.uint64]
    last: npt.NDArray[np.int32]
    expert_of: npt.NDArray[np.int32]


@dataclass
class PlanOutput:
    """What shall happen until the next plan.

    Attributes:
        promote: pairs ``(layer, expert)`` to copy into lines, first ones first; those that have a
            line already are passed over.
        evict: for every layer its experts in the order in which their lines are given up; experts
            that are not named follow, the longest unused first. Empty: nothing is named.
        install: whether an expert that is missed takes a line. False: it passes through, and the
            lines change by promotions alone.
    """

    promote: Sequence[Sequence[int]] | npt.NDArray[np.integer[Any]] = ()
    evict: ExpertLists = ()
    install: bool = True


class Policy:
    """Base of policies in Python. As it stands it does what ``recency`` does.

    Attributes:
        name: how notes and tables call it; by default the name of the class.

    Example:
        A policy that protects the experts used most since the start and lets the rest come and go:

        >>> class KeepFavourites(flashnext.Policy):
        ...     def plan(self, counters):
        ...         order = counters.total.argsort(axis=1, kind="stable")
        ...         return flashnext.PlanOutput(evict=order[:, : -counters.budget // 2])
        >>> trace = flashnext.Trace("run.trace")  # of `flashnext bench --trace run.trace`
        >>> trace.replay(lines=64, policy=KeepFavourites()).hit_rate
        0.62
    """

    name: str

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__

    def initial(
        self, shape: CacheShape, budget: int, profile: npt.NDArray[np.uint64] | None
    ) -> ExpertLists:
        """Chooses what the lines hold at first.

        Args:
            shape: layers, experts and so on.
            budget: lines of a layer.
            profile: (layers, experts) uses of earlier runs, or None when none are known.

        Returns:
            For every layer the ids of experts, best first; at most ``budget`` of them count.
        """
        if profile is None:
            return np.tile(np.arange(min(budget, shape.experts)), (shape.layers, 1))
        # Most used first, lower ids first among equals.
        rising = np.argsort(profile[:, ::-1], axis=1, kind="stable")
        best: npt.NDArray[np.int64] = (shape.experts - 1 - rising)[:, ::-1][:, :budget]
        return best

    def plan(self, counters: Counters) -> PlanOutput:
        """Decides what changes until the next plan; called before the first step, too.

        It must be quick: a few milliseconds.
        """
        del counters
        return PlanOutput()


Policy.name = "recency"
