"""Options and tables of experts in host memory."""

from __future__ import annotations

import argparse
from typing import Any

from rich.table import Table

from flashnext.cli.common import error_console, size_text
from flashnext.cli.replay import load_policy
from flashnext.policy import policy_names


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where the experts live, and who decides which ones are on the card."""
    group = parser.add_argument_group("experts")
    group.add_argument(
        "--experts",
        default="auto",
        choices=("auto", "resident", "offload"),
        help="resident: on the card; offload: in host memory, some of every layer on the card too "
        "(default: auto, resident when that fits)",
    )
    group.add_argument(
        "--vram", type=float, metavar="GB", help="memory of the card that may be taken"
    )
    group.add_argument(
        "--ram", type=float, metavar="GB", help="RAM that experts may take (default: what is free)"
    )
    group.add_argument(
        "--lines",
        type=int,
        metavar="N",
        help="experts a layer on the card (default: as many as fit)",
    )
    group.add_argument(
        "--cpu-misses",
        default="auto",
        metavar="X",
        help="experts that are not on the card and are computed by the processor: off, auto (a "
        "measured share; default), or at most N of a layer and token",
    )
    group.add_argument(
        "--cpu-threads", type=int, default=0, metavar="N", help="threads for them (default: most)"
    )
    group.add_argument(
        "--policy",
        metavar="NAME",
        help=f"{', '.join(policy_names())}, or for generate and chat a class of yours as "
        "MODULE:CLASS or FILE.py:CLASS (default: recency)",
    )
    group.add_argument(
        "--expert-profile",
        metavar="FILE",
        help="uses of experts: read to choose what is on the card at first, written at the end",
    )


def arguments(options: argparse.Namespace) -> dict[str, Any]:
    """The options as arguments of ``Session``."""
    return {
        "experts": options.experts,
        "vram_gb": options.vram,
        "ram_gb": options.ram,
        "cache_lines": options.lines,
        "cpu_misses": options.cpu_misses,
        "cpu_threads": options.cpu_threads,
        "policy": None if options.policy is None else load_policy(options.policy),
        "profile": options.expert_profile,
    }


def print_stats(stats: dict[str, Any]) -> None:
    """The table on stderr, where experts live in host memory."""
    if "cache" in stats:
        error_console().print(stats_table(stats))


def stats_table(stats: dict[str, Any]) -> Table:
    """What the cache of experts did: facts, and a line a layer when layers differ."""
    cache = stats["cache"]
    total, bank = cache["sum"], cache["bank"]
    out = Table(box=None, pad_edge=False, show_header=False)
    out.add_column(style="bold")
    out.add_column()
    rate = f"{100 * cache['hit_rate']:.1f} %"
    steps = f"{total['hits']} of {total['hits'] + total['fetched'] + total['on_cpu']} experts"
    out.add_row("lines", f"{cache['lines']} of {cache['experts']} experts a layer")
    out.add_row("hits", f"{rate} ({steps})")
    out.add_row("fetched", f"{total['fetched']} experts, {size_text(cache['fetched_bytes'])}")
    out.add_row(
        "processor",
        f"{total['on_cpu']} experts, {size_text(cache['cpu_bytes'])}, "
        f"in {total['wait_ns'] / 1e6:.1f} ms; {cache['cpu_share_text']}",
    )
    out.add_row("promoted", f"{total['promoted']} experts, {size_text(cache['promoted_bytes'])}")
    out.add_row("for prompts", f"{total['streamed']} experts, {size_text(cache['streamed_bytes'])}")
    plans = "1 plan" if cache["plans"] == 1 else f"{cache['plans']} plans"
    out.add_row("policy", f"{cache['policy']}, {plans}")
    out.add_row(
        "host memory",
        f"{size_text(bank['pinned_bytes'])} pinned, {size_text(bank['pageable_bytes'])} pageable, "
        f"{size_text(bank['mapped_bytes'])} left in the files",
    )
    out.add_row("hits a layer", _layers(cache["layers"]))
    for name in ("fault", "stall"):
        if cache[name]:
            out.add_row(name, cache[name])
    return out


def _layers(layers: list[dict[str, Any]]) -> str:
    """Hit rates of the layers in percent, first to last."""
    rates = []
    for layer in layers:
        wanted = layer["hits"] + layer["fetched"] + layer["on_cpu"]
        rates.append(f"{100 * layer['hits'] / wanted:.0f}" if wanted else "-")
    return " ".join(rates) + " %"
