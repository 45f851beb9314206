"""Decoder bits: against tensors decoded by another implementation, and against the formulas."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

import flashnext
import tensors
from flashnext import _core
from helpers import SHARED, checkpoint, load_golden

RATES = [1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8]
LEVELS = 32258


def value(sums: np.ndarray) -> np.ndarray:
    """Byte sums -> fp16 codebook values, one rounding: rn16((887 B - 452608) / 2^17)."""
    return ((887 * sums.astype(np.int64) - 452608) / 131072.0).astype(np.float16)


def golden_names(letter: str) -> list[str]:
    golden = load_golden(f"{letter}_decoder.npz")
    return [name.removeprefix("rot/") for name in golden.files if name.startswith("rot/")]


def oracle() -> Any:
    path = SHARED / "oracle" / "exl3_ref.py"
    if not path.exists():
        pytest.skip("the numpy oracle is not in ../shared/oracle")
    spec = importlib.util.spec_from_file_location("exl3_ref", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def isas() -> list[str]:
    order = ["scalar", "avx2", "avx512"]
    return order[: order.index(flashnext.build_info()["isa"]) + 1]


@pytest.mark.parametrize("letter", ["A", "B"])
def test_rotated_weights_bit_for_bit(letter: str) -> None:
    golden, folder = load_golden(f"{letter}_decoder.npz"), checkpoint(letter)
    names = golden_names(letter)
    assert len(names) == 12
    for name in names:
        sums = _core.exl3_reconstruct_sums(tensors.read(folder, f"{name}.trellis"))
        expected = golden[f"rot/{name}"]
        assert (value(sums).view(np.uint16) == expected.view(np.uint16)).all(), name


@pytest.mark.parametrize("letter", ["A", "B"])
def test_weights_in_the_original_basis(letter: str) -> None:
    golden, folder = load_golden(f"{letter}_decoder.npz"), checkpoint(letter)
    for name in golden_names(letter):
        expected = golden[f"w/{name}"]  # first rows of [in, out]
        trellis, suh, svh = (tensors.read(folder, f"{name}.{m}") for m in ("trellis", "suh", "svh"))
        rows = np.eye(len(expected), len(suh), dtype=np.float32)
        own = _core.exl3_linear(trellis, suh.view(np.uint16), svh.view(np.uint16), rows)
        error = np.linalg.norm(own - expected) / np.linalg.norm(expected)
        # The integer linear leaves out the rounding of weights to fp16: 2.1e-4 relative.
        assert error < 5e-4, (name, error)


@pytest.mark.parametrize(("letter", "bits"), [("A", 5), ("B", 4)])
def test_ngram_rows(letter: str, bits: int) -> None:
    golden, folder = load_golden(f"{letter}_decoder.npz"), checkpoint(letter)
    header, _ = tensors.read_header(folder / "ngram_embedding.safetensors")
    shards = sorted(
        (name for name in header if name.endswith(".trellis")),
        key=lambda name: int(name.rsplit("shard_", 1)[1].split(".")[0]),
    )
    prefix = shards[0].rsplit(".shard_", 1)[0]
    table = np.concatenate([tensors.read(folder, shard) for shard in shards])
    bias = tensors.read(folder, f"{prefix}.head_bias")
    offsets = tensors.read(folder, f"{prefix}.head_offsets")
    for part, at in (("rows_0_8", np.arange(8)), ("rows_last_8", np.arange(-8, 0))):
        rows = np.arange(len(table))[at]
        head = np.searchsorted(offsets, rows, side="right") - 1
        own = _core.ring_rows(np.ascontiguousarray(table[rows]), bits, bias[head].view(np.uint16))
        expected = golden[f"ngram/{part}"].astype(np.float16)
        assert (own.astype(np.float16).view(np.uint16) == expected.view(np.uint16)).all(), part


def test_codebook_values_of_the_format_description() -> None:
    own = _core.exl3_codebook()
    for state, bits in [
        (0x0000, 0xC2E8),
        (0x0001, 0x3921),
        (0x0123, 0xB4CB),
        (0x1234, 0xB89E),
        (0x8000, 0xBAF2),
        (0xFFFF, 0xB936),
    ]:
        assert own[state] == bits, hex(state)


def test_codebook_of_every_state() -> None:
    product = np.arange(65536, dtype=np.uint64) * np.uint64(0x83DCD12D) & np.uint64(0xFFFFFFFF)
    sums = sum((product >> np.uint64(8 * i)) & np.uint64(255) for i in range(4))
    assert (_core.exl3_codebook() == value(np.asarray(sums)).view(np.uint16)).all()


@pytest.mark.parametrize("rate", RATES)
def test_random_tiles_against_the_oracle(rate: float) -> None:
    ref = oracle()
    rng = np.random.default_rng(int(rate * 2))
    trellis = rng.integers(-32768, 32768, (8, 24, int(16 * rate)), np.int16)
    expected = ref.reconstruct(trellis, rate, "mul1")
    own = value(_core.exl3_reconstruct_sums(trellis))
    assert (own.view(np.uint16) == expected.view(np.uint16)).all()


@pytest.mark.parametrize("bits", range(1, 9))
def test_random_rings_against_the_oracle(bits: int) -> None:
    ref = oracle()
    rng = np.random.default_rng(bits)
    rows = rng.integers(-32768, 32768, (50, 1 + 10 * bits), np.int16)
    rows[:, 0] = rng.uniform(0.01, 2, 50).astype(np.float16).view(np.int16)
    bias = rng.normal(size=(50, 160)).astype(np.float16)
    for given in (bias, None):
        expected = ref.ngram_rows(rows, bits, given)
        own = _core.ring_rows(rows, bits, None if given is None else given.view(np.uint16))
        assert (own.astype(np.float16).view(np.uint16) == expected.view(np.uint16)).all()


def butterflies(x: np.ndarray) -> np.ndarray:
    """fp32 [rows, n]: Hadamard of each block of 128, the operation order of the contract."""
    x = x.astype(np.float32).reshape(len(x), -1, 128).copy()
    stride = 1
    while stride < 128:
        pairs = x.reshape(len(x), x.shape[1], -1, 2, stride)
        a, b = pairs[..., 0, :].copy(), pairs[..., 1, :].copy()
        pairs[..., 0, :], pairs[..., 1, :] = a + b, a - b
        stride *= 2
    return (x * np.float32(0.08838834764831845)).reshape(len(x), -1)


def integer_linear(
    sums: np.ndarray, suh: np.ndarray, svh: np.ndarray, x: np.ndarray, levels: int
) -> np.ndarray:
    """The integer linear step by step in numpy: x fp32 [rows, in] -> fp32 [rows, out]."""
    u = butterflies(x * suh.astype(np.float32))
    top = np.abs(u).max(1, keepdims=True)
    r, q = np.float32(levels) / top, top / np.float32(levels)
    v = np.clip(np.rint(u * r), -levels, levels).astype(np.int64)
    a = v @ (sums.astype(np.int64) - 510)
    s = v.sum(1, keepdims=True)
    scaled = q * a.astype(np.float32)
    constant = np.float32(-238 / 2**17) * (q * s.astype(np.float32))
    # One rounding, as a fused multiply-add has.
    exact = scaled.astype(np.longdouble) * np.longdouble(887 / 2**17) + constant
    return butterflies(exact.astype(np.float32)) * svh.astype(np.float32)


@pytest.mark.parametrize("levels", [LEVELS, 127])
@pytest.mark.parametrize("rate", RATES)
def test_integer_linear_bit_for_bit(rate: float, levels: int) -> None:
    rng = np.random.default_rng(int(10 * rate))
    n_in, n_out = 384, 256
    trellis = rng.integers(-32768, 32768, (n_in // 16, n_out // 16, int(16 * rate)), np.int16)
    suh = (rng.choice([-1.0, 1.0], n_in) * rng.uniform(0.02, 0.06, n_in)).astype(np.float16)
    svh = rng.choice([-1.0, 1.0], n_out).astype(np.float16)
    x = rng.normal(size=(5, n_in)).astype(np.float32)
    sums = _core.exl3_reconstruct_sums(trellis)
    expected = integer_linear(sums, suh, svh, x, levels)
    weight = (trellis, suh.view(np.uint16), svh.view(np.uint16))
    for isa in isas():
        own = _core.exl3_linear(*weight, x, levels, isa, 1)
        assert (own.view(np.uint32) == expected.view(np.uint32)).all(), isa
        two = _core.exl3_linear(*weight, x, levels, isa, 2)
        one = np.concatenate(
            [_core.exl3_linear(*weight, x[r : r + 1], levels, isa, 1) for r in range(5)]
        )
        assert (own == two).all() and (own == one).all(), isa


@pytest.mark.parametrize("name", ["exp", "sigmoid", "silu", "softplus"])
def test_elementary_functions(name: str) -> None:
    x = np.linspace(-80, 80, 100001).astype(np.float32)
    wide = x.astype(np.longdouble)
    expected = {
        "exp": lambda: np.exp(wide),
        "sigmoid": lambda: 1 / (1 + np.exp(-wide)),
        "silu": lambda: wide / (1 + np.exp(-wide)),
        "softplus": lambda: np.log1p(np.exp(wide)),
    }[name]()
    own = _core.elementwise(name, x)
    error = np.abs(own - expected) / np.maximum(np.abs(expected), np.finfo(np.float32).tiny)
    assert error.max() < (5e-7 if name != "softplus" else 2e-6), error.max()
