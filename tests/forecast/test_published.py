"""Published shapes by name and from config.json; errors name the key and the nearest spelling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.base.errors import ConfigError
from shoal.forecast.models.published_models import SHAPES, published_shape, shape_from_config
from shoal.forecast.models.transformer_costs import transformer_facts

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_name_gives_facts_that_add_up(name: str) -> None:
    shape = published_shape(name)
    facts = transformer_facts(shape, shape.positions or 2048, 2)
    assert facts.trainable == sum(unit.count * unit.parameters for unit in facts.units)
    assert sum(unit.count for unit in facts.units) == shape.layers + 2
    assert shape.hidden == shape.heads * shape.head_width or shape.latent


def test_names_are_forgiving_and_the_unknown_gets_the_nearest() -> None:
    assert published_shape("Meta-Llama-3-8B") is published_shape("llama-3-8b")
    assert published_shape("gpt3-175b").layers == 96
    with pytest.raises(ConfigError, match=r"try: llama-3\.1-405b"):
        published_shape("llama-3.1-450b")


def test_llama_from_config_is_the_published_one() -> None:
    shape = shape_from_config(LLAMA)
    assert transformer_facts(shape, 64, 2).trainable == 8_030_261_248


def test_mixtral_and_deepseek_from_config() -> None:
    mixtral = shape_from_config(
        {
            **LLAMA,
            "model_type": "mixtral",
            "vocab_size": 32000,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        }
    )
    assert transformer_facts(mixtral, 64, 2).trainable == 46_702_792_704
    deepseek = shape_from_config(
        {
            "model_type": "deepseek_v3",
            "num_hidden_layers": 61,
            "hidden_size": 7168,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "vocab_size": 129280,
        }
    )
    one, other = (transformer_facts(s, 64, 2) for s in (deepseek, published_shape("deepseek-v3")))
    assert one.units == other.units


def test_gpt2_and_vit_from_config() -> None:
    gpt = shape_from_config(
        {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024}
        | {"vocab_size": 50257}
    )
    assert transformer_facts(gpt, 1024, 2).trainable == 124_439_808
    vit = shape_from_config(
        {
            "model_type": "vit",
            "num_hidden_layers": 12,
            "hidden_size": 768,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "image_size": 224,
            "patch_size": 16,
            "id2label": {str(label): "" for label in range(1000)},
        }
    )
    assert transformer_facts(vit, 197, 4).trainable == 86_567_656


def test_a_folder_a_file_and_what_is_wrong_with_them(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(ConfigError, match=r"cannot be read"):
        shape_from_config(tmp_path)
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"no JSON"):
        shape_from_config(file)
    file.write_text("[]")
    with pytest.raises(ConfigError, match=r"no object"):
        shape_from_config(file)
    file.write_text(json.dumps(LLAMA))
    assert shape_from_config(tmp_path).kv_heads == 8


def test_a_missing_or_wrong_key_is_named() -> None:
    broken = {key: value for key, value in LLAMA.items() if key != "hidden_size"}
    with pytest.raises(
        ConfigError, match=r"key hidden_size is missing; nearest key there: hidden_sizes"
    ):
        shape_from_config({**broken, "hidden_sizes": 4096})
    with pytest.raises(ConfigError, match=r"vocab_size = '32k': needs a whole number"):
        shape_from_config({**LLAMA, "vocab_size": "32k"})


DECODER = {"model_type": "gemma", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 99,
           "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128}  # fmt: skip


def test_families_under_other_keys() -> None:
    """Published totals: OPT-6.7B, BLOOM-7.1B, Falcon-7B; Gemma ties its head without saying so."""
    opt = {"model_type": "opt", "hidden_size": 4096, "num_hidden_layers": 32, "ffn_dim": 16384,
           "num_attention_heads": 32, "vocab_size": 50272, "max_position_embeddings": 2048}  # fmt: skip
    bloom = {"model_type": "bloom", "hidden_size": 4096, "n_layer": 30, "n_head": 32,
             "vocab_size": 250880}  # fmt: skip
    falcon = {"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32,
              "num_attention_heads": 71, "vocab_size": 65024}  # fmt: skip
    for config, billions in ((opt, 6.66), (bloom, 7.07), (falcon, 6.92)):
        facts = transformer_facts(shape_from_config(config), 2048, 2)
        assert facts.trainable / 1e9 == pytest.approx(billions, rel=0.01), config
    assert shape_from_config(DECODER).tied


def test_the_longest_sequence_of_a_config_is_known() -> None:
    assert shape_from_config({**DECODER, "max_position_embeddings": 4096}).context == 4096
    assert published_shape("llama-2-7b").context == 4096
