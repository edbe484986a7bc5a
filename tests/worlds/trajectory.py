"""Runs a few steps of a case on a world and writes down everything that must agree."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import cases
import shoal
from shoal.fabric import World

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
}


def run(
    world: World, case: str, optimizer: str, out: str, steps: int = 5, clip: float = 0.5
) -> dict[str, Any]:
    """Train `case` for `steps`; rank 0 writes gradients of every step and the final state.

    Gives losses and norms, and a digest of the final state, which must be equal on all ranks.
    """
    trained = shoal.parallelize(
        cases.build(case),
        OPTIMIZERS[optimizer],
        cases.loss(case),
        batch=cases.BATCH,
        micro_batch=cases.MICRO_BATCH,
        precision="fp64",
        clip=clip,
        seed=3,
        world=world,
    )
    loader = trained.loader(cases.dataset(case))
    tensors: dict[str, torch.Tensor] = {}
    rows = []
    while trained.step_count < steps:
        for batch in loader:
            result = trained.step(batch)
            rows.append([result.loss, result.grad_norm, result.targets])
            for name, parameter in trained.program.parameters.items():
                gradient = parameter.grad
                kept = torch.zeros_like(parameter) if gradient is None else gradient
                tensors[f"{result.step}.gradient.{name}"] = kept.detach().clone()
                tensors[f"{result.step}.used.{name}"] = torch.tensor(float(gradient is not None))
            if trained.step_count >= steps:
                break
    digest = hashlib.sha256()
    for name, tensor in trained.model.state_dict().items():
        tensors[f"final.{name}"] = tensor.clone()
        digest.update(tensor.reshape(-1).contiguous().view(torch.uint8).numpy().data)
    values = trained.evaluate(cases.dataset(case))
    if world.is_first:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, out)
    return {"rows": rows, "digest": digest.hexdigest(), "evaluated": values}
