"""Branch-train-merge: copies of the model train apart for long, are averaged, and branch again.

    merge       W ← Σ n_i·w_i / Σ n_i
    branch      w_i ← W, with an inner optimizer that begins anew

The inner optimizer's moments belong to weights that the merge has left, so they are dropped; the
learning-rate schedule goes on.

Source: Li et al. 2022, "Branch-train-merge"; weights averaged as in Wortsman et al. 2022 (model
soups), where the paper also keeps the branches as an ensemble
"""

from __future__ import annotations

from shoal.islands.method import Method


class BranchTrainMerge(Method):
    """Averaging by tokens after long rounds, and a fresh inner optimizer after each."""

    name = "branch-train-merge"
    resets_inner = True
