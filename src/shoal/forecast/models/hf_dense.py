"""Model types of transformers without experts: one row of parameters per model_type."""

from __future__ import annotations

from typing import Any

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
    count_sinks,
)


def _falcon_norms(keys: Keys) -> int:
    usual = 2 if keys.get("new_decoder_architecture") else 1
    parallel = keys.get("num_ln_in_parallel_attn") or usual
    return 2 if parallel == 2 or not keys["parallel_attn"] else 1


def _falcon_kv(keys: Keys, heads: int) -> int:
    if keys.get("new_decoder_architecture"):
        return keys.get("num_kv_heads") or heads
    return 1 if keys.get("multi_query") else heads


def _all_heads(keys: Keys, heads: int) -> int:
    """Return the number of heads: the class ignores num_key_value_heads."""
    return heads


def _two_vectors(shape: TransformerShape, keys: Keys) -> int:
    """Return two vectors: a norm of the embedding, or two positions that no token uses."""
    return 2 * shape.hidden


def _every(number: int, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose every n-th block attends to all tokens, if the file names no blocks."""
    return {**row, "usual": {"sliding_window_pattern": number, **row.get("usual", {})}}


GEMMA: dict[str, Any] = {**ATTENTION, "usual": {**TIED, "head_dim": 256}}
GLM: dict[str, Any] = {
    "qkv": "attention_bias",
    "usual": {"attention_bias": True, "head_dim": 128},
}
PLAIN: dict[str, Any] = {
    "norm": "layer", "qkv": True, "o": True, "ffn": True, "gated": False,
    "kv_heads": _all_heads, "head_dim": False,
}  # fmt: skip
"""LayerNorm, a plain ffn, biases everywhere; the class ignores head_dim and num_key_value_heads."""
GPT: dict[str, Any] = {
    **PLAIN, "wide": True, "width": "n_inner",
    "names": {"hidden_size": ("n_embd",), "num_attention_heads": ("n_head",),
              "num_hidden_layers": ("n_layer",), "n_positions": ("max_position_embeddings",)},
}  # fmt: skip
"""PLAIN with the names of GPT-2; without n_inner the ffn is four times as wide as the model."""
GPTJ: dict[str, Any] = {**GPT, "qkv": False, "o": False, "norms": 1, "head": True}
"""GPT with one norm in a block, and a bias in the head instead of in attention."""
BERT: dict[str, Any] = {
    **PLAIN,
    "usual": {**TIED, "type_vocab_size": 2},
    "fixed": {"add_cross_attention": False},
    "last": False,
    "positions": "max_position_embeddings",
    "encoder": True,
    "embedding": lambda shape, keys: (keys["type_vocab_size"] + 2) * shape.hidden,
    "head": True,
    "top": lambda shape, keys: (
        shape.hidden * (shape.hidden + 3) + (0 if shape.tied else shape.vocabulary)
    ),  # two biases, which are one if weights are tied
}

DENSE: dict[str, DecoderRow] = {
    "apertus": DecoderRow(
        "ApertusForCausalLM",
        mha=True,
        **ATTENTION,
        gated=False,
        qk_norm="head",
        block_ffn=lambda shape, keys: 2 * (keys["hidden_act"] == "xielu"),
    ),
    "arcee": DecoderRow("ArceeForCausalLM", mha=True, **LLAMA, gated=False),
    "bert": DecoderRow("BertForMaskedLM BertLMHeadModel", **BERT),
    "biogpt": DecoderRow(
        "BioGptForCausalLM",
        **PLAIN,
        usual=TIED,
        positions="max_position_embeddings",
        embedding=_two_vectors,
    ),
    "bitnet": DecoderRow(
        "BitNetForCausalLM",
        **ATTENTION,
        attention=lambda shape, keys: shape.hidden + shape.ffn,
    ),
    "bloom": DecoderRow(
        "BloomForCausalLM", **{**GPT, "width": ""}, usual=TIED, embedding=_two_vectors
    ),
    "camembert": DecoderRow("CamembertForMaskedLM CamembertForCausalLM", **BERT),
    "codegen": DecoderRow("CodeGenForCausalLM", **GPTJ),
    "cohere": DecoderRow(
        "CohereForCausalLM",
        mha=True,
        **ATTENTION,
        norms=1,
        usual=TIED,
        qk_norm="width",
        qk_key="use_qk_norm",
    ),
    "cohere2": DecoderRow(
        "Cohere2ForCausalLM", mha=True, **_every(4, {**ATTENTION, "usual": TIED}), norms=1
    ),
    "cwm": DecoderRow("CwmForCausalLM", ffn="mlp_bias", usual={"head_dim": 128}),
    "diffllama": DecoderRow(
        "DiffLlamaForCausalLM",
        mha=True,
        **ATTENTION,
        attention=lambda shape, keys: 4 * shape.head_width,
    ),
    "ernie4_5": DecoderRow(
        "Ernie4_5ForCausalLM",
        **USE_BIAS,
        usual={**TIED, "head_dim": 128},
    ),
    "exaone4": DecoderRow("Exaone4ForCausalLM", qk_norm="head"),
    "falcon": DecoderRow(
        "FalconForCausalLM",
        norm="layer",
        gated=False,
        qkv="bias",
        o="bias",
        ffn="bias",
        wide=True,
        width="ffn_hidden_size",
        norms=_falcon_norms,
        kv_heads=_falcon_kv,
        usual={**TIED, "multi_query": True, "parallel_attn": True},
    ),
    "gemma": DecoderRow("GemmaForCausalLM", **GEMMA),
    "gemma2": DecoderRow("Gemma2ForCausalLM", **_every(2, GEMMA), norms=4),
    "gemma3_text": DecoderRow("Gemma3ForCausalLM", **_every(6, GEMMA), norms=4, qk_norm="head"),
    "glm": DecoderRow("GlmForCausalLM", **GLM),
    "glm4": DecoderRow("Glm4ForCausalLM", **GLM, norms=4),
    "gpt2": DecoderRow(
        "GPT2LMHeadModel",
        **GPT,
        usual=TIED,
        positions="n_positions",
        fixed={"add_cross_attention": False},
    ),
    "gpt_bigcode": DecoderRow(
        "GPTBigCodeForCausalLM",
        **{**GPT, "kv_heads": lambda keys, heads: 1 if keys["multi_query"] else heads},
        positions="n_positions",
        usual={**TIED, "multi_query": True},
        fixed={"add_cross_attention": False},
    ),
    "gpt_neo": DecoderRow(
        "GPTNeoForCausalLM",
        **{**PLAIN, "qkv": False},
        wide=True,
        names={"num_attention_heads": ("num_heads",), "num_hidden_layers": ("num_layers",)},
        usual=TIED,
        positions="max_position_embeddings",
    ),
    "gpt_neox": DecoderRow(
        "GPTNeoXForCausalLM",
        **{**PLAIN, **ATTENTION},
        usual={"attention_bias": True},
    ),
    "gptj": DecoderRow("GPTJForCausalLM", **GPTJ),
    "granite": DecoderRow("GraniteForCausalLM", mha=True, **LLAMA),
    "granite_swa": DecoderRow("GraniteSWAForCausalLM", **LLAMA, usual=TIED, attention=count_sinks),
    "helium": DecoderRow(
        "HeliumForCausalLM",
        qkv="attention_bias",
        ffn="mlp_bias",
        usual={"head_dim": 128},
        attention=lambda shape, keys: (
            shape.hidden * (shape.hidden - shape.heads * shape.head_width)
        ),
    ),
    "hunyuan_v1_dense": DecoderRow(
        "HunYuanDenseV1ForCausalLM", mha=True, **ATTENTION, qk_norm="head"
    ),
    "hyperclovax": DecoderRow(
        "HyperCLOVAXForCausalLM",
        mha=True,
        **LLAMA,
        usual={"use_post_norm": True},
        norms=lambda keys: 4 if keys["use_post_norm"] else 2,
    ),
    "jais2": DecoderRow(
        "Jais2ForCausalLM",
        mha=True,
        **LLAMA,
        norm="layer",
        gated=False,
        usual={"attention_bias": True, "mlp_bias": True},
    ),
    "llama": DecoderRow("LlamaForCausalLM", mha=True, **LLAMA),
    "minicpm3": DecoderRow("MiniCPM3ForCausalLM", **DEEPSEEK, ffn="mlp_bias", usual=TIED),
    "ministral": DecoderRow("MinistralForCausalLM"),
    "ministral3": DecoderRow("Ministral3ForCausalLM", usual={"head_dim": 128}),
    "mistral": DecoderRow("MistralForCausalLM"),
    "mpt": DecoderRow(
        "MptForCausalLM",
        names={
            "hidden_size": ("d_model",),
            "num_attention_heads": ("n_heads",),
            "num_hidden_layers": ("n_layers",),
        },
        kv_heads=_all_heads,
        head_dim=False,
        gated=False,
        width="",
        wide=True,
        usual=TIED,
    ),
    "nanochat": DecoderRow("NanoChatForCausalLM", mha=True, **ATTENTION, norm="none", gated=False),
    "nemotron": DecoderRow("NemotronForCausalLM", mha=True, **LLAMA, norm="layer", gated=False),
    "olmo": DecoderRow("OlmoForCausalLM", mha=True, **ATTENTION, norm="none"),
    "olmo2": DecoderRow("Olmo2ForCausalLM", **OLMO),
    "olmo3": DecoderRow("Olmo3ForCausalLM", **_every(4, OLMO)),
    "opt": DecoderRow(
        "OPTForCausalLM",
        **{**PLAIN, "qkv": "enable_bias", "o": "enable_bias", "ffn": "enable_bias"},
        width="ffn_dim",
        usual={**TIED, "enable_bias": True},
        positions="max_position_embeddings",
        embedding=_two_vectors,
        fixed={
            "do_layer_norm_before": True,
            "layer_norm_elementwise_affine": True,
            "_remove_final_layer_norm": False,
            "word_embed_proj_dim": "hidden_size",
        },
    ),
    "persimmon": DecoderRow(
        "PersimmonForCausalLM",
        **PLAIN,
        qk_norm="head",
        qk_key="qk_layernorm",
        usual={"qk_layernorm": True},
    ),
    "phi": DecoderRow(
        "PhiForCausalLM",
        **{**PLAIN, "kv_heads": None, "head_dim": True},
        mha=True,
        norms=1,
        head=True,
        qk_norm="head",
        qk_key="qk_layernorm",
    ),
    "phi3": DecoderRow("Phi3ForCausalLM", mha=True),
    "qwen2": DecoderRow("Qwen2ForCausalLM", qkv=True),
    "qwen3": DecoderRow("Qwen3ForCausalLM", **ATTENTION, qk_norm="head", usual={"head_dim": 128}),
    "roberta": DecoderRow("RobertaForMaskedLM RobertaForCausalLM", **BERT),
    "seed_oss": DecoderRow(
        "SeedOssForCausalLM",
        **GLM,
        o="attention_out_bias",
        ffn="mlp_bias",
    ),
    "smollm3": DecoderRow("SmolLM3ForCausalLM", **LLAMA, usual=TIED),
    "stablelm": DecoderRow(
        "StableLmForCausalLM",
        head_dim=False,
        norm="layer",
        qkv="use_qkv_bias",
        norms=lambda keys: 1 if keys.get("use_parallel_residual") else 2,
        attention=lambda shape, keys: (
            (shape.heads + shape.kv_heads) * shape.head_width if keys.get("qk_layernorm") else 0
        ),
    ),
    "starcoder2": DecoderRow(
        "Starcoder2ForCausalLM",
        norm="layer",
        gated=False,
        **USE_BIAS,
        usual={**TIED, "use_bias": True},
    ),
    "vaultgemma": DecoderRow("VaultGemmaForCausalLM", **GEMMA),
    "xglm": DecoderRow(
        "XGLMForCausalLM",
        **PLAIN,
        width="ffn_dim",
        names={
            "hidden_size": ("d_model",),
            "num_attention_heads": ("attention_heads",),
            "num_hidden_layers": ("num_layers",),
        },
        usual=TIED,
        fixed={"add_cross_attention": False},
    ),
    "xlm-roberta": DecoderRow("XLMRobertaForMaskedLM XLMRobertaForCausalLM", **BERT),
    "youtu": DecoderRow("YoutuForCausalLM", **DEEPSEEK, usual=TIED),
}
"""model_type → the parameters that the class builds."""
