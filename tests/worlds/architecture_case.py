"""An architecture of the transformers library on a layout, and under its authors' own plan for tp."""

from __future__ import annotations

import copy
import functools
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from family_case import OUTPUTS, battery_of, leaning_loss, proven
from shoal.fabric import World
from shoal.proof import Battery
from shoal.proof.trial_side import unfuse_experts

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parallel"))

from tiny_architectures import Architecture


@functools.lru_cache(maxsize=1)
def battery(folder: str, name: str) -> tuple[Battery, dict[str, Any]]:
    """The battery of the model at hand: its twin's record serves every layout."""
    return battery_of(Architecture(folder, name))


def prove(world: World, folder: str, name: str, layout: dict[str, int]) -> dict[str, Any]:
    """What a layout computes, beside one process.

    Gives   the report; "not made" where transformers' own model does not run alone
    """
    why = _alone(folder, name)
    if why:
        return {
            "verdict": "not made",
            "reason": why,
            "said": "",
            "cause": None,
            "trajectories": [],
            "notices": [],
            "shares": {},
        }
    return proven(world, *battery(folder, name), layout)


@functools.lru_cache(maxsize=1)
def _alone(folder: str, name: str) -> str:
    """Why the tiny model does not run in float32 in plain torch; empty where it does."""
    made = Architecture(folder, name)
    try:
        torch.manual_seed(0)
        outputs = made.build()(**made.inputs(2))
        next(outputs[key] for key in OUTPUTS if key in outputs).sum().backward()
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}".strip().splitlines()[-1][-300:]
    return ""


def theirs(world: World, folder: str, name: str) -> dict[str, Any]:
    """`beside_plan`, or the line of the error that ended it here."""
    try:
        return {"error": "", **beside_plan(world, folder, name)}
    except Exception as failure:
        return {"error": f"{type(failure).__name__}: {failure}".strip().splitlines()[0][:300]}


def beside_plan(world: World, folder: str, name: str) -> dict[str, Any]:
    """The model under the plan that comes with it, in float64, beside one process.

    Gives   share of the parameters that is split; largest difference of the loss, and of any
            gradient as a share of the whole gradient's norm
    """
    from torch.distributed import init_device_mesh
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    made = Architecture(folder, name)
    torch.manual_seed(0)
    whole = made.build().double().eval()
    unfuse_experts(whole, [])
    split = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
    asked = DistributedConfig(tp_size=world.size)
    plan = split._resolve_parallel_plans(asked)[0]
    there = {n for n, _ in split.named_modules()} | {n for n, _ in split.named_parameters()}
    apply_tensor_parallelism(split, mesh, {n: how for n, how in plan.items() if n in there})
    split.tie_weights()  # a tied head follows its embedding
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in made.inputs(4).items()}
    losses = [float(_loss_of(model, inputs)) for model in (whole, split)]
    expected = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    norm = float(torch.stack([g.norm() for g in expected.values()]).norm())
    held, size, far = 0, 0, 0.0
    for key, parameter in split.named_parameters():
        size += parameter.numel()
        local, grad = parameter, parameter.grad
        if hasattr(local, "to_local"):
            local = local.to_local()
        held += parameter.numel() - local.numel() and parameter.numel()
        if key in expected and grad is not None:
            full = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            if full.shape == expected[key].shape:
                far = max(far, float((full - expected[key]).norm()) / norm)
            else:
                raise ValueError(f"the gradient of {key} has another shape")
        elif key in expected:
            raise ValueError(f"{key} has no gradient")
    return {"share": held / size, "loss": abs(losses[1] / losses[0] - 1), "gradient": far}


def _loss_of(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(1)
    total, count = leaning_loss(model(**inputs), torch.arange(4))
    (total / count).backward()
    return (total / count).detach()
