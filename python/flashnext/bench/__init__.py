"""Benches: decode, prefill and load, each ending in receipts.

``run(bench, setup)`` measures and returns finished receipts; ``flashnext bench`` is its command
line. Random weights (``like``) stand for a model of the same dimensions: speed does not depend on
the values.
"""

from flashnext.bench.runs import BENCHES, run
from flashnext.bench.setup import Setup

__all__ = ["BENCHES", "Setup", "run"]
