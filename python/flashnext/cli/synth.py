"""``flashnext synth``: writes a random checkpoint."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from flashnext import synthetic
from flashnext.cli import common


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "synth",
        help="write a random checkpoint of the real dimensions",
        description=(
            "Writes a checkpoint with random weights: for measuring and testing without the real "
            "one. Its text means nothing. The n-gram table of flash-next is a file with holes."
        ),
    )
    parser.add_argument("out", metavar="OUT", help="a new or empty folder")
    parser.add_argument(
        "--like",
        default="flash-next",
        choices=synthetic.LIKE,
        help="whose dimensions (default: flash-next)",
    )
    parser.add_argument(
        "--layers", type=int, default=0, metavar="N", help="number of layers (default: all)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    bar = common.new_bar(options)
    start = time.monotonic()
    try:
        folder = synthetic.write(
            options.out, options.like, options.layers, seed=options.seed, progress=bar.update
        )
    finally:
        bar.close()
    seconds = time.monotonic() - start
    size = synthetic.disk_bytes(options.like, options.layers)
    if options.json:
        print(json.dumps({"folder": str(folder), "bytes": size, "seconds": seconds}))
        return
    rate = common.size_text(size / seconds)
    print(f"{folder}: {common.size_text(size)} in {seconds:.1f} s ({rate}/s)")
