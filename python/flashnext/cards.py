"""What cards can do by their makers' sheets, and the speeds that bytes and rates allow at best."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flashnext.errors import InputError

GIB = 2**30

# GB/s of one PCIe lane: 16 or 32 GT/s with 128 bits in 130.
_LANE = {4: 16 / 8 * 128 / 130, 5: 32 / 8 * 128 / 130}
# Of that, what arrives when lines of 1.8 MB are copied: 51.5 of 63.0 GB/s on an H200, as the
# receipts of its benchmarks have it.
_ARRIVES = 0.82

# A desktop with two channels of DDR5-5600 (89.6 GB/s by the sheet), of which about two thirds can
# be read.
ASSUMED_MEMORY = 60.0


@dataclass(frozen=True)
class Card:
    """A card as its maker's sheet describes it."""

    name: str
    memory_gib: float
    memory_rate: float  # GB/s
    pcie: int  # generation
    lanes: int

    @property
    def link_rate(self) -> float:
        """GB/s at which expert lines can cross the link, in a slot that gives all lanes."""
        return _LANE[self.pcie] * self.lanes * _ARRIVES


# Sources: the specification pages of nvidia.com for the GeForce RTX 50 series ("Memory
# Configuration", "Memory Interface Width" and speed, "PCI Express Gen 5"; the 5060 Ti has x8), the
# data sheets of RTX PRO 6000 Blackwell, H100 and H200 ("GPU memory bandwidth").
CARDS = (
    Card("RTX 5060 Ti 16GB", 16, 448, 5, 8),
    Card("RTX 5070", 12, 672, 5, 16),
    Card("RTX 5070 Ti", 16, 896, 5, 16),
    Card("RTX 5080", 16, 960, 5, 16),
    Card("RTX 5090", 32, 1792, 5, 16),
    Card("RTX PRO 6000", 96, 1792, 5, 16),
    Card("H100", 80, 3350, 5, 16),
    Card("H200", 141, 4800, 5, 16),
)


def _key(name: str) -> str:
    words = name.lower()
    for word in ("nvidia", "geforce", "rtx"):
        words = words.replace(word, "")
    return "".join(c for c in words if c.isalnum())


def card_named(name: str) -> Card:
    """The card of that name; maker, spaces and case do not matter.

    Raises:
        InputError: No such card is in the table; the message lists it.
    """
    wanted = _key(name)
    fitting = [c for c in CARDS if wanted and _key(c.name).startswith(wanted)]
    exact = [c for c in fitting if _key(c.name) == wanted or _key(c.name) == wanted + "16gb"]
    if len(exact or fitting) != 1:
        known = ", ".join(c.name for c in CARDS)
        raise InputError(
            f"no card is named {name!r}; known are {known} (for another, give its --vram, "
            "--bandwidth and --link)"
        )
    return (exact or fitting)[0]


@dataclass(frozen=True)
class Rates:
    """GB/s of the parts that a token's bytes come through."""

    card: float  # the card's memory
    link: float  # host memory to card
    memory: float  # host memory
    cpu: float  # experts that the processor computes


@dataclass(frozen=True)
class Bound:
    """The best tokens per second at one hit rate; no engine can be faster with these rates."""

    hit_rate: float
    missed_bytes: float
    fetch: float  # all misses cross the link
    cpu: float  # the processor computes all misses
    both: float  # misses are shared between them


def bounds(token: dict[str, Any], rates: Rates, hit_rates: Iterable[float]) -> list[Bound]:
    """Tokens per second that the bytes of one token allow.

    Dense weights and state are read from the card while nothing else happens; within a layer,
    experts on the card and missing ones proceed side by side.

    Args:
        token: Bytes of a token, as ``_core.plan`` has them.
        rates: What the machine moves.
        hit_rates: Shares of experts that are on the card, 0 to 1.
    """
    giga = 1e9
    always = token["dense_bytes"] + token["state_bytes"] + token["attention_bytes"]
    dense = always / (rates.card * giga)
    experts = token["expert_bytes"]
    cpu_rate = min(rates.cpu, rates.memory)
    shared_rate = min(rates.link + cpu_rate, max(rates.memory, rates.link))

    def speed(on_card: float, missed: float, rate: float) -> float:
        return 1.0 / float(dense + max(on_card / (rates.card * giga), missed / (rate * giga)))

    found = []
    for hit_rate in hit_rates:
        missed = (1 - hit_rate) * experts
        hits = experts - missed
        found.append(
            Bound(
                hit_rate,
                missed,
                speed(experts, missed, rates.link),  # what was fetched is read there too
                speed(hits, missed, cpu_rate),
                speed(hits, missed, shared_rate),
            )
        )
    return found
