"""Models of the transformers library, unmodified, from tiny random configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from user_modules import Example, by_name, named, numbers, tokens

WIDTHS = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
LLAMA = {**WIDTHS, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}


def built(kind: str, model: str, **config: Any) -> Callable[[], nn.Module]:
    """A function that makes transformers' class `model` from configuration class `kind`."""

    def build() -> nn.Module:
        import transformers

        made = getattr(transformers, kind)(**config)
        made.use_cache = False
        made._experts_implementation = "eager"  # the fused one knows no float64
        return getattr(transformers, model)(made)

    return build


def causal(batch: int) -> dict[str, Any]:
    return {"input_ids": tokens(batch), "use_cache": False}


def masked(batch: int) -> dict[str, Any]:
    ids = tokens(batch)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def two_sided(batch: int) -> dict[str, Any]:
    ids = tokens(batch)
    return {"input_ids": ids, "decoder_input_ids": ids[:, 1:].flip(1), "use_cache": False}


def text(build: Callable[[], nn.Module], blocks: str, inputs: Any = causal) -> Example:
    return Example(build, inputs, named(blocks), by_name)


NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}

HF_EXAMPLES: dict[str, Example] = {
    "gpt2": text(
        built(
            "GPT2Config",
            "GPT2LMHeadModel",
            vocab_size=64,
            n_embd=32,
            n_layer=4,
            n_head=4,
            n_positions=64,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        ),
        "transformer.h.{}",
    ),
    "llama": text(built("LlamaConfig", "LlamaForCausalLM", **LLAMA), "model.layers.{}"),
    "qwen3": text(built("Qwen3Config", "Qwen3ForCausalLM", **LLAMA, head_dim=8), "model.layers.{}"),
    "gemma2": text(
        built("Gemma2Config", "Gemma2ForCausalLM", **LLAMA, head_dim=8, sliding_window=4),
        "model.layers.{}",
    ),
    "mistral": text(
        built("MistralConfig", "MistralForCausalLM", **LLAMA, sliding_window=4), "model.layers.{}"
    ),
    "phi3": text(  # q, k and v in one: twice as many heads of q
        built("Phi3Config", "Phi3ForCausalLM", **LLAMA, pad_token_id=0, eos_token_id=1),
        "model.layers.{}",
    ),
    "bert": text(
        built(
            "BertConfig",
            "BertForMaskedLM",
            **WIDTHS,
            intermediate_size=48,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        "bert.encoder.layer.{}",
        masked,
    ),
    "vit": Example(
        built(
            "ViTConfig",
            "ViTForImageClassification",
            image_size=8,
            patch_size=4,
            num_channels=1,
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=48,
            num_labels=3,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        lambda n: {"pixel_values": numbers(n, 1, 8, 8)},
        named("vit.layers.{}"),
        by_name,
    ),
    "t5": Example(
        built(
            "T5Config",
            "T5ForConditionalGeneration",
            vocab_size=64,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=3,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        ),
        two_sided,
        (*named("encoder.block.{}", 3), *named("decoder.block.{}", 3)),
        by_name,
    ),
    "mixtral": text(
        built(
            "MixtralConfig",
            "MixtralForCausalLM",
            **LLAMA,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
        "model.layers.{}",
    ),
    "mamba": text(
        built(
            "MambaConfig",
            "MambaForCausalLM",
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=4,
            state_size=8,
            conv_kernel=4,
            expand=2,
            time_step_rank=4,
        ),
        "backbone.layers.{}",
    ),
    "falcon": text(
        built("FalconConfig", "FalconForCausalLM", **WIDTHS, **NO_DROPOUT), "transformer.h.{}"
    ),
    "bloom": text(
        built(
            "BloomConfig",
            "BloomForCausalLM",
            vocab_size=64,
            hidden_size=32,
            n_layer=4,
            n_head=4,
            **NO_DROPOUT,
        ),
        "transformer.h.{}",
    ),
}

SIX = {**WIDTHS, "hidden_size": 48, "num_attention_heads": 6, "intermediate_size": 48}


def eight(batch: int) -> dict[str, Any]:
    return {"input_ids": tokens(batch, 8), "use_cache": False}


SIX_HEADS: dict[str, Example] = {
    "llama": text(
        built("LlamaConfig", "LlamaForCausalLM", **SIX, num_key_value_heads=3),
        "model.layers.{}",
        eight,
    ),
    "gpt-neox": text(
        built("GPTNeoXConfig", "GPTNeoXForCausalLM", **SIX), "gpt_neox.layers.{}", eight
    ),
}
"""Sequences that 4 ranks can share, and heads that they cannot."""
