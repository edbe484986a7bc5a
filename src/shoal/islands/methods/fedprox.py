"""FedProx: FedAvg whose islands are held near the merged weights while they train alone.

    gradient of an inner step  g ← g + μ·(w_i − W)        of the added loss  μ/2·‖w_i − W‖²

W is what was merged last. g is the mean gradient of the step, over all its micro-batches and ranks;
added there, the pull is the same however the batch is cut, and clipping acts on the sum.

Source: Li et al. 2020, "Federated optimization in heterogeneous networks", algorithm 2
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shoal.islands.method import Method
from shoal.islands.outer import Outer


class FedProx(Method):
    """FedAvg with a pull of strength μ = `islands.proximal`.

    Limits   with the model on a GPU, W (kept on the CPU) crosses the bus at every inner step
    """

    name = "fedprox"
    pulls = True

    @torch.no_grad()
    def before_update(self, outer: Outer, local: Mapping[str, nn.Parameter]) -> None:
        """Add μ·(w − W) to every gradient; parameters without one are left alone."""
        for name, own in local.items():
            if own.grad is not None and name in outer.weights:
                anchor = outer.weights[name].to(own.device, own.dtype)
                own.grad.add_(
                    (own.detach() - anchor).to(own.grad.dtype), alpha=self.policy.proximal
                )
