"""A model, data, callback and link with planned sleeps; `planted.json` says where and how long.

each_s   part → seconds of a step on every rank, for a run in which nothing else is planted
calls    part → calls a step in which a part takes its time (1): samples, micro-batches
costs    list of {part, s} and, of each: rank (all), every (1: each step), flips (a seed: the rank
         changes every third step)
ops      tiny operations in each forward pass; blocks: their number
fault    {kind: hang | kill | nan, rank, step}, and of nan the share of samples
"""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

ASKED = json.loads(Path("planted.json").read_text()) if Path("planted.json").exists() else {}
RANK = int(os.environ.get("RANK", "0"))
EACH_S = {"data": 0.002, "forward": 0.012, "backward": 0.018, "optimizer": 0.002}
EACH_S.update(ASKED.get("each_s", {}))
TIMES = ASKED.get("calls", {})
FAULT = ASKED.get("fault", {})
CALLS: dict[str, int] = {}


def spend(part: str) -> None:
    """Take the time of one call of a part."""
    calls = TIMES.get(part, 1)
    count = CALLS[part] = CALLS.get(part, 0) + 1
    step = (count - 1) // calls
    if part == FAULT.get("part") and step == FAULT["step"]:
        end_process()
    seconds = EACH_S.get(part, 0.0) / calls
    for cost in ASKED.get("costs", ()):
        if cost["part"] == part and step % cost.get("every", 1) == 0:
            rank = cost.get("rank", RANK)
            if "flips" in cost:
                rank = random.Random(f"{cost['flips']} {step // 3}").randrange(2)
            seconds += (rank == RANK) * cost["s"] / (1 if cost.get("each_call") else calls)
    if seconds:
        time.sleep(seconds)


class Samples:
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        spend("data")
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(8, generator=generator)
        share = FAULT.get("share", 0.0) if FAULT.get("kind") == "nan" else 0.0
        if share and random.Random(f"{FAULT['seed']} {index}").random() < share:
            x[0] = float("nan")
        return x, torch.tensor(index % 4)


class Validation(Samples):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(ASKED.get("validation_s", 0.0) / 4)
        return torch.randn(8), torch.tensor(index % 4)


def collate(samples: list[Any]) -> Any:
    """Join samples to a batch."""
    spend("collate")
    return torch.utils.data.default_collate(samples)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and ASKED.get("in_blocks"):
            spend("forward")
        for _ in range(ASKED.get("ops", 0)):
            x = x * 1.0001
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.blocks = nn.ModuleList([Block() for _ in range(ASKED.get("blocks", 4))])
        self.last = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.training and not ASKED.get("divided"):
            if not ASKED.get("in_blocks"):
                spend("forward")
            x.register_hook(lambda gradient: spend("backward"))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def build() -> nn.Module:
    return Model()


def data() -> Any:
    return Samples(), Validation()


def hook(record: dict[str, Any]) -> None:
    """Take the time of a callback after each step."""
    if record.get("event") == "step":
        spend("hooks")


def end_process() -> None:
    """Stop or kill the process of the faulty rank, once."""
    ends = {"hang": signal.SIGSTOP, "kill": signal.SIGKILL}
    if FAULT["kind"] in ends and FAULT["rank"] == RANK and not Path("ended").exists():
        Path("ended").touch()
        os.kill(os.getpid(), ends[FAULT["kind"]])


def meet_passes() -> None:
    """Spend in passes of whatever a layout made of the model: a graph, or stages of it."""
    real: Callable[..., Any] = torch.autograd.backward

    def before(module: nn.Module, inputs: object) -> None:
        if isinstance(module, Model) and module.training and torch.is_grad_enabled():
            spend("forward")

    def backward(*tensors: Any, **more: Any) -> None:
        spend("backward")
        real(*tensors, **more)

    register_module_forward_pre_hook(before)
    torch.autograd.backward = backward


def slow_link() -> None:
    """Sleep once a step in the wait for the sum of gradients, as over a slow link."""
    from shoal.fabric.collectives.traffic_counts import TrafficCounter
    from shoal.wire import phases
    from shoal.wire.watch_page import PART, STEP

    real = TrafficCounter.waiting
    slept = [-1]

    @contextmanager
    def waiting(self: TrafficCounter, count: int = 1) -> Iterator[None]:
        with real(self, count):
            yield
            page = phases.page
            if page and page._words[PART] == phases.SUM and slept[0] != page._words[STEP]:
                slept[0] = page._words[STEP]
                spend("sum")

    TrafficCounter.waiting = waiting  # type: ignore[method-assign]


if ASKED:
    register_optimizer_step_pre_hook(lambda *_: spend("optimizer"))
    if ASKED.get("divided"):
        meet_passes()
    if any(cost["part"] == "sum" for cost in ASKED.get("costs", ())):
        slow_link()
