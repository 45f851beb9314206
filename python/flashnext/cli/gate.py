"""``flashnext gate``: may this machine's device run a model?"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from flashnext import contracts, evidence, gate, receipts
from flashnext.errors import InputError
from flashnext.paths import as_path, told
from flashnext.receipts import Receipt

_DESCRIPTION = """\
Runs the gates on a device: every op against the host device, the integer path bit for bit, graphs,
rows, chunks, prefixes and rewinds with ==, and the demo checkpoint against reference answers.
Writes a receipt, which enables the device's architecture for this build if everything passed.
"""


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "gate",
        help="prove a device, and enable it",
        description=_DESCRIPTION,
        epilog="exit codes: 0 every gate passed, 1 one failed or did not run, 2 no such device",
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="cuda, cuda:N or host (default: the first GPU, else the host)",
    )
    parser.add_argument(
        "--receipts",
        metavar="DIR",
        help="write the receipt here instead of the folder of this user",
    )
    parser.add_argument(
        "--contracts",
        metavar="FILE",
        help="also write the kernel-contract records (.md or .json) from this and other receipts",
    )
    parser.add_argument(
        "--no-run",
        action="store_true",
        help="with --contracts: from the receipts at hand alone",
    )
    parser.add_argument("--json", action="store_true", help="print the receipt and nothing else")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    receipt = None
    if not options.no_run or options.contracts is None:
        receipt = _run(options)
    if options.contracts is not None:
        write_contracts(as_path("--contracts", options.contracts), options.receipts, receipt)
    return 0 if receipt is None or receipt["check"]["pass"] else 1


def _run(options: argparse.Namespace) -> Receipt:
    folder = evidence.local_folder() if options.receipts is None else Path(options.receipts)
    if folder is None:
        raise InputError(
            "you have no home folder to keep the receipt in; name one with --receipts DIR, or in "
            "FLASHNEXT_GATES, where sessions look for it too"
        )
    folder = receipts.writable_folder(folder)  # before the gates have taken their time
    device = gate.default_device() if options.device is None else options.device
    show = None if options.json else lambda done: print(line(done), flush=True)
    if not options.json:
        print(f"gate on {device}", flush=True)
    receipt = gate.run(device, on_gate=show, command=("flashnext", *sys.argv[1:]))
    path = receipts.save(receipt, folder)
    if options.json:
        print(json.dumps(receipt, sort_keys=True))
    else:
        print("\n".join(verdict(receipt)))
        print(f"receipt {path}")
    return receipt


def line(done: gate.Gate) -> str:
    """One gate."""
    state = {True: "pass", False: "FAIL", None: "not run"}[done.passed]
    text = f"  {done.name:10} {state:8} {done.seconds:6.1f} s  {done.cases:4} cases  "
    text += gate.GATES[done.name]
    if done.failed:
        text += f"\n             {done.failed} failed; {done.detail}"
    elif done.detail:
        text += f"\n             {done.detail}"
    return text


def verdict(receipt: Receipt) -> list[str]:
    """What follows from it."""
    gpu, check = receipt["machine"]["gpu"], receipt["check"]
    seconds = receipt["counters"]["seconds"]
    if not check["pass"]:
        bad = [*check["failed"], *(f"{name} (not run)" for name in check["not_run"])]
        return [f"FAILED after {seconds:.1f} s: {', '.join(bad)}"]
    if gpu is None:
        return [f"passed in {seconds:.1f} s"]
    build = receipt["code"]["build_id"]
    return [f"passed in {seconds:.1f} s: {gpu['capability']} is enabled for build {build}"]


def write_contracts(path: Path, folder: str | None, own: Receipt | None) -> None:
    """Writes the records; only receipts that passed speak, and the one just made."""
    where = evidence.folders() if folder is None else [as_path("--receipts", folder)]
    found = [r for r in evidence.gate_receipts(where) if r["check"]["pass"]]
    if own is not None:
        found.append(own)
    table = contracts.records(found)
    text = json.dumps(table, indent=1) + "\n" if path.suffix == ".json" else ""
    with told(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text or contracts.markdown(table), encoding="utf-8")
