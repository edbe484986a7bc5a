"""SCAFFOLD: control variates correct the drift of data owners whose data differ.

    inner step     g ← g − c_i + c                    g is the step's mean gradient
    owner          c_i⁺ = (1/K)·Σ g                   of its K inner steps, before the correction
                   message  W − w_i,  c_i⁺ − c_i
    merge          W ← W − mean(W − w_i)              over the owners that took part, equal weights
                   c ← c + |S|/N · mean(c_i⁺ − c_i)   |S| of N owners took part

c and W are equal on all islands; c_i stays with its owner. All begin at 0. A message is twice as
large as the model.

The paper writes option II as c_i⁺ = c_i − c + (x − y_i)/(K·lr). With plain SGD of a constant rate
this is the mean gradient; the mean also holds for other rates and other inner optimizers. Clipping
acts on g before the correction.

Source: Karimireddy et al. 2020, "SCAFFOLD: stochastic controlled averaging", algorithm 1
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from shoal.base.errors import BugError, ConfigError
from shoal.base.layouts.island_options import IslandsPolicy
from shoal.base.plans.tensor_shards import Shard
from shoal.islands.method import MergedWeights, MergeMethod
from shoal.islands.outer_optimizer import Build, OuterState

CONTROL = "control:"
"""Prefix of a control's name in a message."""
SUFFIX = "scaffold_control"
"""Key of a control in a checkpoint, next to the weight NAME: NAME.scaffold_control."""


def _add_change(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the step c ← c + change, as SGD, which subtracts."""
    return torch.optim.SGD(parameters, lr=1.0)


class ControlledOuterState(OuterState):
    """W and its outer optimizer, and the common control c of every parameter."""

    def __init__(self, local: Mapping[str, Tensor], build: Build) -> None:
        super().__init__(local, build)
        self.controls = OuterState(
            {name: torch.zeros_like(part) for name, part in local.items()}, _add_change
        )

    def propose_both(self, mean: Mapping[str, Tensor], share: float) -> bool:
        """Propose W', u' and c' from the mean message; return whether they are finite.

        Args:
            share: |S|/N.
        """
        weights = {name: part for name, part in mean.items() if not name.startswith(CONTROL)}
        changes = {
            name.removeprefix(CONTROL): -share * part
            for name, part in mean.items()
            if name.startswith(CONTROL)
        }
        finite = super().propose(weights)
        return self.controls.propose(changes) and finite

    def commit(self) -> None:
        """Install the proposed W, u and c."""
        super().commit()
        self.controls.commit()

    def undo(self) -> None:
        """Restore all three as before the proposal, bit for bit."""
        super().undo()
        self.controls.undo()

    def digest(self) -> str:
        """Return the digest of W, u and c."""
        both = super().digest() + self.controls.digest()
        return hashlib.sha256(both.encode()).hexdigest()

    def tensors(self) -> dict[str, Tensor]:
        """Return committed W and u, and c as NAME.scaffold_control."""
        controls = self.controls.tensors()
        return super().tensors() | {f"{name}.{SUFFIX}": part for name, part in controls.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load all three from the result of `tensors`; after an error none has changed."""
        own: dict[str, Tensor] = {}
        controls: dict[str, Tensor] = {}
        for path, part in tensors.items():
            name, _, key = path.rpartition(".")
            if path not in self.weights and key == SUFFIX and name in self.weights:
                controls[name] = part
            else:
                own[path] = part
        self._sorted(own)  # or the controls would be loaded and the weights not
        self.controls.load(controls)
        super().load(own)


class Scaffold(MergeMethod):
    """SCAFFOLD: FedAvg whose inner gradients are corrected by controls; see the module."""

    name = "scaffold"
    pulls = True

    def __init__(self, policy: IslandsPolicy) -> None:
        if policy.codec not in ("none", "bf16"):
            raise ConfigError(
                f"islands.codec = {policy.codec}: one scale of a block would fit weights and "
                f"controls, which differ in size; try: islands.codec=none"
            )
        super().__init__(policy)
        self._sums: dict[str, Tensor] = {}
        self._steps = 0

    def open(self, local: Mapping[str, Tensor]) -> OuterState:
        """Create the outer state, weights and controls, from this rank's parts of the weights."""
        return ControlledOuterState(local, self._build)

    def message_shards(self, weights: Mapping[str, Shard]) -> dict[str, Shard]:
        """Return the shards of weights and controls."""
        controls = {CONTROL + n: replace(s, name=CONTROL + n) for n, s in weights.items()}
        return {**weights, **controls}

    def message_like(self, outer: OuterState, names: Sequence[str]) -> dict[str, Tensor]:
        """Return tensors with the names and shapes of weights and controls."""
        found = super().message_like(outer, names)
        return {**found, **{CONTROL + name: part for name, part in found.items()}}

    def start_owner(self, control: Mapping[str, Tensor]) -> None:
        """Start the inner steps of a data owner: load its control, and reset its gradient sums."""
        super().start_owner(control)
        self._sums, self._steps = {}, 0

    @torch.no_grad()
    def before_update(self, outer: MergedWeights, local: Mapping[str, nn.Parameter]) -> None:
        """Add the step's gradient to the data owner's sum, and c − c_i to the gradient."""
        common = _controls_of(outer).weights
        self._steps += 1
        for name, own in local.items():
            if own.grad is None or name not in common:
                continue
            gradient = own.grad.detach().to("cpu", common[name].dtype, copy=True)
            gradient = gradient.view(common[name].shape)
            sums = self._sums.get(name)
            self._sums[name] = gradient if sums is None else sums.add_(gradient)
            correction = common[name] - self.control.get(name, torch.zeros_like(common[name]))
            own.grad.add_(correction.view_as(own).to(own.grad))

    def message(
        self, outer: OuterState, names: Sequence[str], local: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return W − w_i, and c_i⁺ − c_i."""
        found = super().message(outer, names, local)
        fresh = self.end_owner()
        for name in list(found):
            zero = torch.zeros_like(outer.weights[name])
            found[CONTROL + name] = fresh.get(name, zero) - self.control.get(name, zero)
        return found

    def end_owner(self) -> dict[str, Tensor]:
        """Return c_i⁺ of every parameter; c_i where no step had a gradient."""
        steps = max(1, self._steps)
        return {**self.control, **{name: total / steps for name, total in self._sums.items()}}

    def step(self, outer: OuterState, mean: Mapping[str, Tensor], counted: int = 1) -> bool:
        """Propose W', u' and c' from the mean message of `counted` data owners."""
        return _controlled(outer).propose_both(mean, counted / self.policy.count)


def _controlled(outer: MergedWeights) -> ControlledOuterState:
    if not isinstance(outer, ControlledOuterState):
        raise BugError("islands: scaffold steps weights that another method opened")
    return outer


def _controls_of(outer: MergedWeights) -> OuterState:
    return _controlled(outer).controls
