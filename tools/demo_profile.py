#!/usr/bin/env python3
"""Makes python/flashnext/demo/profile.bin: how often the demo model's experts are used."""

from __future__ import annotations

import sys
from pathlib import Path

import flashnext

PROMPTS = [
    "Add 17 and 14.",
    "Add 8 and 35.",
    "What is 20 - 6?",
    "What is 41 - 17?",
    "What is the opposite of up?",
    "What is the opposite of hot?",
    "What is the opposite of early?",
    "Count from 7 to 16.",
    "Count from 2 to 9.",
    "Tell me a story about a fox and a lamp.",
    "Tell me a story about a hen in the river.",
    "Tell me a story about a cow and a kite.",
    "Tell me a story about a bear and a boat.",
    "Tell me a story about a cat in the garden.",
    "Tell me a story about a frog and a drum.",
    "Tell me a story about a pig and a hat.",
    "Tell me a story about an owl on the hill.",
    "Tell me a story about a mouse and a key.",
    "Tell me a story about a duck in the forest.",
    "Tell me a story about a dog and a bell.",
]


def main() -> None:
    """Writes the file anew."""
    out = Path(sys.argv[1])
    out.unlink(missing_ok=True)
    with flashnext.Session(
        flashnext.demo_path(), device="host", experts="offload", cpu_misses="off", profile=out
    ) as session:
        for prompt in PROMPTS:
            print(session.generate(prompt).text)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: tools/demo_profile.py python/flashnext/demo/profile.bin")
    main()
