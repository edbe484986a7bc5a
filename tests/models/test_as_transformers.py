"""Our Llama under transformers' names and configuration computes the same, to fp32 rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.forecast.models.model_facts import resolve_model
from shoal.models.as_transformers import llama_config, llama_name
from shoal.models.catalog import build
from shoal.models.llama import Llama

transformers = pytest.importorskip("transformers")

ARGUMENTS: dict[str, Any] = {
    "dim": 48, "layers": 3, "heads": 6, "kv_heads": 2, "hidden": 72, "vocabulary": 97,
    "sequence": 40, "rope_theta": 300.0, "norm_epsilon": 1e-2, "tied": False,
}  # fmt: skip


def pair(**changed: Any) -> tuple[Llama, Any]:
    """Our model, and transformers' with its weights; weights larger than at the start."""
    torch.manual_seed(0)
    ours = build("llama", {**ARGUMENTS, **changed}).eval()
    assert isinstance(ours, Llama)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(5).add_(0.1 * torch.randn_like(parameter))
    told = llama_config(resolve_model("llama", {**ARGUMENTS, **changed}).arguments, 0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**told)).eval()
    state = {llama_name(name): tensor for name, tensor in ours.state_dict().items()}
    theirs.load_state_dict(state, strict=True)
    return ours, theirs


@torch.no_grad()
def distances(ours: Llama, theirs: Any) -> tuple[float, float]:
    """How far theirs is from ours, and how far ours is from itself in float64: its rounding."""
    tokens = torch.randint(97, (4, 40), generator=torch.Generator().manual_seed(1))
    found = ours(tokens).logits()
    apart = (found - theirs(tokens).logits).abs().max()
    exact = ours.double()(tokens).logits()
    assert exact.std() > 0.5, "logits that differ"
    return float(apart), float((found - exact).abs().max())


@pytest.mark.parametrize("changed", [{}, {"tied": True}, {"kv_heads": 6}, {"rope_theta": 1e4}])
def test_logits_are_equal_to_rounding(changed: dict[str, Any]) -> None:
    apart, rounding = distances(*pair(**changed))
    assert apart <= 4 * rounding


@pytest.mark.parametrize("wrong", ["rms_norm_eps", "rope_parameters", "num_attention_heads"])
def test_a_configuration_with_one_value_wrong_would_be_seen(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: dict[str, Any] = {
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "num_attention_heads": 12,
    }
    real = llama_config

    def mistaken(*given: Any) -> dict[str, Any]:
        told = {**real(*given), wrong: values[wrong]}
        if wrong == "num_attention_heads":
            told |= {"num_key_value_heads": 4, "head_dim": 4}
        return told

    monkeypatch.setitem(globals(), "llama_config", mistaken)
    apart, rounding = distances(*pair())
    assert apart > 100 * rounding


def test_a_name_of_another_model_is_not_guessed() -> None:
    with pytest.raises(KeyError, match="positions.weight"):
        llama_name("positions.weight")
