"""A method: what an island sends of what it learnt, and what it does with what all sent.

    message   m_i = W − w_i                     of a fragment, after its last inner step
    merge     D = Σ n_i·m_i / Σ n_i             n_i: tokens that m_i was learnt from, or 1
    step      W, u ← outer optimizer(W, u, D)   the same bits on every island that took part
    adopt     w_i ← w_i + (1 − α)·(W − w_i as it was sent)
              α = `islands.mixing`, what is kept of the own; all that was learnt since is kept

So says the base class here, which is DiLoCo with any torch optimizer outside; a method is a file in
`methods/` that changes what differs. Weights by tokens make islands of unequal speed fair: the 60
steps of a slow island count as 60 beside the 240 of a fast one.

Source: Douillard et al. 2023 (DiLoCo), algorithm 1; McMahan et al. 2017 (weights by examples)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from shoal.base.layouts.island_options import IslandsPolicy
from shoal.islands.fragments import Moment, deal, moments
from shoal.islands.outer_optimizer import Build, Outer, all_finite, outer_builder
from shoal.islands.two_tiers import TwoTiers, members


class Method:
    """Base class of the methods by which islands merge: DiLoCo with any torch optimizer outside.

    Rounds and islands are counted from 0.

    Attributes:
        policy: settled (`IslandsPolicy.settled`).
        resets_inner: the inner optimizer begins anew when an island has adopted the merged weights.
        pulls: `before_update` does something, so it must be called before every inner update.
        keeps: share of what a code left out of a message that the next one carries on.
        common_past: who merges has always merged together, so what they remember of past rounds
            (the norms that admission compares with) is the same.

    Raises:
        ConfigError: for an outer optimizer that torch lacks, or that refuses its numbers.
    """

    name: ClassVar[str]
    resets_inner: ClassVar[bool] = False
    pulls: ClassVar[bool] = False
    keeps: ClassVar[float] = 1.0
    common_past: ClassVar[bool] = True

    def __init__(self, policy: IslandsPolicy) -> None:
        self.policy = policy
        self._build = self.builder()

    def builder(self) -> Build:
        """What makes the outer optimizer."""
        return outer_builder(self.policy)

    def open(self, local: Mapping[str, Tensor]) -> Outer:
        """W as the run begins, all islands alike: a copy of this rank's part of every parameter."""
        if self.policy.regions > 1:
            return TwoTiers(local, self._build, self.policy.far_period)
        return Outer(local, self._build)

    def fragments(self, bytes_of: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
        """Names of the parameters of every fragment; see `fragments.deal`."""
        return deal(bytes_of, self.policy.fragments)

    def moments(self, steps: int) -> tuple[Moment, ...]:
        """When the fragments travel in a round in which this island takes so many inner steps."""
        return moments(steps, self.policy.fragments, self.policy.overlap)

    def partners(self, round_number: int, index: int, count: int) -> tuple[int, ...]:
        """The islands that island `index` merges with in a round, itself included, ascending."""
        return members(round_number, index, count, self.policy.regions, self.policy.far_period)

    def weigh(
        self, tokens: Sequence[float], norms: Sequence[float], admitted: Sequence[bool]
    ) -> tuple[list[float], float]:
        """What each partner's message is multiplied by, and what their sum is divided by.

        Args:
            tokens: that each message was learnt from.
            norms: of the messages, as decoded.
            admitted: whose message counts; the others' weigh 0 and are not in the divisor.

        Returns:
            (weights, divisor), in the order of the partners; the divisor is 0 only if nobody is
            admitted, or none of them has learnt from any token.
        """
        del norms
        by_tokens = self.policy.weighting == "tokens"
        weights = [
            (float(n) if by_tokens else 1.0) if counts else 0.0
            for n, counts in zip(tokens, admitted, strict=True)
        ]
        return weights, sum(weights)

    def message(
        self, outer: Outer, names: Sequence[str], local: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """OLD − NEW of what this rank holds of a fragment, in the dtype of W, on the CPU."""
        return {
            name: outer.weights[name] - _like(local[name], outer.weights[name])
            for name in names
            if name in outer.weights
        }

    def spread(self, gram: Sequence[Sequence[float]]) -> float | None:
        """How far apart the partners' weights are, of their norm; None where they end up equal.

        Args:
            gram: inner products of the messages of those whose change counted.
        """
        del gram
        return None

    def step(self, outer: Outer, mean: Mapping[str, Tensor]) -> bool:
        """Propose W', u' from the mean of the messages. Gives whether they are finite."""
        return outer.propose(mean)

    @torch.no_grad()
    def adopt(
        self,
        outer: Outer,
        names: Sequence[str],
        local: Mapping[str, Tensor],
        *,
        refused: bool,
        sent: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Write the merged weights of a fragment into the island's own, in place.

        Args:
            refused: the own message did not count, so nothing of it is kept.
            sent: what `sent` gave; None where the island did not train on meanwhile.
        """
        kept = 0.0 if refused else self.policy.mixing
        for name in names:
            if name not in outer.weights:
                continue
            own, merged = local[name], outer.weights[name]
            if sent is not None and not refused and all_finite(own):
                merged = _like(own, merged) + (1 - kept) * (merged - sent[name])
            elif kept:
                merged = kept * _like(own, merged) + (1 - kept) * merged
            own.copy_(merged)

    def sent(
        self, outer: Outer, names: Sequence[str], local: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """A copy of this rank's part of a fragment as it leaves: where W lies, in W's dtype."""
        weights = outer.weights
        return {
            name: _like(local[name], weights[name]).clone() for name in names if name in weights
        }

    def before_update(self, outer: Outer, local: Mapping[str, nn.Parameter]) -> None:
        """Called before every inner update, when `.grad` is the mean gradient of the step."""


def _like(part: Tensor, weight: Tensor) -> Tensor:
    return part.detach().to(weight.device, weight.dtype)
