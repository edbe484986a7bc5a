"""Base class of merge methods: the message of an island, and the use of all messages.

    message   m_i = W − w_i                     of a fragment, after its last inner step
    merge     D = Σ n_i·m_i / Σ n_i             n_i: training tokens of m_i, or 1
    step      W, u ← outer optimizer(W, u, D)   the same bits on every partner
    adopt     w_i ← w_i + (1 − α)·(W − w_i as it was sent)
              α = `islands.mixing`, share of the own weights; changes since the sending stay

The base class is DiLoCo with any torch optimizer as outer optimizer; a method is a file in
`methods/` that overrides the differences. Weights by tokens treat islands of unequal speed fairly:
the 60 steps of a slow island count as 60, the 240 of a fast one as 240.

Source: Douillard et al. 2023 (DiLoCo), algorithm 1; McMahan et al. 2017 (weights by examples)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from shoal.base.layouts.island_options import IslandsPolicy
from shoal.base.plans.tensor_shards import Shard
from shoal.islands.fragments import FragmentSchedule, partition_parameters, schedule_fragments
from shoal.islands.outer_optimizer import Build, OuterState, all_finite, make_outer_builder
from shoal.islands.two_tiers import TwoTierOuterState, list_partners


class MergedWeights(Protocol):
    """Merged weights W by name, in the shapes of this rank's parts."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """W of this rank's parts."""


class MergeMethod:
    """Base class of the methods by which islands merge: DiLoCo with any torch outer optimizer.

    Rounds and islands are counted from 0.

    Attributes:
        policy: the resolved policy (`IslandsPolicy.settled`).
        resets_inner: the inner optimizer is reset when an island has adopted the merged weights.
        pulls: `before_update` changes gradients, so it must run before every inner update.
        keeps: share of a message's encoding error that is added to the next message.
        saves_branches: the weights of each owner are saved as a tag before they are merged.
        common_past: the partners have always merged together, so their records of past rounds (the
            norms for admission) are equal.
        control: state of the owner that trains now, which never leaves it, by parameter name.
        before_send: function that gets each owner's message before it is encoded, and returns the
            message that leaves: the place for clipping, noise or masks. None: it leaves as it is.

    Raises:
        ConfigError: torch lacks the outer optimizer, or it refuses its numbers.
    """

    name: ClassVar[str]
    resets_inner: ClassVar[bool] = False
    pulls: ClassVar[bool] = False
    keeps: ClassVar[float] = 1.0
    saves_branches: ClassVar[bool] = False
    common_past: ClassVar[bool] = True

    def __init__(self, policy: IslandsPolicy) -> None:
        self.policy = policy
        self.control: dict[str, Tensor] = {}
        self.before_send: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
        self._build = self.optimizer_builder()

    def optimizer_builder(self) -> Build:
        """Return the constructor of the outer optimizer."""
        return make_outer_builder(self.policy)

    def open(self, local: Mapping[str, Tensor]) -> OuterState:
        """Create W at the start, equal on all islands: a copy of this rank's parts."""
        if self.policy.regions > 1:
            return TwoTierOuterState(local, self._build, self.policy.far_period)
        return OuterState(local, self._build)

    def fragments(self, bytes_of: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
        """Return the parameter names of every fragment."""
        return partition_parameters(bytes_of, self.policy.fragments)

    def schedule_fragments(self, steps: int) -> tuple[FragmentSchedule, ...]:
        """Return the schedule of the fragments in a round of `steps` inner steps of this island."""
        return schedule_fragments(steps, self.policy.fragments, self.policy.overlap)

    def partners(self, round_number: int, index: int, count: int) -> tuple[int, ...]:
        """Return the islands that merge with island `index` in a round, itself included."""
        return list_partners(
            round_number, index, count, self.policy.regions, self.policy.far_period
        )

    def message_weights(
        self, sizes: Sequence[float], norms: Sequence[float], admitted: Sequence[bool]
    ) -> tuple[list[float], float]:
        """Return the weight of each partner's message, and the divisor of their sum.

        Args:
            sizes: training tokens of each message, or samples (`islands.weighting`).
            norms: norms of the decoded messages.
            admitted: the partners whose message counts; the others have weight 0 and are not in the
                divisor.

        Returns:
            (weights, divisor), in the order of the partners; the divisor is 0 only if no partner is
            admitted, or all admitted ones have 0 tokens.
        """
        del norms
        by_size = self.policy.weighting != "uniform"
        weights = [
            (float(n) if by_size else 1.0) if counts else 0.0
            for n, counts in zip(sizes, admitted, strict=True)
        ]
        return weights, sum(weights)

    def message_like(self, outer: OuterState, names: Sequence[str]) -> dict[str, Tensor]:
        """Return tensors with the names and shapes of a message of these parameters."""
        return {name: outer.weights[name] for name in names if name in outer.weights}

    def message_shards(self, weights: Mapping[str, Shard]) -> dict[str, Shard]:
        """Return the shards of a message's tensors; `weights`: those of the parameters."""
        return dict(weights)

    def message(
        self, outer: OuterState, names: Sequence[str], local: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return OLD − NEW of this rank's part of a fragment, in the dtype of W, on the CPU."""
        return {
            name: outer.weights[name] - _like(local[name], outer.weights[name])
            for name in names
            if name in outer.weights
        }

    def weight_distance(self, gram: Sequence[Sequence[float]]) -> float | None:
        """Return the relative distance between the partners' weights; None if they end up equal.

        Args:
            gram: inner products of the admitted messages.
        """
        del gram
        return None

    def step(self, outer: OuterState, mean: Mapping[str, Tensor], counted: int = 1) -> bool:
        """Propose W', u' from the mean of the messages; return whether they are finite.

        Args:
            counted: messages in the mean.
        """
        del counted
        return outer.propose(mean)

    @torch.no_grad()
    def apply_merge(
        self,
        outer: OuterState,
        names: Sequence[str],
        local: Mapping[str, Tensor],
        *,
        refused: bool,
        sent: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Write the merged weights of a fragment into the island's own, in place.

        Args:
            refused: the own message was refused, so the island drops its change.
            sent: result of `sent`; None if the island did not train during the transfer.
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
        self, outer: OuterState, names: Sequence[str], local: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Copy this rank's part of a fragment at sending, on the device and in the dtype of W."""
        weights = outer.weights
        return {
            name: _like(local[name], weights[name]).clone() for name in names if name in weights
        }

    def before_update(self, outer: MergedWeights, local: Mapping[str, nn.Parameter]) -> None:
        """Adjust gradients before every inner update, when `.grad` is the step's mean gradient."""

    def start_owner(self, control: Mapping[str, Tensor]) -> None:
        """Start the inner steps of a data owner, whose state `end_owner` returned in a past round.

        Args:
            control: {} if the owner has not trained yet.
        """
        self.control = dict(control)

    def end_owner(self) -> dict[str, Tensor]:
        """Return the data owner's state after its message; it counts only if the message does."""
        return self.control


def _like(part: Tensor, weight: Tensor) -> Tensor:
    return part.detach().to(weight.device, weight.dtype)
