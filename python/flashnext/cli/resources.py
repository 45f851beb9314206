"""``flashnext resources``: what the compiled kernels take, without a card."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from flashnext import receipts, resources
from flashnext.receipts import Receipt


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "resources",
        help="registers and memory of the compiled kernels",
        description=(
            "Reads registers, stack and shared memory of every CUDA kernel from the compiled "
            "library, for each architecture in it. Needs cuobjdump of the CUDA toolkit, no card."
        ),
        epilog="exit codes: 0 the check passed, 1 it failed, 2 no cuobjdump or no kernels",
    )
    parser.add_argument(
        "--library",
        metavar="PATH",
        help="an extension module or libflashnext_cuda.a (default: the module of this build)",
    )
    parser.add_argument("--receipt", metavar="DIR", help="write a receipt into this folder")
    parser.add_argument("--json", action="store_true", help="print the receipt and nothing else")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    receipt = resources.report(options.library, command=("flashnext", *sys.argv[1:]))
    path = None if options.receipt is None else receipts.save(receipt, options.receipt)
    if options.json:
        print(json.dumps(receipt, sort_keys=True))
    else:
        print("\n".join(lines(receipt)))
        if path is not None:
            print(f"receipt {path}")
    return 0 if receipt["check"]["pass"] else 1


def lines(receipt: Receipt) -> list[str]:
    """An architecture after the other: the sum, and the kernels that have a stack."""
    out = []
    for arch in receipt["check"]["compiled_for"]:
        found = receipt["results"][arch]
        most = found["most_registers"]
        out.append(
            f"{arch}: {len(found['kernels'])} kernels, at most {most['registers']} registers "
            f"({most['kernel']}), {len(found['with_stack'])} with a stack"
        )
        out += [
            f"  {kernel['name']:36} {kernel['use']:13} {kernel['registers']:3} registers, "
            f"{kernel['stack_bytes']} bytes of stack"
            for kernel in found["kernels"]
            if kernel["stack_bytes"]
        ]
        out.append(f"  {found['skipped'] or 'covered by ' + found['gate']}")
    check = receipt["check"]
    out.append("check passed" if check["pass"] else "check FAILED")
    for name in ("not_compiled_for", "not_in_all", "names_without_kernel"):
        out += [f"  {name.replace('_', ' ')}: {entry}" for entry in check[name]]
    out += [
        f"  {entry['arch']}: decode kernel {entry['kernel']} has {entry['bytes']} bytes of stack"
        for entry in check["decode_stack_unexpected"]
    ]
    return out
