"""``flashnext bench``: how fast, against what this machine can do at best."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, TypeVar

from flashnext import bench, receipts
from flashnext.bench import beside
from flashnext.bench.runs import skipped
from flashnext.cli import common, offload
from flashnext.errors import Error, InputError
from flashnext.paths import checkpoint_folder
from flashnext.receipts import Receipt

_Number = TypeVar("_Number", int, float)

_DESCRIPTION = """\
Measures decoding, reading prompts, a prompt beside a decoding request, or opening a model, on
random weights of the real dimensions or on a checkpoint. The bounds of the machine are measured in
the same run, and the tokens are checked: the same ids run twice must draw the same, and so they
must without graphs.
"""


def add(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "bench",
        help="measure speed against the machine's bounds",
        description=_DESCRIPTION,
    )
    parser.add_argument("bench", choices=sorted(bench.BENCHES), help="what to measure")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--like",
        default="flash-next",
        choices=("flash-next", "tiny"),
        help="random weights with the dimensions of this model (default: flash-next)",
    )
    which.add_argument("--model", metavar="PATH", help="checkpoint folder instead")
    parser.add_argument(
        "--layers",
        type=int,
        default=12,
        metavar="N",
        help="layers of the random model; 0: all (default: 12)",
    )
    parser.add_argument(
        "--device", default="auto", metavar="NAME", help="auto, host, cuda or cuda:N"
    )
    parser.add_argument(
        "--context",
        default="2048",
        metavar="N[,N..]",
        help="tokens of the prompt, a run for each (default: 2048)",
    )
    parser.add_argument(
        "--tokens", type=int, default=64, metavar="N", help="decode steps (default: 64)"
    )
    parser.add_argument(
        "--token-wait",
        type=float,
        default=0.2,
        metavar="SECONDS",
        help="beside: how long a token may take while a prompt is read (default: 0.2)",
    )
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="warm runs (default: 3)"
    )
    parser.add_argument(
        "--chunk",
        type=int,
        default=2048,
        metavar="N",
        help="rows of a prefill step (default: 2048)",
    )
    parser.add_argument(
        "--lanes",
        type=int,
        default=1,
        metavar="N",
        help="requests that decode together (default: 1)",
    )
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads")
    parser.add_argument(
        "--levels", type=int, default=32258, choices=(32258, 127), help="activation levels"
    )
    parser.add_argument("--isa", default="auto", help="auto, scalar, avx2 or avx512")
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="of weights and prompts (default: 1)"
    )
    parser.add_argument(
        "--cold", action="store_true", help="open anew, with an empty page cache, for each context"
    )
    parser.add_argument(
        "--memory-budget", type=int, default=0, metavar="BYTES", help="stand for a smaller card"
    )
    offload.add_options(parser)
    _add_expert_options(parser)
    parser.add_argument(
        "--profile",
        type=int,
        default=3,
        metavar="N",
        help="measurements an op family (0: no stage times; default: 3)",
    )
    parser.add_argument(
        "--unproven",
        metavar="SM",
        action="append",
        default=[],
        help="run on this GPU architecture (e.g. sm_90) although no gate receipt vouches for it",
    )
    parser.add_argument("--receipt", metavar="DIR", help="write receipts into this folder")
    parser.add_argument("--json", action="store_true", help="print receipts, one a line")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    parser.set_defaults(run=run)


def _add_expert_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("experts in host memory, for benches")
    group.add_argument(
        "--link",
        type=float,
        default=0.0,
        metavar="GB/S",
        help="play a slower link to the card, by 10**9 bytes a second (default: off)",
    )
    group.add_argument(
        "--hit-rate",
        default="",
        metavar="SHARE[,SHARE..]",
        help="decode with routing replayed from a synthetic trace, made so that the policy "
        "recency finds this share of the experts on the card; a run for each",
    )
    group.add_argument(
        "--zipf",
        type=float,
        default=0.6,
        metavar="X",
        help="skew of that trace: exponent of the popularity of experts (default: 0.6)",
    )
    group.add_argument(
        "--random-ids",
        action="store_true",
        help="decode random ids, instead of feeding each drawn token back",
    )
    group.add_argument("--trace", metavar="FILE", help="record the routing of all steps")


def _numbers(option: str, text: str, kind: type[_Number]) -> tuple[_Number, ...]:
    try:
        return tuple(kind(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise InputError(f"{option} {text}: give numbers separated by commas") from error


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    setup = bench.Setup(
        like=options.like,
        layers=options.layers,
        model=None if options.model is None else str(checkpoint_folder(options.model)),
        device=options.device,
        context=_numbers("--context", options.context, int),
        tokens=options.tokens,
        lanes=options.lanes,
        token_wait=options.token_wait,
        repeats=options.repeats,
        chunk=options.chunk,
        threads=options.threads,
        levels=options.levels,
        isa=options.isa,
        seed=options.seed,
        cold=options.cold,
        memory_budget=options.memory_budget,
        profile=options.profile,
        capabilities=tuple(options.unproven),
        experts=options.experts,
        vram=options.vram,
        ram=options.ram,
        lines=options.lines,
        cpu_misses=options.cpu_misses,
        cpu_threads=options.cpu_threads,
        policy=options.policy,
        profile_file=options.expert_profile,
        link=options.link,
        trace=options.trace,
        hit_rate=_numbers("--hit-rate", options.hit_rate, float),
        zipf=options.zipf,
        random_ids=options.random_ids,
        command=("flashnext", *sys.argv[1:]),
    )
    if options.receipt is not None:
        receipts.writable_folder(options.receipt)  # before the runs have taken their time
    bar = common.new_bar(options)
    try:
        for receipt in bench.run(options.bench, setup, bar.update):
            bar.close()
            _report(receipt, options)
    except Error as error:
        if options.receipt is not None and not isinstance(error, InputError):
            print("receipt", receipts.save(skipped(options.bench, setup, error), options.receipt))
        raise
    finally:
        bar.close()


def _report(receipt: Receipt, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(receipt, sort_keys=True), flush=True)
    else:
        print("\n".join(describe(receipt)), flush=True)
    if options.receipt is not None:
        path = receipts.save(receipt, Path(options.receipt))
        if not options.json:
            print(f"receipt {path}")


def describe(receipt: Receipt) -> list[str]:
    """The lines that a person wants of a receipt."""
    summary, limit = receipt["summary"], receipt["limit"]
    lines = [f"{receipt['bench']}: {receipt['model']['name']} on {receipt['effective']['device']}"]
    if receipt["bench"] == "load":
        for name in ("cold_ns", "warm_ns"):
            if summary[name]["n"]:
                lines.append(f"  open, {name[:4]}: {summary[name]['median'] / 1e9:.2f} s")
        lines.append(f"  {receipt['counters']['bytes_per_second'] / 1e9:.2f} GB/s of weights")
    elif receipt["bench"] == "beside":
        lines += beside.describe(receipt)
    else:
        counters = receipt["counters"]
        first = summary["first_token_ns"]["median"] / 1e6
        cold = summary["first_token_cold_ns"]["median"] / 1e6
        lines.append(
            f"  prompt of {receipt['workload']['prompt_tokens']}: first token after {first:.1f} ms "
            f"(cold {cold:.1f} ms), {counters['prefill_tokens_per_second']:.0f} tokens/s"
        )
        if "step_ns" in summary:
            step = {k: v / 1e6 for k, v in summary["step_ns"].items()}
            lines.append(
                f"  decode: {counters['decode_tokens_per_second']:.1f} tokens/s; a token takes "
                f"{step['mean']:.3f} ms (median {step['median']:.3f}, p99 {step['p99']:.3f})"
            )
    lines += _experts(receipt)
    if "fraction" in limit:
        lines.append(
            f"  the machine's bound is {limit['bound_seconds'] * 1e3:.3f} ms: "
            f"{100 * limit['fraction']:.0f} % of it reached"
        )
    lines += _stages(limit)
    verdict = "passed" if receipt["check"]["pass"] else "FAILED"
    lines.append(f"  check of the tokens: {verdict}")
    return lines


def _experts(receipt: Receipt) -> list[str]:
    """What the experts in host memory did."""
    done, effective = receipt["counters"].get("experts"), receipt["effective"]
    if done is None:
        return []
    steps = max(1, done["steps"])
    hits = receipt["summary"].get("all_hit_ns")  # of one lane alone
    alone = f"; with hits alone it takes {hits['median'] / 1e6:.3f} ms" if hits else ""
    lines = [
        f"  experts: {effective['lines']} of {effective['experts_a_layer']} a layer have lines; "
        f"{100 * done['hit_rate']:.1f} % hits, a token fetches "
        f"{common.size_text(done['fetched_bytes'] / steps)}, the processor computes "
        f"{common.size_text(done['cpu_bytes'] / steps)}{alone}"
    ]
    routing = receipt["workload"]["experts"]
    if "hash" in routing:
        lines.append(
            f"  routing {routing['routing']}, skew {routing['zipf']:g}, recency "
            f"{routing['recency']:.3f}, {routing['hash']}"
        )
    return lines


def _stages(limit: dict[str, Any]) -> list[str]:
    stages = sorted(limit.get("stages", []), key=lambda s: -s["seconds"])
    if not stages:
        return []
    lines = [
        f"  a step of {limit['rows']} rows: {limit['step_seconds'] * 1e3:.3f} ms; stages one by "
        f"one {limit['stage_seconds'] * 1e3:.3f} ms, {limit['launches']} ops"
        + (f", {limit['nodes_a_layer']:.1f} nodes a layer" if limit["nodes"] else "")
    ]
    for stage in stages:
        moved = stage["weight_bytes"] + stage["other_bytes"]
        lines.append(
            f"    {stage['name']:14} x{stage['launches']:<4} {stage['seconds'] * 1e6:10.1f} us  "
            f"{moved / 1e6:9.2f} MB  {100 * stage['fraction']:4.0f} % of the bound"
        )
    return lines
