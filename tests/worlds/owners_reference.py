"""Federated methods written out by hand, in float64: what the papers say, and nothing of Shoal's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Weights = list[Tensor]
Gradient = Callable[[Weights, int, Sequence[int]], Weights]
"""(weights, owner, sample numbers) → gradient of the mean loss of these samples."""


def federate(x: Weights, lengths: Sequence[int], gradient: Gradient,
             order: Callable[[int, int, int], int], *, method: str, rounds: int, batch: int,
             period: int, share: float, lr: float, seed: int, last_epoch: int = 0,
             merge: str = "mean", server: str = "adam", weighting: str = "tokens") -> list[Weights]:  # fmt: skip
    """Return the merged weights after every round.

    order: (owner, epoch, offset) → sample number.
    """
    n, zero = len(lengths), [torch.zeros_like(w) for w in x]
    places, c, each_c = [0] * n, zero, [zero] * n
    m, v, after = zero, [torch.full_like(w, 1e-6) for w in x], []
    for r in range(rounds):
        active = [
            i for i in range(n) if lengths[i] and not 0 < last_epoch * lengths[i] <= places[i]
        ]
        key = {i: hashlib.sha256(f"owners {seed} {r} {i}".encode()).digest() for i in active}
        drawn = sorted(sorted(active, key=key.get)[: max(1, round(share * len(active)))])
        ys, sizes, changes = [], [], [zero] * n
        for i in drawn:
            y, g_sum, steps, seen = x, zero, 0, 0
            while steps < period and not 0 < last_epoch * lengths[i] <= places[i]:
                stop = min(places[i] + batch, (places[i] // lengths[i] + 1) * lengths[i])
                if last_epoch:
                    stop = min(stop, last_epoch * lengths[i])
                numbers = [
                    order(i, p // lengths[i], p % lengths[i]) for p in range(places[i], stop)
                ]
                g = gradient(y, i, numbers)
                g_sum = [a + b for a, b in zip(g_sum, g, strict=True)]
                if method == "scaffold":
                    g = [a - b + d for a, b, d in zip(g, each_c[i], c, strict=True)]
                if method == "fedprox":
                    g = [a + 0.3 * (b - d) for a, b, d in zip(g, y, x, strict=True)]
                y = [a - lr * b for a, b in zip(y, g, strict=True)]
                seen, steps, places[i] = seen + len(numbers), steps + 1, stop
            changes[i] = [a / steps - b for a, b in zip(g_sum, each_c[i], strict=True)]
            ys.append(y)
            sizes.append({"tokens": seen, "samples": lengths[i], "uniform": 1}[weighting])
        columns = [torch.stack(one) for one in zip(*ys, strict=True)]
        if merge == "mean":
            new = [sum(s * y for s, y in zip(sizes, column, strict=True)) / sum(sizes)
                   for column in columns]  # fmt: skip
        elif merge == "median":
            new = [torch.quantile(column, 0.5, dim=0) for column in columns]
        else:
            drop = int(0.2 * len(ys))
            new = [column.sort(dim=0).values[drop : len(ys) - drop].mean(0) for column in columns]
        delta = [a - b for a, b in zip(new, x, strict=True)]
        if method == "fedopt":
            m = [0.9 * a + 0.1 * d for a, d in zip(m, delta, strict=True)]
            rule = {"adam": lambda a, d: 0.99 * a + 0.01 * d * d, "adagrad": lambda a, d: a + d * d,
                    "yogi": lambda a, d: a - 0.01 * d * d * torch.sign(a - d * d)}[server]  # fmt: skip
            v = [rule(a, d) for a, d in zip(v, delta, strict=True)]
            x = [w + 0.1 * a / (b.sqrt() + 1e-3) for w, a, b in zip(x, m, v, strict=True)]
        else:
            x = new
        if method == "scaffold":
            c = [a + sum(changes[i][k] for i in drawn) / n for k, a in enumerate(c)]
            for i in drawn:
                each_c[i] = [a + b for a, b in zip(each_c[i], changes[i], strict=True)]
        after.append(x)
    return after
