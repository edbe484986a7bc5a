"""Trains a case of the battery on a world of processes: the tests' side of `shoal.proof`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

import cases
from shoal.data.loading.step_samples import StepBatch
from shoal.fabric import World
from shoal.proof import Battery, Trial, TrialSide
from shoal.trainer.step.optimizer_step import StepResult

CASES = ("llama", "gpt", "cnn", "mlp", "towers", "gan")
LAYOUTS = ("ddp", "zero1", "zero2", "fsdp", "hsdp", "dp", "parameter-server")


def table() -> list[tuple[str, str, int]]:
    """Every layout × case × 2 and 4 processes; `dp` × 2 and 4 threads of one process."""
    whole = itertools.product(LAYOUTS, CASES, (2, 4))
    return [(layout, case, size) for layout, case, size in whole if (layout, size) != ("hsdp", 2)]


def is_sample(layout: str, place: int) -> bool:
    """Whether `make test` runs the row at `place` of a layout: of ddp a third, of others fewer.

    Cases and numbers of processes take turns, so that every case comes up, and both 2 and 4. `towers`
    are held under ddp and fsdp, the two runs of `gan` under zero2.
    """
    turns = {0, 7} if LAYOUTS.index(layout) % 2 else {3, 4}
    late = {"zero1": 8, "hsdp": 4, "dp": 8, "parameter-server": 11}.get(layout)
    return place % 8 in (turns if layout != "ddp" else {0, 4, 7}) and place != late


SAMPLE = [
    row
    for layout in LAYOUTS
    for place, row in enumerate(row for row in table() if row[0] == layout)
    if is_sample(layout, place)
]


WHOLE = {layout: next(row for row in SAMPLE if row[0] == layout) for layout in LAYOUTS}
"""The row of each layout that `make test` trains with both optimizers, for all steps."""


def ask(
    worlds: Callable[[int], Any], layout: str, case: str, size: int, **shorter: Any
) -> list[dict[str, Any]]:
    """Every rank's report of one row of the table; `shorter` as `battery` takes it."""
    if layout == "dp":
        more = {**shorter, "threads": size}
        return worlds(1).call("trajectory:prove", case=case, layout=layout, **more)
    return worlds(size).call("trajectory:prove", case=case, layout=layout, **shorter)


def trial_of(case: str) -> Trial:
    """What both sides train: the case's model, data and loss."""
    if case == "gan":
        return gan

    def train(side: TrialSide) -> Iterator[tuple[str, StepResult]]:
        run = side.parallelize(
            lambda: cases.build(case),
            cases.loss(case),
            batch=cases.BATCH,
            micro_batch=cases.MICRO_BATCH,
        )
        loader = run.loader(cases.dataset(case))
        while True:
            for batch in loader:
                yield "", run.step(batch)

    return train


def gan(side: TrialSide) -> Iterator[tuple[str, StepResult]]:
    """Two runs in one process: every step trains the judge, then the maker against it."""
    sizes = {"batch": cases.BATCH, "micro_batch": cases.MICRO_BATCH}
    judging = side.parallelize(cases.judge, cases.judged, label="judge", **sizes)
    judge = judging.model
    making = side.parallelize(
        cases.maker, lambda fakes, real: cases.judged(judge(fakes), real), label="maker", **sizes
    )
    loader = judging.loader(cases.Pairs())
    while True:
        for batch in loader:
            yield "judge", judging.step(mapped(batch, lambda v: cases.judge_batch(v, making.model)))
            yield "maker", making.step(mapped(batch, cases.maker_batch))


def mapped(batch: StepBatch, change: Any) -> StepBatch:
    """A step whose micro-batches hold something else, in the same places."""
    changed = tuple(replace(m, value=change(m.value)) for m in batch.micro_batches)
    return replace(batch, micro_batches=changed)


@functools.cache
def battery(case: str, precision: str = "fp64", steps: int = 5, optimizer: str = "") -> Battery:
    """One battery per case and process: the twin's records serve every layout."""
    made = Battery(trial_of(case), precision=precision, steps=steps)
    return replace(made, optimizers={optimizer: made.optimizers[optimizer]}) if optimizer else made


def prove(
    world: World,
    case: str,
    layout: str,
    threads: int = 0,
    servers: int = 0,
    reshard: str = "yes",
    per_node: int = 0,
    **shorter: Any,
) -> dict[str, Any]:
    """The report of a case on a layout; threads are few, so that processes share the cores.

    threads    replicas of the layout `dp`, which is one process · shorter  as `battery` takes it
    per_node   ranks that are taken to share a machine; 0: as it is
    """
    torch.set_num_threads(1)
    words = {"strategy": layout, **({"threads": threads} if threads else {})}
    words |= {"servers": servers} if servers else {}
    local_size = world.local_size
    world.local_size = per_node or local_size
    try:
        return battery(case, **shorter).prove(world, words, {"reshard": reshard})
    finally:
        world.local_size = local_size
