"""Where prompts part: positions at which the state of a prompt is worth keeping for later ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Marks:
    """Positions in a prompt, in tokens.

    Attributes:
        turns: where its turns begin, ascending, the opening of the answer among them.
        shared: the end of the system block, which other conversations begin with too; 0: none.
    """

    turns: list[int]
    shared: int = 0


class TurnMarks:
    """Finds turns by the id that opens them, and the system block by its role.

    A chat template may drop or keep what an answer thought, and a client may replace a part of the
    history: prompts of one conversation part where a turn begins.

    Args:
        opening: ids that the template puts before a turn's text, such as those of
            ``<|im_start|>user`` and a line break; empty: the prompts have no turns.
        system: the ids of the system block's beginning in the same form; empty: there is none.
    """

    def __init__(self, opening: Sequence[int], system: Sequence[int]) -> None:
        self._opening = opening[0] if opening else None
        self._system = list(system)

    def find(self, ids: Sequence[int]) -> Marks:
        """The marks of a prompt."""
        if self._opening is None:
            return Marks([])
        turns = [i for i, token in enumerate(ids) if token == self._opening and i > 0]
        begins = self._system and list(ids[: len(self._system)]) == self._system
        return Marks(turns, turns[0] if begins and turns else 0)
