"""The model that every peer trains: a Llama as a person writes it in plain PyTorch.

Same architecture and the same parameter names as Shoal's, so it loads Shoal's state dict; but stock
parts only: nn.Linear, nn.RMSNorm, F.scaled_dot_product_attention, a rotary table kept in buffers,
and logits of the whole micro-batch, on which peers call F.cross_entropy.
Source: Touvron et al. 2023 (2302.13971); halves are paired as transformers does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def swap_halves(x: Tensor) -> Tensor:
    """[..., head_dim]: (a, b) becomes (−b, a)."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.q = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, seq, dim] to [batch, seq, dim]."""
        batch, seq, _ = x.shape
        q = self.q(x).view(batch, seq, self.heads, self.head_dim).transpose(1, 2)
        k = self.k(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        q, k = q * cos + swap_halves(q) * sin, k * cos + swap_halves(k) * sin
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        return self.o(mixed.transpose(1, 2).reshape(batch, seq, -1))


class SwiGLU(nn.Module):
    """The feed-forward part."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] to [..., dim]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer."""

    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, epsilon)
        self.attention = Attention(dim, heads, kv_heads)
        self.mlp_norm = nn.RMSNorm(dim, epsilon)
        self.mlp = SwiGLU(dim, hidden)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, seq, dim] to [batch, seq, dim]."""
        h = h + self.attention(self.attention_norm(h), cos, sin)
        return h + self.mlp(self.mlp_norm(h))


class PlainLlama(nn.Module):
    """The whole model; takes the resolved arguments of Shoal's `llama`, dropout 0."""

    def __init__(
        self,
        *,
        vocabulary: int,
        dim: int,
        layers: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        sequence: int,
        rope_theta: float = 10000.0,
        norm_epsilon: float = 1e-5,
        tied: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if dropout:
            raise ValueError("the peers' model has no dropout")
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(
            Block(dim, heads, kv_heads, hidden, norm_epsilon) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(dim, norm_epsilon)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        rates = rope_theta ** -(torch.arange(0, dim // heads, 2) / (dim // heads))
        angles = torch.outer(torch.arange(sequence).float(), rates).repeat(1, 2)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos(), persistent=False)  # [seq, head_dim]
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [batch, seq] to logits [batch, seq, vocabulary]."""
        return self.head(self.hidden_states(tokens))

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """Token ids [batch, seq] to what the head reads, [batch, seq, dim]."""
        seq = tokens.shape[1]
        cos, sin = self.cos[:seq], self.sin[:seq]
        h = self.embedding(tokens)
        for block in self.blocks:
            h = block(h, cos, sin)
        return self.norm(h)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over all targets, as every tutorial writes it."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
