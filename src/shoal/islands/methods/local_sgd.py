"""Local SGD: every island trains alone for H steps, then all take the average of their weights.

    w_i ← Σ n_i·w_i / Σ n_i

which is the outer step W ← W − 1·mean(W − w_i). With H = 1 and plain SGD inside it is data parallel
training.

Source: Stich 2019, "Local SGD converges fast and communicates little"
"""

from __future__ import annotations

from shoal.islands.method import Method


class LocalSGD(Method):
    """Averaging every H steps: an outer SGD of learning rate 1 without momentum."""

    name = "local-sgd"
