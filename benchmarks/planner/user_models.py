"""Models that no planner knows by name, as users write them: for the runs at hand."""

from __future__ import annotations

import torch
from torch import nn


class Patches(nn.Module):
    """A small encoder over the rows of an image: torch's own TransformerEncoder."""

    def __init__(self, width: int = 192, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = images.reshape(images.shape[0], 8, 8)
        return self.head(self.encoder(self.embed(rows)).mean(dim=1))


class Wide(nn.Module):
    """Few, wide layers: parameters and optimizer count more than activations."""

    def __init__(self, width: int = 1536) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.body(images)


def patches() -> nn.Module:
    """For model.build."""
    return Patches()


def wide() -> nn.Module:
    """For model.build."""
    return Wide()
