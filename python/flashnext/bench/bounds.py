"""The least time that a step can take here, from what it must move and multiply."""

from __future__ import annotations

from typing import Any

from flashnext import _core, provenance

_DIGIT_PRODUCTS = 4  # int8 products of one 15-bit by 10-bit product on tensor cores

_CUDA_MODEL = (
    "sum over op families of the largest of bytes / read rate, 4 int8 products an EXL3 product"
    " (2 operations each) / int8 rate, fp16 products / fp16 rate; weights once a step, graph nodes"
    " and overlap of families not counted"
)
_HOST_MODEL = (
    "sum over op families: EXL3 products at the measured rate of one-row (K = 3) or of 128-row"
    " products, or their weights at the measured read rate, whichever takes longer; all other bytes"
    " at the read rate; all threads, {}; fp32 arithmetic not counted"
)
_ONE_ROW_BYTES = 3 / 8  # of a weight in the one-row measurement


class Bounds:
    """Rates measured on the device that a bench runs on."""

    def __init__(self, device: str, threads: int, isa: str) -> None:
        self.cuda = device.startswith("cuda")
        if self.cuda:
            self.rates = _core.cuda_bounds(int(device.partition(":")[2] or 0))
        else:
            self.rates = _core.host_bounds(threads, isa)

    @property
    def link(self) -> list[dict[str, Any]]:
        """Copy rates between host and device."""
        return list(self.rates.get("link", []))

    def limit(self, profile: dict[str, Any], layers: int) -> dict[str, Any]:
        """Bound of a profiled step, whole and stage by stage."""
        weights = sum(f["weight_bytes"] for f in profile["families"])
        cached = not self.cuda and weights < provenance.last_level_cache()
        stages = []
        for family in profile["families"]:
            bound = self._seconds(family, profile["rows"], cached)
            stages.append(
                {
                    **family,
                    "bound_seconds": bound,
                    "fraction": bound / family["seconds"] if family["seconds"] else 0.0,
                }
            )
        where = "weights in the caches" if cached else "weights in memory"
        return {
            "model": _CUDA_MODEL if self.cuda else _HOST_MODEL.format(where),
            "rates": self.rates,
            "rows": profile["rows"],
            "bytes": sum(s["weight_bytes"] + s["other_bytes"] for s in stages),
            "exl3_macs": sum(s["exl3_macs"] for s in stages),
            "half_macs": sum(s["half_macs"] for s in stages),
            "bound_seconds": sum(s["bound_seconds"] for s in stages),
            "step_seconds": profile["seconds"],
            "stage_seconds": sum(s["seconds"] for s in stages),
            "nodes": profile["nodes"],
            "nodes_a_layer": profile["nodes"] / layers,
            "launches": sum(s["launches"] for s in stages),
            "experts_a_layer": profile["experts"],
            "stages": stages,
        }

    def seconds(self, family: dict[str, Any], rows: int) -> float:
        """Bound of one family of ops whose weights lie in memory."""
        return self._seconds(family, rows, cached=False)

    def _seconds(self, family: dict[str, Any], rows: int, cached: bool) -> float:
        weights, other = family["weight_bytes"], family["other_bytes"]
        rates = self.rates
        if not self.cuda:
            read = rates["all_read_cached" if cached else "all_read"]
            if not family["exl3_macs"]:
                return float((weights + other) / read)
            one_row = rates["all_exl3_cached" if cached else "all_exl3"] / _ONE_ROW_BYTES
            products = family["exl3_macs"] / (one_row if rows == 1 else rates["all_exl3_macs"])
            return float(max(weights / read, products) + other / read)
        return float(
            max(
                (weights + other) / rates["read"],
                2 * _DIGIT_PRODUCTS * family["exl3_macs"] / rates["int8_ops"],
                2 * family["half_macs"] / rates["half_flops"],
            )
        )
