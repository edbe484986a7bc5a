"""Averaging methods: islands' changes become one mean change, and an outer step by it.

Each is a subclass of `MergeMethod`, whose outer step it configures, with its formulas and sources.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shoal.islands.method import MergedWeights, MergeMethod


class LocalSGD(MergeMethod):
    """Local SGD: every island trains alone for H steps, then all average their weights.

        w_i ← Σ n_i·w_i / Σ n_i

    This is the outer step W ← W − 1·mean(W − w_i): SGD of learning rate 1 without momentum. With H
    = 1 and plain SGD inside it is data parallel training.

    Source: Stich 2019, "Local SGD converges fast and communicates little"
    """

    name = "local-sgd"


class FedAvg(MergeMethod):
    """FedAvg: local training, then the average of the weights by tokens seen.

        W ← Σ n_i·w_i / Σ n_i

    n_i are the tokens of the round (`islands.weighting = tokens`), so that every token has the same
    weight on any island. In the paper n_i are the samples that an owner holds (`samples`).

    Source: McMahan et al. 2017, "Communication-efficient learning of deep networks", algorithm 1
    """

    name = "fedavg"


class FedProx(MergeMethod):
    """FedProx: FedAvg with a proximal term towards the merged weights in local training.

        gradient of an inner step  g ← g + μ·(w_i − W)        of the added loss  μ/2·‖w_i − W‖²

    W are the last merged weights, μ is `islands.proximal`. g is the mean gradient of the step, over
    all its micro-batches and ranks. So the term does not depend on the micro-batches, and clipping
    acts on the sum.

    Note:
        With the model on a GPU, W (on the CPU) crosses the bus at every inner step.

    Source: Li et al. 2020, "Federated optimization in heterogeneous networks", algorithm 2
    """

    name = "fedprox"
    pulls = True

    @torch.no_grad()
    def before_update(self, outer: MergedWeights, local: Mapping[str, nn.Parameter]) -> None:
        """Add μ·(w − W) to every gradient; parameters without a gradient stay unchanged."""
        for name, own in local.items():
            if own.grad is not None and name in outer.weights:
                anchor = outer.weights[name].to(own.device, own.dtype)
                own.grad.add_(
                    (own.detach() - anchor).to(own.grad.dtype), alpha=self.policy.proximal
                )


class BranchTrainMerge(MergeMethod):
    """Branch-train-merge: copies of the model train apart for long, are averaged, branch again.

        merge       W ← Σ n_i·w_i / Σ n_i
        branch      w_i ← W, with an inner optimizer that begins anew

    The inner optimizer's moments belong to the weights before the merge, so they are dropped; the
    learning-rate schedule continues. An owner's branch is saved before its merge (the tag
    `branch-NAME`): as an expert of an ensemble, and to grow other branches from.

    Source: Li et al. 2022, "Branch-train-merge"; weights averaged as in Wortsman et al. 2022 (model
    soups)
    """

    name = "branch-train-merge"
    resets_inner = True
    saves_branches = True


class DiLoCo(MergeMethod):
    """DiLoCo: H local AdamW steps per island, then an outer Nesterov step by the mean change.

        D = mean of W − w_i        u ← 0.9·u + D        W ← W − 0.7·(D + 0.9·u)        w_i ← W

    For a constant D the step is 1.33·D in round 1, 1.90·D in round 2, 7·D in the limit. The inner
    optimizer's state stays with its island: it is neither sent nor reset. With one island, DiLoCo
    is an outer optimizer around an ordinary run, which helps too.

    Source: Douillard et al. 2023, "DiLoCo", algorithm 1; one island: Charles et al. 2025 (scaling
    laws)
    """

    name = "diloco"


class StreamingDiLoCo(MergeMethod):
    """Streaming DiLoCo: the model travels in fragments, while the islands train on.

        after step ⌊(p+1)·H/P⌋ − τ   send fragment p, coded in 4 bits: W_p − w_p;  s_p ← w_p
        after step ⌊(p+1)·H/P⌋       W_p, u_p ← outer step;  w_p ← w_p + (1 − α)·(W_p − s_p)  α = 0

    Peak bandwidth falls by P, and transfers overlap with τ inner steps. The paper uses w_p ← α·w_p
    + (1 − α)·W_p with α = 0.5, which drops half of an island's change in those τ steps and leaves
    the islands different. Here that change is added to the merged weights, so all of it stays and
    travels with the next message. With α = 0, a single island trains exactly as a run without
    islands (`docs/decisions/0011-what-is-learnt-on-the-way.md` has the measurement).

    The fragments and their schedule are in `fragments.py`, α in `MergeMethod.apply_merge`.

    Source: Douillard et al. 2025, "Streaming DiLoCo with overlapping communication"
    """

    name = "streaming-diloco"
