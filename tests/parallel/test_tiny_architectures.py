"""The shrinker of every architecture: its rules by name, and tiny models that are what they were."""

from __future__ import annotations

import pytest
import torch
from tiny_architectures import MOST, Architecture, cut, sections, size_of, tiny

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("hidden_size", 32),
        ("moe_intermediate_size", 24),
        ("num_local_experts", 4),
        ("kv_lora_rank", 16),
        ("qk_rope_head_dim", 8),
        ("qk_head_dim", None),  # the sum of others
        ("rope_theta", None),
        ("layer_norm_eps", None),
    ],
)
def test_a_name_says_a_size(name: str, size: int | None):
    assert size_of(name) == size


def test_every_kind_of_layer_stays():
    assert cut(["a", "a", "b", "a", "a", "a"]) == ["a", "a", "b", "a"]
    assert set(cut(["a"] * 9 + ["b"] * 9)) == {"a", "b"}
    assert len(cut(["a", "b"] * 20)) == 4


def test_sections_fill_half_of_what_is_turned():
    assert sum(sections({})) == 4
    assert sum(sections({"partial_rotary_factor": 0.5})) == 2


def test_parts_of_parts_are_small_and_meanings_are_no_samples():
    made = tiny(transformers.LlavaConfig, "llava")
    assert made.text_config.hidden_size == made.vision_config.hidden_size == 32
    assert made.image_token_index == 1  # samples have ids from 2 on
    assert made.text_config.vocab_size == 64


@pytest.mark.parametrize(
    ("folder", "name", "kinds"),
    [
        ("gemma3", "Gemma3ForCausalLM", {"sliding_attention", "full_attention"}),
        ("qwen3_next", "Qwen3NextForCausalLM", {"linear_attention", "full_attention"}),
    ],
)
def test_hybrids_stay_hybrids(folder: str, name: str, kinds: set[str]):
    one = Architecture(folder, name)
    torch.manual_seed(0)
    model = one.build()
    assert sum(p.numel() for p in model.parameters()) < MOST
    assert set(model.config.layer_types) == kinds
    outputs = model(**one.inputs(2))
    assert outputs["logits"].isfinite().all()
