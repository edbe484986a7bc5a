"""Every architecture of the transformers library, shrunk: found by its classes, sized by its names.

A configuration is walked, parts of parts too: whatever is a size by its name is made small, lists
of one entry per layer are cut so that every kind of layer stays, tokens with a meaning get ids that
no sample has. What the names do not say stands in `MORE`, by the model's folder.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from architecture_exceptions import MORE, SECTIONED, TALKERS
from torch import nn

VOCABULARY, TOKENS, LAYERS, HIDDEN, HEADS = 64, 8, 4, 32, 4
MOST = 3_000_000
"""Parameters of a model that is still tiny."""

SIZES: list[tuple[str, int]] = [
    (
        r"(\w+_)?vocab(ulary)?_size(_per_layer_input|_base)?|encoder_hash_byte_group_vocab",
        VOCABULARY,
    ),
    (r"num_(hidden|encoder|decoder)?_?layers|n_layers?|(encoder|decoder)_layers|depth", LAYERS),
    (r"(\w+_)?num_hidden_layers(_\w+)?|layers|num_blocks", LAYERS),
    (
        r"num_key_value_heads|num_kv_heads|kv_n_heads|swa_num_key_value_heads|linear_num_key_heads",
        2,
    ),
    (r"(\w+_)?(num|n)_(attention_|value_|mamba_)?heads?|(\w+_)?attention_heads", HEADS),
    (r"\w*num_value_heads|linear_num_heads|index_n_heads|mamba_n_heads", HEADS),
    (r"(?!qk_head_dim)\w*head_dim|kv_channels|d_kv|dim_head", 8),
    (
        r"(\w+_)?(hidden_size|d_model|n_embd|embed_dim)(_\w+)?|embedding_size|dim|decoder_dim",
        HIDDEN,
    ),
    (r"(\w+_)?(lora_rank|rank)", 16),
    (r"(\w*moe\w*|shared\w*|\w*expert\w*)_(intermediate|hidden)_(size|dim)", 24),
    (r"(\w+_)?(intermediate_size|ffn_dim|n_inner|d_ff|ffn_hidden_size|mlp_dim)(_\w+)?", 40),
    (r"word_embed_proj_dim|attention_hidden_size|lru_width|out_hidden_size|model_dim", HIDDEN),
    (r"(\w+_)?(num_experts|num_local_experts|n_routed_experts|moe_num_experts)", 4),
    (r"num_experts_per_tok(en)?|moe_top_?k|top_?k_experts|moe_k", 2),
    (r"(n_shared_experts|num_shared_experts|moe_num_shared_experts|n_group|topk_group)", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"num_(mtp|nextn_predict)_layers|num_kv_shared_layers", 0),
    (r"(\w+_)?(max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length)", 64),
    (r"max_(source|target)_positions", 64),
    (r"(\w+_)?(sliding_window|attention_window_size|chunk_size|attention_chunk_size)", 4),
    (r"(mamba_)?d_state|mamba_d_state|state_size|ssm_state_size", 8),
    (r"mamba_n?groups|n_groups|mamba_n_groups", 1),
    (r"image_size|max_image_size", 16),
    (r"patch_size", 4),
    (r"(?!qk_head_dim)\w+_(dim|size|channels|ff)|\w+_channel", HIDDEN),
]

UNKNOWN = re.compile(r"(\w*(token|bos|eos|pad|boi|eoi|boa|eoa)_?(id|index|ids))")
"""Tokens with a meaning: padding is 0, everything else 1; samples have ids from 2 on."""


@dataclass(frozen=True)
class Architecture:
    """One class of a model that is made tiny.

    folder, name   of transformers' models, or "diffusers" · plan  whether a plan for tp comes with it
    """

    folder: str
    name: str
    plan: bool = False

    @property
    def key(self) -> str:
        """How rows name it."""
        return f"{self.folder} {self.name}"

    def kind(self) -> Any:
        """Its class."""
        if self.folder == "diffusers":
            return getattr(importlib.import_module("diffusers"), self.name)
        where = f"transformers.models.{self.folder}.modeling_{self.folder}"
        return getattr(importlib.import_module(where), self.name)

    def build(self) -> nn.Module:
        """The module, drawn from torch's generator as it stands; ValueError where it is not tiny."""
        kind = self.kind()
        if self.folder == "diffusers":
            made: nn.Module = kind(**MORE["diffusers"][self.name])
            return made
        with torch.device("meta"):
            size = sum(p.numel() for p in kind(tiny(kind.config_class, self.folder)).parameters())
        if size > MOST:
            raise ValueError(f"{size / 1e6:.0f} million parameters: its sizes have unknown names")
        made = kind(tiny(kind.config_class, self.folder))
        return made

    def inputs(self, samples: int) -> dict[str, Any]:
        """What it reads: text, or what its forward asks for."""
        asked = inspect.signature(self.kind().forward).parameters
        draw = torch.Generator().manual_seed(200)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(samples, *shape, generator=draw)

        found: dict[str, Any] = {}
        if self.folder == "diffusers":
            found = {"sample": numbers(4, 8, 8), "hidden_states": numbers(4, 8, 8)}
            found |= {
                "timestep": torch.arange(samples) * 7,
                "class_labels": torch.arange(samples) % 5,
            }
            found["encoder_hidden_states"] = numbers(TOKENS, 16)
            if "sample" in asked:
                found.pop("class_labels")
            return {name: value for name, value in found.items() if name in asked}
        if "input_ids" in asked:
            found["input_ids"] = ids(samples)
        if "decoder_input_ids" in asked:
            found["decoder_input_ids"] = ids(samples).flip(1)
        if self.name in SEEING:
            found |= {"pixel_values": numbers(3, 16, 16)}
        if "input_features" in asked and "input_ids" not in asked:
            found["input_features"] = numbers(8, 2 * TOKENS)
        return found


BESIDES = [
    Architecture("vit", "ViTForImageClassification"),
    Architecture("swin", "SwinForImageClassification"),
    Architecture("convnext", "ConvNextForImageClassification"),
    Architecture("clip", "CLIPModel"),
    Architecture("whisper", "WhisperForConditionalGeneration"),
    Architecture("diffusers", "UNet2DConditionModel"),
    Architecture("diffusers", "DiTTransformer2DModel"),
]
SEEING = {one.name for one in BESIDES[:4]} | {"PPFormulaNetForConditionalGeneration"}
"""Classes that get pictures; models that read both read text alone."""


def size_of(name: str) -> int | None:
    """What a size of that name becomes.

    >>> size_of("hidden_size"), size_of("moe_intermediate_size"), size_of("rope_theta")
    (32, 24, None)
    """
    return next((value for words, value in SIZES if re.fullmatch(words, name)), None)


def tiny(kind: Any, folder: str) -> Any:
    """A small configuration of a class, its parts small too."""
    plain = kind()
    given: dict[str, Any] = {}
    parts = {k: type(v) for k, v in vars(plain).items() if hasattr(v, "to_dict")}
    for key, part in parts.items():
        given[key] = tiny(part, folder).to_dict()
    layers = next(
        (
            getattr(plain, k)
            for k in ("num_hidden_layers", "n_layer", "num_layers")
            if hasattr(plain, k)
        ),
        None,
    )
    for key, value in vars(plain).items():
        if key.startswith("_") or key in parts or isinstance(value, bool):
            continue
        if UNKNOWN.fullmatch(key):
            if isinstance(value, int) and value >= 2:
                given[key] = 1
            elif isinstance(value, list):
                given[key] = [1]
        elif isinstance(value, list | tuple) and len(value) == layers and layers > 1:
            given[key] = cut(list(value))
        elif key == "rope_parameters" and isinstance(value, dict):
            if folder in SECTIONED or "mrope_section" in {
                *value,
                *(getattr(kind, "ignore_keys_at_rope_validation", ()) or ()),
            }:
                given[key] = {**value, "mrope_section": sections(value)}
        elif isinstance(value, int) and (small := size_of(key)) is not None:
            given[key] = min(small, value)
        elif (
            isinstance(value, list | tuple)
            and value
            and all(type(n) is int and n >= 64 for n in value)
        ):
            given[key] = [HIDDEN] * len(value)
        elif value is None and key in ("num_key_value_heads", "head_dim"):
            given[key] = size_of(key)
    if "kv_lora_rank" in given and "num_key_value_heads" in given:
        given["num_key_value_heads"] = HEADS  # latent attention has no groups of heads
    given |= MORE.get(folder, {}).get(kind.__name__, {})
    try:
        return kind(**given)
    except ValueError:  # not every family has groups of heads
        if "num_key_value_heads" not in given:
            raise
        return kind(**{**given, "num_key_value_heads": HEADS})


def cut(entries: list[Any], layers: int = LAYERS) -> list[Any]:
    """As many entries as there are layers, every kind of them if that is possible.

    >>> cut(["a", "a", "a", "a", "a", "b", "a"])
    ['a', 'a', 'a', 'b']
    """
    first: dict[str, int] = {}
    for index, entry in enumerate(entries):
        first.setdefault(str(entry), index)
    others = [index for index in range(len(entries)) if index not in first.values()]
    return [entries[index] for index in sorted([*first.values(), *others][:layers])]


def sections(rope: dict[str, Any]) -> list[int]:
    """Three parts that fill half of what a head of 8 numbers turns.

    >>> sections({}), sections({"partial_rotary_factor": 0.5})
    ([2, 1, 1], [1, 1, 0])
    """
    half = int(8 * rope.get("partial_rotary_factor", 1.0)) // 2
    return [half - half // 2, half // 2 - half // 4, half // 4] if half > 2 else [1, 1, 0]


def architectures() -> Iterator[Architecture]:
    """Every `…ForCausalLM`, one model of each folder that has a plan for tp without one, `BESIDES`."""
    import transformers.models as models

    for found in pkgutil.iter_modules(models.__path__):
        where = f"transformers.models.{found.name}.modeling_{found.name}"
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError:
            continue
        classes = {
            n: c
            for n, c in vars(module).items()
            if inspect.isclass(c)
            and c.__module__ == where
            and inspect.isclass(getattr(c, "config_class", None))
        }
        planned = any(has_plan(c) for c in classes.values())
        causal = [n for n in classes if n.endswith("ForCausalLM")]
        for name in causal or first_of(classes, planned):
            yield Architecture(found.name, TALKERS.get(found.name, name), planned)
    yield from BESIDES


def first_of(classes: dict[str, Any], planned: bool) -> list[str]:
    """The class that stands for a folder without a causal model, if it has a plan."""
    if not planned:
        return []
    for ending in ("ForConditionalGeneration", "ForMaskedLM", "Model"):
        found = [n for n in classes if n.endswith(ending) and not n.endswith("PreTrainedModel")]
        if found:
            return found[:1]
    return []


def has_plan(kind: Any) -> bool:
    """Whether a class, or its configuration, says which weights tp splits."""
    config = kind.config_class
    written = getattr(config, "base_model_tp_plan", None) if inspect.isclass(config) else None
    return bool(vars(kind).get("_tp_plan")) or bool(written)


def ids(samples: int) -> torch.Tensor:
    """Token ids from 2 on: 0 and 1 mean padding, ends and images to some."""
    draw = torch.Generator().manual_seed(100)
    return torch.randint(2, VOCABULARY, (samples, TOKENS), generator=draw)
