"""``flashnext plan``: does a model fit on a card and a machine, and how fast can it be."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flashnext import _core
from flashnext.cards import ASSUMED_MEMORY, CARDS, GIB, Bound, Card, Rates, bounds, card_named
from flashnext.checks import MAX_INT, real, whole
from flashnext.cli.common import new_bar, size_text
from flashnext.errors import InputError
from flashnext.options import memory_bytes
from flashnext.paths import checkpoint_folder, demo_path

_SYSTEM = 2 * GIB  # RAM that a running system takes
_SMALL = 1_000_000  # bytes; what is less is shown together
_CONTEXT = 0.75  # GB of a card that the driver, the code and a screen take

_DESCRIPTION = """\
Adds up what a session takes of a card and of RAM, before anything is taken, and says how many
experts a layer stay on the card and how fast decoding can be at best. Needs no GPU. Sizes of cards
and RAM are as sold: 1 GB of --vram and --ram is 2^30 bytes. Exit code 4 when it does not fit.
"""


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "plan",
        help="show whether a model fits on a card and in RAM, and its speed bounds",
        description=_DESCRIPTION,
    )
    parser.add_argument(
        "path",
        nargs="?",
        help="checkpoint folder, or synthetic:flash-next[:LAYERS] for the dimensions alone "
        "(default: the installed demo model)",
    )
    card = parser.add_argument_group("card")
    card.add_argument(
        "--gpu",
        default=CARDS[0].name,
        metavar="NAME",
        help=f"one of {', '.join(c.name for c in CARDS)} (default: {CARDS[0].name})",
    )
    card.add_argument("--vram", type=float, metavar="GB", help="its memory, if not the sheet's")
    card.add_argument(
        "--vram-reserve",
        type=float,
        default=_CONTEXT,
        metavar="GB",
        help=f"of it, what driver, code and a screen take (default: {_CONTEXT})",
    )
    card.add_argument("--bandwidth", type=float, metavar="GB/s", help="of its memory")
    card.add_argument("--link", type=float, metavar="GB/s", help="from host memory to the card")
    host = parser.add_argument_group("host")
    host.add_argument("--ram", type=float, metavar="GB", help="its RAM (default: this machine's)")
    host.add_argument(
        "--memory",
        type=float,
        default=ASSUMED_MEMORY,
        metavar="GB/s",
        help=f"rate of its RAM (default: {ASSUMED_MEMORY:g}, two channels of DDR5)",
    )
    host.add_argument(
        "--cpu",
        type=float,
        metavar="GB/s",
        help="rate at which the processor computes experts (default: as fast as its RAM)",
    )
    session = parser.add_argument_group("session")
    session.add_argument(
        "--window", type=int, metavar="N", help="tokens of a sequence (default: 32768)"
    )
    session.add_argument("--lanes", type=int, default=1, metavar="N", help="requests at once")
    session.add_argument(
        "--kv",
        type=float,
        metavar="GB",
        help="KV pages that requests share (default: a window, and a quarter a further lane)",
    )
    session.add_argument(
        "--chunk",
        type=int,
        default=0,
        metavar="N",
        help="tokens of a prompt in one step (default: 512, or 2048 with experts in RAM)",
    )
    session.add_argument(
        "--snapshots", type=int, default=16, metavar="N", help="prefixes remembered (default: 8)"
    )
    session.add_argument(
        "--experts", default="auto", choices=("auto", "resident", "offload"), help="default: auto"
    )
    session.add_argument(
        "--lines", type=int, default=0, metavar="N", help="experts a layer on the card (0: all fit)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    card = _card(options)
    rates = Rates(
        card.memory_rate,
        card.link_rate if options.link is None else _positive("link", options.link),
        _positive("memory", options.memory),
        _positive("memory" if options.cpu is None else "cpu", options.cpu or options.memory),
    )
    plan = _plan(options, card)
    share = plan["lines"] / plan["experts_per_layer"]
    hit_rates = (
        [1.0]
        if plan["experts"] == "resident"
        else sorted({0.0, 0.25, 0.5, 0.75, 0.9, 1.0, round(share, 3)})
    )
    found = bounds(plan["token"], rates, hit_rates)
    if options.json:
        report = {"plan": plan, "card": asdict(card), "rates": asdict(rates)}
        print(json.dumps({**report, "bounds": [asdict(bound) for bound in found]}))
        return
    console = Console(highlight=False, soft_wrap=True)
    _print_memory(console, plan, card)
    _print_speed(console, plan, rates, found, assumed=options.memory == ASSUMED_MEMORY)


def _positive(name: str, value: float) -> float:
    number = real(name, value, "more than 0")
    if number <= 0:
        raise InputError(f"{name} is {number:g}, expected more than 0")
    return number


def _card(options: argparse.Namespace) -> Card:
    card = card_named(options.gpu)
    changes: dict[str, Any] = {}
    if options.vram is not None:
        changes["memory_gib"] = _positive("vram", options.vram)
    if options.bandwidth is not None:
        changes["memory_rate"] = _positive("bandwidth", options.bandwidth)
    return Card(**{**asdict(card), **changes})


def _plan(options: argparse.Namespace, card: Card) -> dict[str, Any]:
    path = options.path
    if path is None or not path.startswith("synthetic:"):
        path = str(demo_path() if path is None else checkpoint_folder(path))
    reserve = real("vram_reserve", options.vram_reserve, "0 or more")
    if not 0 <= reserve < card.memory_gib:
        raise InputError(f"vram_reserve is {reserve:g}, expected 0 to less than --vram")
    if options.ram is None:
        ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        ram = int(_positive("ram", options.ram) * GIB)
    bar = new_bar(options)
    try:
        plan = _core.plan(
            path,
            vram=int((card.memory_gib - reserve) * GIB),
            ram=max(ram - _SYSTEM, 0),
            reserve=max(_SYSTEM, ram // 20),
            window=0 if options.window is None else whole("window", options.window, 1, MAX_INT),
            lanes=whole("lanes", options.lanes, 1, MAX_INT),
            kv_bytes=memory_bytes("kv", options.kv),
            chunk=whole("chunk", options.chunk, 0, MAX_INT),
            snapshots=whole("snapshots", options.snapshots, 0, MAX_INT),
            experts=options.experts,
            cache_lines=whole("lines", options.lines, 0, MAX_INT),
            progress=bar.update,
        )
    finally:
        bar.close()
    return {"path": path, "ram": ram, **plan}


def _print_memory(console: Console, plan: dict[str, Any], card: Card) -> None:
    console.print(
        f"{plan['path']}: {plan['lanes']} x {plan['window']} tokens on {card.name} "
        f"({card.memory_gib:g} GB, {card.memory_rate:g} GB/s) with "
        f"{plan['ram'] / GIB:.0f} GB of RAM",
        markup=False,
    )
    table = Table("part", "card", "RAM", box=None)
    for column in (1, 2):
        table.columns[column].justify = "right"
    small = [0, 0]
    for part in plan["parts"]:
        on_card = part["space"] == "device"
        if part["bytes"] < _SMALL:
            small[0 if on_card else 1] += part["bytes"]
            continue
        size = size_text(part["bytes"])
        table.add_row(escape(part["what"]), size if on_card else "", "" if on_card else size)
    table.add_row("small parts", *(size_text(size) for size in small))
    table.add_row("together", size_text(plan["device_bytes"]), size_text(plan["host_bytes"]))
    console.print(table)
    if not plan["exact_scratch"]:
        console.print(
            "scratch (activations): the host device's sizes, since this build has no CUDA; the "
            "card's differ by a little"
        )
    if plan["experts"] == "resident":
        console.print("experts: all of them on the card")
    else:
        console.print(
            f"experts: {plan['lines']} of {plan['experts_per_layer']} a layer on the card; one "
            f"more takes {size_text(plan['line_bytes_all_layers'])}"
        )
        console.print(
            f"bank: {size_text(plan['bank_pinned_bytes'])} of experts in RAM, "
            f"{size_text(plan['bank_mapped_bytes'])} left in the files"
        )
        if plan["bank_mapped_bytes"]:
            console.print(
                "note: experts in the files are computed by the processor, and read from the disk "
                "where the page cache does not hold them: the bounds below do not hold for them",
                markup=False,
            )
    if plan["ngram_mapped_bytes"]:
        console.print(
            f"n-gram table: {size_text(plan['ngram_mapped_bytes'])} in the files, a few rows a "
            "token"
        )


def _print_speed(
    console: Console, plan: dict[str, Any], rates: Rates, found: list[Bound], *, assumed: bool
) -> None:
    token = plan["token"]
    console.print(
        f"a token reads {size_text(token['dense_bytes'])} of weights, "
        f"{size_text(token['expert_bytes'])} of experts and, at the end of the window, "
        f"{size_text(token['state_bytes'] + token['attention_bytes'])} of state"
    )
    console.print(
        f"rates in GB/s: card {rates.card:.0f}, link {rates.link:.1f}, RAM {rates.memory:.0f}"
        f"{' (assumed)' if assumed else ''}, processor {rates.cpu:.0f}"
    )
    console.print("tokens per second at best, one request, no drafts:")
    if plan["experts"] == "resident":
        console.print(f"  {found[0].fetch:.1f}")
        return
    table = Table("hits", "missed a token", "fetched", "on the processor", "shared", box=None)
    for column in range(5):
        table.columns[column].justify = "right"
    share = round(plan["lines"] / plan["experts_per_layer"], 3)
    for bound in found:
        hits = f"{100 * bound.hit_rate:.0f} %"
        table.add_row(
            f"random {hits}" if bound.hit_rate == share else hits,
            size_text(bound.missed_bytes),
            *(f"{speed:.1f}" for speed in (bound.fetch, bound.cpu, bound.both)),
        )
    console.print(table)
    console.print("random: what routing at random would hit, the share of experts on the card")
