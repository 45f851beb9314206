"""``flashnext replay`` and ``flashnext heatmap``: what a run's routing trace says."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from flashnext import heatmap
from flashnext.cli.common import size_text
from flashnext.errors import InputError
from flashnext.policy import Policy, policy_names
from flashnext.traces import Replay, Trace

_BLOCKS = "▁▂▃▄▅▆▇█"
_COLUMNS = 60  # of a plot

_DESCRIPTION = """\
Plays a routing trace through caches of several sizes under several policies, on the host, with the
code that the engine runs. Record a trace with `flashnext bench --trace FILE`.
"""


def add(commands: Any) -> None:
    """Adds both commands."""
    parser = commands.add_parser(
        "replay", help="compare cache policies on a recorded trace", description=_DESCRIPTION
    )
    parser.add_argument("file", metavar="FILE", help="the trace")
    parser.add_argument(
        "--lines",
        type=int,
        nargs="+",
        required=True,
        metavar="N",
        help="experts that a layer's cache holds; several for a table of sizes",
    )
    parser.add_argument(
        "--policy",
        action="append",
        metavar="NAME",
        help=f"{', '.join(policy_names())}, or a class of yours as MODULE:CLASS or FILE.py:CLASS; "
        "may be given several times (default: all that are built in)",
    )
    parser.add_argument(
        "--plan-every", type=int, default=16, metavar="N", help="steps between plans (default: 16)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the policy random")
    parser.add_argument(
        "--profile", metavar="FILE", help="fill the cache at first by this profile of earlier runs"
    )
    parser.add_argument(
        "--plot", action="store_true", help="also show the hit rate in the course of the trace"
    )
    parser.add_argument("--heatmap", metavar="OUT.png", help="also draw the map of `heatmap`")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.set_defaults(run=run)

    picture = commands.add_parser(
        "heatmap",
        help="draw which experts a recorded trace used",
        description="Draws the experts of every layer, coloured by how many steps of the trace "
        "used them, as a PNG file.",
    )
    picture.add_argument("file", metavar="FILE", help="the trace")
    picture.add_argument("out", metavar="OUT.png", help="the picture")
    picture.set_defaults(run=run_heatmap)


def run(options: argparse.Namespace) -> None:
    """Runs ``replay``."""
    policies = [(name, load_policy(name)) for name in options.policy or policy_names()]
    trace = Trace(options.file)
    profile = None if options.profile is None else trace.profile(options.profile)
    if options.heatmap is not None:
        draw(trace, options.heatmap)
    found = [
        (
            name,
            trace.replay(
                lines, policy, seed=options.seed, plan_every=options.plan_every, profile=profile
            ),
        )
        for lines in options.lines
        for name, policy in policies
    ]
    if options.json:
        print(json.dumps({"trace": describe(trace), "results": [result(*one) for one in found]}))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(summary(trace), markup=False)
    console.print(table(trace, found))
    if options.plot:
        console.print()
        for name, one in found:
            console.print(f"{plot(one)}  {name}, {one.lines} lines", markup=False)
    for name, one in found:
        if one.fault is not None:
            print(f"{name}: {one.fault}", file=sys.stderr)


def run_heatmap(options: argparse.Namespace) -> None:
    """Runs ``heatmap``."""
    draw(Trace(options.file), options.out)


def draw(trace: Trace, out: str) -> None:
    """Writes the picture."""
    heatmap.save(trace.uses(), out)


def load_policy(name: str) -> str | Policy:
    """A built-in policy's name, or an object of a class that is named by its module or file."""
    where, colon, attribute = name.rpartition(":")
    if not colon:
        if name not in policy_names():
            raise InputError(
                f"there is no policy {name!r}; known: {', '.join(policy_names())}, "
                "or MODULE:CLASS for one of yours"
            )
        return name
    try:
        made = getattr(_module(where), attribute)()
    except (Exception, SystemExit) as error:
        raise InputError(f"policy {name}: {type(error).__name__}: {error}") from error
    if not (hasattr(made, "initial") and hasattr(made, "plan")):
        raise InputError(f"policy {name} is no flashnext.Policy: it lacks initial or plan")
    policy: Policy = made
    return policy


def _module(where: str) -> ModuleType:
    if not where.endswith(".py"):
        if "" not in sys.path:
            sys.path.insert(0, "")  # modules of the folder that the program was started in
        return importlib.import_module(where)
    path = Path(where)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {where}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def describe(trace: Trace) -> dict[str, Any]:
    """The trace in numbers."""
    names = ("layers", "experts", "top_k", "line_bytes", "steps", "step_rows", "prompt_rows")
    return {name: getattr(trace, name) for name in names}


def result(name: str, one: Replay) -> dict[str, Any]:
    """One result for JSON."""
    steps = max(1, len(one.step_hits))
    return {
        "policy": name,
        "lines": one.lines,
        "hit_rate": one.hit_rate,
        "hits": one.hits,
        "fetched": one.fetched,
        "promoted": one.promoted,
        "bytes": one.bytes,
        "bytes_per_step": one.bytes / steps,
        "prompt_uses": one.prompt_uses,
        "prompt_hits": one.prompt_hits,
        "plan_seconds": one.plan_seconds,
        "fault": one.fault,
    }


def summary(trace: Trace) -> str:
    """The trace in one line."""
    text = (
        f"{trace.steps} steps of {trace.step_rows} rows, {trace.layers} layers of "
        f"{trace.experts} experts, {trace.top_k} a token"
    )
    if trace.line_bytes:
        text += f", {size_text(trace.line_bytes)} each"
    if trace.prompt_rows:
        text += f"; prompts: {trace.prompt_rows} rows"
    return text


def table(trace: Trace, found: list[tuple[str, Replay]]) -> Table:
    """A line a result; the best of a size is marked."""
    out = Table(box=None, pad_edge=False)
    out.add_column("lines", justify="right")
    out.add_column("policy")
    for name in ("hits", "fetched", "promoted", "copied/step", "plan"):
        out.add_column(name, justify="right")
    best: dict[int, float] = {}
    for _, one in found:
        best[one.lines] = max(best.get(one.lines, 0.0), one.hit_rate)
    for name, one in found:
        mark = " *" if len(found) > len(best) and one.hit_rate == best[one.lines] else "  "
        steps = max(1, len(one.step_hits))
        copies = (one.fetched + one.promoted) / steps
        out.add_row(
            str(one.lines),
            name + ("" if one.fault is None else " (failed, then recency)"),
            f"{100 * one.hit_rate:.1f} %{mark}",
            str(one.fetched),
            str(one.promoted),
            size_text(one.bytes / steps) if trace.line_bytes else f"{copies:.1f} experts",
            f"{1e3 * one.plan_seconds:.2f} ms",
        )
    return out


def plot(one: Replay) -> str:
    """The hit rate in the course of the trace, from 0 to 100 %."""
    hits, uses = one.step_hits, one.step_hits + one.step_fetched
    parts = [p for p in np.array_split(np.arange(len(hits)), _COLUMNS) if len(p)]
    rates = [float(hits[p].sum()) / max(1, int(uses[p].sum())) for p in parts]
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round(rate * top)] for rate in rates)
