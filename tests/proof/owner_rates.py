"""FedAvg and SCAFFOLD without Shoal: at which learning rates does a CNN of owners train at all?

    python tests/proof/owner_rates.py 0.02 0.05 0.1 0.2

The setting is that of owners_gates_second.toml: 100 owners of one label each, 20 drawn a round, ten
inner steps of four images. The drawn owners train together, by `torch.func.vmap`: a run of 60 rounds
takes about four processor seconds, so that a rate is chosen here, on seeds 1 and 2, and not by the
trials that judge. Each line: model, rate, method, and for each seed the rounds until an accuracy.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import owner_models
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

OWNERS, DRAWN, STEPS, BATCH, ROUNDS = 100, 20, 10, 4, 60
SEEDS, ACCURACY = (1, 2), 0.85
HELD = 359


def split_labels(draws: np.random.Generator) -> tuple[Tensor, Tensor, Tensor, list[np.ndarray]]:
    """Return images, labels, held-out numbers, and each owner's numbers: all of one label."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    train, owners = order[HELD:], []
    for label in range(10):
        own = draws.permutation(train[labels[train] == label])
        owners += np.array_split(own, OWNERS // 10)
    x = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    return x, torch.tensor(labels), torch.tensor(order[:HELD]), owners


def count_rounds(build: Any, method: str, rate: float, seed: int) -> int:
    """Return the first round that reaches the accuracy; ROUNDS + 1 if none does."""
    draws = np.random.default_rng(seed)
    torch.manual_seed(seed)
    net: nn.Module = build()
    x, y, held, owners = split_labels(draws)
    weights = {name: one.detach().clone() for name, one in net.named_parameters()}
    common = {name: torch.zeros_like(one) for name, one in weights.items()}
    own = {name: torch.zeros(OWNERS, *one.shape) for name, one in weights.items()}
    ahead: list[list[int]] = [[] for _ in range(OWNERS)]

    def loss(parts: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(net, parts, (images,)), labels)

    gradients = vmap(grad(loss))
    for round_number in range(1, ROUNDS + 1):
        drawn = np.sort(draws.choice(OWNERS, DRAWN, replace=False))
        parts = {name: one.expand(DRAWN, *one.shape).clone() for name, one in weights.items()}
        mean = {name: torch.zeros_like(one) for name, one in parts.items()}
        for _ in range(STEPS):
            for owner in drawn:
                while len(ahead[owner]) < BATCH:
                    ahead[owner] += [*draws.permutation(owners[owner])]
            rows = torch.tensor(np.array([ahead[owner][:BATCH] for owner in drawn]))
            for owner in drawn:
                del ahead[owner][:BATCH]
            for name, found in gradients(parts, x[rows], y[rows]).items():
                mean[name] += found / STEPS
                drift = common[name] - own[name][drawn] if method == "scaffold" else 0.0
                parts[name] -= rate * (found + drift)
        for name, one in parts.items():
            weights[name] = one.mean(0)
            common[name] += (mean[name] - own[name][drawn]).sum(0) / OWNERS
            own[name][drawn] = mean[name]
        right = functional_call(net, weights, (x[held],)).argmax(1) == y[held]
        if float(right.float().mean()) >= ACCURACY:
            return round_number
    return ROUNDS + 1


def main() -> None:
    """Try every rate, method and model."""
    torch.set_num_threads(1)
    for name in ("cnn", "groupnorm"):
        for rate in map(float, sys.argv[1:]):
            for method in ("fedavg", "scaffold"):
                build = getattr(owner_models, name)
                found = [count_rounds(build, method, rate, seed) for seed in SEEDS]
                sys.stdout.write(f"{name} {rate:g} {method} {found}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
