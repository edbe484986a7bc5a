"""Name the ranks whose weights, layers or modes differ from those of the others.

Imported when a check has failed, or when weights changed and no write was counted. Every rank has
the values of all ranks, and builds the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from shoal.base.errors import ConfigError
from shoal.base.layouts.policies import OffloadPolicy
from shoal.parallel.program import Program
from shoal.trainer.guards.checksums import (
    NO_GRADIENT,
    ChecksumSnapshot,
    Marks,
    has_nonzero_gradient,
)
from shoal.trainer.guards.reports.corruption_report import (
    CorruptionCheckFields,
    check_single_element,
)
from shoal.trainer.step.step_vector import InvariantCheck

Written = Mapping[int, tuple[int, int, torch.dtype]]
"""By id of a tensor: its write counter, its address, its dtype."""


class CorruptionSnapshotFields(CorruptionCheckFields, Protocol):
    """Interface of a `CorruptionCheck` that reports read."""

    on: bool

    def compute_snapshot(self, step: int) -> ChecksumSnapshot:
        """Return checksums of the present tensors."""


class ExternalWriteFields(Protocol):
    """Interface of an `ExternalWriteGuard` that reports read."""

    program: Program

    @property
    def drift(self) -> CorruptionSnapshotFields:
        """Return the check for silent corruption."""


def refuse_rank_differences(
    touched: ExternalWriteFields,
    step: int,
    found: InvariantCheck,
    refuse_unlike: Callable[..., None],
) -> None:
    """Raise for ranks that would train different models; every rank calls it.

    Args:
        touched: the guard.
        step: the current step.
        found: results of `ExternalWriteGuard.invariants` on all ranks.
        refuse_unlike: names the first layer that differs.

    Raises:
        ClusterError: one element differs.
        ConfigError: user code changed weights, layers or modes.
    """
    if pair := found.first_differing_pair("operands"):
        raise unlike_operands_error(step, pair[1])
    written: list[int] = found.by_rank("weights_written")
    if 1 not in written and (any(written) or found.differs("weights")) and touched.drift.on:
        check_single_element(touched.drift, touched.drift.compute_snapshot(step - 1))
    written = [int(one > 0) for one in written]
    if len(set(written)) > 1 and found.differs("weights_written"):
        raise ConfigError(
            f"step {step}: weights were changed beside the run on {_ranks_with(written, 1)} and "
            "not "
            f"on {_ranks_with(written, 0)}; try: the same change on every rank"
        )
    if pair := found.first_differing_pair("weights"):
        raise ConfigError(
            f"step {step}: weights on rank {pair[1]} are not those on rank {pair[0]}: they were "
            f"changed beside the run, or by the model's own forward pass, by each rank for "
            f"itself; try: the same change on every rank (seed it), or before shoal.parallelize"
        )
    if found.differs("trainable"):
        counts = ", ".join(map(str, found.by_rank("trainable")))
        raise ConfigError(
            f"step {step}: ranks train unlike numbers of parameters ({counts} by rank): some were "
            f"frozen on some ranks only; try: requires_grad_() before shoal.parallelize, on every "
            f"rank"
        )
    if found.differs("layers"):
        refuse_unlike(touched.program.module, touched.program.replicas, step)
    training = found.by_rank("training_mode")
    if len(set(training)) > 1:
        raise ConfigError(
            f"step {step}: the model is in training mode on {_ranks_with(training, 1)} and in "
            f"evaluation mode on {_ranks_with(training, 0)}; try: model.train() on every rank"
        )


def unlike_operands_error(step: int, rank: int) -> ConfigError:
    """Return the error for weights or gradients that ranks changed by different tensors."""
    return ConfigError(
        f"step {step}: weights or gradients were changed by a tensor that is another one on rank "
        f"{rank} than on rank 0, and each rank has some of them; try: the same tensor on "
        f"every rank (noise: a generator with one seed)"
    )


def part_of_weight_line(function: str, layout: str) -> str:
    """Return the notice on a reduction of a weight of which this rank has a part."""
    return (
        f"{function} of a weight that is split over ranks ({layout}): the number is that of this "
        f"rank's part; try: with run.whole_weights():, called on every rank, or run.state_dict()"
    )


def part_error(function: str, name: str) -> ConfigError:
    """Return the error for a function of torch that needs the whole of a split tensor."""
    return ConfigError(
        f"{function} of {name}: this rank has a part of it, and the whole is needed here; try: "
        f"with run.whole_weights():, called on every rank, or run.state_dict()"
    )


def collective_error(function: str) -> ConfigError:
    """Return the error for a collective of user code on a weight that ranks hold in parts."""
    return ConfigError(
        f"torch.distributed.{function} of a weight or its gradient: each rank has another part of "
        f"it under this layout, so the result would mix them; try: leave it out: the run sums "
        f"gradients, and begins with equal weights on every rank"
    )


def copy_error(kind: str, layout: str) -> ConfigError:
    """Return the error for a deep copy of a model of which this rank has parts."""
    return ConfigError(
        f"copy.deepcopy of {kind}: under {layout} this rank has no whole one; try: a copy before "
        f"shoal.parallelize, then copy.load_state_dict(run.state_dict()) on every rank; for an "
        f"average of the weights average=0.999 of shoal.parallelize"
    )


def pickle_error(kind: str, layout: str) -> ConfigError:
    """Return the error for a pickle of a model of which this rank has parts."""
    return ConfigError(
        f"torch.save of {kind}: under {layout} this rank has no whole one; try: "
        f"torch.save(run.state_dict(), …), with run.state_dict() called on every rank"
    )


def own_writes_line(name: str, passes: int) -> str:
    """Return the notice on a weight that the model's own forward pass writes.

    Args:
        name: of the weight.
        passes: micro-batches of the step on this rank.
    """
    return (
        f"{name}: the model's own forward pass writes it, so {passes} times in a step on this "
        f"rank, and other ranks do so for themselves: how far it moves depends on the layout; try: "
        f"the change after run.step(batch), on run.model"
    )


def penalty_text(name: str, layout: str) -> str:
    """Return the error's text on a loss that computes with a weight that is split over ranks."""
    return (
        f"loss: it computes with {name}, and under {layout} a rank holds parts of weights, so that "
        f"a penalty on them would be another one; try: weight_decay of the optimizer, or "
        f"layout=zero2"
    )


def _ranks_with(flags: Sequence[float], value: float) -> str:
    found = [str(rank) for rank, flag in enumerate(flags) if flag == value]
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(found)}"


def refuse_changed_modules(before: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Raise ConfigError if a layer or parameter was added, removed or replaced since the start."""
    name = next(n for n in {**now, **before} if now.get(n) != before.get(n))
    what = "is new" if name not in before else "is gone" if name not in now else "was replaced"
    raise ConfigError(
        f"model: {name} {what} since shoal.parallelize was called, so the optimizer does not step "
        f"what is there now, and nothing sums its gradient over ranks; try: change or tie "
        f"layers before shoal.parallelize"
    )


def refuse_changed_trainable(step: int, trained: int, agreed: Callable[[str], bool]) -> None:
    """Raise ConfigError if ranks would send each other gradients of different parameters.

    Args:
        step: the step that begins.
        trained: number of parameters that this rank trains now.
        agreed: returns whether all ranks pass the same text.
    """
    if not agreed(f"step {step} trains {trained}"):
        raise ConfigError(
            f"step {step}: this rank trains {trained} parameters, and others do not: "
            f"requires_grad_() was called on some ranks only; try: on every rank, or "
            f"before shoal.parallelize"
        )


def refuse_moved_weights(program: Program, before: Written, now: Written) -> None:
    """Raise ConfigError if a change of a weight would be lost, or break a layout.

    Args:
        program: the run's.
        before, now: by id of a weight: its write counter, its address, its dtype.
    """
    for name, parameter in program.parameters.items():
        here, there = now.get(id(parameter)), before.get(id(parameter))
        if here == there or here is None or there is None:
            continue
        moved = (
            here[1] != there[1]
            and program.plan.layout.zero
            and not program.plan.differs_from_default(OffloadPolicy)
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


def written_parts_line(names: Sequence[str], layout: str) -> str:
    """Return the notice on weights that user code wrote where each rank holds a part of them.

    Args:
        names: of the weights.
        layout: the layout, as a line.
    """
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return (
        f"{names[0]}{more} was changed between steps, and under {layout} each rank has a part of "
        f"it: a change of each element by itself is right, as is a new draw, but a norm of rows or "
        f"of the whole is that of parts; try: weights = run.state_dict(), the change there, then "
        f"run.model.load_state_dict(weights)"
    )


CLIP = "try: clip=… of shoal.parallelize (optimizer.clip=…)"
ZEROS = (
    "a gradient reads as zeros between the passes and run.update, and after it, since under this "
    "layout each rank has some rows of it, on the tensors that the optimizer holds; try: the norm "
    "between the two by "
    "run.clip_grad_norm_(float('inf')), or by torch.nn.utils.clip_grad_norm_ and get_total_norm"
)
"""Notice on a gradient that was read where there is a placeholder."""

PART = (
    "a gradient whose weight is split over ranks was reduced to a norm, a sum or a mean: the "
    "number is that of this rank's part; try: the norm by run.clip_grad_norm_(float('inf')), or by "
    "torch.nn.utils.clip_grad_norm_ and get_total_norm, which are right here"
)
"""Notice on a reduction of a part of a gradient."""


def refuse_dropped_gradients(
    stepped: Sequence[nn.Parameter], before: Marks, step: int, call: str
) -> None:
    """Raise ConfigError if user code removed all gradients of the update.

    Args:
        stepped: parameters that the optimizer steps, or those that it steps parts of.
        before: marks when the run's last call ended, of all of them or of some.
        step: the current step.
        call: the call that made the gradients.

    Raises:
        ConfigError: all gradients that were there are None or zero now.
    """
    held = [p for p in stepped if before.get(id(p), NO_GRADIENT) != NO_GRADIENT]
    if not held or has_nonzero_gradient(stepped):
        return
    raise dropped_gradients_error(step, call)


def dropped_gradients_error(step: int, call: str) -> ConfigError:
    """Return the error for gradients that were all set to None or zero."""
    return ConfigError(
        f"step {step}: gradients were set to None or zero between {call} and run.update (by "
        f"optimizer.zero_grad(), model.zero_grad() or p.grad = None), so no weight would move; "
        f"try: leave it out, each step begins without gradients"
    )


def foreign_change_error() -> ConfigError:
    """Return the error for gradients that were changed after an update and before the next step."""
    return ConfigError(
        "gradients were changed beside the run (by loss.backward(), or by clipping after "
        "run.step), and the next step begins with none: try: one loss for run.step, "
        "clip=… of shoal.parallelize; or model.zero_grad(), if they were only looked at"
    )


def half_step_change_error(step: int, what: str, call: str, layout: str) -> ConfigError:
    """Return the error for gradients that were changed where ranks step parts of them.

    Args:
        step: the current step.
        what: the change, as a participle.
        call: the call that ended the passes.
        layout: the layout, as a line.
    """
    return ConfigError(
        f"step {step}: gradients were {what} between {call} and run.update, where under {layout} "
        f"the update steps other tensors, so it would change nothing; try: run.clip_grad_norm_, "
        f"run.clip_grad_value_, or clip=… of shoal.parallelize; a factor or a mask: "
        f"weight.register_hook(…); parts that shall rest: requires_grad_(False) before "
        f"shoal.parallelize"
    )


def unlike_changes_error(step: int, ranks: Sequence[int], changed: Sequence[bool]) -> ConfigError:
    """Return the error for gradients that user code changed differently on ranks.

    Args:
        step: the current step.
        ranks: two ranks whose gradients differ.
        changed: by rank: whether its user code changed some.
    """
    first, other = ranks
    how = (
        f"changed on rank {first if changed[first] else other} and not on rank "
        f"{other if changed[first] else first}"
        if changed[first] != changed[other]
        else f"changed on ranks {first} and {other} by different numbers"
    )
    return ConfigError(
        f"step {step}: gradients were {how} before run.update, so that ranks would step different "
        f"models; try: the same change on every rank (noise: a generator with one seed), or none"
    )
