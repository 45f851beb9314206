"""``flashnext inspect``: what is in a checkpoint, and does it fit."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flashnext import pack
from flashnext.checks import whole
from flashnext.cli.common import size_text
from flashnext.errors import InputError
from flashnext.paths import demo_path

_BAD_CHECKPOINT = 3

# place -> (what it is, where it lives)
_PLACES = {
    "experts": ("routed experts", "mapped file, used in place"),
    "dense": ("EXL3 dense linears and head", "mapped file, used in place"),
    "fp16": ("16-bit weights", "memory"),
    "embedding": ("token embedding", "mapped file"),
    "mtp": ("draft head", "mapped file; its 16-bit weights in memory"),
    "ngram_table": ("n-gram table", "mapped file, rows read on demand"),
}


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "inspect",
        help="show what is in a checkpoint, what it needs and what is wrong with it",
        description=(
            "Reads the configuration, the headers, the 16-bit weights and the tokenizer of a "
            "checkpoint (not the EXL3 weights) and shows its shape, its tensors by family and "
            "bits, the bytes by place, and every problem. Exit code 3 if there is a problem."
        ),
    )
    parser.add_argument(
        "path", nargs="?", help="checkpoint folder (default: the installed demo model)"
    )
    parser.add_argument(
        "--window", type=int, metavar="N", help="tokens to plan memory for (default: 32768)"
    )
    parser.add_argument(
        "--lanes", type=int, default=1, metavar="N", help="requests at once to plan memory for"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    report = pack.inspect(demo_path() if options.path is None else options.path)
    report["plan"] = memory_plan(report, options.window, options.lanes)
    if options.json:
        print(json.dumps(report))
    else:
        _print(report)
    return _BAD_CHECKPOINT if report["problems"] else 0


def memory_plan(report: dict[str, Any], window: int | None, lanes: int) -> dict[str, Any]:
    """Bytes of memory for a window and a number of lanes, against what this machine has.

    Mapped parts (EXL3 linears, embedding, n-gram table) are read in place: they need no memory of
    their own, but decoding is only fast while the page cache holds the experts.
    """
    lanes = whole("lanes", lanes, 1)
    limit = int((report.get("shape") or {}).get("max_positions") or 0)
    if window is not None:
        whole("window", window, 1)
        if limit and window > limit:
            raise InputError(f"window is {window}, and the model's limit is {limit} positions")
    elif limit:
        window = min(32768, limit)
    else:
        window = 32768
    places = report.get("places", {})
    own = int(places.get("fp16", 0))
    # Lanes share the pages of a window and a quarter more for each further lane.
    positions = window + (lanes - 1) * ((window + 3) // 4)
    state = positions * int(places.get("kv_per_token", 0)) + lanes * int(
        places.get("state_per_lane", 0)
    )
    mapped = sum(int(places.get(part, 0)) for part in ("experts", "dense", "embedding", "mtp"))
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "window": window,
        "lanes": lanes,
        "weights_bytes": own,
        "state_bytes": state,
        "mapped_bytes": mapped,
        "ngram_table_bytes": int(places.get("ngram_table", 0)),
        "machine_bytes": machine,
        "fits": own + state <= machine,
        "fits_with_experts_cached": own + state + mapped <= machine,
    }


def _print(report: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{report['folder']}", markup=False)
    console.print(
        f"{int(report.get('parameters', 0)):,} parameters, {size_text(report.get('bytes', 0))} "
        f"in {len(report['files'])} files"
    )
    shape = report.get("shape") or {}
    if shape:
        text = ", ".join(
            f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}"
            for k, v in shape.items()
            if not isinstance(v, (list, dict))
        )
        console.print(f"shape: {text}", markup=False)
    _print_families(console, report)
    _print_places(console, report)
    for note in report["notes"]:
        console.print(f"note: {note}", markup=False)
    for problem in report["problems"]:
        console.print(f"PROBLEM: {problem}", markup=False)
    count = len(report["problems"])
    console.print("no problems" if count == 0 else f"{count} problem{'s' if count > 1 else ''}")


def _print_families(console: Console, report: dict[str, Any]) -> None:
    table = Table("family", "tensors", "bytes", "bits per weight", box=None)
    for column in (1, 2):
        table.columns[column].justify = "right"
    for family in report["families"]:
        bits = ", ".join(f"{k:g} ({n})" for k, n in family.get("bits", {}).items())
        table.add_row(
            escape(family["family"]),
            str(family["tensors"]),
            size_text(family["bytes"]),
            bits or "-",
        )
    console.print(table)


def _print_places(console: Console, report: dict[str, Any]) -> None:
    places, plan = report.get("places", {}), report["plan"]
    table = Table("part", "bytes", "on the host device", box=None)
    table.columns[1].justify = "right"
    for part, (label, where) in _PLACES.items():
        if part in places:
            table.add_row(label, size_text(places[part]), where)
    table.add_row(
        f"state of {plan['lanes']} x {plan['window']} tokens",
        size_text(plan["state_bytes"]),
        "memory",
    )
    console.print(table)
    need = plan["weights_bytes"] + plan["state_bytes"]
    verdict = (
        "fits, experts and all"
        if plan["fits_with_experts_cached"]
        else "fits, but the experts are read from the disk again and again"
        if plan["fits"]
        else "does not fit"
    )
    console.print(
        f"memory: {size_text(need)} needed, {size_text(plan['mapped_bytes'])} mapped, "
        f"{size_text(plan['machine_bytes'])} in this machine: {verdict}"
    )
