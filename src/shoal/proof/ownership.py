"""Who holds what of a model that is divided, and which ranks disagree about what both hold.

Under tensor and pipeline parallelism several ranks may hold the same part of a parameter: norms
that every tensor-parallel rank has whole, a tied weight that two stages use. Their gradients must
be equal after the reduction. Where they are not, the sum over all of them tells the mistake: it is
the right gradient if every rank kept its own share, and each was to be added to the others'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shoal.base.shards import Shard
from shoal.parallel.compare_weights import tensor_digest
from shoal.parallel.program import Program

AXES = ("tp", "cp", "pp")
"""Along which several ranks may hold the same part of one model."""


@dataclass(frozen=True)
class Held:
    """Who holds a parameter.

    stages     ranks of the pipeline · holders  ranks of one model that hold the same part
    dim        along which tensor-parallel ranks cut it; None: each has all of it
    segments   of that dim, each of which is cut
    """

    stages: tuple[int, ...] = (0,)
    holders: int = 1
    dim: int | None = None
    segments: int = 1


@dataclass(frozen=True)
class Apart:
    """A parameter of which holders of the same part have different gradients.

    along   tp │ cp │ pp: between which ranks · total  the sum over them, clipped as they are
    """

    along: str
    total: torch.Tensor


def divided(program: Program) -> bool:
    """Whether ranks share a model's work otherwise than by micro-batches."""
    layout = program.plan.layout
    return layout.tp * layout.pp * layout.cp > 1


def coordinates(rank: int, degrees: Mapping[str, int]) -> dict[str, int]:
    """Where a rank is along every axis; the last axis's neighbours have consecutive ranks.

    >>> coordinates(5, {"pp": 2, "dp": 2, "tp": 2})
    {'pp': 1, 'dp': 0, 'tp': 1}
    """
    found: dict[str, int] = {}
    for axis in reversed(list(degrees)):
        rank, found[axis] = divmod(rank, degrees[axis])
    return {axis: found[axis] for axis in degrees}


def who_holds(program: Program) -> dict[str, Held]:
    """Every trainable parameter of the whole model; every rank calls it."""
    if not divided(program):
        return {}
    mine = {}
    for name in program.parameters:
        dim, segments = _cut(program.places[name]) if name in program.places else (None, 1)
        mine[name] = [program.pipe.rank, program.holders.get(name, 1), dim, segments]
    found: dict[str, Held] = {}
    for told in program.world.gather_json(mine):
        for name, (stage, holders, dim, segments) in told.items():
            stages = {*found[name].stages, stage} if name in found else {stage}
            found[name] = Held(tuple(sorted(stages)), holders, dim, segments)
    return found


def replicas_apart(program: Program) -> dict[str, Apart]:
    """Parameters of which two holders of the same part have different gradients; all ranks call."""
    if not divided(program):
        return {}
    mine = {}
    for name, local in program.local.items():
        if program.holders.get(name, 1) > 1:
            gradient = local.parameter.grad
            digest = "" if gradient is None else tensor_digest(gradient)
            shape = list(local.shard.global_shape)
            mine[name] = [str(local.shard.slices), digest, shape, local.shard.dtype]
    told = program.world.gather_json(mine)
    found = {}
    for name in dict.fromkeys(n for one in told for n in one):
        along = _apart_along(name, told, program)
        if along:
            shape, dtype = next(one[name][2:] for one in told if name in one)
            total = torch.zeros(shape, dtype=getattr(torch, dtype), device=program.world.device)
            _add_own(total, name, program)
            program.world.sum(total)
            found[name] = Apart(along, total.cpu())
    return found


def _cut(shard: Shard) -> tuple[int | None, int]:
    """(dim that is cut, segments of it) by the boxes of one rank's part."""
    for dim, size in enumerate(shard.global_shape):
        spans = {box[dim] for box in shard.slices}
        if spans and spans != {(0, size)}:
            return dim, len(spans)
    return None, 1


def _apart_along(name: str, told: list[dict[str, list[str]]], program: Program) -> str:
    """Between ranks of which axis replicas differ, "" if they agree."""
    degrees = program.plan.layout.degrees
    seen: dict[str, dict[tuple[int, ...], dict[str, str]]] = {axis: {} for axis in AXES}
    for rank, one in enumerate(told):
        if name not in one:
            continue
        part, digest = one[name][:2]
        at = coordinates(rank, degrees)
        for axis, same in seen.items():  # ranks that differ along this axis only
            others = tuple(place for other, place in at.items() if other != axis)
            line = same.setdefault(others, {})
            if line.setdefault(part, digest) != digest:
                return axis
    return ""


def _add_own(total: torch.Tensor, name: str, program: Program) -> None:
    """Add this rank's part, if it is not one that data-parallel ranks have too."""
    at = coordinates(program.world.rank, program.plan.layout.degrees)
    local = program.local.get(name)
    again = at["dp_replicate"] or (at["dp_shard"] and not program.plan.layout.zero)
    if local is None or local.parameter.grad is None or again:
        return
    flat = local.parameter.grad.detach().reshape(-1)
    place = 0
    for box in local.shard.slices:
        count = math.prod(stop - start for start, stop in box)
        target = total[tuple(slice(start, stop) for start, stop in box)]
        target += flat[place : place + count].view(target.shape)
        place += count
