"""Find ranks that hold the same part of a parameter and disagree about its gradient.

Under tensor and pipeline parallelism several ranks may hold the same part of a parameter: norms
that every tensor-parallel rank has whole, a tied weight that two stages use. Their gradients must
be equal after the reduction. If they are not, the sum over all of them identifies the mistake: it
is the right gradient if every rank kept its own share instead of the sum.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shoal.fabric import World
from shoal.parallel.compare_weights import tensor_digest
from shoal.parallel.program import Program

AXES = ("tp", "cp", "pp")
"""Axes along which several ranks may hold the same part of one model."""


@dataclass(frozen=True)
class OwnershipMismatch:
    """A parameter whose holders of the same part have different gradients.

    Attributes:
        along: tp │ cp │ pp: the axis along which they disagree.
        total: the sum over them, clipped as they are.
        ranks: some that hold the same part and do not agree on it.
    """

    along: str
    total: torch.Tensor
    ranks: tuple[int, ...]


def is_model_parallel(program: Program) -> bool:
    """Return whether ranks share a model's work otherwise than by micro-batches."""
    layout = program.plan.layout
    return layout.tp * layout.pp * layout.cp > 1


def find_ownership_mismatches(program: Program) -> dict[str, OwnershipMismatch]:
    """Return parameters whose holders of the same part have different gradients (collective)."""
    if not is_model_parallel(program):
        return {}
    mine = {}
    for name, local in program.local.items():
        if program.rows[name].copies_in_model(program.plan.layout) > 1:
            gradient = local.parameter.grad
            digest = "" if gradient is None else tensor_digest(gradient)
            shape = list(local.shard.global_shape)
            mine[name] = [str(local.shard.slices), digest, shape, local.shard.dtype]
    told = program.world.gather_json(mine)
    found = {}
    for name in dict.fromkeys(n for one in told for n in one):
        along, ranks = _find_mismatch_axis(name, told, program)
        if along:
            shape, dtype = next(one[name][2:] for one in told if name in one)
            total = torch.zeros(shape, dtype=getattr(torch, dtype), device=program.world.device)
            _add_local_part(total, name, program)
            program.world.all_reduce(total)
            found[name] = OwnershipMismatch(along, total.cpu(), ranks)
    return found


def _find_mismatch_axis(
    name: str, told: list[dict[str, list[str]]], program: Program
) -> tuple[str, tuple[int, ...]]:
    """Return (axis, ranks that differ along it alone in their gradients); ("", ()) if all agree."""
    layout = program.plan.layout
    for axis in AXES:
        holders: dict[tuple[Any, ...], dict[str, list[int]]] = {}
        for rank, one in enumerate(told):
            if name in one:
                part, digest = one[name][:2]
                at = layout.at(rank)
                others = (part, *(at[other] for other in layout.degrees if other != axis))
                holders.setdefault(others, {}).setdefault(digest, []).append(rank)
        for digests in holders.values():
            if len(digests) > 1:
                return axis, tuple(sorted(rank for ranks in digests.values() for rank in ranks))
    return "", ()


def _add_local_part(total: torch.Tensor, name: str, program: Program) -> None:
    """Add this rank's part, unless another data-parallel rank adds the same one."""
    at, local = program.at, program.local.get(name)
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


def find_unequal_ranks(
    world: World, digests: Mapping[str, list[str]]
) -> dict[str, list[list[int]]]:
    """Return tensors whose equal parts differ between ranks: groups of ranks that agree.

    Args:
        world: the ranks; all call it.
        digests: name → [part, digest] on this rank.
    """
    total = hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()
    if len(set(world.gather_json(total))) == 1:
        return {}
    seen: dict[tuple[str, str], dict[str, list[int]]] = {}
    for rank, one in enumerate(world.gather_json(digests)):
        for name, (part, digest) in one.items():
            seen.setdefault((name, part), {}).setdefault(digest, []).append(rank)
    return {name: list(ranks.values()) for (name, _), ranks in seen.items() if len(ranks) > 1}
