"""The reference implementation of the architecture, run live on the decoded weights of A."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashnext
from helpers import load_golden
from test_decoder import oracle
from test_golden import VALID, compare, margins

pytestmark = [pytest.mark.reference, pytest.mark.slow]

TRUNK = "model.language_model."
TABLE = "ple.ple_embedding.ngram_embedding"


def decode(folder: Path, reference: Any) -> dict[str, np.ndarray]:
    """All tensors of the text trunk, decoded by the numpy oracle, under the reference's names."""
    checkpoint = reference.Checkpoint(folder)
    linears = set(checkpoint.linears())
    state: dict[str, np.ndarray] = {}
    for name in sorted(linears):
        if not name.startswith("mtp."):
            state[f"{name}.weight"] = reference.weight(checkpoint.tensors(name)).T  # [out, in]
    for name in checkpoint.where:
        if name.startswith("mtp.") or name.rpartition(".")[0] in linears or TABLE in name:
            continue
        state[name] = checkpoint.read(name).astype(np.float32)
    table = checkpoint.ngram()
    rows = np.concatenate([checkpoint.read(name) for name in table["shards"]])
    head = np.searchsorted(table["head_offsets"], np.arange(len(rows)), side="right") - 1
    prefix = table["prefix"].removesuffix(".ngram_embedding")
    values = reference.ngram_rows(rows, table["K"], table["head_bias"][head])
    state[f"{prefix}.ngram_embedding.weight"] = values.astype(np.float32)
    state[f"{prefix}.layer_multipliers"] = table["layer_multipliers"]
    state[f"{prefix}.ngram_heads_offsets"] = table["head_offsets"]
    state[f"{prefix}.ngram_heads_vocab_sizes"] = table["head_vocab_sizes"]
    return {name.replace(TRUNK, "model."): value for name, value in state.items()}


def fuse_experts(state: dict[str, np.ndarray], layers: int, experts: int) -> None:
    """experts.E.{gate,up,down}_proj -> the two stacked tensors that the reference has."""
    for layer in range(layers):
        p = f"model.layers.{layer}.mlp.experts"
        taken = {
            part: [state.pop(f"{p}.{e}.{part}_proj.weight") for e in range(experts)]
            for part in ("gate", "up", "down")
        }
        both = [np.concatenate(pair) for pair in zip(taken["gate"], taken["up"], strict=True)]
        state[f"{p}.gate_up_proj"] = np.stack(both)
        state[f"{p}.down_proj"] = np.stack(taken["down"])


@pytest.fixture(scope="module")
def reference_model() -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install .[reference])")
    pytest.importorskip("transformers", reason="transformers is not installed")
    modeling = pytest.importorskip(
        "transformers.models.qwen4_exp.modeling_qwen4_exp",
        reason="this transformers has no qwen4_exp",
    )
    configuration = pytest.importorskip("transformers.models.qwen4_exp.configuration_qwen4_exp")
    folder = flashnext.demo_path()
    text = json.loads((folder / "config.json").read_text())["text_config"]
    config = configuration.Qwen4ExpTextConfig(**text)
    config._attn_implementation = "eager"
    model = modeling.Qwen4ExpForCausalLM(config).float().eval()
    state = decode(folder, oracle())
    fuse_experts(state, text["num_hidden_layers"], text["num_experts"])
    wanted = model.state_dict()
    assert state.keys() == wanted.keys()
    tensors = {name: torch.from_numpy(np.ascontiguousarray(v)) for name, v in state.items()}
    model.load_state_dict({name: t.reshape(wanted[name].shape) for name, t in tensors.items()})
    return model


def reference_logits(model: Any, ids: list[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
    result: np.ndarray = logits[0].float().numpy()
    return result


def hold(session: flashnext.Session, model: Any, ids: list[int], what: str) -> None:
    expected = reference_logits(model, ids)
    compare(expected, session.logits(ids), expected[:, :VALID].argmax(1), what)


def test_the_reference_is_the_goldens_reference(reference_model: Any) -> None:
    golden = load_golden("A_visible.npz")
    ids, at = golden["4/tokens"].tolist(), golden["4/pos"]
    difference = np.abs(reference_logits(reference_model, ids)[at] - golden["4/logits"])
    assert difference.max() < 1e-2


@pytest.mark.parametrize("prompt", [0, 13, 17])
def test_golden_prompts(session: flashnext.Session, reference_model: Any, prompt: int) -> None:
    ids = load_golden("A_visible.npz")[f"{prompt}/tokens"].tolist()
    hold(session, reference_model, ids, f"prompt {prompt}")


def test_a_fresh_answer(session: flashnext.Session, reference_model: Any) -> None:
    """Text that no golden has: a prompt and the engine's own answer to it."""
    prompt = session.tokenize(
        session.chat_template(
            [{"role": "user", "content": "Tell me a story about a cow and a kite."}]
        )
    )
    answer = session.generate(prompt).tokens
    ids = prompt + answer
    hold(session, reference_model, ids, "fresh answer")
    expected = reference_logits(reference_model, ids)[len(prompt) - 1 : -1, :VALID]
    clear = margins(expected) > 1e-2
    assert (expected.argmax(1) == answer)[clear].all()


def test_random_ids(session: flashnext.Session, reference_model: Any) -> None:
    """Ids in no order, separators among them, past the budget of the sparse attention."""
    ids = np.random.default_rng(5).integers(0, VALID, 150)
    ids[[20, 21, 77]] = 1493
    expected = reference_logits(reference_model, ids.tolist())
    own = session.logits(ids.tolist())
    difference = np.abs(own[:, :VALID] - expected[:, :VALID]).max(1)
    # At a near-tie of the block selection one position may read another block.
    assert np.median(difference) < 2e-2 and np.quantile(difference, 0.9) < 5e-2, difference
