"""A mixture of experts: Llama with many SwiGLUs per block, of which each token uses top_k.

Formula   p = softmax(router(x)) over E experts;  T(x) = the top_k of them
          y = Σ_{e ∈ T(x)}  p_e / Σ_{j ∈ T(x)} p_j · expert_e(x)
          No token is dropped: an expert takes what comes to it.
Capacity  if one is given, an expert takes at most capacity · tokens · top_k / E of a micro-batch's
          places, first choices before second ones, then in order; what is over is nobody's and
          counted (`dropped`). The weights of the others stay. Since micro-batches do not depend on
          the layout, the same places are dropped in every one
Balance   auxiliary = weight · mean over layers of  E · Σ_e f_e · P_e, with f_e the share of routed
          places that e got and P_e the mean of p_e, over the tokens of the micro-batch; E · Σ is 1
          when the router is indifferent. In training the loss of every target grows by it
          (`balanced_loss`), so it means the same in every layout: micro-batches do not depend on it
Protocol  places (token, choice) are sorted by expert; the experts' weights are stacked
          [experts, …] and unbound once, so that an expert without tokens has a gradient of zeros
          and the parameter can be cut along its first dim. `Experts` is called with tokens, chosen
          experts and weights, so what runs them elsewhere (expert parallelism) can take its place
Source    top-k of SwiGLUs: Mixtral, Jiang et al. 2024 (2401.04088); balance: Switch Transformer,
          Fedus et al. 2021 (2101.03961) eq. 4–6, capacity eq. 3, order of
          choices: GShard, Lepikhin et al. 2020 (2006.16668); without drops: MegaBlocks (2211.15841)
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
from shoal.models._torch import is_fake, is_tracing, pytree
from shoal.models.llama import INIT_STD, Attention, Projection, TokenEmbedding
from shoal.models.loss import Unprojected, token_loss
from shoal.models.norm import RMSNorm


@dataclass(frozen=True)
class Routed(Unprojected):
    """Output of a mixture in training: hidden states and head, with the auxiliary loss.

    Attributes:
        auxiliary: scalar, already weighted: it is added to the loss of every target.
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
    """Compute the loss of `moe`: cross-entropy plus, in training, the auxiliary loss per target.

    Arguments, results and errors are those of `token_loss`; outputs without an auxiliary loss add
    none.
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

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, [tokens, dim].

        Waits for the device: how many rows an expert has depends on the data.

        Args:
            tokens: [tokens, dim].
            weights: [tokens, top_k].
            chosen: [tokens, top_k] integers; the number of experts stands for none.
        """
        experts, (count, top_k) = len(self.gate), chosen.shape
        places = chosen.flatten()
        counts = count_each(places, experts + 1)
        order = places.argsort(stable=True)
        rows = tokens.index_select(0, order // top_k)
        *shares, nobodys = rows.split(_as_sizes(counts, len(rows)))
        matrices = zip(self.gate.unbind(), self.up.unbind(), self.down.unbind(), strict=True)
        outputs = [
            F.linear(F.silu(F.linear(share, gate)) * F.linear(share, up), down)
            for share, (gate, up, down) in zip(shares, matrices, strict=True)
        ]
        mixed = torch.cat([*outputs, torch.zeros_like(nobodys, dtype=outputs[0].dtype)])
        back = mixed.index_select(0, order.argsort()).view(count, top_k, -1)
        return (back * weights.unsqueeze(-1)).sum(1)


def count_each(numbers: Tensor, kinds: int) -> Tensor:
    """Count 0 … kinds − 1 among integers: [kinds]; as `bincount`, in any graph.

    >>> count_each(torch.tensor([2, 0, 2]), 4)
    tensor([1, 0, 2, 0])
    """
    counts = torch.zeros(kinds, dtype=numbers.dtype, device=numbers.device)
    return counts.scatter_add(0, numbers, torch.ones_like(numbers))


def apply_capacity(chosen: Tensor, experts: int, places: int) -> Tensor:
    """Return the chosen experts, and the number of experts where one is over its capacity.

    Args:
        chosen: [tokens, top_k].
        places: of each expert.

    >>> apply_capacity(torch.tensor([[0, 1], [0, 1], [1, 0]]), 2, 2)
    tensor([[0, 1],
            [0, 2],
            [1, 2]])
    """
    flat = chosen.t().flatten()  # first choices of all tokens, then second ones
    order = flat.argsort(stable=True)
    counts = count_each(flat, experts)
    before = (counts.cumsum(0) - counts).index_select(0, flat.index_select(0, order))
    turns = torch.arange(len(flat), device=flat.device) - before
    turn = torch.zeros_like(flat).scatter(0, order, turns).view(chosen.shape[::-1]).t()
    return chosen.masked_fill(turn >= places, experts)


def _as_sizes(counts: Tensor, rows: int) -> list[int]:
    """Return counts as Python numbers; even ones for tensors without data, used in planning.

    While a graph is recorded, the even sizes would be wrong for other data. Reading the numbers
    then fails, since a mixture is no fixed graph.
    """
    shapes_alone = counts.is_meta or is_fake(counts)
    if not shapes_alone or is_tracing() or torch.compiler.is_compiling():
        return counts.tolist()
    experts = len(counts) - 1  # the last count is of what no expert takes
    return [rows // experts + (place < rows % experts) for place in range(experts)] + [0]


class Mixture(nn.Module):
    """Router and experts: the feed-forward part of a block.

    Attributes:
        load: [experts], after a forward pass: routed (token, choice) pairs of each expert.
        dropped: scalar, after a forward pass: pairs that no expert took, for lack of capacity.
    """

    load: Tensor | None = None
    dropped: Tensor | None = None

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        experts: int,
        top_k: int,
        residual_std: float,
        capacity: float = 0.0,
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.capacity = capacity
        self.router = Projection(dim, experts)
        self.experts = Experts(experts, dim, hidden, residual_std=residual_std)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map [batch, seq, dim] to the same, and return the load-balance loss, 1 where even.

        Probabilities are computed in fp32 or better: they decide which experts are chosen.
        """
        rows = x.reshape(-1, x.shape[-1])
        scores = self.router(rows)
        wide = torch.promote_types(scores.dtype, torch.float32)
        odds = scores.softmax(-1, dtype=wide)  # [tokens, experts]
        weights, chosen = odds.topk(self.top_k, -1)  # [tokens, top_k]
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        experts, places = odds.shape[1], chosen.numel()
        counts = self.load = count_each(chosen.flatten(), experts)
        if self.capacity:
            most = math.ceil(self.capacity * places / experts)
            chosen = apply_capacity(chosen, experts, most)
            self.load = counts.clamp(max=most)
            self.dropped = places - self.load.sum()
        mixed: Tensor = self.experts(rows, chosen, weights)
        balance = experts * torch.dot(counts.to(wide) / places, odds.mean(0))
        return mixed.view_as(x), balance


class Block(nn.Module):
    """Transformer block: attention, then the mixture, each added to the residual stream."""

    def __init__(
        self, attention: Attention, mixture: Mixture, dim: int, epsilon: float, dropout: float
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim, epsilon)
        self.attention = attention
        self.mixture_norm = RMSNorm(dim, epsilon)
        self.mixture = mixture
        self.residual_dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor, balance: Tensor, *packed: Tensor) -> tuple[Tensor, Tensor]:
        """Map h [batch, seq, dim] to the same, and add this block's balance loss to `balance`.

        Args:
            packed: position ids [batch, seq] of packed rows.
        """
        h = h + self.residual_dropout(self.attention(self.attention_norm(h), *packed))
        mixed, own = self.mixture(self.mixture_norm(h))
        return h + self.residual_dropout(mixed), balance + own


class MoE(nn.Module):
    """Mixture-of-experts language model; arguments as in `shoal.forecast.models.families`."""

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
        capacity: float = 0.0,
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
        self.blocks = nn.ModuleList(
            Block(
                Attention(dim, heads, kv_heads, **heads_of),
                Mixture(
                    dim,
                    hidden,
                    experts=experts,
                    top_k=top_k,
                    residual_std=std,
                    capacity=capacity,
                ),
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

        In training the result is a `Routed`, which has the auxiliary loss too.

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
        total = torch.zeros((), dtype=torch.promote_types(h.dtype, torch.float32), device=h.device)
        for block in self.blocks:
            h, total = block(h, total, *packed)
        outputs = Unprojected(self.norm(h), self.head.weight)
        if not (self.training and self.balance):
            return outputs
        auxiliary = total * (self.balance / len(self.blocks))
        return Routed(outputs.hidden, outputs.weight, auxiliary=auxiliary)


def dropped_places(model: nn.Module) -> dict[str, Tensor]:
    """Return the dropped pairs of the last forward pass, a scalar per mixture by name.

    Only mixtures with a capacity drop any.
    """
    return {
        name: part.dropped
        for name, part in model.named_modules()
        if isinstance(part, Mixture) and part.dropped is not None
    }
