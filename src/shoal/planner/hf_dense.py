"""Types of transformers without experts: what each builds, one row per model_type."""

from __future__ import annotations

from typing import Any

from shoal.planner.hf_types import ATTENTION, DEEPSEEK, LLAMA, TIED, Decoder, Keys


def _falcon_norms(keys: Keys) -> int:
    usual = 2 if keys.get("new_decoder_architecture") else 1
    parallel = keys.get("num_ln_in_parallel_attn") or usual
    return 2 if parallel == 2 or not keys["parallel_attn"] else 1


def _falcon_kv(keys: Keys, heads: int) -> int:
    if keys.get("new_decoder_architecture"):
        return keys.get("num_kv_heads") or heads
    return 1 if keys.get("multi_query") else heads


GEMMA: dict[str, Any] = {**ATTENTION, "usual": {**TIED, "head_dim": 256}}
PLAIN: dict[str, Any] = {
    "norm": "layer", "qkv": True, "o": True, "ffn": True, "gated": False, "mha": True
}  # fmt: skip
"""LayerNorm, a plain ffn, biases everywhere."""
GPT: dict[str, Any] = {**PLAIN, "wide": True}
"""And an ffn four times as wide as the model."""
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
    ),  # two biases, which are one where weights are tied
}

DENSE: dict[str, Decoder] = {
    "apertus": Decoder(
        "ApertusForCausalLM",
        mha=True,
        **ATTENTION,
        gated=False,
        qk_norm="head",
        block_ffn=lambda shape, keys: 2 * (keys["hidden_act"] == "xielu"),
    ),
    "arcee": Decoder("ArceeForCausalLM", mha=True, **LLAMA, gated=False),
    "bert": Decoder("BertForMaskedLM BertLMHeadModel", **BERT),
    "biogpt": Decoder(
        "BioGptForCausalLM",
        **PLAIN,
        usual=TIED,
        positions="max_position_embeddings",
        embedding=lambda shape, keys: 2 * shape.hidden,
    ),
    "bitnet": Decoder(
        "BitNetForCausalLM",
        **ATTENTION,
        attention=lambda shape, keys: shape.hidden + shape.ffn,
    ),
    "bloom": Decoder(
        "BloomForCausalLM", **GPT, usual=TIED, embedding=lambda shape, keys: 2 * shape.hidden
    ),
    "camembert": Decoder("CamembertForMaskedLM CamembertForCausalLM", **BERT),
    "codegen": Decoder(
        "CodeGenForCausalLM", **{**GPT, "qkv": False, "o": False}, norms=1, head=True
    ),
    "cohere": Decoder(
        "CohereForCausalLM",
        mha=True,
        **ATTENTION,
        norms=1,
        usual=TIED,
        qk_norm="width",
        qk_key="use_qk_norm",
    ),
    "cohere2": Decoder("Cohere2ForCausalLM", mha=True, **ATTENTION, norms=1, usual=TIED),
    "cwm": Decoder("CwmForCausalLM", ffn="mlp_bias", usual={"head_dim": 128}),
    "diffllama": Decoder(
        "DiffLlamaForCausalLM",
        mha=True,
        **ATTENTION,
        attention=lambda shape, keys: 4 * shape.head_width,
    ),
    "ernie4_5": Decoder(
        "Ernie4_5ForCausalLM",
        qkv="use_bias",
        o="use_bias",
        ffn="use_bias",
        usual={**TIED, "head_dim": 128},
    ),
    "exaone4": Decoder("Exaone4ForCausalLM", qk_norm="head"),
    "falcon": Decoder(
        "FalconForCausalLM",
        norm="layer",
        gated=False,
        qkv="bias",
        o="bias",
        ffn="bias",
        wide=True,
        norms=_falcon_norms,
        kv_heads=_falcon_kv,
        usual={**TIED, "multi_query": True, "parallel_attn": True},
    ),
    "gemma": Decoder("GemmaForCausalLM", **GEMMA),
    "gemma2": Decoder("Gemma2ForCausalLM", **GEMMA, norms=4),
    "gemma3_text": Decoder("Gemma3ForCausalLM", **GEMMA, norms=4, qk_norm="head"),
    "glm": Decoder(
        "GlmForCausalLM", qkv="attention_bias", usual={"attention_bias": True, "head_dim": 128}
    ),
    "glm4": Decoder(
        "Glm4ForCausalLM",
        qkv="attention_bias",
        norms=4,
        usual={"attention_bias": True, "head_dim": 128},
    ),
    "gpt2": Decoder(
        "GPT2LMHeadModel",
        **GPT,
        usual=TIED,
        positions="n_positions",
        fixed={"add_cross_attention": False},
    ),
    "gpt_bigcode": Decoder(
        "GPTBigCodeForCausalLM",
        **GPT,
        positions="n_positions",
        usual={**TIED, "multi_query": True},
        fixed={"add_cross_attention": False},
        kv_heads=lambda keys, heads: 1 if keys["multi_query"] else heads,
    ),
    "gpt_neo": Decoder(
        "GPTNeoForCausalLM",
        **{**GPT, "qkv": False},
        usual=TIED,
        positions="max_position_embeddings",
    ),
    "gpt_neox": Decoder(
        "GPTNeoXForCausalLM",
        **{**PLAIN, "qkv": "attention_bias", "o": "attention_bias"},
        usual={"attention_bias": True},
    ),
    "gptj": Decoder("GPTJForCausalLM", **{**GPT, "qkv": False, "o": False}, norms=1, head=True),
    "granite": Decoder("GraniteForCausalLM", mha=True, **LLAMA),
    "granite_swa": Decoder(
        "GraniteSWAForCausalLM", **LLAMA, usual=TIED, attention=lambda shape, keys: shape.heads
    ),
    "helium": Decoder(
        "HeliumForCausalLM",
        qkv="attention_bias",
        ffn="mlp_bias",
        usual={"head_dim": 128},
        attention=lambda shape, keys: (
            shape.hidden * (shape.hidden - shape.heads * shape.head_width)
        ),
    ),
    "hunyuan_v1_dense": Decoder("HunYuanDenseV1ForCausalLM", mha=True, **ATTENTION, qk_norm="head"),
    "hyperclovax": Decoder(
        "HyperCLOVAXForCausalLM",
        mha=True,
        **LLAMA,
        usual={"use_post_norm": True},
        norms=lambda keys: 4 if keys["use_post_norm"] else 2,
    ),
    "jais2": Decoder(
        "Jais2ForCausalLM",
        mha=True,
        **LLAMA,
        norm="layer",
        gated=False,
        usual={"attention_bias": True, "mlp_bias": True},
    ),
    "llama": Decoder("LlamaForCausalLM", mha=True, **LLAMA),
    "minicpm3": Decoder("MiniCPM3ForCausalLM", **DEEPSEEK, ffn="mlp_bias", usual=TIED),
    "ministral": Decoder("MinistralForCausalLM"),
    "ministral3": Decoder("Ministral3ForCausalLM", usual={"head_dim": 128}),
    "mistral": Decoder("MistralForCausalLM"),
    "mpt": Decoder("MptForCausalLM", mha=True, gated=False, wide=True, usual=TIED),
    "nanochat": Decoder("NanoChatForCausalLM", mha=True, **ATTENTION, norm="none", gated=False),
    "nemotron": Decoder("NemotronForCausalLM", mha=True, **LLAMA, norm="layer", gated=False),
    "olmo": Decoder("OlmoForCausalLM", mha=True, **ATTENTION, norm="none"),
    "olmo2": Decoder("Olmo2ForCausalLM", mha=True, **ATTENTION, qk_norm="width"),
    "olmo3": Decoder("Olmo3ForCausalLM", mha=True, **ATTENTION, qk_norm="width"),
    "opt": Decoder(
        "OPTForCausalLM",
        mha=True,
        norm="layer",
        gated=False,
        qkv="enable_bias",
        o="enable_bias",
        ffn="enable_bias",
        usual={**TIED, "enable_bias": True},
        positions="max_position_embeddings",
        embedding=lambda shape, keys: 2 * shape.hidden,
        fixed={
            "do_layer_norm_before": True,
            "layer_norm_elementwise_affine": True,
            "_remove_final_layer_norm": False,
            "word_embed_proj_dim": "hidden_size",
        },
    ),
    "persimmon": Decoder(
        "PersimmonForCausalLM",
        **PLAIN,
        qk_norm="head",
        qk_key="qk_layernorm",
        usual={"qk_layernorm": True},
    ),
    "phi": Decoder(
        "PhiForCausalLM", **PLAIN, norms=1, head=True, qk_norm="head", qk_key="qk_layernorm"
    ),
    "phi3": Decoder(
        "Phi3ForCausalLM",
        mha=True,
    ),
    "qwen2": Decoder("Qwen2ForCausalLM", qkv=True),
    "qwen3": Decoder("Qwen3ForCausalLM", **ATTENTION, qk_norm="head", usual={"head_dim": 128}),
    "roberta": Decoder("RobertaForMaskedLM RobertaForCausalLM", **BERT),
    "seed_oss": Decoder(
        "SeedOssForCausalLM",
        qkv="attention_bias",
        o="attention_out_bias",
        ffn="mlp_bias",
        usual={"attention_bias": True, "head_dim": 128},
    ),
    "smollm3": Decoder("SmolLM3ForCausalLM", **LLAMA, usual=TIED),
    "stablelm": Decoder(
        "StableLmForCausalLM",
        norm="layer",
        qkv="use_qkv_bias",
        norms=lambda keys: 1 if keys.get("use_parallel_residual") else 2,
        attention=lambda shape, keys: (
            (shape.heads + shape.kv_heads) * shape.head_width if keys.get("qk_layernorm") else 0
        ),
    ),
    "starcoder2": Decoder(
        "Starcoder2ForCausalLM",
        norm="layer",
        gated=False,
        qkv="use_bias",
        o="use_bias",
        ffn="use_bias",
        usual={**TIED, "use_bias": True},
    ),
    "vaultgemma": Decoder("VaultGemmaForCausalLM", **GEMMA),
    "xglm": Decoder("XGLMForCausalLM", **PLAIN, usual=TIED, fixed={"add_cross_attention": False}),
    "xlm-roberta": Decoder("XLMRobertaForMaskedLM XLMRobertaForCausalLM", **BERT),
    "youtu": Decoder("YoutuForCausalLM", **DEEPSEEK, usual=TIED),
}
"""model_type → what it builds."""
