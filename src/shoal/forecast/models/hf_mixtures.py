"""Model types of transformers with routed experts: one row of parameters per model_type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shoal.base.estimates.transformer_shape import TransformerShape
from shoal.forecast.models.hf_types import (
    ATTENTION,
    DEEPSEEK,
    LLAMA,
    OLMO,
    TIED,
    USE_BIAS,
    DecoderRow,
    Keys,
    MixtureRow,
    count_sinks,
)


def _first_dense(keys: Keys, layers: int) -> int:
    """Return the number of dense blocks: the first ones, and those that the frequency skips."""
    first, every = keys["first_k_dense_replace"] or 0, keys.get("moe_layer_freq") or 1
    return sum(not (i >= first and i % every == 0) for i in range(layers))


def _sparse_step(keys: Keys, layers: int) -> int:
    """Return Qwen's number of dense blocks: every n-th block has experts, except named ones."""
    plain, step = keys.get("mlp_only_layers") or (), keys.get("decoder_sparse_step") or 1
    return sum(i in plain or (i + 1) % step != 0 for i in range(layers))


def _named_layers(keys: Keys, layers: int) -> int:
    """Return the number of blocks that mlp_layer_types lists as dense."""
    return list(keys["mlp_layer_types"] or ())[:layers].count("dense")


def _llama4_dense(keys: Keys, layers: int) -> int:
    step, named = keys.get("interleave_moe_layer_step") or 1, keys.get("moe_layers")
    return layers - len(range(step - 1, layers, step) if named is None else named)


def _ernie_dense(keys: Keys, layers: int) -> int:
    first, last = keys["moe_layer_start_index"] or 0, keys.get("moe_layer_end_index", -1)
    every, last = keys.get("moe_layer_interval") or 1, layers - 1 if last == -1 else last
    return sum(not ((i + 1) % every == 0 and first <= i <= last) for i in range(layers))


def _times(number: str, width: str) -> Callable[[Keys], int]:
    """Return a reader of the width of all shared experts: their number times the width of one."""
    return lambda keys: (keys[number] or 0) * keys[width]


def _width(key: str) -> Callable[[Keys], int]:
    """Return a reader of the width of the single shared expert."""
    return lambda keys: keys[key]


def _olmoe_norms(shape: TransformerShape, keys: Keys) -> int:
    """Return the parameters of query and key norms, whose width does not follow head_dim."""
    return (shape.heads + shape.kv_heads) * (shape.hidden // shape.heads)


def _router_bias(shape: TransformerShape, keys: Keys) -> int:
    return shape.experts


def _shared_gate(shape: TransformerShape, keys: Keys) -> int:
    """Return one vector: the gate of the shared expert, or a norm of the block's output."""
    return shape.hidden


SHARED_EXPERT = _width("shared_expert_intermediate_size")
SHARED = _times("n_shared_experts", "moe_intermediate_size")
ROUTED = MixtureRow("n_routed_experts num_local_experts", shared=SHARED, dense=_first_dense)
NAMED = replace(ROUTED, dense=_named_layers)
NUMBERED = MixtureRow(
    "num_experts",
    dense=_named_layers,
    shared=_times("num_shared_experts", "moe_intermediate_size"),
)
BOTH = "num_local_experts num_experts"
"""The two names of the number of experts in these files; transformers writes the first."""
LOCAL = MixtureRow(BOTH, width="")
GRANITE = MixtureRow("num_local_experts", width="", shared=_width("shared_intermediate_size"))


MIXTURES: dict[str, DecoderRow] = {
    "aria_text": DecoderRow(
        "AriaTextForCausalLM",
        mha=True,
        **LLAMA,
        mixture=MixtureRow(
            "moe_num_experts",
            "moe_topk",
            "",
            shared=_times("moe_num_shared_experts", "intermediate_size"),
        ),
    ),
    "axk1": DecoderRow(
        "AXK1ForCausalLM",
        **DEEPSEEK,
        mixture=replace(NAMED, router=_shared_gate),
    ),
    "cohere2_moe": DecoderRow(
        "Cohere2MoeForCausalLM",
        mha=True,
        **ATTENTION,
        norms=1,
        usual={**TIED, "head_dim": 128},
        mixture=MixtureRow(
            width="", shared=_times("num_shared_experts", "intermediate_size"), dense=_named_layers
        ),
    ),
    "deepseek_v2": DecoderRow(
        "DeepseekV2ForCausalLM",
        **DEEPSEEK,
        ffn="mlp_bias",
        mixture=replace(ROUTED, experts="n_routed_experts num_experts"),
    ),
    "deepseek_v3": DecoderRow("DeepseekV3ForCausalLM", **DEEPSEEK, mixture=ROUTED),
    "dots1": DecoderRow("Dots1ForCausalLM", **ATTENTION, qk_norm="head", mixture=ROUTED),
    "ernie4_5_moe": DecoderRow(
        "Ernie4_5_MoeForCausalLM",
        **USE_BIAS,
        head="use_bias",
        usual={**TIED},
        mixture=MixtureRow(
            "moe_num_experts num_experts",
            "moe_k",
            dense=_ernie_dense,
            shared=_times("moe_num_shared_experts", "moe_intermediate_size"),
            router=_router_bias,
        ),
    ),
    "exaone_moe": DecoderRow(
        "ExaoneMoeForCausalLM",
        qk_norm="head",
        mixture=NUMBERED,
    ),
    "flex_olmo": DecoderRow("FlexOlmoForCausalLM", **OLMO, mixture=LOCAL),
    "glm4_moe": DecoderRow(
        "Glm4MoeForCausalLM",
        qkv="attention_bias",
        qk_norm="head",
        qk_key="use_qk_norm",
        mixture=ROUTED,
    ),
    "glm4_moe_lite": DecoderRow(
        "Glm4MoeLiteForCausalLM",
        **DEEPSEEK,
        names={"qk_rope_head_dim": ("head_dim",)},
        mixture=NAMED,
    ),
    "gpt_oss": DecoderRow(
        "GptOssForCausalLM",
        **ATTENTION,
        usual={"attention_bias": True, "head_dim": 64},
        attention=count_sinks,
        mixture=MixtureRow(
            BOTH,
            width="",
            router=_router_bias,
            each=lambda shape, keys: 2 * shape.ffn + shape.hidden,
        ),
    ),
    "granitemoe": DecoderRow(
        "GraniteMoeForCausalLM",
        mha=True,
        **ATTENTION,
        mixture=MixtureRow("num_local_experts", width=""),
    ),
    "granitemoe_swa": DecoderRow(
        "GraniteMoeSWAForCausalLM",
        mha=True,
        **ATTENTION,
        attention=count_sinks,
        mixture=GRANITE,
    ),
    "granitemoeshared": DecoderRow(
        "GraniteMoeSharedForCausalLM", mha=True, **ATTENTION, mixture=GRANITE
    ),
    "hunyuan_v1_moe": DecoderRow(
        "HunYuanMoEV1ForCausalLM",
        mha=True,
        **ATTENTION,
        qk_norm="head",
        mixture=(
            MixtureRow(
                BOTH,
                "moe_topk",
                "",
                shared=_width("intermediate_size"),
            )
        ),
    ),
    "hy_v3": DecoderRow(
        "HYV3ForCausalLM",
        **LLAMA,
        qk_norm="head",
        usual={"head_dim": 128},
        mixture=replace(NUMBERED, experts=BOTH),
    ),
    "kolibri1": DecoderRow(
        "Kolibri1ForCausalLM",
        width="moe_intermediate_size",
        usual={"head_dim": 128},
        qk_norm="head",
        norms=4,
        mixture=MixtureRow(BOTH, shared=SHARED_EXPERT),
    ),
    "llama4_text": DecoderRow(
        "Llama4ForCausalLM",
        **ATTENTION,
        usual={"head_dim": 128},
        width="intermediate_size_mlp",
        mixture=MixtureRow(
            "num_local_experts",
            width="intermediate_size",
            dense=_llama4_dense,
            shared=_width("intermediate_size"),
        ),
    ),
    "mellum": DecoderRow(
        "MellumForCausalLM",
        **ATTENTION,
        qk_norm="head",
        usual={"head_dim": 128},
        mixture=MixtureRow(BOTH, dense=_named_layers),
    ),
    "minimax_m2": DecoderRow(
        "MiniMaxM2ForCausalLM", qk_norm="width", usual={"head_dim": 128}, mixture=LOCAL
    ),
    "mixtral": DecoderRow("MixtralForCausalLM", mixture=LOCAL),
    "olmoe": DecoderRow(
        "OlmoeForCausalLM", **{**OLMO, "qk_norm": ""}, attention=_olmoe_norms, mixture=LOCAL
    ),
    "phimoe": DecoderRow(
        "PhimoeForCausalLM",
        **ATTENTION,
        norm="layer",
        head="lm_head_bias",
        mixture=replace(LOCAL, experts="num_local_experts"),
    ),
    "qwen2_moe": DecoderRow(
        "Qwen2MoeForCausalLM",
        qkv="qkv_bias",
        usual={"qkv_bias": True},
        mixture=MixtureRow(shared=SHARED_EXPERT, dense=_sparse_step, router=_shared_gate),
    ),
    "qwen3_moe": DecoderRow(
        "Qwen3MoeForCausalLM",
        **ATTENTION,
        qk_norm="head",
        mixture=MixtureRow(BOTH, dense=_sparse_step),
    ),
    "solar_open": DecoderRow(
        "SolarOpenForCausalLM",
        qkv="attention_bias",
        usual={"head_dim": 128},
        width="moe_intermediate_size",
        mixture=MixtureRow("n_routed_experts num_local_experts", shared=SHARED),
    ),
}
"""model_type → the parameters that the class builds."""
