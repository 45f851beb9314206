"""Which CUDA architectures are enabled: the receipts of the gate that count here.

A receipt enables the capability of its GPU when

* it is valid (its id holds a hash of its content) and its check passed,
* its ``build_id`` is the one of the running build: a hash over the sources of ``cpp/`` and
  ``cuda/``, taken when the extension module is built (:func:`flashnext.build_info`).

Receipts are looked for among those shipped with the package and in a folder of the user
(:func:`local_folder`), which ``flashnext gate`` writes to.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from flashnext import _core, receipts
from flashnext.errors import InputError
from flashnext.paths import as_path, home
from flashnext.receipts import Receipt


def local_folder() -> Path | None:
    """Where ``flashnext gate`` keeps this user's receipts.

    ``$FLASHNEXT_GATES``, else ``$XDG_DATA_HOME/flashnext/gates``, else
    ``~/.local/share/flashnext/gates``; None for a user without a home.

    Raises:
        InputError: one of the variables is no path.
    """
    if given := os.environ.get("FLASHNEXT_GATES"):
        return as_path("FLASHNEXT_GATES", given)
    if data := os.environ.get("XDG_DATA_HOME"):
        return as_path("XDG_DATA_HOME", data) / "flashnext" / "gates"
    own = home()
    return None if own is None else own / ".local" / "share" / "flashnext" / "gates"


def folders() -> list[Path]:
    """Where gate receipts lie: shipped ones first, then the user's.

    A folder that may not be read vouches for nothing, as one that is not there.
    """
    package = Path(__file__).resolve().parent
    shipped = [package / "gates", package.parents[1] / "receipts"]  # installed; the source tree
    return [folder for folder in (*shipped, local_folder()) if folder and os.path.isdir(folder)]


def gate_receipts(where: Iterable[Path] | None = None) -> list[Receipt]:
    """Every valid receipt of a gate, oldest first; files that are none are passed over."""
    found: dict[str, Receipt] = {}
    for folder in folders() if where is None else where:
        for path in sorted(folder.glob("*-gate-*.json")):
            try:
                receipt = receipts.read(path)
            except InputError:
                continue
            if not receipts.problems(receipt, path.name) and receipt["bench"] == "gate":
                found[receipt["id"]] = receipt
    return sorted(found.values(), key=lambda r: (str(r["utc"]), str(r["id"])))


def why_not_accepted(receipt: Receipt, build_id: str | None = None) -> str | None:
    """Why a gate receipt enables nothing on this build; None when it does."""
    build_id = _core.build_info()["build_id"] if build_id is None else build_id
    if not receipt["check"]["pass"]:
        bad = [*receipt["check"].get("failed", []), *receipt["check"].get("not_run", [])]
        return f"its check failed ({', '.join(bad) or 'no gate is named'})"
    if receipt["skipped"] is not None:
        return f"it was skipped: {receipt['skipped']}"
    if receipt["machine"]["gpu"] is None:
        return "it is of the host device, which needs none"
    if receipt["code"].get("build_id") != build_id:
        return f"it is of build {receipt['code'].get('build_id')}, this is build {build_id}"
    return None


def accepted_capabilities(where: Iterable[Path] | None = None) -> dict[str, str]:
    """CUDA capabilities that a receipt vouches for on this build, with the receipt's id."""
    if not _core.build_info()["cuda"]:
        return {}
    return {
        receipt["machine"]["gpu"]["capability"]: receipt["id"]
        for receipt in gate_receipts(where)
        if why_not_accepted(receipt) is None
    }
