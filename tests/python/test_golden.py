"""The goldens: logits, draft logits and streams of two independent reference implementations."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import flashnext
from flashnext import _core, evidence
from helpers import capability, checkpoint, load_golden

PROMPTS = range(20)
VALID = 1498  # columns from here on are padding
MAX_MEAN_KL = 1e-6
MARGIN = 1e-3
WITH_DRAFTS = [prompt for prompt in PROMPTS if prompt != 12]  # 12 is a single token
WITH_STREAMS = [17, 18]


DEVICES = ["host", pytest.param("cuda", marks=pytest.mark.gpu)]

_opened: list[Any] = []


@cache
def open_checkpoint(letter: str, device: str) -> flashnext.Session:
    with pytest.MonkeyPatch.context() as patch:
        if device != "host":  # the gate has its own tests; here any compiled architecture will do
            patch.setattr(evidence, "accepted_capabilities", lambda: [capability()])
        _opened.append(flashnext.Session(checkpoint(letter), device=device))
    return _opened[-1]


@cache
def open_with_drafts(letter: str, device: str) -> _core.Session:
    """With the draft head, which a session has only when it is asked for."""
    on = {} if device == "host" else {"capabilities": [capability()]}
    _opened.append(_core.Session(str(checkpoint(letter)), device=device, mtp=True, **on))
    return _opened[-1]


@pytest.fixture(scope="module", autouse=True)
def _close_sessions() -> Any:
    yield
    for session in _opened:
        session.close()
    _opened.clear()
    open_checkpoint.cache_clear()
    open_with_drafts.cache_clear()


def kl(reference: np.ndarray, own: np.ndarray) -> np.ndarray:
    """KL divergence of each row in float64: float [rows, vocab] twice -> float64 [rows]."""

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64)
        x = x - x.max(1, keepdims=True)
        return x - np.log(np.exp(x).sum(1, keepdims=True))

    p, q = log_softmax(reference), log_softmax(own)
    return (np.exp(p) * (p - q)).sum(1)


def margins(logits: np.ndarray) -> np.ndarray:
    """Distance of the best from the second best: float [rows, vocab] -> float64 [rows]."""
    top = np.sort(logits.astype(np.float64), 1)[:, -2:]
    return top[:, 1] - top[:, 0]


def compare(reference: np.ndarray, own: np.ndarray, argmax: np.ndarray, what: str) -> None:
    """Holds own logits at some positions against the reference's there."""
    assert own.dtype == np.float32
    assert np.isfinite(own[:, :VALID]).all()
    divergence = kl(reference[:, :VALID], own[:, :VALID])
    print(f"{what}: mean KL {divergence.mean():.2e}, worst {divergence.max():.2e}")
    assert divergence.mean() < MAX_MEAN_KL, f"{what}: KL by position {divergence}"
    clear = margins(reference[:, :VALID]) > MARGIN
    assert clear.any()
    np.testing.assert_array_equal(own[clear, :VALID].argmax(1), argmax[clear], what)


def test_the_measure_itself() -> None:
    a, b = np.log([[0.5, 0.5]]).astype(np.float32), np.log([[0.25, 0.75]]).astype(np.float32)
    expected = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    np.testing.assert_allclose(kl(a, b + np.float32(3)), [expected], rtol=1e-6)
    assert kl(a, a) == 0
    reference = load_golden("A_visible.npz")["0/logits"]
    noise = np.random.default_rng(0).normal(size=reference.shape).astype(np.float32)
    with pytest.raises(AssertionError, match="KL"):
        compare(reference, reference + np.float32(5e-3) * noise, reference.argmax(1), "noise")


@pytest.mark.parametrize("letter", ["A", "B"])
def test_every_answer_of_the_golden_is_used(letter: str) -> None:
    names = load_golden(f"{letter}_visible.npz").files
    have = {kind: [p for p in PROMPTS if f"{p}/{kind}" in names] for kind in ("mtp_pos", "logits")}
    assert have == {"mtp_pos": WITH_DRAFTS, "logits": list(PROMPTS)}
    assert [p for p in PROMPTS if f"{p}/streams_last" in names] == WITH_STREAMS
    assert f"{len(PROMPTS)}/tokens" not in names


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("letter", ["A", "B"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits(device: str, letter: str, prompt: int) -> None:
    golden, session = load_golden(f"{letter}_visible.npz"), open_checkpoint(letter, device)
    tokens, at = golden[f"{prompt}/tokens"], golden[f"{prompt}/pos"]
    own = session.logits(tokens)
    assert own.shape == (len(tokens), 1536)
    argmax = golden[f"{prompt}/argmax"]
    compare(golden[f"{prompt}/logits"], own[at], argmax[at], f"{letter} {prompt}")
    # The reference has logits at some positions only; where our margin is clear, its is too.
    clear = margins(own[:, :VALID]) > 2 * MARGIN
    np.testing.assert_array_equal(own[clear, :VALID].argmax(1), argmax[clear])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("letter", ["A", "B"])
@pytest.mark.parametrize("prompt", WITH_DRAFTS)
def test_draft_logits(device: str, letter: str, prompt: int) -> None:
    golden = load_golden(f"{letter}_visible.npz")
    tokens, at = golden[f"{prompt}/tokens"], golden[f"{prompt}/mtp_pos"]
    own = open_with_drafts(letter, device).mtp_logits(tokens.tolist())
    assert own.shape == (len(tokens) - 1, 1536)
    argmax = golden[f"{prompt}/mtp_argmax"]
    compare(golden[f"{prompt}/mtp_logits"], own[at], argmax[at], f"{letter} {prompt} draft")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("letter", ["A", "B"])
@pytest.mark.parametrize("prompt", WITH_STREAMS)
def test_streams(device: str, letter: str, prompt: int) -> None:
    golden = load_golden(f"{letter}_visible.npz")
    reference = golden[f"{prompt}/streams_last"]  # [layers, streams * hidden]
    on = {} if device == "host" else {"capabilities": [capability()]}
    tapped = _core.Session(str(checkpoint(letter)), device=device, taps=True, **on)
    own = tapped.streams(golden[f"{prompt}/tokens"].tolist())
    assert own.shape == reference.shape
    error = np.linalg.norm(own.astype(np.float64) - reference, axis=1)
    relative = error / np.linalg.norm(reference.astype(np.float64), axis=1)
    print(f"{letter} {prompt}: relative error by layer {relative}")
    assert (relative < 1e-3).all(), relative
