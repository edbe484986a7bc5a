"""Names what `touched.py` saw: on which ranks weights, rates or modes are other than on the others.

Loaded when something is wrong, or when weights changed and no write was counted. Every rank has
what all of them said, and comes to the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from shoal.base.errors import ConfigError
from shoal.base.policies import OffloadPolicy
from shoal.parallel.program import Program
from shoal.trainer.drift import Drift
from shoal.trainer.drift_told import one_element_differs
from shoal.trainer.module_guard import refuse_unlike
from shoal.trainer.step_vector import StepNumbers

Written = Mapping[int, tuple[int, int, torch.dtype]]
"""By id of a tensor: its count of writes, its address, its format."""


class Touching(Protocol):
    """What of a `Touched` is needed."""

    program: Program
    drift: Drift


def refuse_unlike_ranks(touched: Touching, step: int, numbers: StepNumbers) -> None:
    """Raise for ranks that would train different models; every rank calls it.

    numbers  of the step, with what `Touched.by_rank` gave
    Errors   ClusterError for one element that differs, ConfigError for all that users' code does
    """
    written, groups = numbers.row("weights_written"), numbers.row("replica_group")
    weights, training = numbers.row("weights"), numbers.row("training_mode")
    trains, layers = numbers.row("trainable"), numbers.row("layers")
    unlike = len(set(zip(groups, weights, strict=True))) > len(set(groups))
    if 1.0 not in written and (unlike or any(written)) and touched.drift.on:
        one_element_differs(touched.drift, touched.drift.look_now(step - 1))
    written = [float(one > 0) for one in written]
    if len(set(written)) > 1:
        raise ConfigError(
            f"step {step}: weights were changed beside the run on {_ranks(written, 1)} and not "
            f"on {_ranks(written, 0)}; try: the same change on every rank"
        )
    first: dict[float, int] = {}
    for rank, (group, value) in enumerate(zip(groups, weights, strict=True)):
        other = first.setdefault(group, rank)
        if weights[other] != value:
            raise ConfigError(
                f"step {step}: weights on rank {rank} are not those on rank {other}: they "
                f"were changed beside the run, or by the model's own forward pass, by each "
                f"rank for itself; try: the same change on every rank (seed it), or before "
                f"shoal.parallelize"
            )
    by_group: dict[float, float] = {}
    for group, count in zip(groups, trains, strict=True):
        if by_group.setdefault(group, count) != count:
            raise ConfigError(
                f"step {step}: ranks train unlike numbers of parameters ("
                f"{', '.join(f'{n:.0f}' for n in trains)} by rank): some were frozen on some "
                f"ranks only; try: requires_grad_() before shoal.parallelize, on every rank"
            )
    if len(set(zip(groups, layers, strict=True))) > len(set(groups)):
        refuse_unlike(touched.program.module, touched.program.replicas, step)
    if len(set(training)) > 1:
        raise ConfigError(
            f"step {step}: the model is in training mode on {_ranks(training, 1)} and in "
            f"evaluation mode on {_ranks(training, 0)}; try: model.train() on every rank"
        )


def _ranks(flags: Sequence[float], value: float) -> str:
    found = [str(rank) for rank, flag in enumerate(flags) if flag == value]
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(found)}"


def refuse_other_parts(before: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Errors: ConfigError where a model has another layer or parameter than the run knows."""
    name = next(n for n in {**now, **before} if now.get(n) != before.get(n))
    what = "is new" if name not in before else "is gone" if name not in now else "was replaced"
    raise ConfigError(
        f"model: {name} {what} since shoal.parallelize was called, so the optimizer does not step "
        f"what is there now, and nothing sums its gradient over ranks; try: change or tie "
        f"layers before shoal.parallelize"
    )


def refuse_other_trained(step: int, trained: int, agreed: Callable[[str], bool]) -> None:
    """Raise ConfigError where ranks would send each other gradients of unlike parameters.

    Args:
        step: the one that begins.
        trained: how many parameters this rank trains now.
        agreed: asks all ranks whether they say the same.
    """
    if not agreed(f"step {step} trains {trained}"):
        raise ConfigError(
            f"step {step}: this rank trains {trained} parameters, and others do not: "
            f"requires_grad_() was called on some ranks only; try: on every rank, or "
            f"before shoal.parallelize"
        )


def refuse_other_memory(program: Program, before: Written, now: Written) -> None:
    """Raise ConfigError where what was done to a weight would be lost, or break a layout.

    Args:
        program: whose weights they are.
        before, now: by id of a weight: its count of writes, its address, its format.
    """
    for name, parameter in program.parameters.items():
        here, there = now.get(id(parameter)), before.get(id(parameter))
        if here == there or here is None or there is None:
            continue
        moved = (
            here[1] != there[1]
            and program.plan.layout.zero
            and not program.plan.asks(OffloadPolicy)
        )
        if moved or here[2] != there[2]:
            raise ConfigError(
                f"{name} lies in other memory than when shoal.parallelize was called, which "
                f"the layout knows nothing of (by model.half(), model.to(…), or by setting "
                f".data): try: do it before shoal.parallelize; formats: precision=…"
            )
        one = program.local.get(name)
        master = id(one.parameter) if one is not None else 0
        if name in program.parts and (not master or now[master] == before[master]):
            raise ConfigError(
                f"{name} was changed beside the run, but it is a {program.plan.compute} copy "
                f"that the next update makes anew from its fp32 master; try: change "
                f"weights before shoal.parallelize, or run.model.load_state_dict(…)"
            )
