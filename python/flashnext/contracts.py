"""Kernel-contract records: what each family of ops takes, how it sums, and what was shown where.

The text of a family says what is fixed; the evidence comes from receipts of the gate, one
architecture each, and says ``not run`` where there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flashnext import _core
from flashnext.receipts import Receipt

ARCHITECTURES = ("sm_90", "sm_120", "host")
NOT_RUN = "not run"


@dataclass(frozen=True)
class Family:
    """Ops that share kernels."""

    name: str
    ops: tuple[str, ...]
    inputs: str
    accumulation: str


FAMILIES = (
    Family(
        "integer linear",
        ("exl3_linear", "experts"),
        "fp32 rows; EXL3 trellis of K = 1..8 and 1.5, 2.5, 3.5; fp16 scales; 32258 or 127 levels",
        "integers, any order; then fp32 element by element in a fixed order: the host's bits",
    ),
    Family(
        "fp16 products",
        ("mix", "dense"),
        "fp32 rows, fp16 weights",
        "fp32, an order along k that does not depend on the number of rows",
    ),
    Family(
        "streams",
        ("embed", "residual", "mtp_join"),
        "bf16 embedding, fp32 streams",
        "fp32, element by element: the host's bits",
    ),
    Family("norms", ("mtp_norm", "ple_gate"), "fp32", "fp32 sums of a row in a fixed tree"),
    Family(
        "Gated DeltaNet",
        ("gdn_conv", "gdn_recur", "gdn_gate"),
        "fp32 rows, fp16 weights of the gates, fp32 state of 128 by 128 a head",
        "fp32, the token recurrence, keys of a column in a fixed order",
    ),
    Family(
        "attention",
        ("attn_prepare", "attention"),
        "fp32 queries, fp16 keys and values in pages of 64",
        "fp32; tiles of 64 at absolute edges, joined in order",
    ),
    Family(
        "choice",
        ("index_select", "route", "sample"),
        "fp32 scores and logits; of the router fp32 rows and fp16 weights, as fp16 products",
        "fp32; exact choice, ties to the lowest index: the host's answer",
    ),
    Family(
        "expert sum",
        ("combine",),
        "fp32 rows of the slots, fp32 weights",
        "fp32 fma in slot order, the shared expert last: the host's bits",
    ),
    Family(
        "n-gram rows",
        ("ngram_hash", "ngram_gather", "ngram_decode"),
        "token ids; rows of K = 1..8 bits or fp16, at any alignment",
        "64-bit integers; fp16 rounded once: the host's bits",
    ),
    Family(
        "windows",
        ("ple_conv", "window_push"),
        "fp32 rows, fp32 windows of the state",
        "fp32, taps in order: the host's bits",
    ),
    Family(
        "experts in host memory",
        ("resolve", "fetch", "cpu_post", "cpu_join", "pace"),
        "expert ids of up to 128 slots, tables of up to 4096 experts and lines; lines and a "
        "mailbox in pinned memory",
        "none: integers by one rule, copies of bytes, slot rows of the processor; waits have "
        "deadlines",
    ),
)


def records(found: Iterable[Receipt]) -> list[dict[str, Any]]:
    """One record a family; of several receipts of an architecture the last one speaks."""
    by_architecture: dict[str, Receipt] = {}
    for receipt in found:
        gpu = receipt["machine"]["gpu"]
        by_architecture["host" if gpu is None else gpu["capability"]] = receipt
    order = [*ARCHITECTURES, *sorted(set(by_architecture) - set(ARCHITECTURES))]
    table = []
    for family in FAMILIES:
        evidence = {arch: _evidence(family, by_architecture.get(arch)) for arch in order}
        table.append({**asdict(family), "ops": list(family.ops), "evidence": evidence})
    return table


def _evidence(family: Family, receipt: Receipt | None) -> dict[str, Any]:
    if receipt is None:
        return {"state": NOT_RUN}
    mine = [entry for entry in receipt["results"]["ops"] if entry["op"] in family.ops]
    if any(entry["passed"] is None for entry in mine) or len(mine) != len(family.ops):
        state = NOT_RUN
    else:
        state = "passed" if all(entry["passed"] for entry in mine) else "failed"
    return {
        "state": state,
        "receipt": receipt["id"],
        "build_id": receipt["code"].get("build_id"),
        "cases": sum(entry["cases"] for entry in mine),
        "rows": sorted({rows for entry in mine for rows in entry["rows"]}),
        # The worst of the family, or null where a number was missing.
        "max_error": None
        if any(entry["max_error"] is None for entry in mine)
        else max((entry["max_error"] for entry in mine), default=0.0),
        "tolerance": max((entry["tolerance"] for entry in mine), default=0.0),
    }


def uncovered() -> list[str]:
    """Ops of the op table that no family names."""
    named = {op for family in FAMILIES for op in family.ops}
    return [op for op in _core.op_names() if op not in named]


def markdown(table: Sequence[dict[str, Any]]) -> str:
    """The records as a page."""
    architectures = list(table[0]["evidence"])
    lines = [
        "# Kernel contracts",
        "",
        "Made by `flashnext gate --contracts`; not written by hand. Every op is compared with the "
        "host device",
        "(and the host device with its scalar code): bit for bit where the tolerance is 0, else by "
        "the",
        "normwise relative difference. Evidence names the receipt of the gate.",
        "",
        "| family | ops | inputs | accumulation |",
        "|---|---|---|---|",
    ]
    for record in table:
        ops = ", ".join(f"`{op}`" for op in record["ops"])
        lines.append(
            f"| {record['name']} | {ops} | {record['inputs']} | {record['accumulation']} |"
        )
    for architecture in architectures:
        evidence = [(record["name"], record["evidence"][architecture]) for record in table]
        names = {e["receipt"]: e["build_id"] for _, e in evidence if "receipt" in e}
        lines += ["", f"## {architecture}", ""]
        if not names:
            lines.append(f"{NOT_RUN.capitalize()}.")
            continue
        lines += [f"Receipt `{name}`, build `{build}`." for name, build in names.items()]
        lines += [
            "",
            "| family | evidence | cases | rows | worst difference | tolerance |",
            "|---|---|---|---|---|---|",
        ]
        for name, e in evidence:
            worst = "no number" if e["max_error"] is None else f"{e['max_error']:.1e}"
            exact = e["tolerance"] == 0
            lines.append(
                f"| {name} | {e['state']} | {e['cases']} | {_ranges(e['rows'])} | "
                f"{'same bits' if exact and e['state'] == 'passed' else worst} | "
                f"{'0' if exact else format(e['tolerance'], '.0e')} |"
            )
    return "\n".join(lines) + "\n"


def _ranges(rows: Sequence[int]) -> str:
    """[1, 2, 3, 64] as "1-3, 64"."""
    parts: list[list[int]] = []
    for row in rows:
        if parts and row == parts[-1][1] + 1:
            parts[-1][1] = row
        else:
            parts.append([row, row])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)
