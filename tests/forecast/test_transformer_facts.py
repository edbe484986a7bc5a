"""Facts of a transformer by arithmetic: sizes as published, work by formula, bytes as torch saves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shoal.base.errors import PlanError
from shoal.base.estimates.estimate import UnitFacts
from shoal.base.estimates.transformer_shape import TransformerShape
from shoal.forecast.memory.framework_memory import framework_memory, own_kernels
from shoal.forecast.models.model_facts import count_model_parameters
from shoal.forecast.models.own_transformers import own_shape
from shoal.forecast.models.published_models import published_shape
from shoal.forecast.models.transformer_costs import Kernels, transformer_facts
from shoal.models.llama import Attention, Block, SwiGLU


def block(
    shape: TransformerShape, sequence: int = 1024, kernels: Kernels | None = None
) -> UnitFacts:
    facts = transformer_facts(shape, sequence, 2, kernels or Kernels())
    return next(unit for unit in facts.units if unit.name == "block")


def units(found: float, shape: TransformerShape, sequence: int = 1024) -> float:
    """Bytes in units of sequence × hidden, without the log-sum-exp of flash attention."""
    return found / (sequence * shape.hidden) - 4 * shape.heads / shape.hidden


def saved(found: UnitFacts) -> float:
    return found.saved_split_bytes + found.saved_plain_bytes


@pytest.mark.parametrize(
    ("name", "billions", "share"),
    [
        ("gpt-2", 0.124439808, 1e-9),  # openai/gpt-2: 124 439 808
        ("gpt-3-125m", 0.125, 0.01),
        ("gpt-3-1.3b", 1.3, 0.02),
        ("gpt-3-175b", 174.6, 0.001),  # table D.1: 174 600 M
        ("llama-2-7b", 6.738415616, 1e-9),
        ("llama-2-70b", 68.976648192, 1e-9),
        ("llama-3-8b", 8.030261248, 1e-9),
        ("llama-3.1-405b", 405.853388800, 1e-9),
        ("mixtral-8x7b", 46.702792704, 1e-9),
        ("mixtral-8x22b", 140.6, 0.001),
        ("deepseek-v2-lite", 15.706484224, 1e-9),
        ("deepseek-v3", 671.026, 1e-4),
        ("vit-b", 0.086567656, 1e-9),  # torchvision vit_b_16
        ("vit-l", 0.304326632, 1e-9),  # torchvision vit_l_16
    ],
)
def test_parameters_are_as_published(name: str, billions: float, share: float) -> None:
    shape = published_shape(name)
    facts = transformer_facts(shape, shape.positions or 1024, 2)
    assert facts.trainable == pytest.approx(billions * 1e9, rel=share)


def test_work_is_two_flop_per_weight_and_token_and_attention() -> None:
    shape, sequence = published_shape("llama-3-8b"), 8192
    facts = transformer_facts(shape, sequence, 2)
    table = shape.vocabulary * shape.hidden
    norms = (2 * shape.layers + 1) * shape.hidden
    products = 2 * (facts.trainable - table - norms) * sequence
    attention = 4 * shape.layers * shape.hidden * sequence**2
    assert facts.forward_flops == products + attention
    assert sum(u.count * u.attention_flops for u in facts.units) == attention


def test_a_window_bounds_attention() -> None:
    shape = replace(published_shape("mistral-7b"), window=4096)
    near, far = block(shape, 4096), block(shape, 16384)
    assert far.attention_flops == 4 * near.attention_flops  # not 16: each query sees 4096 keys


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        (Kernels(), 41.0),
        (Kernels(fused_norm=False), 53.0),
        (Kernels(fused_gate=True), 34.0),
        (Kernels(repeated_kv=True), 44.0),
        (Kernels(wide_residual=True), 51.0),  # fp32 twice; 5 narrow copies of 2 norms, not 2
    ],
)
def test_llama_saves_so_many_units(kernels: Kernels, expected: float) -> None:
    shape = published_shape("llama-3-8b")
    assert units(saved(block(shape, kernels=kernels)), shape) == pytest.approx(expected)


def test_gpt_with_dropout_saves_34_units_and_its_scores() -> None:
    shape = replace(published_shape("gpt-3-6.7b"), dropout=0.1)
    assert units(saved(block(shape)), shape) == pytest.approx(34)
    scores = saved(block(shape, kernels=Kernels(flash=False))) / (1024 * shape.hidden)
    assert scores == pytest.approx(34 + 5 * shape.heads * 1024 / shape.hidden)


def test_every_second_product_of_llama_is_15_5_units() -> None:
    shape = published_shape("llama-3-8b")
    kept = block(shape, kernels=framework_memory("torchtitan").kernels).selective_bytes
    assert units(sum(kept), shape) == pytest.approx(15.5)
    compiled = block(shape, kernels=framework_memory("torchtitan").compiled).selective_bytes
    assert units(sum(compiled), shape) == pytest.approx(13.5)


@pytest.mark.parametrize("sequence", [96, 384])
def test_our_own_block_saves_what_torch_saves(sequence: int) -> None:
    """Every storage that autograd keeps of one fp32 block on the CPU, weights left out."""
    torch.manual_seed(0)
    attention = Attention(64, 4, 2, rope_theta=1e4, dropout=0.0, residual_std=0.02)
    module = Block(attention, SwiGLU(64, 192, residual_std=0.02), 64, 1e-5, 0.0)
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(torch.randn(2, sequence, 64, requires_grad=True))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    found = sum(size for place, size in storages.items() if place not in weights)
    shape = own_shape("llama", {"dim": 64, "layers": 1, "heads": 4, "hidden": 192})
    facts = transformer_facts(shape, sequence, 4, own_kernels("cpu", sequence, 4))
    assert 2 * saved(facts.units[1]) == pytest.approx(found, rel=0.03)


def test_our_family_has_the_size_of_the_built_model() -> None:
    arguments = {"dim": 96, "layers": 3, "heads": 4, "vocabulary": 512, "sequence": 64}
    for tied in (True, False):
        shape = own_shape("llama", {**arguments, "tied": tied})
        facts = transformer_facts(shape, 64, 4)
        assert facts.trainable == count_model_parameters("llama", {**arguments, "tied": tied})
    with pytest.raises(PlanError, match=r"no transformer"):
        own_shape("resnet")


def test_experts_are_counted_apart_and_routers_copied() -> None:
    shape = published_shape("mixtral-8x7b")
    found = block(shape)
    assert found.expert_parameters == 8 * 3 * 4096 * 14336
    assert found.plain_parameters == 2 * 4096 + 8 * 4096
    assert found.routed_bytes == 2 * 2 * 4096 * 1024
    dense = block(replace(shape, experts=0))
    one_more = 2 * 3 * 4096 * 14336 * 1024 + 2 * 4096 * 8 * 1024  # second expert, router
    assert found.forward_flops == dense.forward_flops + one_more


def test_the_first_blocks_of_deepseek_are_dense() -> None:
    facts = transformer_facts(published_shape("deepseek-v3"), 4096, 2)
    assert [(u.name, u.count) for u in facts.units[1:3]] == [("dense block", 3), ("block", 58)]
    active = facts.forward_flops / (2 * 4096)
    assert active < 0.08 * facts.trainable  # 37 of 671 billion, and attention


@pytest.mark.parametrize(("sequence", "width"), [(0, 2), (16, 3)])
def test_impossible_sequences_and_formats_are_refused(sequence: int, width: int) -> None:
    with pytest.raises(PlanError, match=r"try: "):
        transformer_facts(published_shape("gpt-2"), sequence, width)
