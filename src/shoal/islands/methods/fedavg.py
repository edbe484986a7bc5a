"""FedAvg: local training, then the average of the weights by how much data each has seen.

    W ← Σ n_i·w_i / Σ n_i

n_i are the tokens of the round (`islands.weighting = tokens`), so that every token weighs the same
wherever it was learnt.

Source: McMahan et al. 2017, "Communication-efficient learning of deep networks", algorithm 1
"""

from __future__ import annotations

from shoal.islands.method import Method


class FedAvg(Method):
    """Averaging by tokens: an outer SGD of learning rate 1 without momentum."""

    name = "fedavg"
