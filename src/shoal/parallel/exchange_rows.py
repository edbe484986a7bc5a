"""Predict the bytes that a divided model sends, from its tensor split and its stage cut.

Nothing is run: the split's labels give every collective of a layer, the cut gives the tensors
between stages. Both were made in fp32; blocks with a bf16 residual stream send half as much.
The run forecast and the comparison with traffic counters both read it here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from shoal.base.plans.comm_volume import CommVolume, StageTransfer, TensorExchange
from shoal.parallel.pipeline.partition_model import StageCut
from shoal.parallel.spmd.labelling.labels import Split
from shoal.parallel.spmd.split_block import ModelSplit
from shoal.trace.isolation.meta_inputs import tensors_of


def predict_traffic(
    split: ModelSplit | None,
    cut: StageCut | None,
    samples: int,
    narrow: Collection[str] = (),
) -> CommVolume:
    """Return the traffic of a model divided by a tensor split and a stage cut.

    Args:
        samples: number of samples in the batch that the split and the cut were made with.
        narrow: names of the blocks whose residual stream is bf16.
    """
    stages = 1 if cut is None else cut.stages
    stage_of = {} if cut is None else {call.name: call.stage for call in cut.calls}
    exchanges: list[list[TensorExchange]] = [[] for _ in range(stages)]
    for name, several in (list_exchanges(split, narrow) if split else {}).items():
        exchanges[_stage(name, stage_of, stages)] += several
    parts = _parts(split) if split else {}
    return CommVolume(
        samples,
        tuple(tuple(one) for one in exchanges),
        () if cut is None else tuple(_crossing(cut, s, parts, narrow) for s in range(1, stages)),
    )


def list_exchanges(split: ModelSplit, narrow: Collection[str]) -> dict[str, list[TensorExchange]]:
    """Return the collectives of a tensor split by module, in the formats of a run.

    Args:
        narrow: names of the blocks whose residual stream is bf16.
    """
    found = {}
    for name, several in split.exchanges.items():
        width = 2 if _is_inside(name, narrow) else 1
        found[name] = [TensorExchange(e.kind, e.when, e.payload_bytes // width) for e in several]
    return found


def _stage(name: str, stage_of: Mapping[str, int], stages: int) -> int:
    """Return the stage that computes a module: that of the unit around it; the loss: the last."""
    while name and name not in stage_of:
        name = name.rpartition(".")[0]
    return stage_of.get(name, stages - 1)


def _parts(split: ModelSplit) -> dict[str, int]:
    """Return modules that return their rank's part of a sequence → the number of parts."""
    found = dict.fromkeys(split.scattered, split.degree)
    for group in split.classes:
        if any(isinstance(label, Split) for label in group.split.outputs):
            found |= dict.fromkeys(group.names, split.degree)
    return found


def _is_inside(name: str, blocks: Collection[str]) -> bool:
    return any(name == block or name.startswith(f"{block}.") for block in blocks)


def _crossing(
    cut: StageCut, stage: int, parts: Mapping[str, int], narrow: Collection[str]
) -> StageTransfer:
    forward_bytes = backward_bytes = 0
    for call, leaf in cut.crossings[stage]:
        plan = cut.calls[call]
        value: Tensor = tensors_of(plan.outputs)[leaf]
        size_bytes = value.numel() * value.element_size() // parts.get(plan.name, 1)
        if plan.name in narrow and value.dtype == torch.float32 and value.dim():
            size_bytes //= 2
        forward_bytes += size_bytes
        backward_bytes += size_bytes * value.is_floating_point()
    return StageTransfer(forward_bytes, backward_bytes)
