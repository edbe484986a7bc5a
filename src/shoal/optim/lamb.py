"""LAMB: Adam whose step on every matrix is proportional to the norm of the matrix.

    m, v as Adam's, with bias correction;  r = m̂ / (√v̂ + ε) + λ·w;  w ← w − lr·(φ(‖w‖) / ‖r‖)·r

The ratio φ(‖w‖)/‖r‖, one per tensor and 1 where either norm is 0, lets every layer learn at its
own pace in very large batches. It needs the norm of the whole tensor: LAMB cannot run on slices.

Source: You et al. 2020, "Large batch optimization for deep learning", algorithm 2. The paper leaves
φ open; the authors' program and NVIDIA's take φ(z) = z, others clamp z to at most 10.
As those programs do, this class gives vectors and scalars (norms, biases) a ratio of 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from shoal.optim.lion import check_settings, foreach_chunks, run_closure


class LAMB(torch.optim.Optimizer):
    """LAMB optimizer: layer-wise adaptive moments for very large batches.

    Args:
        params: parameters or groups.
        lr: a number or a 0-dim tensor.
        betas, eps: as in Adam.
        weight_decay: λ, inside the normalised step.
        norm_clamp: (low, high) of φ(z) = min(max(z, low), high); None: φ(z) = z.
        maximize: ascend instead.

    Raises:
        ValueError: a number is out of range.
        RuntimeError: sparse or complex gradients.

    Note:
        There is one implementation: torch's foreach kernels over a few parameters at a time.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        norm_clamp: tuple[float, float] | None = None,
        maximize: bool = False,
    ) -> None:
        check_settings(lr, betas, weight_decay)
        if norm_clamp is not None and not 0 <= norm_clamp[0] < norm_clamp[1]:
            raise ValueError(f"norm_clamp = {norm_clamp}: wanted 0 ≤ low < high")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "norm_clamp": norm_clamp,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make one update; return the closure's result, if there is a closure."""
        loss = run_closure(closure)
        for group in self.param_groups:
            for params, grads in foreach_chunks(self, group):
                updates = self._adam(params, grads, group)
                if group["weight_decay"]:
                    torch._foreach_add_(updates, params, alpha=group["weight_decay"])
                _scale_to_weights(updates, params, group["norm_clamp"])
                torch._foreach_add_(params, updates, alpha=-float(group["lr"]))
        return loss

    def _adam(
        self, params: list[torch.Tensor], grads: list[torch.Tensor], group: dict[str, Any]
    ) -> list[torch.Tensor]:
        """Return Adam's direction m̂ / (√v̂ + ε) for every parameter, in new tensors."""
        for parameter in params:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros(())  # on the CPU, as torch keeps it
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[p] for p in params]
        first, second = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
        beta1, beta2 = group["betas"]
        for state in states:
            state["step"] += 1
        steps = [state["step"].item() for state in states]
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        below = list(torch._foreach_sqrt(second))
        torch._foreach_div_(below, [(1 - beta2**step) ** 0.5 for step in steps])
        torch._foreach_add_(below, group["eps"])
        updates = list(torch._foreach_div(first, below))
        torch._foreach_div_(updates, [1 - beta1**step for step in steps])
        return updates


def _scale_to_weights(
    updates: list[torch.Tensor], params: list[torch.Tensor], clamp: tuple[float, float] | None
) -> None:
    """Multiply the update of every matrix by φ(‖w‖) / ‖update‖, in place."""
    places = [place for place, p in enumerate(params) if p.ndim >= 2]
    if not places:
        return
    matrices = [updates[place] for place in places]
    weight_norms = torch._foreach_norm([params[place] for place in places])
    update_norms = torch._foreach_norm(matrices)
    ratios = []
    for weight, update in zip(weight_norms, update_norms, strict=True):
        phi = weight if clamp is None else weight.clamp(*clamp)
        ratios.append(torch.where((weight > 0) & (update > 0), phi / update, 1.0))
    torch._foreach_mul_(matrices, ratios)
