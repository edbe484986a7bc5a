"""Trains on a simulated device with states elsewhere; tells losses, norms and weights as JSON.

python offload_case.py '[{"offload": "parameters", "seeds": [0, 1], …}, …]'
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch  # its import makes the next one possible

import simulated_cuda  # isort: skip

import shoal
from shoal.models.catalog import build

VOCABULARY, SEQUENCE = 512, 32


def train(asked: dict[str, Any]) -> dict[str, Any]:
    """Some steps of a Llama; `mode` and `seed` are of the device's schedule."""
    simulated_cuda.set_mode(asked["mode"])
    simulated_cuda.seed_schedule(asked["seed"])
    simulated_cuda.set_limit(0, asked.get("limit_bytes", 2**32))
    draws = torch.Generator().manual_seed(3)
    rows = asked.get("rows", 4)
    tokens = torch.randint(VOCABULARY, (rows, SEQUENCE + 1), generator=draws)
    model = {"heads": 8, **asked["model"]}
    torch.cuda.reset_peak_memory_stats()
    run = shoal.parallelize(
        lambda: build("llama", model, vocabulary=VOCABULARY, sequence=SEQUENCE),
        lambda p: torch.optim.AdamW(p, lr=1e-3),
        layout="single",
        batch=rows,
        micro_batch=asked.get("micro_batch", 2),
        precision=asked["precision"],
        recompute=asked.get("recompute", "none"),
        offload=asked["offload"],
        clip=0.1,
    )
    results = [run.step((tokens[:, :-1], tokens[:, 1:])) for _ in range(asked.get("steps", 2))]
    found = hashlib.sha256()
    for tensor in run.state_dict().values():
        found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    told = {
        "losses": [result.loss.hex() for result in results],
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
