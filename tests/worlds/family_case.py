"""A transformers family on a layout, proven by the battery that `shoal prove` runs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from shoal.base.errors import ConfigError, PlanError
from shoal.fabric import World
from shoal.proof import Battery, Trial, TrialSide
from shoal.proof.battery import SGD
from shoal.trainer.metrics_recorder import MetricsRecorder
from shoal.trainer.run import Run
from shoal.trainer.step.optimizer_step import StepResult

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parallel"))

BATCH, MICRO_BATCH, SAMPLES, STEPS = 8, 2, 11, 3
"""Steps of 8 and 3 samples and 8 again: the second is short, its last micro-batch too."""


OUTPUTS = ("logits", "logits_per_image", "last_hidden_state", "sample")
"""What a loss can lean on, the first that there is."""


class Samples:
    """A family's inputs, one sample at a time, and a number to lean the loss on."""

    draws_nothing = True

    def __init__(self, whole: dict[str, torch.Tensor]) -> None:
        self.whole = whole

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return {name: tensor[index] for name, tensor in self.whole.items()}, torch.tensor(index)


def leaning_loss(outputs: Any, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum, count): every output weighs, unequally; counts differ between samples."""
    found = next(outputs[name] for name in OUTPUTS if name in outputs)
    found = found.to(torch.promote_types(found.dtype, torch.float32))
    weight = (1 + index % 3).to(found).view(-1, *(1 for _ in found.shape[1:]))
    draw = torch.Generator().manual_seed(5)
    lean = torch.randn(found.shape[1:], generator=draw).to(found)
    total = (weight * (found * lean + 0.1 * found.square())).flatten(1).mean(1).sum()
    return total, (1 + index % 3).sum()


def trial_of(made: Any, shares: dict[str, Any]) -> Trial:
    """What both sides train; `shares` gets what this rank holds of every parameter.

    made   builds the module and gives its inputs: a `Family`, an `Architecture`
    """

    def build() -> nn.Module:
        torch.manual_seed(0)
        built: nn.Module = made.build()
        if hasattr(built.config, "use_cache"):  # as transformers' own models come
            built.config.use_cache = True
        return built

    def train(side: TrialSide) -> Iterator[tuple[str, StepResult]]:
        data = Samples(made.inputs(SAMPLES))
        collate = torch.utils.data.default_collate
        run = side.parallelize(
            build,
            leaning_loss,
            batch=BATCH,
            micro_batch=MICRO_BATCH,
            call="kwargs",
            sample=lambda: collate([data[k] for k in range(3)]),
        )
        if run.plan.layout.tp > 1:
            shares.update(split_shares(run))
        loader = run.loader(data, collate=collate)
        while True:
            for batch in loader:
                yield "", run.step(batch)

    return train


def split_shares(run: Run) -> dict[str, Any]:
    """Share of the parameters that tensor parallelism splits, and names of those that stay whole.

    Vectors (biases, gains) are not named: they follow what they are added to.
    """
    whole, numel, split = [], 0, 0
    for name, parameter in run.program.parameters.items():
        shard = run.program.cuts.get(name)
        shape = run.program.rows[name].shape
        size = int(torch.Size(shape).numel())
        numel += size
        if shard is not None and parameter.numel() < size:
            split += size
        elif len(shape) > 1:
            whole.append(name)
    return {"share": split / numel, "whole": whole}


@functools.cache
def battery(family: str) -> tuple[Battery, dict[str, Any]]:
    """One battery per family and process: the twin's record serves every layout."""
    from hf_families import FAMILIES

    return battery_of(FAMILIES[family])


def battery_of(made: Any) -> tuple[Battery, dict[str, Any]]:
    """(the battery of what `trial_of` takes, what this rank will hold of every parameter)."""
    shares: dict[str, Any] = {}
    full = Battery(trial_of(made, shares), steps=STEPS)
    return replace(full, optimizers={SGD: full.optimizers[SGD]}), shares


def prove(world: World, family: str, layout: dict[str, int]) -> dict[str, Any]:
    """The battery's report, with notices and shares; "refused" with the line where it is."""
    return proven(world, *battery(family), layout)


def proven(
    world: World, made: Battery, shares: dict[str, Any], layout: dict[str, int]
) -> dict[str, Any]:
    """`prove` of a battery."""
    torch.set_num_threads(1)
    told: list[str] = []

    def hear(recorder: MetricsRecorder, text: str) -> None:
        told.append(text)

    shares.clear()
    with mock.patch.object(MetricsRecorder, "notice", hear):
        try:
            report = made.prove(world, layout)
        except (PlanError, ConfigError) as refusal:
            report = {"verdict": "refused", "reason": str(refusal), "said": [], "cause": None}
            report["trajectories"] = []
    notices = list(dict.fromkeys(told))
    return {**report, "notices": notices, "shares": dict(shares)}
