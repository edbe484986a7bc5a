"""NoLoCo: every round each island merges with one random partner; never with all islands.

    δ_i ← a·δ_i − b·mean(D_j) − (φ_i − mean(φ_j))        φ_i ← φ_i + δ_i        w_i ← φ_i

over the pair j; φ_i are island i's outer weights, D_j = φ_j − w_j. a = `islands.outer_momentum`, b
= `islands.outer_lr`; the pull towards the pair's mean has weight 1. Both means come from one
message m_j = b·D_j − φ_j: the outer step is then heavy-ball SGD with gradient φ_i + mean(m_j). A
merge preserves the mean of φ over all islands, so both of a pair have the same weight whatever
their tokens. With an odd number one island has no partner. The islands' weights approach each other
but are never equal: `pair_distance` measures their distance, and any island's weights, or their
mean, are the model.

Source: Kolehmainen et al. 2025, "NoLoCo"
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shoal.base.errors import BugError, ConfigError
from shoal.base.layouts.island_options import IslandsPolicy
from shoal.islands.method import MergeMethod
from shoal.islands.outer_optimizer import Build, OuterState, hash_tensors


def draw_pairs(seed: int, round_number: int, count: int) -> list[tuple[int, ...]]:
    """Return the pairs that merge in a round, from shuffled islands; the last may be alone.

    The order is that of a hash, the same on any machine and in any version of Python.

    >>> sorted(len(pair) for pair in draw_pairs(0, 3, 5))
    [1, 2, 2]
    """
    order = sorted(
        range(count),
        key=lambda index: hashlib.sha256(f"{seed} {round_number} {index}".encode()).digest(),
    )
    return [tuple(sorted(order[place : place + 2])) for place in range(0, count, 2)]


def pair_distance(gram: Sequence[Sequence[float]]) -> float:
    """Return the root mean square distance of a pair's weights to their mean, over its norm.

    Args:
        gram: inner products of the messages, which are minus the weights that each island would
            have alone.

    Returns:
        0 for equal islands, NaN if the messages are not finite.
    """
    count = len(gram)
    mean = sum(sum(row) for row in gram) / count**2
    around = sum(gram[k][k] for k in range(count)) / count - mean
    return math.sqrt(max(around, 0.0) / mean) if mean > 0 else math.nan if mean != 0 else 0.0


class UnsharedOuterState(OuterState):
    """Outer weights of one island alone, checked by a hash instead of a vote.

    A pair votes on the bits of its mean message. No other island can check an island's weights and
    momentum, so each island hashes its own from one step to the next and detects corrupted memory.
    """

    def __init__(self, local: Mapping[str, Tensor], build: Build) -> None:
        super().__init__(local, build)
        self._stepped_with = ""
        self._sealed = {name: self._seal(name) for name in self.weights}

    def digest(self) -> str:
        """Return the digest of state that is equal on all islands: names and shapes."""
        alike = sorted((name, list(weight.shape)) for name, weight in self.weights.items())
        return hashlib.sha256(repr(alike).encode()).hexdigest()

    def vote_digest(self) -> str:
        """Return the digest of names, shapes and the mean message of the step."""
        return hashlib.sha256((self.digest() + self._stepped_with).encode()).hexdigest()

    def step(self, mean: Mapping[str, Tensor]) -> bool:
        """Propose W', u' from the pair's mean message; return whether they are sound."""
        changed = [name for name in mean if self._seal(name) != self._sealed[name]]
        self.trouble = (
            f"its own outer weights or momentum of {changed[0]} are not what it committed: its "
            f"memory changed"
            if changed
            else ""
        )
        if changed:
            return False
        self._stepped_with = hash_tensors(mean)
        return self.propose({name: self.weights[name] + part for name, part in mean.items()})

    def commit(self) -> None:
        """Install the proposed outer weights and state, and hash those that changed."""
        moved = list(self._before or {})
        super().commit()
        self._sealed.update({name: self._seal(name) for name in moved})

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load outer weights and optimizer state by name, and hash them."""
        super().load(tensors)
        self._sealed = {name: self._seal(name) for name in self.weights}

    def _seal(self, name: str) -> str:
        state = {key: part for key, part in self._state(name).items() if isinstance(part, Tensor)}
        return hash_tensors({"": self.weights[name], **state})


class NoLoCo(MergeMethod):
    """NoLoCo: momentum and a pull between random pairs; see the module.

    Args:
        seed: seed of the pairs, the same on all islands.

    Note:
        A message is nearly minus the weights, so its norm does not measure the change in it.

    Raises:
        ConfigError: the settings have another outer optimizer, regions, or a lossy codec, since
            whole weights travel.
    """

    name = "noloco"
    common_past = False

    def __init__(self, policy: IslandsPolicy, seed: int) -> None:
        for key, got, only in (
            ("outer", policy.outer, "sgd"),
            ("regions", policy.regions, 1),
            ("codec", policy.codec, "none"),
        ):
            if got != only:
                raise ConfigError(
                    f"islands.{key} = {got}: noloco merges whole weights in random pairs with an "
                    f"outer step of its own; try: islands.{key}={only}"
                )
        super().__init__(policy)
        self.seed = seed

    def optimizer_builder(self) -> Build:
        """Return the constructor of the outer optimizer: heavy-ball SGD over `step`'s input."""

        def build(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=1.0, momentum=self.policy.outer_momentum)

        return build

    def open(self, local: Mapping[str, Tensor]) -> OuterState:
        """Create the outer state of this island alone, from this rank's parts of the weights."""
        return UnsharedOuterState(local, self._build)

    def partners(self, round_number: int, index: int, count: int) -> tuple[int, ...]:
        """Return this island's pair in a round, or itself alone."""
        return next(p for p in draw_pairs(self.seed, round_number, count) if index in p)

    def message_weights(
        self, sizes: Sequence[float], norms: Sequence[float], admitted: Sequence[bool]
    ) -> tuple[list[float], float]:
        """Return equal message weights, which preserve the mean of all islands, and their sum."""
        del sizes, norms
        weights = [1.0 if counts else 0.0 for counts in admitted]
        return weights, sum(weights)

    def message(
        self, outer: OuterState, names: Sequence[str], local: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return this island's message: b·D − φ."""
        changes = super().message(outer, names, local)
        return {
            name: self.policy.outer_lr * change - outer.weights[name]
            for name, change in changes.items()
        }

    def weight_distance(self, gram: Sequence[Sequence[float]]) -> float | None:
        """Return the pair's spread just before it merges; None for an island alone."""
        return pair_distance(gram) if len(gram) > 1 else None

    def step(self, outer: OuterState, mean: Mapping[str, Tensor], counted: int = 1) -> bool:
        """Propose φ', δ' from the pair's mean message; see the module."""
        del counted
        if not isinstance(outer, UnsharedOuterState):
            raise BugError("islands: noloco steps weights that another method opened")
        return outer.step(mean)
