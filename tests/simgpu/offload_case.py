"""Trains on a simulated device with states elsewhere; tells losses, norms and weights as JSON.

python offload_case.py '[{"offload": "parameters", "seeds": [0, 1], …}, …]'
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from typing import Any

import torch  # its import makes the next one possible

import simulated_cuda  # isort: skip

from torch import nn

import shoal
from shoal.models.catalog import build

VOCABULARY, SEQUENCE = 512, 32


class Skipping(nn.Module):
    """No gradient goes into its first block: what was brought for that is let go unused."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 256)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
        self.head = nn.Linear(256, VOCABULARY)
        self.register_buffer("scale", torch.ones(256))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.scale
        x = x + self.layers[0](x).relu().detach()
        for layer in self.layers[1:]:
            x = x + layer(x).relu()
        return self.head(x)


def plain(model: dict[str, int]) -> nn.Module:
    """A Llama of that size."""
    return build("llama", {"heads": 8, **model}, vocabulary=VOCABULARY, sequence=SEQUENCE)


def train(asked: dict[str, Any]) -> dict[str, Any]:
    """Some steps of a Llama; `mode` and `seed` are of the device's schedule."""
    simulated_cuda.set_mode(asked["mode"])
    simulated_cuda.seed_schedule(asked["seed"])
    simulated_cuda.set_limit(0, asked.get("limit_bytes", 2**32))
    draws = torch.Generator().manual_seed(3)
    rows = asked.get("rows", 4)
    tokens = torch.randint(VOCABULARY, (rows, SEQUENCE + 1), generator=draws)
    builder = functools.partial(plain, asked["model"]) if asked["model"] else Skipping
    torch.cuda.reset_peak_memory_stats()
    run = shoal.parallelize(
        builder,
        lambda p: torch.optim.AdamW(p, lr=1e-3),
        layout="single",
        batch=rows,
        micro_batch=asked.get("micro_batch", 2),
        precision=asked["precision"],
        recompute=asked.get("recompute", "none"),
        offload=asked["offload"],
        clip=0.1,
    )
    batch = (tokens[:, :-1], tokens[:, 1:])
    results, seen = [], []
    for _ in range(asked.get("steps", 2)):
        run.forward_backward(batch)
        seen += [float(one.double().sum()).hex() for one in run.program.reducer.sums()]
        results.append(run.update())
    found = hashlib.sha256()
    for tensor in run.state_dict().values():
        found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    told = {
        "losses": [result.loss.hex() for result in results],
        "seen": seen,
        "norms": [result.grad_norm.hex() for result in results],
        "weights": found.hexdigest(),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "parameters": run.plan.parameters,
    }
    run.close()
    return told


def main() -> None:
    torch.set_num_threads(1)
    told = [train(one) for one in json.loads(sys.argv[1])]
    sys.stdout.write(json.dumps(told) + "\n")


main()
