"""FedOpt: an adaptive optimizer updates the merged weights: FedAdagrad, FedYogi, FedAdam.

    m ← b1·m + (1 − b1)·D
    v ← v + D²                                adagrad
        v − (1 − b2)·D²·sign(v − D²)          yogi
        b2·v + (1 − b2)·D²                    adam
    W ← W − lr·m / (√v + τ)                   b1 = `islands.outer_momentum`, b2 = 0.99, τ = 1e-3

D is old minus new, a descent direction, so it is subtracted; the paper's Δ is new minus old and is
added. As in the paper v starts at τ² and m has no bias correction.

Source: Reddi et al. 2021, "Adaptive federated optimization", algorithm 2
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shoal.base.errors import ConfigError
from shoal.islands.method import MergeMethod
from shoal.islands.outer_optimizer import Build

B2 = 0.99
TAU = 1e-3
"""Degree of adaptivity; large values approach SGD with momentum."""


def _adagrad(square: Tensor, change: Tensor) -> None:
    square.addcmul_(change, change)


def _yogi(square: Tensor, change: Tensor) -> None:
    fresh = change * change
    square.sub_((1 - B2) * fresh * torch.sign(square - fresh))


def _adam(square: Tensor, change: Tensor) -> None:
    square.mul_(B2).addcmul_(change, change, value=1 - B2)


GROW: dict[str, Callable[[Tensor, Tensor], None]] = {
    "adagrad": _adagrad,
    "yogi": _yogi,
    "adam": _adam,
}
"""Update rules of v, in place, by the name in `islands.server`."""


class ServerOptimizer(torch.optim.Optimizer):
    """Adaptive server optimizer of the module's equations, over any parameters.

    Args:
        momentum: b1, 0 ≤ b1 < 1.
        server: adagrad, yogi or adam.
    """

    def __init__(
        self, parameters: list[nn.Parameter], lr: float, momentum: float, server: str
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})
        self._grow = GROW[server]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters that have a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group["lr"], group["momentum"])
        return loss

    def _move(self, parameter: Tensor, change: Tensor, lr: float, momentum: float) -> None:
        state = self.state[parameter]
        if not state:
            state["mean"] = torch.zeros_like(parameter)
            state["square"] = torch.full_like(parameter, TAU**2)
        state["mean"].mul_(momentum).add_(change, alpha=1 - momentum)
        self._grow(state["square"], change)
        parameter.addcdiv_(state["mean"], state["square"].sqrt().add_(TAU), value=-lr)


class FedOpt(MergeMethod):
    """FedAvg with an adaptive server optimizer: `islands.server`.

    Raises:
        ConfigError: another outer optimizer is configured, or b1 is not below 1.
    """

    name = "fedopt"

    def optimizer_builder(self) -> Build:
        """Return the constructor of the server optimizer."""
        policy = self.policy
        if policy.outer != "sgd":
            raise ConfigError(
                f"islands.outer = {policy.outer}: fedopt brings its own, islands.server; try: "
                f"islands.server=adam, or islands.method=fedavg"
            )
        if policy.outer_momentum >= 1:
            raise ConfigError(
                f"islands.outer_momentum = {policy.outer_momentum:g}: below 1, it is the share of "
                f"the old mean; try: islands.outer_momentum=0.9"
            )
        return lambda parameters: ServerOptimizer(
            parameters, policy.outer_lr, policy.outer_momentum, policy.server
        )
