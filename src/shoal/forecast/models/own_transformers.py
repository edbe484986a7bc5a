"""Shapes of Shoal's own transformers, from the keys of [model].

llama, gpt, moe and vit are described by the same numbers as published transformers, so that
`shoal.forecast.models.transformer_costs` computes sizes, FLOP and memory by arithmetic. Models of
other families are traced.
"""

from __future__ import annotations

from typing import Any

from shoal.base.errors import PlanError
from shoal.base.estimates.transformer_shape import TransformerShape
from shoal.forecast.models.model_facts import resolve_model


def own_shape(name: str, arguments: dict[str, Any] | None = None, **known: int) -> TransformerShape:
    """Derive the shape of one of Shoal's transformers (llama, gpt, moe, vit) from [model]'s keys.

    Args:
        arguments: keys of [model].
        known: `vocabulary` and `sequence` of the data; both as in `model_facts.resolve`.

    Raises:
        ConfigError: as in `model_facts.resolve`.
        PlanError: the family is no transformer.

    >>> own_shape("llama", {"dim": 64, "layers": 2}, vocabulary=512, sequence=32).ffn
    192
    >>> own_shape("moe", {"dim": 64, "experts": 4}).experts_per_token
    2
    """
    found = resolve_model(name, arguments, **known)
    given = found.arguments
    if found.family not in _SHAPES:
        raise PlanError(
            f"model.name = {name}: is no transformer, its facts are traced; try: model.name=llama"
        )
    shared = {
        "name": name,
        "layers": given["layers"],
        "hidden": given["dim"],
        "heads": given["heads"],
        "kv_heads": given.get("kv_heads", given["heads"]),
        "ffn": given["hidden"],
        "dropout": given["dropout"],
    }
    return TransformerShape(**shared, **_SHAPES[found.family](given))


def _llama(given: dict[str, Any]) -> dict[str, Any]:
    return {"vocabulary": given["vocabulary"], "tied": given["tied"]}


def _moe(given: dict[str, Any]) -> dict[str, Any]:
    return {
        **_llama(given),
        "experts": given["experts"],
        "experts_per_token": given["top_k"],
        "expert_ffn": given["hidden"],
    }


_PLAIN = {"gated": False, "norm": "layer", "biases": True}


def _gpt(given: dict[str, Any]) -> dict[str, Any]:
    return {**_llama(given), **_PLAIN, "positions": given["sequence"]}


def _vit(given: dict[str, Any]) -> dict[str, Any]:
    """Return the shape of an encoder on patches; its sequence is their number + 1 class token."""
    return {
        **_PLAIN,
        "vocabulary": given["classes"],
        "patch": given["image_channels"] * given["patch"] ** 2,
        "positions": (given["image_size"] // given["patch"]) ** 2 + 1,
        "causal": False,
    }


_SHAPES = {"llama": _llama, "gpt": _gpt, "moe": _moe, "vit": _vit}
