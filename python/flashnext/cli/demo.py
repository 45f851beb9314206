"""``flashnext demo-path``: where the demo model lies."""

from __future__ import annotations

import argparse
import json
from typing import Any

from flashnext.paths import demo_path


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "demo-path",
        help="print the folder of the installed demo model",
        description="Prints the folder of the small demo checkpoint installed with the program.",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    path = str(demo_path())
    print(json.dumps({"path": path}) if options.json else path)
