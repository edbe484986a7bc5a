"""Layers to be split in tests: GPT blocks with fused q, k, v in every arrangement, convolutions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class GPTBlock(nn.Module):
    """Pre-norm block with biases everywhere; `layout`: how q, k and v lie in one weight."""

    def __init__(self, layout: str, dim: int = 48, heads: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.layout, self.heads, self.dim, self.dropout = layout, heads, dim, dropout
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def split_heads(self, x: torch.Tensor) -> list[torch.Tensor]:
        batch, seq, _ = x.shape
        shape = (batch, seq, self.heads, self.dim // self.heads)
        if self.layout == "interleaved":
            parts = x.view(batch, seq, self.heads, 3, -1).unbind(3)
        elif self.layout == "chunked":
            parts = [t.view(shape) for t in x.chunk(3, -1)]
        elif self.layout == "split":
            parts = [t.view(shape) for t in x.split(self.dim, -1)]
        elif self.layout == "sliced":
            parts = [x[..., k * self.dim : (k + 1) * self.dim].reshape(shape) for k in range(3)]
        else:  # permuted
            parts = x.view(batch, seq, 3, *shape[2:]).permute(2, 0, 1, 3, 4)
        return [t.transpose(1, 2) for t in parts]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split_heads(self.qkv(self.norm1(x)))
        mixed = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        mixed = mixed.transpose(1, 2).reshape(x.shape)
        x = x + F.dropout(self.out(mixed), self.dropout, self.training)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class MLP(nn.Module):
    """A user's two layers, with an activation that must not be summed before."""

    def __init__(self, dim: int = 48, hidden: int = 96) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Residual(nn.Module):
    """ResNet's block: convolutions, BatchNorm, an in-place activation."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(x + self.norm2(self.conv2(inner)))


class PerHead(nn.Module):
    """Attention of weights alone times values: whole weights beside split ones, x @ W.T, a scale."""

    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.randn(2 * dim, dim) / dim**0.5)
        self.scale = nn.Parameter(torch.ones(2 * dim))
        self.outer = nn.Parameter(torch.randn(dim, 2 * dim) / dim**0.5)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.silu(x @ self.inner.T) * torch.exp(self.scale)
        return x + self.gain * (h @ self.outer.T), x.pow(2).mean()
