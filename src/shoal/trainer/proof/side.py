"""One side of the comparison: the processes and the layout on which a trial trains.

A trial is a function that makes one run or several (a GAN) with `side.parallelize` and trains them,
giving back each run's label and result right after its every step. It is called twice, once per
side, and must do the same both times: nothing in it may look at ranks.

Every parameter gets a small noise, keyed by its name, before training: biases that start at 0, norm
gains at 1 and symmetric weights would hide gradients that are 0 or equal by accident.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shoal.fabric import World
from shoal.trainer.contract import Loss
from shoal.trainer.parallelize import parallelize
from shoal.trainer.result import StepResult
from shoal.trainer.run import Run
from shoal.trainer.settings import BuildOptimizer

NOISE_SHARE, NOISE_FLOOR = 0.05, 0.01
"""Noise = floor + share of the parameter's root mean square."""


@dataclass
class Side:
    """Where and how a trial runs.

    world, layout   the processes and the layout, as `shoal.parallelize` takes them
    optimizer       `params -> optimizer` of this trajectory
    steps           optimizer steps of each run · clip  largest gradient norm
    policies        more of `shoal.parallelize`'s arguments (defer_sync, recompute, …)
    on_run          called with every run as it is made, before its first step
    runs            filled by `parallelize`: label → run
    """

    world: World
    layout: str | Mapping[str, Any]
    optimizer: BuildOptimizer
    steps: int
    precision: str = "fp64"
    clip: float = 0.5
    seed: int = 3
    on_run: Callable[[str, Run], None] = lambda label, run: None
    policies: Mapping[str, Any] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)

    def parallelize(
        self,
        build: Callable[[], nn.Module],
        loss: Loss | None = None,
        *,
        label: str = "",
        batch: int | None = None,
        micro_batch: int | None = None,
        call: str = "single",
        sample: Any = None,
    ) -> Run:
        """A run of this side over a freshly built, perturbed module.

        build   gives a new module with the same weights at every call (it is called under
                `torch.manual_seed`) · label  names the run where a trial has several
        Errors  as `shoal.parallelize`
        """
        run = parallelize(
            lambda: perturb(build(), label),
            self.optimizer,
            loss,
            self.layout,
            batch=batch,
            micro_batch=micro_batch,
            precision=self.precision,
            clip=self.clip,
            seed=self.seed,
            skip_limit=self.steps + 1,
            call=call,
            sample=sample,
            world=self.world,
            **self.policies,
        )
        self.runs[label] = run
        self.on_run(label, run)
        return run

    def finished(self) -> bool:
        """Every run has taken its steps."""
        return all(run.step_count >= self.steps for run in self.runs.values())

    def release(self) -> None:
        """Take away what was hung on the modules; the world stays, since others use it."""
        for run in self.runs.values():
            for undo in run.program.on_close:
                undo()
        self.runs = {}


Trial = Callable[[Side], Iterable[tuple[str, StepResult]]]
"""Makes runs, trains them, yields (label, result) after every step of each; may go on for ever."""


def perturb(module: nn.Module, label: str = "") -> nn.Module:
    """Add keyed noise to every parameter, the frozen ones too, in place; gives the module back.

    Tied parameters get it once. The noise depends on the parameter's name and shape alone, hence
    not on layout, rank or order.
    """
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            key = hashlib.blake2b(f"{label}/{name}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key, "big"))
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            size = float(torch.linalg.vector_norm(parameter.detach().double().cpu()))
            scale = NOISE_FLOOR + NOISE_SHARE * size / parameter.numel() ** 0.5
            parameter.add_((noise * scale).to(parameter))
    return module
