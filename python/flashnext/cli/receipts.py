"""``flashnext receipts``: the measurements of a folder, as a table."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from flashnext import receipts
from flashnext.errors import InputError
from flashnext.receipts import Receipt


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "receipts",
        help="list or check measurements",
        description="Prints the receipts of a folder as a table, or checks that all are valid.",
    )
    parser.add_argument("folder", nargs="?", default="receipts", help="default: receipts")
    parser.add_argument(
        "--check", action="store_true", help="only report what is wrong; exit code 2 if anything is"
    )
    parser.add_argument("--json", action="store_true", help="print the receipts, one a line")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    paths = receipts.find(options.folder)
    good: list[Receipt] = []
    bad: list[str] = []
    for path in paths:
        try:
            receipt = receipts.read(path)
            found = receipts.problems(receipt, path.name)
        except InputError as error:
            bad.append(str(error))
            continue
        bad += [f"{path.name}: {problem}" for problem in found]
        if not found:
            good.append(receipt)
    if options.json and not options.check:
        for receipt in good:
            print(json.dumps(receipt, sort_keys=True))
    elif not options.check:
        Console(width=None, highlight=False).print(table(good))
    if bad:
        raise InputError("not valid:\n  " + "\n  ".join(bad))
    if options.check:
        print(f"{len(good)} receipts, all valid")


def headline(receipt: Receipt) -> str:
    """The one number of a receipt."""
    if receipt["skipped"] is not None:
        return "not run"
    counters, summary = receipt["counters"], receipt["summary"]
    if receipt["bench"] == "decode":
        median = summary["step_ns"]["median"] / 1e6
        return f"{median:.3f} ms/token, {counters['decode_tokens_per_second']:.1f} tokens/s"
    if receipt["bench"] == "prefill":
        first = summary["first_token_ns"]["median"] / 1e6
        return f"{first:.1f} ms, {counters['prefill_tokens_per_second']:.0f} tokens/s"
    if receipt["bench"] == "load":
        return f"{summary['warm_ns']['median'] / 1e9:.2f} s"
    if receipt["bench"] == "resources":
        compiled, found = receipt["check"]["compiled_for"], receipt["results"]
        state = "compiled" if receipt["check"]["pass"] else "failed"
        return ", ".join([state, *(f"{a} not run" for a in compiled if found[a]["skipped"])])
    return "passed" if receipt["check"]["pass"] else "failed"


def table(found: list[Receipt]) -> Table:
    """A line a receipt."""
    out = Table(box=None, pad_edge=False)
    for name in ("id", "device", "model", "prompt", "result", "of bound", "citable"):
        out.add_column(name, overflow="fold")
    for receipt in found:
        machine = receipt["machine"]
        gpu = machine["gpu"]
        fraction = receipt["limit"].get("fraction")
        out.add_row(
            receipt["id"],
            machine.get("target", machine["cpu"]) if gpu is None else gpu["name"],
            receipt["model"]["name"],
            str(receipt["workload"].get("prompt_tokens", "")),
            headline(receipt),
            "" if fraction is None else f"{100 * fraction:.0f} %",
            receipts.why_not_citable(receipt) or "yes",
        )
    return out
