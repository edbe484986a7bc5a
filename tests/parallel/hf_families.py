"""Families of the transformers library from tiny random configurations, as unlike as can be.

A family is its configuration class and its model class; sizes are set by the names that its
configuration knows, everything else is as its authors chose: dropout, windows, casts to float32.
Half of them have 6 heads on 48 numbers, which no 4 ranks can share, and half 4 on 32; all read 8
tokens, which any 2 or 4 ranks can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

VOCABULARY, TOKENS, LAYERS = 64, 8, 4


@dataclass(frozen=True)
class Family:
    """What makes one tiny model of a family.

    config, model   names of transformers' classes · inputs  gives `samples` samples
    six             6 heads on 48 numbers, else 4 on 32 · more  what its configuration needs besides
    """

    config: str
    model: str
    inputs: Callable[[int], dict[str, Any]]
    six: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """The module, drawn from torch's generator as it stands."""
        import transformers

        kind = getattr(transformers, self.config)
        plain = kind()
        other_names: dict[str, str] = getattr(kind, "attribute_map", {})
        known = {*plain.to_dict(), *other_names}
        # What a family has one of per stage is for `more` to say.
        lists = {k for k in known if isinstance(getattr(plain, k, None), list | tuple)}
        said = {k for k, name in other_names.items() if name in self.more}
        given = {k: v for k, v in sizes(self.six).items() if k in known - lists - said}
        config = kind(**{**given, **self.more})
        config.use_cache = False
        module: nn.Module = getattr(transformers, self.model)(config)
        return module


def sizes(six: bool) -> dict[str, Any]:
    """Every name that a configuration has for a size, and what it is here."""
    hidden, heads = (48, 6) if six else (32, 4)
    keys = heads // 2
    return {
        **dict.fromkeys(("vocab_size",), VOCABULARY),
        **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim"), hidden),
        **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
        **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), LAYERS // 2),
        **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), heads),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), heads),
        **dict.fromkeys(("attention_heads",), heads),
        **dict.fromkeys(("num_key_value_heads",), keys),
        **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "hidden_dim"), 40),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), 40),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
        **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
        **dict.fromkeys(("num_experts_per_tok",), 2),
        **dict.fromkeys(("pad_token_id", "bos_token_id"), 0),
        **dict.fromkeys(("eos_token_id", "decoder_start_token_id"), 1),
        "head_dim": 8,
        "image_size": 16,
        "patch_size": 4,
        "num_channels": 1,
        "num_labels": 3,
    }


def ids(samples: int) -> torch.Tensor:
    """Token ids from 2 on: 0 and 1 mean padding and ends to some."""
    draw = torch.Generator().manual_seed(100)
    return torch.randint(2, VOCABULARY, (samples, TOKENS), generator=draw)


def causal(samples: int) -> dict[str, Any]:
    return {"input_ids": ids(samples)}


def both_sides(samples: int) -> dict[str, Any]:
    return {"input_ids": ids(samples), "decoder_input_ids": ids(samples).flip(1)}


def images(samples: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(200)
    return {"pixel_values": torch.randn(samples, 1, 16, 16, generator=draw)}


def sounds(samples: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(300)
    heard = torch.randn(samples, 8, 2 * TOKENS, generator=draw)
    return {"input_features": heard, "decoder_input_ids": ids(samples)}


def waves(samples: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(400)
    return {"input_values": torch.randn(samples, 95, generator=draw)}


def series(samples: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(500)
    return {"past_values": torch.randn(samples, 4 * TOKENS, 2, generator=draw)}


def bytes_of_text(samples: int) -> dict[str, Any]:
    return {"inputs": ids(samples)}


MAMBA = {"state_size": 8, "n_groups": 1, "head_dim": 16, "num_heads": 4, "expand": 2}
SSM = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
ROUTED = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}


def _text(name: str, six: bool = False, config: str = "", **more: Any) -> Family:
    return Family(f"{config or name}Config", f"{name}ForCausalLM", causal, six, more)


FAMILIES: dict[str, Family] = {
    "olmo2": _text("Olmo2"),
    "cohere": _text("Cohere"),
    "cohere2": _text("Cohere2", six=True, sliding_window=4),
    "gemma3": _text("Gemma3", config="Gemma3Text", sliding_window=4),
    "helium": _text("Helium"),
    "deepseek v3": _text("DeepseekV3", **LATENT, **ROUTED),
    "gpt-oss": _text("GptOss", sliding_window=4),
    "qwen2 moe": _text("Qwen2Moe"),
    "qwen3 moe": _text("Qwen3Moe", six=True),
    "olmoe": _text("Olmoe"),
    "jamba": _text(
        "Jamba", attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False, **SSM
    ),
    "rwkv": _text("Rwkv", attention_hidden_size=32, context_length=64),
    "mamba2": _text("Mamba2", chunk_size=4, **MAMBA),
    "falcon h1": _text("FalconH1", mamba_n_heads=4, mamba_d_head=16, mamba_d_ssm=64, **SSM),
    "bamba": _text("Bamba", mamba_n_heads=4, mamba_d_head=16, attn_layer_indices=[1, 3], **SSM),
    "recurrent gemma": _text("RecurrentGemma", lru_width=32, attention_window_size=4),
    "lfm2": _text("Lfm2", full_attn_idxs=[1, 3], block_multiple_of=8),
    "minimax": _text("MiniMax", block_size=4),
    "phi": _text("Phi"),
    "phi3": _text("Phi3", six=True),
    "stablelm": _text("StableLm", six=True),
    "granite": _text("Granite"),
    "nemotron": _text("Nemotron"),
    "glm4": _text("Glm4"),
    "smollm3": _text("SmolLM3", six=True),
    "ernie 4.5": _text("Ernie4_5"),
    "opt": _text("OPT"),
    "gpt-neox": _text("GPTNeoX", six=True),
    "gpt-j": _text("GPTJ", rotary_dim=8),
    "codegen": _text("CodeGen", rotary_dim=8),
    "bigcode": _text("GPTBigCode"),
    "mpt": _text("Mpt"),
    "bloom": _text("Bloom", six=True),
    "falcon": _text("Falcon", new_decoder_architecture=True, num_kv_heads=2),
    "xglm": _text("XGLM"),
    "diffllama": _text("DiffLlama"),
    "bart": Family("BartConfig", "BartForConditionalGeneration", both_sides),
    "pegasus": Family("PegasusConfig", "PegasusForConditionalGeneration", both_sides, True),
    "mt5": Family("MT5Config", "MT5ForConditionalGeneration", both_sides, more={"d_kv": 8}),
    "distilbert": Family("DistilBertConfig", "DistilBertForMaskedLM", causal),
    "roberta": Family("RobertaConfig", "RobertaForMaskedLM", causal, True),
    "deberta v2": Family(
        "DebertaV2Config",
        "DebertaV2ForMaskedLM",
        causal,
        more={"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8},
    ),
    "electra": Family("ElectraConfig", "ElectraForMaskedLM", causal, more={"embedding_size": 32}),
    "albert": Family("AlbertConfig", "AlbertForMaskedLM", causal, more={"embedding_size": 16}),
    "modernbert": Family("ModernBertConfig", "ModernBertForMaskedLM", causal),
    "clip text": Family("CLIPTextConfig", "CLIPTextModel", causal),
    "dinov2": Family("Dinov2Config", "Dinov2ForImageClassification", images, True),
    "whisper": Family(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        sounds,
        more={"num_mel_bins": 8, "max_source_positions": TOKENS, "max_target_positions": 16},
    ),
    "swin": Family(
        "SwinConfig",
        "SwinForImageClassification",
        images,
        more={
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 2,
        },
    ),
    "convnext": Family(
        "ConvNextConfig",
        "ConvNextForImageClassification",
        images,
        more={"patch_size": 2, "num_stages": 2, "hidden_sizes": [16, 32], "depths": [2, 2]},
    ),
    # Unlike each other and all above: rotary in two dimensions, convolutions over sound, shared
    # blocks, windows on both sides, queries that are learnt, Fourier transforms, series of numbers.
    "dinov3": Family("DINOv3ViTConfig", "DINOv3ViTModel", images, True),
    "segformer": Family(
        "SegformerConfig",
        "SegformerForImageClassification",
        images,
        more={
            "num_encoder_blocks": 2,
            "depths": [2, 2],
            "sr_ratios": [2, 1],
            "hidden_sizes": [16, 32],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [2, 4],
            "mlp_ratios": [2, 2],
        },
    ),
    "wav2vec2": Family(
        "Wav2Vec2Config",
        "Wav2Vec2ForCTC",
        waves,
        more={
            "conv_dim": [16, 16],
            "conv_stride": [5, 2],
            "conv_kernel": [10, 3],
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 4,
            "mask_time_length": 2,
        },
    ),
    "minicpm3": _text("MiniCPM3", **LATENT),
    "llama4": _text(
        "Llama4", config="Llama4Text", attention_chunk_size=4, intermediate_size_mlp=40
    ),
    "zamba2": _text(
        "Zamba2",
        num_key_value_heads=4,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        mamba_d_state=8,
        n_mamba_heads=4,
        chunk_size=4,
        use_mamba_kernels=False,
        num_logits_to_keep=0,
    ),
    "xlstm": _text("xLSTM", embedding_dim=32, chunk_size=4, ffn_round_up_to_multiple_of=8),
    "switch": Family(
        "SwitchTransformersConfig",
        "SwitchTransformersForConditionalGeneration",
        both_sides,
        more={"d_kv": 8, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 1},
    ),
    "longformer": Family(
        "LongformerConfig", "LongformerForMaskedLM", causal, True, {"attention_window": 4}
    ),
    "perceiver": Family(
        "PerceiverConfig",
        "PerceiverForMaskedLM",
        bytes_of_text,
        more={
            "num_latents": 4,
            "d_latents": 32,
            "num_self_attends_per_block": 4,
            "num_self_attention_heads": 4,
            "num_cross_attention_heads": 4,
            "qk_channels": 16,
            "v_channels": 32,
            "max_position_embeddings": TOKENS,
        },
    ),
    "fnet": Family("FNetConfig", "FNetForMaskedLM", causal, True),
    "patchtst": Family(
        "PatchTSTConfig",
        "PatchTSTModel",
        series,
        more={
            "num_input_channels": 2,
            "context_length": 4 * TOKENS,
            "patch_length": 4,
            "patch_stride": 4,
        },
    ),
}
