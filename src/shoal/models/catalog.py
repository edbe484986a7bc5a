"""Builds a model by name: `llama`, `mlp`, `resnet`, or a published size such as `llama-3-8b`.

Names, arguments, defaults and checks are facts without torch and live in
`shoal.planner.model_facts`; this page only joins each family to its module. Build under
`torch.device("meta")` to get a model of any size that holds no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from shoal.models.llama import Llama
from shoal.models.mlp import MLP
from shoal.models.resnet import ResNet
from shoal.planner.model_facts import resolve

MODELS: dict[str, Callable[..., nn.Module]] = {"llama": Llama, "mlp": MLP, "resnet": ResNet}
"""Family name → module class; the argument names of each are in `model_facts.FAMILIES`."""


def build(
    name: str,
    arguments: Mapping[str, Any],
    *,
    vocabulary: int | None = None,
    sequence: int | None = None,
) -> nn.Module:
    """The model `name` with these arguments, its weights drawn from torch's default generator.

    arguments    keys of [model]
    vocabulary   what the data's tokenizer has · sequence  tokens per sample; None if unknown
    Errors       ConfigError, as `model_facts.resolve`

    >>> build("mlp", {"hidden": 8}).head.in_features
    8
    """
    resolved = resolve(name, arguments, vocabulary=vocabulary, sequence=sequence)
    return MODELS[resolved.family](**resolved.arguments)
