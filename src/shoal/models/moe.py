"""A mixture of experts: Llama whose feed-forward part is many SwiGLUs, of which a token uses few.

Formula   p = softmax(router(x)) over E experts;  T(x) = the top_k of them
          y = Σ_{e ∈ T(x)}  p_e / Σ_{j ∈ T(x)} p_j · expert_e(x)
          No token is dropped and no expert has a capacity: an expert takes what comes to it.
Balance   auxiliary = weight · mean over layers of  E · Σ_e f_e · P_e, with f_e the share of routed
          places that e got and P_e the mean of p_e, over the tokens of the micro-batch; E · Σ is 1
          when the router is indifferent. In training the loss of every target grows by it
          (`balanced_loss`), so it means the same in every layout: micro-batches do not depend on it
Protocol  places (token, choice) are sorted by expert; the experts' weights are stacked
          [experts, …] and unbound once, so that an expert without tokens has a gradient of zeros
          and the parameter can be cut along its first dim
Source    top-k of SwiGLUs: Mixtral, Jiang et al. 2024 (2401.04088); balance: Switch Transformer,
          Fedus et al. 2021 (2101.03961) eq. 4–6; without drops: MegaBlocks (2211.15841)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.base.errors import ConfigError
from shoal.models._torch import FakeTensor, get_proxy_mode, pytree
from shoal.models.llama import INIT_STD, Attention, Projection, TokenEmbedding
from shoal.models.loss import Unprojected, token_loss
from shoal.models.norm import RMSNorm


@dataclass(frozen=True)
class Routed(Unprojected):
    """What a mixture returns in training: as other language models, and its auxiliary loss.

    auxiliary   scalar, weighted already: what the loss of every target grows by
    """

    auxiliary: Tensor | None = None


def _unflatten(children: Iterable[Any], head: Any) -> Routed:
    (hidden, auxiliary), (weight, vocabulary) = children, head
    return Routed(hidden, weight, vocabulary, auxiliary)


pytree.register_pytree_node(
    # As of `Unprojected`: the head is a parameter, no output.
    Routed,
    lambda outputs: ([outputs.hidden, outputs.auxiliary], (outputs.weight, outputs.vocabulary)),
    _unflatten,
)


def balanced_loss(outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The default loss of `moe`: cross-entropy, and in training the auxiliary loss per target.

    Takes, gives and refuses what `token_loss` does; outputs without an auxiliary loss add none.
    """
    total, count = token_loss(outputs, targets)
    auxiliary = getattr(outputs, "auxiliary", None)
    return (total if auxiliary is None else total + auxiliary * count), count


class Experts(nn.Module):
    """All experts of a block, their weights stacked: gate, up [experts, hidden, dim], down."""

    def __init__(self, experts: int, dim: int, hidden: int, *, residual_std: float) -> None:
        super().__init__()
        self.residual_std = residual_std
        self.gate = nn.Parameter(torch.empty(experts, hidden, dim))
        self.up = nn.Parameter(torch.empty(experts, hidden, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights again."""
        nn.init.normal_(self.gate, std=INIT_STD)
        nn.init.normal_(self.up, std=INIT_STD)
        nn.init.normal_(self.down, std=self.residual_std)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Rows [places, dim], sorted by expert, to [places, dim]; counts [experts] says whose.

        Waits for the device: how many rows an expert has is a fact of the data.
        """
        shares = x.split(_as_sizes(counts, len(x)))
        weights = zip(self.gate.unbind(), self.up.unbind(), self.down.unbind(), strict=True)
        outputs = [
            F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), down)
            for rows, (gate, up, down) in zip(shares, weights, strict=True)
        ]
        return torch.cat(outputs)


def _as_sizes(counts: Tensor, rows: int) -> list[int]:
    """Counts as numbers. Shapes without data, which plans are made from, have even ones.

    Not so while a graph is recorded: it would run with these sizes on any data. Asking for the
    numbers then fails, which says that a mixture is no fixed graph.
    """
    shapes_alone = counts.is_meta or isinstance(counts, FakeTensor)
    if not shapes_alone or get_proxy_mode() is not None or torch.compiler.is_compiling():
        sizes: list[int] = counts.tolist()
        return sizes
    experts = len(counts)
    return [rows // experts + (place < rows % experts) for place in range(experts)]


class Mixture(nn.Module):
    """Router and experts: the feed-forward part of a block.

    load   [experts], after a forward pass: how many places of it each expert got
    """

    load: Tensor | None = None

    def __init__(
        self, dim: int, hidden: int, *, experts: int, top_k: int, residual_std: float
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = Projection(dim, experts)
        self.experts = Experts(experts, dim, hidden, residual_std=residual_std)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, seq, dim] to the same, and the load-balance loss: scalar, 1 where even.

        Probabilities are reckoned in fp32 or better: which experts are chosen hangs on them.
        """
        rows = x.reshape(-1, x.shape[-1])
        scores = self.router(rows)
        wide = torch.promote_types(scores.dtype, torch.float32)
        odds = scores.softmax(-1, dtype=wide)  # [tokens, experts]
        weights, chosen = odds.topk(self.top_k, -1)  # [tokens, top_k]
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        places = chosen.flatten()
        counts = torch.zeros(odds.shape[1], dtype=places.dtype, device=places.device)
        counts = counts.scatter_add(0, places, torch.ones_like(places))
        order = places.argsort(stable=True)
        mixed = self.experts(rows.index_select(0, order // self.top_k), counts)
        back = mixed.index_select(0, order.argsort()).view(len(rows), self.top_k, -1)
        self.load = counts
        share = counts.to(wide) / len(places)
        balance = odds.shape[1] * torch.dot(share, odds.mean(0))
        return (back * weights.unsqueeze(-1)).sum(1).view_as(x), balance


class Block(nn.Module):
    """One layer: attention, then the mixture, each added to the residual stream."""

    def __init__(
        self, attention: Attention, mixture: Mixture, dim: int, epsilon: float, dropout: float
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim, epsilon)
        self.attention = attention
        self.mixture_norm = RMSNorm(dim, epsilon)
        self.mixture = mixture
        self.residual_dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor, balance: Tensor) -> tuple[Tensor, Tensor]:
        """h [batch, seq, dim] and the balance losses so far, a scalar, to the same after it."""
        h = h + self.residual_dropout(self.attention(self.attention_norm(h)))
        mixed, own = self.mixture(self.mixture_norm(h))
        return h + self.residual_dropout(mixed), balance + own


class MoE(nn.Module):
    """The whole model; arguments as in `shoal.planner.families`."""

    def __init__(
        self,
        *,
        vocabulary: int,
        dim: int,
        layers: int,
        heads: int,
        kv_heads: int,
        experts: int,
        top_k: int,
        hidden: int,
        sequence: int,
        balance: float = 0.01,
        rope_theta: float = 10000.0,
        norm_epsilon: float = 1e-5,
        tied: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.sequence = sequence
        self.balance = balance
        self.embedding = TokenEmbedding(vocabulary, dim)
        self.embedding_dropout = nn.Dropout(dropout)
        std = INIT_STD / math.sqrt(2 * layers)
        heads_of = {"rope_theta": rope_theta, "dropout": dropout, "residual_std": std}
        mixture_of = {"experts": experts, "top_k": top_k}
        self.blocks = nn.ModuleList(
            Block(
                Attention(dim, heads, kv_heads, **heads_of),
                Mixture(dim, hidden, **mixture_of, residual_std=std),
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

    def forward(self, tokens: Tensor) -> Unprojected:
        """Token ids [batch, seq] to the last hidden states [batch, seq, dim] and the head's weight.

        In training they come as `Routed`, which has the auxiliary loss too.
        Errors: ConfigError for more tokens than `sequence`.
        """
        if tokens.shape[1] > self.sequence:
            raise ConfigError(
                f"data.sequence = {tokens.shape[1]}: longer than model.sequence {self.sequence}; "
                f"set model.sequence={tokens.shape[1]}"
            )
        h = self.embedding_dropout(self.embedding(tokens))
        total = torch.zeros((), dtype=torch.promote_types(h.dtype, torch.float32), device=h.device)
        for block in self.blocks:
            h, total = block(h, total)
        outputs = Unprojected(self.norm(h), self.head.weight)
        if not (self.training and self.balance):
            return outputs
        auxiliary = total * (self.balance / len(self.blocks))
        return Routed(outputs.hidden, outputs.weight, auxiliary=auxiliary)


def expert_loads(model: nn.Module) -> dict[str, Tensor]:
    """How many places of its last forward pass every expert got, [experts] int64 per mixture.

    Even loads are places / experts; the fullest expert's share of the mean is what slows a layer
    whose experts lie on different devices. Keys are the mixtures' names in the model.
    """
    return {
        name: part.load
        for name, part in model.named_modules()
        if isinstance(part, Mixture) and part.load is not None
    }
