"""ViT: image classification by a transformer encoder over a sequence of patches.

Formula   h = [class token, patches · W + b] + positions;  blocks of GPT-2's kind that see all
          positions;  logits = head(norm(h)[class token])
Init      normal, σ = 0.02, biases 0; patches: σ = 1 / √(numbers per patch), so that they enter with
          the variance of the image; what writes into the residual stream: σ / √(2·layers)
Source    Dosovitskiy et al. 2020 (2010.11929). As transformers initialises it, where the paper
          starts the head at 0; GELU by tanh, as GPT-2
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from shoal.base.errors import ConfigError
from shoal.models.gpt import BiasedProjection, build_blocks
from shoal.models.llama import INIT_STD, TokenEmbedding


class Patches(nn.Conv2d):
    """Patch embedding: a convolution whose stride is its kernel size."""

    def __init__(self, channels: int, dim: int, patch: int) -> None:
        super().__init__(channels, dim, patch, stride=patch)

    def reset_parameters(self) -> None:
        """Draw the weights again."""
        nn.init.normal_(self.weight, std=1 / math.sqrt(self.weight[0].numel()))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Map [batch, channels, height, width] to [batch, patches, dim], row by row."""
        return super().forward(images).flatten(2).transpose(1, 2)


class ClassToken(nn.Module):
    """Learnt class token, prepended to every sequence; its output is classified."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the vector again."""
        nn.init.normal_(self.weight, std=INIT_STD)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, n, dim] to [batch, 1 + n, dim]."""
        return torch.cat((self.weight.to(x.dtype).expand(x.shape[0], 1, -1), x), 1)


class ViT(nn.Module):
    """Vision transformer; arguments as in `shoal.forecast.models.families`."""

    def __init__(
        self,
        *,
        classes: int,
        image_channels: int,
        image_size: int,
        patch: int,
        dim: int,
        layers: int,
        heads: int,
        hidden: int,
        norm_epsilon: float = 1e-6,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.image = (image_channels, image_size, image_size)
        self.patches = Patches(image_channels, dim, patch)
        self.class_token = ClassToken(dim)
        self.positions = TokenEmbedding((image_size // patch) ** 2 + 1, dim)
        self.embedding_dropout = nn.Dropout(dropout)
        self.blocks = build_blocks(
            layers, dim, heads, hidden, causal=False, epsilon=norm_epsilon, dropout=dropout
        )
        self.norm = nn.LayerNorm(dim, norm_epsilon)
        self.head = BiasedProjection(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [batch, image_channels, image_size, image_size] to logits [batch, classes].

        Raises:
            ConfigError: images have another size.
        """
        shape = tuple(images.shape[1:])
        if shape != self.image:
            raise ConfigError(_format_wrong_image(shape, self.image))
        h = self.class_token(self.patches(images))
        places = torch.arange(h.shape[1], device=h.device)
        h = self.embedding_dropout(h + self.positions(places))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h[:, 0]))


def _format_wrong_image(shape: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """Return the message for images of another size than the model's."""
    line = f"model.image_size = {wanted[1]}: the data's samples are {list(shape)}, not "
    line += f"{list(wanted)}"
    if len(shape) != 3 or shape[1] != shape[2]:
        return f"{line}; square images are needed"
    return f"{line}; try: model.image_size={shape[1]} model.image_channels={shape[0]}"
