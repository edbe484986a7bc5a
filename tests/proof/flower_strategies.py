"""Flower's strategies beside Shoal's merges: the same changes of owners, six rounds in float64.

FedAvg, FedMedian and FedTrimmedAvg as Flower has them; FedAdagrad and FedYogi from v = τ², as in the
paper (Flower starts at 0). FedAdam corrects a bias that the paper does not have: its distance is
reported, and is no gate. `flower_quickstart.py strategies` runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

OWNERS, ROUNDS, LR, MOMENTUM = 5, 6, 0.1, 0.9
COUNTS = (9, 4, 30, 17, 6)
SHAPES = {"weight": (7, 3), "bias": (7,)}
GATE = 1e-12
NO_GATE = "fedadam"

Weights = dict[str, Tensor]


def train_owner(weights: Weights, owner: int, round_number: int) -> Weights:
    """Return what an owner makes of the merged weights: a drawn change, unlike for each owner."""
    draws = torch.Generator().manual_seed(100 * round_number + owner)
    return {
        name: one + 0.1 * (owner - 1) * torch.randn(one.shape, generator=draws, dtype=one.dtype)
        for name, one in weights.items()
    }


def merge_with_flower(strategy: Any) -> Callable[[Weights, list[Weights], int], Weights]:
    """Return the merge of a strategy's `aggregate_train`."""
    from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict

    def merge(weights: Weights, trained: list[Weights], round_number: int) -> Weights:
        strategy.current_arrays = {name: one.numpy() for name, one in weights.items()}
        replies = []
        for one, count in zip(trained, COUNTS, strict=True):
            arrays = ArrayRecord({name: Array(part.numpy()) for name, part in one.items()})
            metrics = MetricRecord({"num-examples": count})
            content = RecordDict({"arrays": arrays, "metrics": metrics})
            replies.append(SimpleNamespace(content=content, has_error=lambda: False))
        arrays, _ = strategy.aggregate_train(round_number, replies)
        return {name: torch.from_numpy(np.array(arrays[name].numpy())) for name in weights}

    return merge


def merge_with_shoal(asked: dict[str, Any]) -> Callable[[Weights, list[Weights], int], Weights]:
    """Return the merge of a method: messages, their weights, the rule, the outer step."""
    from shoal.base.layouts.island_options import IslandsPolicy
    from shoal.fabric.islands.compressed_all_reduce import MergeRule, merge_rows
    from shoal.islands.methods import find_method

    policy = IslandsPolicy(
        **{"method": "fedavg", "weighting": "samples", **asked}, count=OWNERS, data="own", concurrent=1
    ).resolved()  # fmt: skip
    method = find_method(policy)
    opened: list[Any] = []

    def merge(weights: Weights, trained: list[Weights], round_number: int) -> Weights:
        opened.append(opened[0] if opened else method.open(weights))
        outer, names = opened[0], list(weights)
        messages = [method.message(outer, names, one) for one in trained]
        shares, divisor = method.message_weights(COUNTS, [1.0] * OWNERS, [True] * OWNERS)
        mean = {}
        for name in names:
            rows = torch.stack([message[name].flatten() for message in messages])
            if policy.merge == "mean":
                flat = (torch.tensor(shares, dtype=rows.dtype) @ rows) / divisor
            else:
                flat = merge_rows(rows, MergeRule(policy.merge, policy.trim))
            mean[name] = flat.view_as(weights[name])
        assert method.step(outer, mean, OWNERS)
        outer.commit()
        return {name: outer.weights[name].clone() for name in names}

    return merge


def run_rounds(merge: Callable[[Weights, list[Weights], int], Weights]) -> list[Weights]:
    """Return the merged weights after every round."""
    draws = torch.Generator().manual_seed(7)
    weights = {n: torch.randn(s, generator=draws, dtype=torch.float64) for n, s in SHAPES.items()}
    after = []
    for number in range(1, ROUNDS + 1):
        trained = [train_owner(weights, owner, number) for owner in range(OWNERS)]
        weights = merge(weights, trained, number)
        after.append(weights)
    return after


def compare_strategies() -> dict[str, Any]:
    """Return the largest relative distance of any round, by strategy."""
    from flwr.serverapp import strategy

    adaptive = {"eta": LR, "beta_1": MOMENTUM, "tau": 1e-3}
    start = {name: np.full(shape, 1e-6) for name, shape in SHAPES.items()}
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "fedavg": (strategy.FedAvg(), {}),
        "fedmedian": (strategy.FedMedian(), {"merge": "median"}),
        "fedtrimmedavg": (strategy.FedTrimmedAvg(beta=0.2), {"merge": "trimmed", "trim": 0.2}),
        "fedadagrad": (strategy.FedAdagrad(eta=LR, tau=1e-3), {"server": "adagrad", "outer_momentum": 0.0}),
        "fedyogi": (strategy.FedYogi(**adaptive, beta_2=0.99), {"server": "yogi"}),
        "fedadam": (strategy.FedAdam(**adaptive, beta_2=0.99), {"server": "adam"}),
    }  # fmt: skip
    distances = {}
    for name, (theirs, asked) in kinds.items():
        if "server" in asked:
            theirs.v_t = {key: one.copy() for key, one in start.items()}
            asked = {"method": "fedopt", "outer_lr": LR, "outer_momentum": MOMENTUM, **asked}
        pairs = zip(
            run_rounds(merge_with_shoal(asked)), run_rounds(merge_with_flower(theirs)), strict=True
        )
        distances[name] = max(_distance(ours, flowers) for ours, flowers in pairs)
    return {"largest_distance": distances, "rounds": ROUNDS, "owners": OWNERS}


def _distance(ours: Weights, theirs: Weights) -> float:
    apart = sum(float(((ours[n] - theirs[n]) ** 2).sum()) for n in theirs)
    return float((apart / sum(float((one**2).sum()) for one in theirs.values())) ** 0.5)
