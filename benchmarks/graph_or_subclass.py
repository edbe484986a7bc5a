"""Which way of running a split layer costs less: a rewritten graph, or a tensor subclass?

One layer of our Llama, forward and backward, in one process: as the user's own code runs it, as its
traced graph, and as the user's own code on a tensor subclass that does nothing but unwrap and wrap
(the least that a subclass with rules would do). What differs is the overhead of the way alone.

    python benchmarks/graph_or_subclass.py            about a minute; needs an idle machine

Prints the ratio of paired medians to the user's own code, with a bootstrap 95 % interval; rows in
benchmarks/results/graph-or-subclass.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shoal.models.llama import Llama
from shoal.trace.graph.layer_graph import trace_layer

TARGET = Path(__file__).resolve().parent / "results" / "graph-or-subclass.json"
SIZES = {"hidden 256, 256 tokens": (256, 256), "hidden 512, 512 tokens": (512, 512)}


class Passing(torch.Tensor):
    """Holds a tensor, and runs every operation on what it holds."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Passing:
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=held.device
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def inside(leaf: Any) -> Any:
            return leaf.held if isinstance(leaf, Passing) else leaf

        def outside(leaf: Any) -> Any:
            return Passing(leaf) if isinstance(leaf, torch.Tensor) else leaf

        plain = pytree.tree_map(inside, (args, kwargs or {}))
        return pytree.tree_map(outside, func(*plain[0], **plain[1]))


def ways(hidden: int, tokens: int) -> dict[str, Callable[[], None]]:
    """What is timed: one forward and backward pass each."""
    model = Llama(
        vocabulary=16, dim=hidden, layers=1, heads=8, kv_heads=4, hidden=3 * hidden, sequence=tokens
    )
    block = model.blocks[0]
    x = torch.randn(2, tokens, hidden, requires_grad=True)
    traced = trace_layer(block, (x,), {})
    parameters = list(block.parameters())

    def own() -> None:
        block(x).sum().backward()

    def graph() -> None:
        traced.module(*parameters, x)[0].sum().backward()

    def subclass() -> None:
        block(Passing(x.detach()).requires_grad_()).sum().backward()

    return {"own code": own, "graph": graph, "subclass": subclass, "own code again": own}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--pairs", type=int, default=100)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "torch": torch.__version__,
        "platform": platform.platform(),
        "pairs": pairs,
        "seconds": {},
    }
    for size, (hidden, tokens) in SIZES.items():
        runs = ways(hidden, tokens)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(pairs + 3):
            for name, run in runs.items():
                began_s = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - began_s)
        kept = {name: taken[3:] for name, taken in seconds.items()}
        record["seconds"][size] = kept
        for name in list(runs)[1:]:
            low, middle, high = ratio(kept[name], kept["own code"])
            print(f"{size}: {name} / own code = {middle:.3f} [{low:.3f}, {high:.3f}]")
    TARGET.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def ratio(one: list[float], other: list[float]) -> tuple[float, float, float]:
    """Ratio of medians with a bootstrap 95 % interval over pairs: (low, middle, high)."""
    draw = random.Random(1)
    found = []
    for _ in range(2000):
        picked = [draw.randrange(len(one)) for _ in one]
        found.append(
            statistics.median(one[k] for k in picked) / statistics.median(other[k] for k in picked)
        )
    found.sort()
    return found[50], statistics.median(one) / statistics.median(other), found[1949]


if __name__ == "__main__":
    sys.exit(main())
