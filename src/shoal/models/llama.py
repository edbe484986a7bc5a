"""Llama: the decoder-only language model that most open models follow; a plain nn.Module.

Formula   h = embedding[tokens]; per block  h += attention(norm(h));  h += mlp(norm(h))
          RMSNorm(x) = x / √(mean(x²) + ε) · w        SwiGLU(x) = down(silu(gate(x)) · up(x))
          RoPE turns the pair (x_i, x_{i + d/2}) at position p by the angle p · θ^(−2i/d)
Returns   `Unprojected(hidden, weight)`: the loss projects onto the vocabulary chunk by chunk
Init      normal, σ = 0.02; what writes into the residual stream (o, down): σ / √(2·layers). Every
          leaf module knows its own σ, so calling `reset_parameters` on any of them is right.
Source    Touvron et al. 2023 (2302.13971, 2307.09288), Llama 3 (2407.21783); σ: GPT-2. Halves are
          paired as transformers does, so its Llama weights fit without permutation.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.base.errors import ConfigError
from shoal.models._torch import is_recording
from shoal.models.attention import causal_attention, number_documents
from shoal.models.loss import Unprojected
from shoal.models.norm import RMSNorm

INIT_STD = 0.02


class Projection(nn.Linear):
    """Linear layer without bias, its weights drawn from a normal of width `std`."""

    def __init__(
        self, inputs: int, outputs: int, *, std: float = INIT_STD, device: str | None = None
    ) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=False, device=device)

    def reset_parameters(self) -> None:
        """Draw the weights again."""
        nn.init.normal_(self.weight, std=self.std)


class TokenEmbedding(nn.Embedding):
    """Embedding with one row per token, drawn as the projections are."""

    def reset_parameters(self) -> None:
        """Draw the weights again."""
        nn.init.normal_(self.weight, std=INIT_STD)


def rotary_table(
    seq: int, head_dim: int, theta: float, like: Tensor, position_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of RoPE: the factors of a vector and of its swapped halves.

    Takes `like`'s dtype and device; angles are computed in fp32 or better, because bf16 has no
    number between 256 and 258. On a CPU each layer's forward pass makes the table (35 µs). On a
    device a launch costs more than its work, so all layers share one table there. A buffer would
    hold garbage after meta-device initialisation and lose digits in `model.to(bfloat16)`; without
    one, blocks need nothing but h and can be split anywhere.

    Returns:
        Each [seq, 1, head_dim]; with position_ids [batch, seq]: each [batch, seq, 1, head_dim].
    """
    fixed = like.device.type not in ("cpu", "meta") and position_ids is None
    if fixed and not is_recording():  # a recorder must see the operations
        shown = torch.is_inference_mode_enabled()  # such tensors are of no use outside of it
        return _shared_rotary_table(seq, head_dim, theta, like.dtype, like.device, shown)
    return _make_rotary_table(seq, head_dim, theta, like.dtype, like.device, position_ids)


@functools.lru_cache(maxsize=4)
def _shared_rotary_table(
    seq: int, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device, shown: bool
) -> tuple[Tensor, Tensor]:
    return _make_rotary_table(seq, head_dim, theta, dtype, device, None)


def _make_rotary_table(
    seq: int,
    head_dim: int,
    theta: float,
    dtype: torch.dtype,
    device: torch.device,
    position_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    steps = torch.arange(0, head_dim, 2, device=device, dtype=exact)
    rates = torch.exp(steps * (-math.log(theta) / head_dim))
    if position_ids is None:
        positions = torch.arange(seq, device=device, dtype=exact)
        angles = torch.outer(positions, rates).unsqueeze(1)
    else:
        angles = (position_ids.to(exact).unsqueeze(-1) * rates).unsqueeze(2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs of x [batch, seq, heads, head_dim] by the table's angles."""
    first, second = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat((second, first), -1), sin)


class Attention(nn.Module):
    """Self-attention with rotary positions and grouped key/value heads."""

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        *,
        rope_theta: float,
        dropout: float,
        residual_std: float,
    ) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.rope_theta = rope_theta
        self.dropout = dropout
        self.q = Projection(dim, heads * self.head_dim)
        self.k = Projection(dim, kv_heads * self.head_dim)
        self.v = Projection(dim, kv_heads * self.head_dim)
        self.o = Projection(heads * self.head_dim, dim, std=residual_std)

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Map [batch, seq, dim] to the same; position ids [batch, seq] of packed rows."""
        batch, seq, _ = x.shape
        q = self.q(x).view(batch, seq, -1, self.head_dim)
        k = self.k(x).view(batch, seq, -1, self.head_dim)
        v = self.v(x).view(batch, seq, -1, self.head_dim)
        cos, sin = rotary_table(seq, self.head_dim, self.rope_theta, q, position_ids)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        mixed = causal_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            dropout=self.dropout if self.training else 0.0,
            documents=None if position_ids is None else number_documents(position_ids),
        )
        return self.o(mixed.transpose(1, 2).reshape(batch, seq, -1))


class SwiGLU(nn.Module):
    """Feed-forward part of a block: one projection gates another."""

    def __init__(self, dim: int, hidden: int, *, residual_std: float) -> None:
        super().__init__()
        self.gate = Projection(dim, hidden)
        self.up = Projection(dim, hidden)
        self.down = Projection(hidden, dim, std=residual_std)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., dim] to [..., dim]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Transformer block: attention, then feed-forward, each added to the residual stream."""

    def __init__(self, attention: Attention, mlp: SwiGLU, dim: int, epsilon: float, dropout: float):
        super().__init__()
        self.attention_norm = RMSNorm(dim, epsilon)
        self.attention = attention
        self.mlp_norm = RMSNorm(dim, epsilon)
        self.mlp = mlp
        self.residual_dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor, *packed: Tensor) -> Tensor:
        """Map [batch, seq, dim] to the same; position ids [batch, seq] of packed rows too."""
        h = h + self.residual_dropout(self.attention(self.attention_norm(h), *packed))
        return h + self.residual_dropout(self.mlp(self.mlp_norm(h)))


class Llama(nn.Module):
    """Llama, a decoder-only language model: token ids [batch, seq] to `Unprojected`.

    Takes    vocabulary, dim, layers, heads, kv_heads, hidden (width of SwiGLU), sequence (most
             tokens), rope_theta, norm_epsilon, tied (head and embedding), dropout; all by keyword,
             as `shoal.forecast.models.model_facts` completes and checks them: nothing is checked
             here

    Raises:
        ConfigError: from a forward pass with more tokens than `sequence`.
    """

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
        self.sequence = sequence
        self.embedding = TokenEmbedding(vocabulary, dim)
        self.embedding_dropout = nn.Dropout(dropout)
        residual_std = INIT_STD / math.sqrt(2 * layers)
        self.blocks = nn.ModuleList(
            Block(
                Attention(
                    dim,
                    heads,
                    kv_heads,
                    rope_theta=rope_theta,
                    dropout=dropout,
                    residual_std=residual_std,
                ),
                SwiGLU(dim, hidden, residual_std=residual_std),
                dim,
                norm_epsilon,
                dropout,
            )
            for _ in range(layers)
        )
        self.norm = RMSNorm(dim, norm_epsilon)
        # a tied head gets the embedding's weight: nothing to draw, nothing to allocate
        self.head = Projection(dim, vocabulary, device="meta" if tied else None)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Unprojected:
        """Map token ids [batch, seq] to last hidden states [batch, seq, dim] and head weight.

        Args:
            position_ids: [batch, seq] of packed rows: each document of a row counts from 0, and
                sees itself alone; None: a row is one document.

        Raises:
            ConfigError: more tokens than `sequence`.
        """
        if input_ids.shape[1] > self.sequence:
            raise ConfigError(
                f"data.sequence = {input_ids.shape[1]}: longer than model.sequence "
                f"{self.sequence}; set model.sequence={input_ids.shape[1]}"
            )
        packed = () if position_ids is None else (position_ids,)
        h = self.embedding_dropout(self.embedding(input_ids))
        for block in self.blocks:
            h = block(h, *packed)
        return Unprojected(self.norm(h), self.head.weight)
