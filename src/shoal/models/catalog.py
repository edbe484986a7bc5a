"""Build a model by name: ours (`llama`, `gpt`, `resnet`, …), a published size, or `hf:PATH`.

Names, arguments, defaults and checks are facts without torch and live in
`shoal.forecast.models.model_facts`; this module only maps each family to its class. Build under
`torch.device("meta")` to get a model of any size that holds no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from shoal.forecast.models.hf_presence import is_hf_name
from shoal.forecast.models.model_facts import family_of, resolve_model
from shoal.models.gpt import GPT
from shoal.models.huggingface import build_transformers_model
from shoal.models.llama import Llama
from shoal.models.loss import token_loss
from shoal.models.mlp import MLP
from shoal.models.moe import MoE, balanced_loss
from shoal.models.resnet import ResNet
from shoal.models.vit import ViT

MODELS: dict[str, Callable[..., nn.Module]] = {
    "llama": Llama,
    "gpt": GPT,
    "moe": MoE,
    "mlp": MLP,
    "resnet": ResNet,
    "vit": ViT,
}
"""Family name → module class; the argument names of each are in `model_facts.FAMILIES`."""


def build(
    name: str,
    arguments: Mapping[str, Any],
    *,
    vocabulary: int | None = None,
    sequence: int | None = None,
) -> nn.Module:
    """Build the model `name` with these arguments; torch's default generator draws its weights.

    Args:
        name: of a family, of a published size, or hf:PATH for a transformers model, whose weights
            are read if they are beside its config.json.
        arguments: keys of [model].
        vocabulary: size of the data's tokenizer.
        sequence: tokens per sample; None if unknown. A language model uses both values where its
            arguments leave them open.

    Raises:
        ConfigError: an unknown name or argument, an impossible value, a model too small for the
            data, a config.json or weights that cannot be used.

    >>> build("mlp", {"hidden": 8}).head.in_features
    8
    """
    if is_hf_name(name):
        return build_transformers_model(name, arguments, vocabulary=vocabulary, sequence=sequence)
    resolved = resolve_model(name, arguments, vocabulary=vocabulary, sequence=sequence)
    return MODELS[resolved.family](**resolved.arguments)


def find_default_loss(name: str) -> Callable[[Any, Tensor], tuple[Tensor, Tensor]]:
    """Return the default loss of a model, used if the user names none.

    balanced_loss for names of the family moe; token_loss for every other, known or not.

    >>> find_default_loss("moe").__name__, find_default_loss("gpt-2").__name__
    ('balanced_loss', 'token_loss')
    """
    return balanced_loss if family_of(name) == "moe" else token_loss
