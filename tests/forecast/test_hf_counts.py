"""Parameters by a config.json: those of the class in transformers, or the type refused by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.base.errors import ConfigError
from shoal.base.estimates.estimate import ModelFacts
from shoal.cli import plan_subject
from shoal.cli.plan_subject import resolve_model_facts
from shoal.config.load import load_config
from shoal.forecast.machines.cluster_syntax import parse_machines
from shoal.forecast.models.hf_config import TYPES, shape_from_config
from shoal.forecast.models.transformer_costs import transformer_facts

sys.path.insert(0, str(Path(__file__).parents[1] / "proof"))

STARCODER2 = {"model_type": "starcoder2", "num_hidden_layers": 30, "hidden_size": 3072,
              "num_attention_heads": 24, "num_key_value_heads": 2, "intermediate_size": 12288,
              "vocab_size": 49152, "hidden_act": "gelu_pytorch_tanh", "use_bias": True}  # fmt: skip
GEMMA = {"model_type": "gemma", "num_hidden_layers": 18, "hidden_size": 2048, "head_dim": 256,
         "num_attention_heads": 8, "num_key_value_heads": 1, "intermediate_size": 16384,
         "vocab_size": 256000, "hidden_act": "gelu"}  # fmt: skip
MAVERICK = {"model_type": "llama4_text", "num_hidden_layers": 48, "hidden_size": 5120,
            "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 8192, "intermediate_size_mlp": 16384, "vocab_size": 202048,
            "num_local_experts": 128, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
            "max_position_embeddings": 1048576, "tie_word_embeddings": False}  # fmt: skip
ERNIE = {"model_type": "ernie4_5_moe", "num_hidden_layers": 28, "hidden_size": 2560,
         "num_attention_heads": 20, "num_key_value_heads": 4, "intermediate_size": 12288,
         "moe_intermediate_size": 1536, "moe_num_experts": 64, "moe_k": 6,
         "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_interval": 1,
         "vocab_size": 103424, "use_bias": False, "tie_word_embeddings": True}  # fmt: skip


GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024,
        "vocab_size": 50257}  # fmt: skip
LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 6,
         "num_key_value_heads": 3, "intermediate_size": 56, "vocab_size": 101}  # fmt: skip


def counted(config: dict[str, Any]) -> int:
    return transformer_facts(shape_from_config(config), 64, 2).trainable


@pytest.mark.parametrize(
    ("config", "parameters"),
    [  # as the model cards and the weights' own index say
        (STARCODER2, 3_030_371_328),
        (GEMMA, 2_506_172_416),
        (MAVERICK, 400_711_848_960),
        (ERNIE, 21_825_437_888),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_types_that_were_counted_wrongly_are_right(config: Any, parameters: int) -> None:
    assert counted(config) == parameters


@pytest.mark.parametrize("name", ["gelu", "silu", "relu", "gelu_pytorch_tanh", "swiglu"])
def test_the_activation_says_nothing_of_gates(name: str) -> None:
    assert counted({**GEMMA, "hidden_act": name}) == counted(GEMMA)
    assert counted({**STARCODER2, "hidden_act": name}) == counted(STARCODER2)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "next_month"}, "model_type next_month is none of the"),
        ({"model_type": "jamba", "hidden_size": 64}, "model_type jamba is none of the"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "model_type t5 is none of the"),
        ({"hidden_size": 64}, "has no model_type"),
        (
            {"model_type": "llama4", "text_config": MAVERICK, "vision_config": {}},
            r"model_type llama4 is made of several models \(text_config, vision_config\)",
        ),
        (
            {**GEMMA, "architectures": ["GemmaForSequenceClassification"]},
            r'architectures = \["GemmaForSequenceClassification"\]: of model_type gemma',
        ),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention = true"),
        ({"model_type": "opt", "hidden_size": 64, "word_embed_proj_dim": 32}, "32.*with 64 alone"),
        ({**GEMMA, "per_layer_config": {"1": {"intermediate_size": 8}}}, "per_layer_config: "),
    ],
)
def test_what_is_not_counted_is_refused_by_name(config: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{said}.*; (try: model.build=|give)"):
        shape_from_config(config)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**ERNIE, "num_experts": 32}, "moe_num_experts = 64 and num_experts = 32: two names"),
        ({**ERNIE, "moe_layer_start_index": "one"}, "has a value of another kind"),
        ({k: v for k, v in MAVERICK.items() if "mlp" not in k}, "key intermediate_size_mlp is mi"),
        ({k: v for k, v in ERNIE.items() if k != "num_key_value_heads"}, "num_key_value_heads is "),
        ({**GEMMA, "head_dim": 0, "hidden_size": 2050}, "2050 is no multiple of 8 heads"),
        ({**GPT2, "max_position_embeddings": 512}, "n_positions = 1024 and max_position_embeddi"),
        (
            {"n_embd" if k == "hidden_size" else k: v for k, v in GEMMA.items()},
            "key hidden_size is",
        ),
    ],
)
def test_a_key_that_would_be_guessed_is_named(config: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        shape_from_config(config)


@pytest.mark.parametrize("key", ["head_dim", "num_key_value_heads", "intermediate_size"])
def test_a_key_that_the_class_does_not_read_changes_nothing(key: str) -> None:
    assert counted({**GPT2, key: 96}) == counted(GPT2) == 124_439_808


@pytest.mark.parametrize(
    ("keys", "more"),
    [
        ({"vocab_size": 102}, 2 * 48),
        ({"tie_word_embeddings": True}, -101 * 48),
        ({"attention_bias": True}, 2 * (48 + 2 * 24 + 48)),
        ({"mlp_bias": True}, 2 * (2 * 56 + 48)),
        ({"head_dim": 10}, 2 * 2 * 48 * 2 * (6 + 3)),
        ({"num_key_value_heads": 1}, -2 * 2 * 48 * 8 * 2),
        ({"num_key_value_heads": None}, 2 * 2 * 48 * 8 * 3),
    ],
)
def test_a_key_changes_the_weights_that_it_names(keys: dict[str, Any], more: int) -> None:
    """For all types `make proof PART=counts` compares with the module, in all combinations."""
    assert counted({**LLAMA, **keys}) - counted(LLAMA) == more


SAMPLE = ("LlamaForCausalLM", "MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM",
          "GemmaForCausalLM", "Gemma3ForCausalLM", "Starcoder2ForCausalLM", "GPT2LMHeadModel",
          "FalconForCausalLM", "OPTForCausalLM", "BloomForCausalLM", "PhiForCausalLM",
          "CohereForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM", "Olmo2ForCausalLM",
          "Ernie4_5_MoeForCausalLM", "Llama4ForCausalLM", "Glm4MoeForCausalLM",
          "BertForMaskedLM")  # fmt: skip
"""What people train, and one of each way to say experts; all of them by `make proof PART=counts`."""


@pytest.mark.parametrize("name", SAMPLE)
def test_a_class_of_transformers_has_as_many_parameters(name: str) -> None:
    """Two small odd shapes, tied and not, in full and as they are saved."""
    pytest.importorskip("transformers")
    import hf_counts

    told = hf_counts.compare(hf_counts.find_class(name), keys=False, default=False)
    assert told["differ"] == []
    assert (told["equal"], told["refused"], told["not built"]) == (8, 0, 0)


def test_every_other_class_is_refused_by_name() -> None:
    """Of the model types of the configurations, without their modules."""
    pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    others = [kind for kind in CONFIG_MAPPING_NAMES if kind not in (*TYPES, "vit", "deit")]
    assert len(others) > 300
    for kind in others:
        with pytest.raises(ConfigError, match=f"model_type {kind} is none of the"):
            shape_from_config({**GEMMA, "model_type": kind})


def planned(tmp_path: Path, config: dict[str, Any], notes: list[str], *words: str) -> ModelFacts:
    """The facts with which `shoal plan` begins, of rows of 16 tokens on GPUs."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_config(None, [f"model.name=hf:{tmp_path}", "data.sequence=16", *words])
    return resolve_model_facts(loaded, parse_machines("8xH100-80GB"), 2, notes)


JAMBA = {"model_type": "jamba", "architectures": ["JambaForCausalLM"], "hidden_size": 32,
         "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 48, "vocab_size": 64, "attn_layer_period": 4, "attn_layer_offset": 2,
         "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8,
         "mamba_dt_rank": 4, "num_experts_per_tok": 2, "pad_token_id": 0}  # fmt: skip
T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 32,
      "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}  # fmt: skip
GEMMA3N = {"model_type": "gemma3n_text", "architectures": ["Gemma3nForCausalLM"],
           "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 10, "vocab_size": 64,
           "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "altup_num_inputs": 2,
           "num_kv_shared_layers": 5, "vocab_size_per_layer_input": 64, "laurel_rank": 4,
           "hidden_size_per_layer_input": 8, "activation_sparsity_pattern": [0.0] * 10}  # fmt: skip


MEGATRON = {"model_type": "megatron-bert", "architectures": ["MegatronBertForCausalLM"],
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
            "intermediate_size": 48, "is_decoder": True, "pad_token_id": 0}  # fmt: skip


@pytest.mark.parametrize(
    "config", [JAMBA, T5, GEMMA3N, MEGATRON], ids=lambda config: str(config["model_type"])
)
def test_a_class_without_a_row_is_traced(tmp_path: Path, config: dict[str, Any]) -> None:
    """A hybrid with experts; encoder and decoder; shared keys and values; one that seeks padding."""
    pytest.importorskip("transformers")
    import hf_counts

    notes: list[str] = []
    facts = planned(tmp_path, config, notes)
    true = hf_counts.count(hf_counts.find_class(config["architectures"][0]), config)
    units = sum(unit.count * unit.parameters for unit in facts.units) + facts.frozen
    assert facts.trainable == units == true
    assert "its class of transformers is traced instead" in notes[0]


def test_experts_of_a_traced_class_multiply_as_many_tokens_as_they_get(tmp_path: Path) -> None:
    """Two experts of four a token, of three matrices each, in every second block."""
    pytest.importorskip("transformers")
    more = planned(tmp_path, {**JAMBA, "num_experts_per_tok": 3}, []).forward_flops
    few = planned(tmp_path, JAMBA, []).forward_flops
    assert more - few == 2 * 2 * 16 * (3 * 32 * 48)


def test_adapters_are_planned_from_the_config_json_alone(tmp_path: Path) -> None:
    """All linear layers but the head: 4 · (in + out) elements each; nothing else is trained."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    facts = planned(tmp_path, LLAMA, [], "tune.adapter=lora", "tune.rank=4")
    block = (48 + 48) * 2 + (48 + 24) * 2 + (48 + 56) * 3
    assert (facts.trainable, facts.frozen) == (2 * 4 * block, counted(LLAMA))


def test_without_transformers_the_type_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_subject, "has_transformers", lambda: False)
    with pytest.raises(ConfigError, match=r"model_type jamba is none of .*pip install 'shoal\[hf"):
        planned(tmp_path, JAMBA, [])


@pytest.mark.parametrize(
    ("keys", "full"),
    [
        ({}, 0),
        ({"layer_types": ["sliding_attention", "full_attention"] * 8}, 8),
        ({"sliding_window_pattern": 6}, 2),
        ({"use_sliding_window": True, "max_window_layers": 12}, 12),
        ({"model_type": "gemma2"}, 8),
        ({"model_type": "gemma3_text"}, 2),
    ],
)
def test_windows_of_some_blocks_leave_the_attention_of_the_others(
    keys: dict[str, Any], full: int
) -> None:
    config = {**GEMMA, "num_hidden_layers": 16, "sliding_window": 1024, **keys}
    shape = shape_from_config(config)
    facts = transformer_facts(shape, 8192, 2)
    attention = facts.units[1].attention_flops * 16
    each = 4 * shape.heads * shape.head_width * 8192
    assert shape.full_layers == full
    assert attention == pytest.approx(each * (8192 * full + 1024 * (16 - full)))
