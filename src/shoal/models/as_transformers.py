"""Names of the tensors and config.json of Shoal's own Llama in transformers.

The two compute the same: halves are paired alike by RoPE, ε is added to the mean square, SwiGLU
gates alike, and no weight is permuted. Neither transformers nor torch is imported.

Source    transformers 5: LlamaConfig, modeling_llama.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NAMES = (
    (r"embedding\.", "model.embed_tokens."),
    (r"blocks\.(\d+)\.attention\.([qkvo])\.", r"model.layers.\1.self_attn.\2_proj."),
    (r"blocks\.(\d+)\.mlp\.(gate|up|down)\.", r"model.layers.\1.mlp.\2_proj."),
    (r"blocks\.(\d+)\.attention_norm\.", r"model.layers.\1.input_layernorm."),
    (r"blocks\.(\d+)\.mlp_norm\.", r"model.layers.\1.post_attention_layernorm."),
    (r"norm\.", "model.norm."),
    (r"head\.", "lm_head."),
)


def llama_name(name: str) -> str:
    """Return LlamaForCausalLM's name for a tensor of `models.llama.Llama`.

    >>> llama_name("blocks.11.attention.q.weight"), llama_name("head.weight")
    ('model.layers.11.self_attn.q_proj.weight', 'lm_head.weight')
    """
    for ours, theirs in _NAMES:
        if match := re.match(ours, name):
            return match.expand(theirs) + name[match.end() :]
    raise KeyError(name)


def llama_config(arguments: Mapping[str, Any], end_of_text: int | None) -> dict[str, Any]:
    """Return the config.json of transformers for one of Shoal's Llamas.

    Args:
        arguments: all of them, as `model_facts.resolve` completes them.
        end_of_text: id of the token that ends a text, after which `generate` stops; None without
            one.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": arguments["vocabulary"],
        "hidden_size": arguments["dim"],
        "intermediate_size": arguments["hidden"],
        "num_hidden_layers": arguments["layers"],
        "num_attention_heads": arguments["heads"],
        "num_key_value_heads": arguments["kv_heads"],
        "head_dim": arguments["dim"] // arguments["heads"],
        "hidden_act": "silu",
        "max_position_embeddings": arguments["sequence"],
        "rms_norm_eps": arguments["norm_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": arguments["rope_theta"]},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": arguments["tied"],
        "bos_token_id": None,
        "eos_token_id": end_of_text,
    }
