"""What the names of a configuration do not say of its sizes, by the folder of its model.

Every entry is a size that others must agree with, a kind of layer that a short list would lose, or
a value without which the authors' own class does not run.
"""

from __future__ import annotations

from typing import Any

SSM = {"mamba_n_heads": 4, "mamba_d_head": 16}
TALKERS = {
    "qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
"""Folders whose first class is not the one that reads text."""

SECTIONED = {"paddleocr_vl"}
"""Folders that turn a head in three parts, and do not say so in their configuration."""

MORE: dict[str, dict[str, Any]] = {
    "jamba": {"JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1}},
    "bamba": {"BambaConfig": {"attn_layer_indices": [1, 3], **SSM}},
    "granitemoehybrid": {
        "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"] * 2, **SSM}
    },
    "mamba2": {"Mamba2Config": {"head_dim": 16}},
    "codegen": {"CodeGenConfig": {"rotary_dim": 8}},
    "gptj": {"GPTJConfig": {"rotary_dim": 8}},
    "deepseek_v2": {"DeepseekV2Config": {"num_experts_per_tok": 2}},
    "esmc": {"EsmcConfig": {"num_key_value_heads": 4}},
    "zamba2": {
        "Zamba2Config": {
            "layers_block_type": ["mamba", "hybrid"] * 2,
            "n_mamba_heads": 4,
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
        }
    },
    "zamba": {
        "ZambaConfig": {
            "layers_block_type": ["mamba", "hybrid"] * 2,
            "n_mamba_heads": 2,
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
        }
    },
    "xmod": {"XmodConfig": {"default_language": "en_XX"}},
    "neomme": {
        "NeoMMEConfig": {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
    },
    "bailing_hybrid": {"BailingHybridConfig": {"layer_group_size": 2}},
    "lfm2_moe": {"Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"] * 2}},
    "dots1": {
        "Dots1Config": {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_shared_experts": 1,
        }
    },
    "longcat_flash": {"LongcatFlashConfig": {"head_dim": 8, "qk_head_dim": 16}},
    "mistral4": {
        "Mistral4Config": {
            "rope_parameters": {
                "rope_type": "default",
                "partial_rotary_factor": 0.5,
                "rope_theta": 10000.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 64,
            }
        }
    },
    "ernie4_5_vl_moe": {
        "Ernie4_5_VLMoeTextConfig": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500000.0,
                "mrope_section": [1, 1, 2],
            }
        }
    },
    "step3p7": {"Step3p7TextConfig": {"sliding_window": 4}},
    "gemma3n": {"Gemma3nTextConfig": {"intermediate_size": 40}},
    "dots3_note": {
        "Dots3NoteTextConfig": {
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_q_lora_rank": 16,
            "swa_kv_lora_rank": 16,
            "swa_head_dim": 16,
            "swa_qk_nope_head_dim": 8,
            "swa_v_head_dim": 8,
        }
    },
    "deepseek_ocr2": {
        "DeepseekOcr2TextConfig": {
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
        }
    },
    "diffusion_gemma": {
        "DiffusionGemmaTextConfig": {
            "moe_intermediate_size": 24,
            "num_experts": 4,
            "top_k_experts": 2,
        }
    },
    "granite4_vision": {"Granite4VisionConfig": {"deepstack_layer_map": [(0, 0)]}},
    "blenderbot": {"BlenderbotConfig": {"num_hidden_layers": 4}},
    "musicgen": {"MusicgenDecoderConfig": {"num_codebooks": 1}},
    "musicgen_melody": {"MusicgenMelodyDecoderConfig": {"num_codebooks": 1}},
    "xlstm": {
        "xLSTMConfig": {
            "hidden_size": 64,
            "embedding_dim": 64,
            "qk_dim_factor": 1.0,
            "chunk_size": 4,
            "ffn_round_up_to_multiple_of": 8,
        }
    },
    "qwen4_exp": {"Qwen4ExpTextConfig": {"indexer_budget": 4, "indexer_compress_ratio": 2}},
    "fun_asr_nano": {"FunAsrNanoAdaptorConfig": {"intermediate_size": 8}},
    "janus": {"JanusVQVAEConfig": {"num_embeddings": 64}},
    "swin": {
        "SwinConfig": {
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 2,
        }
    },
    "convnext": {
        "ConvNextConfig": {
            "patch_size": 2,
            "num_stages": 2,
            "hidden_sizes": [16, 32],
            "depths": [2, 2],
        }
    },
    "whisper": {"WhisperConfig": {"num_mel_bins": 8, "max_source_positions": 8}},
    "diffusers": {
        "UNet2DConditionModel": {
            "sample_size": 8,
            "block_out_channels": (16, 32),
            "layers_per_block": 1,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "cross_attention_dim": 16,
            "attention_head_dim": 4,
            "norm_num_groups": 4,
        },
        "DiTTransformer2DModel": {
            "num_attention_heads": 4,
            "attention_head_dim": 8,
            "in_channels": 4,
            "num_layers": 4,
            "sample_size": 8,
            "patch_size": 2,
            "norm_num_groups": 4,
            "num_embeds_ada_norm": 5,
        },
    },
}
"""What a folder's configurations need besides: {key of the part that it is in, by its class: …}."""
