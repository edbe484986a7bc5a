"""A model and its data of which one rank is slow in one part of every step; `slow.json` says which.

part   data, forward, backward, optimizer, hooks; "" none
rank, extra_s   whose · and seconds more of each step, from step `after` on
each_s          what each of the first four parts takes on every rank; `busy`: not asleep, but
                by multiplying matrices for as long as that took on an idle core
passes          how many forward passes each rank makes in a step; where there are more than 1 the
                model is divided, so passes are met from outside of it; `samples`: read in a step
heavy           a rank whose passes take twice as long as the others', by the plan
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

ASKED = json.loads(Path("slow.json").read_text()) if Path("slow.json").exists() else {}
RANK = int(os.environ.get("RANK", "0"))
MINE = ASKED.get("rank") == RANK
CALLS: dict[str, int] = {}


PASSES = ASKED.get("passes", 1)
DIVIDED = PASSES > 1
TIMES = {part: 1 + (ASKED.get("heavy") == RANK) for part in ("forward", "backward")}


def spend(part: str, calls_a_step: int = 1) -> None:
    """One of so many calls a step in which a part takes its time, and more where it is slow."""
    count = CALLS[part] = CALLS.get(part, 0) + 1
    if part != "hooks":
        work(TIMES.get(part, 1) * ASKED["each_s"] / calls_a_step)
    if MINE and part == ASKED["part"] and count > ASKED["after"] * calls_a_step:
        time.sleep(ASKED["extra_s"] / calls_a_step)


def work(seconds: float) -> None:
    if not ASKED.get("busy"):
        time.sleep(seconds)
        return
    matrix = torch.ones(64, 64)
    for _ in range(int(seconds / ASKED["multiply_s"])):
        matrix @ matrix


class Samples:
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        spend("data", ASKED.get("samples", 2))
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator), torch.tensor(index % 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if self.training and not DIVIDED:
            spend("forward")
            x.register_hook(lambda gradient: spend("backward"))
        return self.last(x)


def build() -> nn.Module:
    return Model()


# Not in `build`, which rank 0 may call twice: its optimizer would be slow, and be told.
if ASKED:  # else nobody runs it, it is only looked through for tests
    register_optimizer_step_pre_hook(lambda *_: spend("optimizer"))


def meet_passes() -> None:
    """Spend in passes of whatever a layout made of the model: a graph, or stages of it."""
    real = torch.autograd.backward

    def before(module: nn.Module, inputs: object) -> None:
        if isinstance(module, Model) and module.training and torch.is_grad_enabled():
            spend("forward", PASSES)

    def backward(*tensors: Any, **more: Any) -> None:
        spend("backward", PASSES)
        real(*tensors, **more)

    register_module_forward_pre_hook(before)
    torch.autograd.backward = backward


if DIVIDED:
    meet_passes()


def data() -> Samples:
    return Samples()


def hook(run: object) -> None:
    """After each step, as `train.on` calls it."""
    spend("hooks")
