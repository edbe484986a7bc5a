"""Arguments of `shoal.parallelize` as a proof changes them; the script's own text stays.

both sides     float64, a folder of the proof's own; no techniques that change numbers on purpose
               (compression, compiled kernels), no remote folder
a layout       the layout that the command names, else the script's own
one process    layout single, without recompute, offload and the other techniques that must not
               change numbers; without guards, which would compare batches with processes
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from shoal.base.layouts.policies import (
    POLICIES,
    CompilePolicy,
    CompressPolicy,
    FsdpPolicy,
    KeepPolicy,
    PrecisionPolicy,
    TensorPolicy,
)
from shoal.base.plans.script_side import ScriptSide
from shoal.fabric import World
from shoal.fabric.device import select_local_device
from shoal.fabric.rendezvous.process_info import ProcessInfo
from shoal.planning.settle import layout_keys
from shoal.proof.script.patched_parallelize import patch_parallelize
from shoal.proof.script.script_end import ScriptEnd
from shoal.proof.script.value_files import read_values
from shoal.proof.trial_side import jitter_weights
from shoal.trainer.known_proofs import PROVEN
from shoal.trainer.run import Run

DROPPED = frozenset(
    key.name
    for policy in (PrecisionPolicy, CompressPolicy, CompilePolicy, KeepPolicy)
    for key in fields(policy)
) | {"trace", "statistics"}
"""Policies that neither side has."""

DATA_PARALLEL = frozenset(("auto", "single", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"))
"""Layouts under which each rank runs whole micro-batches, so that no sample is needed."""

OF_A_SPLIT = frozenset(key.name for policy in (TensorPolicy, FsdpPolicy) for key in fields(policy))
"""Policies of some layouts, which others refuse."""

SPLIT_AXES = ("tp", "pp", "cp", "ep")


@contextmanager
def override_arguments(
    side: ScriptSide, on_run: Callable[[Run, Mapping[str, Any]], None]
) -> Iterator[None]:
    """Change the arguments of each `shoal.parallelize` of a script while it is open.

    Args:
        side: settings of this run of the script.
        on_run: called with each run and the arguments of its call, as the script wrote them.
    """
    alone = _make_lone_world() if side.is_alone else None
    numbers = itertools.count()

    def call(right: Callable[..., Run], arguments: dict[str, Any]) -> Run:
        run = right(**change_arguments(side, dict(arguments), next(numbers), alone))
        on_run(run, arguments)
        return run

    with patch_parallelize(call):
        yield


def change_arguments(
    side: ScriptSide, arguments: dict[str, Any], number: int, alone: World | None
) -> dict[str, Any]:
    """Return the arguments of one `shoal.parallelize` on a side.

    Args:
        side: settings of this run of the script.
        arguments: of the script's call, by name.
        number: of the call, from 0.
        alone: the world of the one process; None on a layout's side.
    """
    plan = arguments.pop("plan", None)
    if plan is not None:
        written = {key: getattr(plan, key) for key in POLICIES}
        sizes = {"batch": plan.batch or None, "micro_batch": plan.micro_batch or None}
        arguments = {**written, **sizes, "layout": layout_keys(plan.layout), **arguments}
    changed = {key: value for key, value in arguments.items() if key not in DROPPED}
    changed |= {"precision": "fp64", "prove": "off"}
    if changed.get("folder") is not None:
        changed["folder"] = Path(side.record).parent / f"folder-{number}"
    if side.jitter:
        changed["model"] = _jittered(changed["model"])
    if alone is not None:
        kept = {key: value for key, value in changed.items() if key not in PROVEN}
        return {**kept, "layout": "single", "guards": "off", "world": alone, "sample": None}
    if side.layout:
        changed["layout"] = side.layout
        if not needs_sample(side.layout):
            changed = {key: value for key, value in changed.items() if key not in OF_A_SPLIT}
    if changed.get("sample") is None and needs_sample(changed.get("layout", "auto")):
        if not side.sample:
            raise ScriptEnd(needs_sample=True)
        changed["sample"] = read_first_micro_batch(Path(side.sample), number)
    return changed


def needs_sample(layout: str | Mapping[str, Any]) -> bool:
    """Return whether a layout splits the model, so that `parallelize` runs a sample.

    >>> needs_sample("fsdp"), needs_sample("tp"), needs_sample({"tp": 2}), needs_sample({"zero": 3})
    (False, True, True, False)
    """
    if isinstance(layout, str):
        return layout not in DATA_PARALLEL
    return any(int(layout.get(axis, 1)) > 1 for axis in SPLIT_AXES)


def read_first_micro_batch(record: Path, number: int) -> Any:
    """Return the first micro-batch that a record has of a run, by number.

    Raises:
        ScriptEnd: the record has none.
    """
    for path in sorted(record.glob(f"{number}-1-batch-*.json")):
        for _index, value in read_values(path.with_suffix("")):
            return value
    if any(record.glob(f"{number}-1-passes-*.json")):
        raise ScriptEnd(
            "a loop of another library (Accelerate, DeepSpeed, Lightning) calls the model whole, "
            "and this layout divides it; try: --layouts ddp,zero1,zero2,fsdp"
        )
    raise ScriptEnd("no micro-batch was recorded that could be the missing sample=")


def _jittered(model: nn.Module | Callable[[], nn.Module]) -> nn.Module | Callable[[], nn.Module]:
    if isinstance(model, nn.Module):
        return jitter_weights(model)
    return lambda: jitter_weights(model())


def _make_lone_world() -> World:
    return World(ProcessInfo(), select_local_device(0, 1, False), None)
