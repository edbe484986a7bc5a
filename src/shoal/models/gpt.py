"""GPT-2: a pre-norm decoder with learnt positions and a tied head; a plain nn.Module.

Formula   h = words[tokens] + positions[0 … seq);  per block  h += attention(norm(h));
          h += down(gelu(up(norm(h))));  every norm a LayerNorm, every projection with a bias;
          q, k and v are one projection (rows: all of q, all of k, all of v)
Returns   `Unprojected(hidden, weight)`: the loss projects onto the vocabulary chunk by chunk
Init      normal, σ = 0.02, biases 0; what writes into the residual stream: σ / √(2·layers)
Source    Radford et al. 2019 and openai/gpt-2 (model.py): pre-norm, GELU by tanh, tied head. Its
          Conv1D weights are those of nn.Linear transposed; dropout as there, off by default
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.base.errors import ConfigError
from shoal.models.attention import causal_attention, number_documents
from shoal.models.llama import INIT_STD, Projection, TokenEmbedding
from shoal.models.loss import Unprojected


class BiasedProjection(nn.Linear):
    """Linear layer with weights drawn from a normal of width `std` and biases 0."""

    def __init__(self, inputs: int, outputs: int, *, std: float = INIT_STD) -> None:
        self.std = std
        super().__init__(inputs, outputs)

    def reset_parameters(self) -> None:
        """Draw the weights again, and set the biases to 0."""
        nn.init.normal_(self.weight, std=self.std)
        nn.init.zeros_(self.bias)


class FusedAttention(nn.Module):
    """Self-attention with one projection for q, k and v.

    Args:
        causal: every position sees itself and the past; else all positions.
    """

    def __init__(
        self, dim: int, heads: int, *, causal: bool, dropout: float, residual_std: float
    ) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.causal = causal
        self.dropout = dropout
        self.qkv = BiasedProjection(dim, 3 * dim)
        self.out = BiasedProjection(dim, dim, std=residual_std)

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Map [batch, seq, dim] to the same; position ids [batch, seq] of packed rows."""
        batch, seq, _ = x.shape
        q, k, v = (
            part.view(batch, seq, -1, self.head_dim).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        dropout = self.dropout if self.training else 0.0
        if self.causal:
            documents = None if position_ids is None else number_documents(position_ids)
            mixed = causal_attention(q, k, v, dropout=dropout, documents=documents)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        return self.out(mixed.transpose(1, 2).reshape(batch, seq, -1))


class Perceptron(nn.Module):
    """Feed-forward part of a block: up projection, GELU, down projection."""

    def __init__(self, dim: int, hidden: int, *, residual_std: float) -> None:
        super().__init__()
        self.up = BiasedProjection(dim, hidden)
        self.down = BiasedProjection(hidden, dim, std=residual_std)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., dim] to [..., dim]."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class PlainBlock(nn.Module):
    """Transformer block: attention, then feed-forward, each added to the residual stream."""

    def __init__(
        self,
        dim: int,
        heads: int,
        hidden: int,
        *,
        causal: bool,
        epsilon: float,
        dropout: float,
        residual_std: float,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim, epsilon)
        self.attention = FusedAttention(
            dim, heads, causal=causal, dropout=dropout, residual_std=residual_std
        )
        self.mlp_norm = nn.LayerNorm(dim, epsilon)
        self.mlp = Perceptron(dim, hidden, residual_std=residual_std)
        self.residual_dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor, *packed: Tensor) -> Tensor:
        """Map [batch, seq, dim] to the same; position ids [batch, seq] of packed rows too."""
        h = h + self.residual_dropout(self.attention(self.attention_norm(h), *packed))
        return h + self.residual_dropout(self.mlp(self.mlp_norm(h)))


def build_blocks(
    layers: int,
    dim: int,
    heads: int,
    hidden: int,
    *,
    causal: bool,
    epsilon: float,
    dropout: float,
) -> nn.ModuleList:
    """Build equal blocks; residual projections are drawn with σ = INIT_STD / √(2 · layers)."""
    residual_std = INIT_STD / math.sqrt(2 * layers)
    return nn.ModuleList(
        PlainBlock(
            dim,
            heads,
            hidden,
            causal=causal,
            epsilon=epsilon,
            dropout=dropout,
            residual_std=residual_std,
        )
        for _ in range(layers)
    )


class GPT(nn.Module):
    """GPT-2 language model; arguments as in `shoal.forecast.models.families`."""

    def __init__(
        self,
        *,
        vocabulary: int,
        dim: int,
        layers: int,
        heads: int,
        hidden: int,
        sequence: int,
        norm_epsilon: float = 1e-5,
        tied: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.sequence = sequence
        self.embedding = TokenEmbedding(vocabulary, dim)
        self.positions = TokenEmbedding(sequence, dim)
        self.embedding_dropout = nn.Dropout(dropout)
        self.blocks = build_blocks(
            layers, dim, heads, hidden, causal=True, epsilon=norm_epsilon, dropout=dropout
        )
        self.norm = nn.LayerNorm(dim, norm_epsilon)
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
            ConfigError: more tokens than `sequence`, the number of learnt positions.
        """
        seq = input_ids.shape[1]
        if seq > self.sequence:
            raise ConfigError(
                f"data.sequence = {seq}: longer than model.sequence {self.sequence}; "
                f"set model.sequence={seq}"
            )
        packed = () if position_ids is None else (position_ids,)
        places = packed[0] if packed else torch.arange(seq, device=input_ids.device)
        h = self.embedding_dropout(self.embedding(input_ids) + self.positions(places))
        for block in self.blocks:
            h = block(h, *packed)
        return Unprojected(self.norm(h), self.head.weight)
