"""Check at the start that a split block computes the same as the unsplit block.

The check takes one block of every class, on the real ranks, in float64, with perturbed parameters
(zero biases and unit norms hide mistakes) and the sample's own inputs. It compares outputs and the
gradients of inputs and of all parameters. A mistake shows as a difference of 1e-3 to 1, rounding as
1e-15, so the two never overlap. A block that does not run in float64 is checked in float32, where
rounding is 1e-7.

A block that fails stays whole; the notice names the difference and the cause (`check_causes.py`).

Source: measured with planted bugs; a missing backward reduction leaves outputs and loss exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from shoal.base.errors import PlanError
from shoal.parallel.spmd.autograd_collectives import Axis
from shoal.parallel.spmd.block_trial import BlockTrial, measure_relative_distance
from shoal.parallel.spmd.split_block import BlockClass, BlockSplit, ModelSplit
from shoal.parallel.spmd.verified_blocks import PASSED
from shoal.trace.graph.layer_graph import is_function
from shoal.trace.isolation.lifted_casts import NARROW, LiftedCasts
from shoal.trace.isolation.preserve_state import preserve_state
from shoal.wire.phases import iter_with_progress

if TYPE_CHECKING:
    from shoal.parallel.spmd.check_causes import CheckFinding

EXACT, CAST = 1e-10, 1e-4
"""Largest difference that counts as rounding, relative to the norm of the whole tensor: in float64,
and where the block computes in float32.
"""


def check_blocks(
    module: nn.Module, split: ModelSplit, axis: Axis, *, strict: bool = False
) -> ModelSplit:
    """Return `split` without the blocks that fail the check; a failed block stays unsplit.

    A notice names each failed block and the cause.

    Args:
        module: the model, still whole and equal on every rank of `axis`; every rank must call.

    Raises:
        PlanError: a block fails under `strict`, or no split parameter is left.
    """
    failed: dict[str, str] = {}
    for group in iter_with_progress("check layers", len(split.classes), split.classes):
        finding = check_class(module, group, axis)
        if finding is None:
            continue
        failed[finding.block] = finding.text()
        if strict:
            raise PlanError(
                f"layout.tp = {split.degree}: {finding.block}: {finding.text()}; try: layout.tp=1"
            )
    if not failed:
        return split
    from shoal.parallel.spmd.model_split import keep_blocks_whole  # only tp needs it; cp checks too

    return keep_blocks_whole(module, split, failed)


def check_class(module: nn.Module, group: BlockClass, *axes: Axis) -> CheckFinding | None:
    """Check the first block of a class; return the finding, or None if all results are equal.

    A block that casts to float32 internally is checked without its casts: casts can amplify the
    rounding of a correct split and hide a small mistake. Every rank must call.

    Args:
        axes: the axis of the group's split, then that of the split inside of it.
    """
    passed, known = PASSED.get(), build_check_key(group, axes)
    if passed is None or known is None:
        return _check_with_fallbacks(module, group, axes)
    device = next(module.parameters()).device
    here = torch.tensor([int(known in passed)], device="cpu" if device.type == "meta" else device)
    for axis in axes:  # a check is a collective: either all ranks skip it, or none does
        here = axis.all_gather(here).min().reshape(1)
    if bool(here):
        return None
    finding = _check_with_fallbacks(module, group, axes)
    if finding is None:
        passed.add(known)
    return finding


def build_check_key(group: BlockClass, axes: tuple[Axis, ...]) -> object:
    """Return a key for all that a check depends on: program, shapes and split; None: no such key.

    The program is written in float64. The model's own autograd functions are compared by identity,
    because their names are not unique. A program with constants has no key: its code does not show
    their values.
    """
    split = group.split
    nodes = split.run.graph.nodes
    if any(node.op == "get_attr" for node in nodes):
        return None
    code = split.run.code
    for dtype in NARROW:
        code = code.replace(str(dtype), "torch.float64")
    inputs = split.flatten(group.call.args, group.call.kwargs)
    return (
        group.names,
        axes,
        code,
        tuple(n.target for n in nodes if is_function(n.target)),
        tuple((tuple(t.shape), t.requires_grad) for t in inputs),
        *(_build_division_key(one) for one in (split, split.inner) if one is not None),
    )


def _build_division_key(split: BlockSplit) -> object:
    """Return a key for how one axis divides a block's tensors and where its ranks communicate."""
    return (
        tuple(split.shapes.items()),
        tuple(split.parameters.items()),
        split.partial,
        (split.inputs, split.outputs),
        tuple((e.kind, e.when, e.after) for e in split.exchanges),
    )


def _check_with_fallbacks(
    module: nn.Module, group: BlockClass, axes: Sequence[Axis]
) -> CheckFinding | None:
    try:
        with LiftedCasts():
            return _check_in_dtype(module, group, axes, torch.float64)
    except Exception:  # a block that insists on its own casts
        try:
            return _check_in_dtype(module, group, axes, torch.float64)
        except Exception:  # operations or constants that float64 does not have
            try:
                return _check_in_dtype(module, group, axes, torch.float32)
            except torch.OutOfMemoryError:  # nothing is wrong with the split
                raise
            except Exception as error:  # alike on every rank: their parts have one size
                from shoal.parallel.spmd.check_causes import CheckFinding

                line = (str(error).splitlines() or [""])[0]
                return CheckFinding(group.names[0], 0.0, (), "", f"{type(error).__name__}: {line}")


def _check_in_dtype(
    module: nn.Module, group: BlockClass, axes: Sequence[Axis], dtype: torch.dtype
) -> CheckFinding | None:
    name = group.names[0]
    with preserve_state(module):
        trial = BlockTrial(module.get_submodule(name), group, axes, dtype)
        expected = trial.run_unsplit()
        got = trial.run_split()
        tolerance = CAST if trial.uses_float32 else EXACT
        outputs = trial.max_over_ranks(measure_relative_distance(got.outputs, expected.outputs))
        wrong = [
            n
            for n, wanted in expected.gradients.items()
            if trial.max_over_ranks(expected.relative_difference(wanted - got.gradients[n]))
            > tolerance
        ]
        wrong.reverse()
        wrong.sort(key=lambda n: n.startswith("input "))  # the last parameter first, inputs last
        if not (wrong or outputs > tolerance):
            return None
        from shoal.parallel.spmd.check_causes import (
            CheckFinding,
            diagnose_gradients,
            diagnose_outputs,
        )

        if outputs > tolerance:
            return CheckFinding(name, outputs, tuple(wrong), diagnose_outputs(trial, tolerance))
        cause = diagnose_gradients(trial, tolerance, wrong, got, expected)
        return CheckFinding(name, 0.0, tuple(wrong), cause)
