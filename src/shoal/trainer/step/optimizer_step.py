"""One optimizer step, on any layout: micro-batches in, one update out.

    forward_backward   for each own micro-batch: forward, loss sum, backward; gradients of loss SUMS
                       travel while the last backward still runs
    tally              one all-reduce: loss sum, count of targets N, norm², ranks with non-finite
                       numbers, stop requests, used parameters
    update             gradient = sum / N, clipped by the true global norm; both are one
                       multiplication; then the optimizer, on all ranks or on none

Nothing is ever averaged per rank or per micro-batch, so unequal counts of targets weigh right.
Source: design §6; the same rule as torchtitan's global normalisation, but with N known late.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Protocol

import torch

from shoal.base.errors import BugError, ConfigError, PlanError
from shoal.fabric import World
from shoal.fabric.device import copy_numbers_to_device
from shoal.parallel.program import Program, Reducer
from shoal.trainer._torch import pytree
from shoal.trainer.step.call_contract import Loss
from shoal.trainer.step.micro_batch import JOINING, MicroBatch
from shoal.trainer.step.rank_share import RankShare
from shoal.trainer.step.step_vector import (
    NUMBERS,
    UNLIKE,
    Invariant,
    InvariantCheck,
    StepNumbers,
    StepVector,
)
from shoal.wire import phases


@dataclass(slots=True)  # frozen, seventeen fields take three times as long
class StepTotals:
    """Totals of a step over all ranks, after its backward passes.

    Attributes:
        loss_sum, count: over all targets of the step.
        norm: of the summed gradient, over every part of it on every rank, scaled.
        broken: some rank's numbers are not finite.
        loss_broken: some rank's loss is not finite, whatever its gradients are.
        stop, save: some rank requested it.
        moved: some rank's forward passes changed a buffer that no rule covers.
        save_failed: some rank learnt that the save in flight failed.
        used: per name of the program: some rank used the parameter.
        micro_batches: how many all ranks ran.
        uneven: some ranks ran more than others.
        numbers: all of it by names, `StepFlags.sums` too.
        measured: sums of `StepFlags.measured`.
        unnamed: some rank has values of unknown names.
        broken_ranks: returns the ranks whose numbers are not finite; every rank calls it.
        averaged: gradients are the clipped mean already, which user code may have changed.
        norm_now: norm of the mean gradient after these changes; None: it is `norm`'s.
    """

    loss_sum: float
    count: float
    norm: float
    broken: bool
    loss_broken: bool
    stop: bool
    save: bool
    moved: bool
    save_failed: bool
    used: list[bool]
    micro_batches: int
    uneven: bool
    numbers: StepNumbers
    measured: Sequence[float]
    unnamed: bool
    broken_ranks: Callable[[], list[int]]
    averaged: bool = False
    norm_now: float | None = None


@dataclass(slots=True)
class StepFlags:
    """Values that a rank adds to the step's all-reduce beside its loss and norm.

    Attributes:
        stop, save, save_failed: as in `StepTotals`.
        step: the current one, from 1.
        sums: numbers by name, summed over ranks; names, order and lengths are the same on each.
        invariants: values that must be equal on all ranks of a group.
        measured: float64, to be summed over ranks, of equal length on each; None: nothing.
        unnamed: this rank has values by names that others may not know.
    """

    stop: bool = False
    save: bool = False
    save_failed: bool = False
    step: int = 0
    sums: Mapping[str, Sequence[float]] = field(default_factory=dict)
    invariants: Sequence[Invariant] = ()
    measured: torch.Tensor | None = None
    unnamed: bool = False


def reducer_of(program: Program) -> Reducer:
    """Return the program's reducer, which `compose` always sets."""
    if program.reducer is None:
        raise BugError("the program has no reducer: compose() was not called")
    return program.reducer


def forward_backward(
    program: Program,
    share: RankShare,
    loss: Loss,
    *,
    step: int,
    call: str = "single",
    scale: float = 1.0,
    flags: Callable[[], StepFlags] = StepFlags,
    note: Callable[[Any, Any, Any], None] | None = None,
) -> StepTotals:
    """Run this rank's micro-batches of one step and sum everything over all ranks.

    Args:
        program: the run's.
        share: this rank's micro-batches; without any the rank joins with zeros.
        loss: the run's loss.
        step: the step's number, a key of its random generators.
        call: as in `call_model`.
        scale: factor of the loss before backward (fp16).
        flags: returns this rank's `StepFlags`, after its passes.
        note: called with the loss's result, outputs and targets of each micro-batch.

    Returns:
        The tally; the program's local gradients are then sums over all ranks, scaled.

    Raises:
        ConfigError: the loss returned a mean; nothing was updated.
        PlanError: a parameter trains that was frozen when the program was composed; nothing was
            updated.
    """
    ready, sums = begin_passes(program, share, loss, step, call, scale, note)
    program.run(program, ready, reducer_of(program))
    return reduce_step(program, sums, len(share.micro_batches), flags())


def begin_passes(
    program: Program,
    share: RankShare,
    loss: Loss,
    step: int,
    call: str,
    scale: float,
    note: Callable[[Any, Any, Any], None] | None = None,
) -> tuple[list[MicroBatch], torch.Tensor]:
    """Zero the gradients; return this rank's passes, and their sums: [loss sum, count].

    Passes of weight 0, which only take part in the others' collectives, come last. Arguments as in
    `forward_backward`.
    """
    _check_frozen(program)
    reducer_of(program).start_step(max(share.rounds, len(share.micro_batches)))
    for begin in program.on_begin:
        begin()
    sums = torch.zeros(2, dtype=torch.float64, device=program.world.device)
    passes = list(share.micro_batches)
    if program.together and len(passes) < share.rounds:
        # A model that writes its inputs in place would write the user's once more.
        spare = pytree.tree_map_only(torch.Tensor, torch.clone, share.spare)
        passes += [(JOINING, spare)] * (share.rounds - len(passes))
    shared = (call, scale, sums, note)
    ready = [MicroBatch(program, loss, step, n, batch, *shared) for n, batch in passes]
    return ready, sums


def reduce_step(program: Program, sums: torch.Tensor, ran: int, flags: StepFlags) -> StepTotals:
    """Sum gradients, loss and count over all ranks after the passes; `ran` of them count."""
    phases.record_step_part(phases.SUM)
    reducer = reducer_of(program)
    reducer.finish()
    # Before others' gradients come in; alone the sum itself says whether it is finite.
    alone = program.world.size == 1 and not is_off_host(program.world.device)
    used, norms = reducer.used_parameters(), [] if alone else reducer.local_norms()
    if program.has_shared_gradients:
        from shoal.parallel.data_parallel.shared_parameters import all_reduce_shared_gradients

        all_reduce_shared_gradients(program, reducer)
    return _reduce_totals(program, sums, used, norms, ran, flags)


def _check_frozen(program: Program) -> None:
    for name, parameter in program.frozen.items():
        if parameter.requires_grad:
            raise PlanError(
                f"{name} was frozen when shoal.parallelize was called and trains now: nothing sums "
                f"its gradient over ranks; unfreeze it before, or save, and parallelize again"
            )


def _reduce_totals(
    program: Program,
    sums: torch.Tensor,
    used_here: list[bool],
    norms: list[torch.Tensor],
    ran: int,
    flags: StepFlags,
) -> StepTotals:
    """Run one all-reduce of a short float64 vector: sums, flags, names, measured.

    Args:
        used_here, norms: of the gradients that this rank computed itself.
        ran: micro-batches of this rank that count.
    """
    world, names = program.world, program.names
    alone, square_sum = world.size == 1, _squared_norm(program, reducer_of(program))
    used = [1.0] * len(names)
    if len(used_here) < len(names) or not all(used_here):
        here = {n for n, is_used in zip(program.parameters, used_here, strict=True) if is_used}
        used = [float(name in here) for name in names]
    asked = [flags.stop, program.moved(), flags.save_failed, flags.unnamed, flags.save]
    entries: dict[str, Sequence[float]] = {
        "loss_and_count": [0.0, 0.0],
        "squared_norm": [0.0],
        "flags": list(map(float, asked)),
        "broken": [0.0, 0.0],
        "micro_batches": [float(ran), float(ran * ran)],
    }
    own_broken = False
    waits = is_off_host(world.device)
    if not waits:
        numbers = sums.tolist()
        speaks = program.speaks
        entries["loss_and_count"] = [float(speaks * (x if isfinite(x) else 0.0)) for x in numbers]
        entries["squared_norm"] = [float(square_sum)]
        loss_broken = not (isfinite(numbers[0]) and isfinite(numbers[1]))
        own = float(square_sum) if alone else sum(norm.item() for norm in norms)
        own_broken = loss_broken or not isfinite(own)
        entries["broken"] = [float(own_broken), float(loss_broken)]
        if alone and flags.measured is None:  # nothing is sent: the numbers are the sums
            entries |= {**flags.sums, UNLIKE: [0.0] * NUMBERS, "used": used, "measured": ()}
            one_rank = StepNumbers(entries, InvariantCheck(flags.invariants))
            return _build_totals(one_rank, world, own_broken)
    vector = StepVector()
    added = [vector.add(*one) for one in (*entries.items(), *flags.sums.items())]
    lies, square, _, broken, *_ = added
    vector.add_invariants(flags.invariants, flags.step, world)
    vector.add("used", used)
    vector.add_device_entry("measured")
    if waits:
        # All numbers of the host go to the device in one asynchronous copy.
        sent = copy_numbers_to_device(world.device, vector.values)
        # A rank whose loss is not finite must not turn the sums of the others into NaN.
        sent[lies] = torch.nan_to_num(sums, 0, 0, 0) * program.speaks
        sent[square.start] = square_sum
        magnitude = sums.abs().sum()
        if norms:  # one launch for all of them: there may be one of each block
            magnitude = magnitude + torch.stack(norms).double().sum()
        finite = torch.isfinite(torch.stack([magnitude, sums.sum()]))
        is_broken: torch.Tensor | bool = ~finite[0]
        sent[broken] = (~finite).double()
    else:
        sent, is_broken = torch.tensor(vector.values, dtype=torch.float64), own_broken
    if flags.measured is not None:
        sent = torch.cat((sent, flags.measured))
    world.all_reduce(sent)
    summed = sent.tolist()  # the only point of a step where the host waits for the device
    return _build_totals(vector.name_sums(summed, flags.invariants, world), world, is_broken)


def _build_totals(numbers: StepNumbers, world: World, is_broken: torch.Tensor | bool) -> StepTotals:
    entries = numbers.entries
    loss_sum, count = entries["loss_and_count"]
    (square,) = entries["squared_norm"]
    stop, moved, save_failed, unnamed, save = [one > 0 for one in entries["flags"]]
    broken, loss_broken = entries["broken"]
    micro_batches, squares = entries["micro_batches"]
    return StepTotals(
        loss_sum=loss_sum,
        count=count,
        norm=math.sqrt(square) if square >= 0 else math.nan,
        stop=stop,
        moved=moved,
        save_failed=save_failed,
        unnamed=unnamed,
        save=save,
        broken=broken > 0,
        loss_broken=loss_broken > 0,
        micro_batches=int(micro_batches),
        uneven=world.size * squares != micro_batches * micro_batches,
        numbers=numbers,
        used=[n > 0 for n in entries["used"]],
        measured=entries["measured"],
        broken_ranks=lambda: [r for r, one in enumerate(world.gather_json(bool(is_broken))) if one],
    )


def _squared_norm(program: Program, reducer: Reducer) -> torch.Tensor | float:
    """Return this rank's share of the gradient's squared norm; each element counts once."""
    held = reducer.sums()
    if program.world.size == 1 and held and held[0].device != program.world.device:
        # Offloaded after measuring on the device: the host would add up in another order.
        return torch.stack([norm.double() for norm in reducer.local_norms()]).square().sum()
    if program.world.size == 1:
        return sum_of_squares(held)
    by_copies: dict[int, list[torch.Tensor]] = {}
    for name, tensor in zip(reducer.summed_names(), held, strict=True):
        by_copies.setdefault(program.copies_of_sum[name], []).append(tensor)
    return sum([sum_of_squares(tensors) / copies for copies, tensors in by_copies.items()])


def is_off_host(device: torch.device) -> bool:
    """Return whether the host must wait for numbers that are computed there."""
    return device.type != "cpu"


def sum_of_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor | float:
    """Return Σ x² over all elements of all tensors, in float64; a tensor if on a device."""
    if not tensors:
        return 0.0
    if is_off_host(tensors[0].device):
        norms = list(torch._foreach_norm(list(tensors)))
        return torch.stack(norms).double().square().sum()
    total = 0.0
    for term in square_terms(tensors):
        total += term
    return total


def square_terms(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return two numbers for each tensor on a CPU, whose sum is its Σ x².

    On a CPU torch adds a tensor's squares up in few running sums of its own format. So 3.5M fp32
    elements in one buffer lose 7e-5 of their norm (random ones) to 3e-4 (a gradient). Other layouts
    lose less, so they would clip differently. Rows of 4096 lose 5e-9, in no more time.
    """
    terms = [0.0] * (2 * len(tensors))  # added up in the order of the tensors: rows, then the rest
    rests: dict[int, torch.Tensor] = {}
    alike: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        if (count := tensor.numel()) < NORM_ROW:
            alike.setdefault((tensor.shape, tensor.dtype), []).append(place)
            continue
        flat, whole = tensor.reshape(-1), count // NORM_ROW * NORM_ROW
        if whole == NORM_ROW:  # the same bits as of rows, by fewer calls
            rests[2 * place] = flat[:whole]
        else:
            rows = torch.linalg.vector_norm(flat[:whole].view(-1, NORM_ROW), dim=1)
            terms[2 * place] = rows.double().square().sum().item()
        if whole < count:
            rests[2 * place + 1] = flat[whole:]
    for places in alike.values():
        if len(places) == 1:
            rests[2 * places[0]] = tensors[places[0]].contiguous()
            continue
        # A call for each small tensor takes longer than a copy of all.
        rows = torch.stack([tensors[place] for place in places]).view(len(places), -1)
        for place, norm in zip(places, torch.linalg.vector_norm(rows, dim=1).tolist(), strict=True):
            terms[2 * place] = norm * norm
    for place, one in zip(
        rests, torch._foreach_norm([*rests.values()]) if rests else (), strict=False
    ):
        norm = one.item()
        terms[place] = norm * norm
    return terms


NORM_ROW = 4096
"""Elements whose squares are summed in their own dtype."""

NO_GRADIENT = (
    "loss: no parameter got a gradient: the loss is cut off from the model (by .detach(), .item(), "
    "or torch.no_grad()), or computed from something else"
)
"""Error for a loss that is not connected to the model."""

NO_TARGET = "the loss counted no target"
"""Reason for skipping a step whose targets are all ignored."""


@dataclass(frozen=True)
class UpdateResult:
    """Result of an update: mean loss, gradient norm before clipping, and why weights did not move.

    Attributes:
        reason: why the update was skipped, or "".
        spike: why loss or norm are a spike, whether skipped or not; "": they are none.
    """

    loss: float
    grad_norm: float
    skipped: bool
    reason: str = ""
    spike: str = ""


def _reason_to_skip(tally: StepTotals, scale: float) -> tuple[float, str]:
    """Return (norm of the mean gradient, why this step must be skipped), the same on all ranks."""
    if tally.broken:
        return math.nan, "non-finite loss or gradient"
    if tally.count <= 0:
        return 0.0, NO_TARGET
    if not any(tally.used):
        raise ConfigError(NO_GRADIENT)
    norm = tally.norm / (tally.count * scale)
    return norm, "" if math.isfinite(norm) else "the summed gradient overflowed"


def mean_coefficient(tally: StepTotals, clip: float, scale: float, norm: float) -> float:
    """Return the factor that makes the clipped mean gradient of the summed, scaled one.

    Args:
        tally: totals of the step.
        clip: largest norm of the mean gradient; 0: do not clip.
        scale: factor of the loss before backward.
        norm: of the mean gradient.
    """
    coefficient = 1.0 / (tally.count * scale)
    return coefficient * min(1.0, clip / (norm + 1e-6)) if clip > 0 else coefficient


class SpikeJudge(Protocol):
    """Detector of spikes, called with loss and norm of a step before its update.

    Attributes:
        skips: whether the update of a spike is skipped.
    """

    skips: bool

    def judge(self, loss: float, norm: float) -> str:
        """Return why the step is a spike, or "" if it is none."""


def update(
    program: Program,
    optimizer: torch.optim.Optimizer,
    tally: StepTotals,
    *,
    clip: float,
    scale: float = 1.0,
    watch: Callable[[Program, torch.optim.Optimizer], None] | None = None,
    adjust: Callable[[], None] | None = None,
    spikes: SpikeJudge | None = None,
) -> UpdateResult:
    """Turn summed gradients into one step of the optimizer, or skip it on all ranks.

    Args:
        program: the run's.
        optimizer: the run's.
        tally: totals of the step.
        clip: largest norm of the mean gradient; 0: do not clip.
        scale: factor of the loss before backward.
        watch: called between the last change of gradients and the optimizer's step.
        adjust: changes the clipped mean gradient, or None.
        spikes: judges loss and norm, and may skip the step.

    Returns:
        The result. Local gradients are then the clipped mean gradient, and None where no rank used
        the parameter (weight decay and momentum then leave it alone, as in one process).

    Raises:
        ConfigError: targets were counted, but no parameter got a gradient on any rank.
    """
    phases.record_step_part(phases.UPDATE)
    _mark_unequal_work(program, tally)
    reducer = reducer_of(program)
    sums = reducer.sums()
    loss = tally.loss_sum / tally.count if tally.count else math.nan
    norm, reason = _reason_to_skip(tally, scale)
    spike = spikes.judge(loss, norm) if spikes and not reason else ""
    if spikes and spikes.skips:
        reason = reason or spike
    if tally.moved:
        program.align(bool(reason))
    if reason:
        return UpdateResult(math.nan if tally.loss_broken else loss, norm, True, reason, spike)
    if tally.norm_now is not None and not math.isfinite(tally.norm_now):
        return UpdateResult(loss, norm, True, "gradients that are not finite before the update")
    if sums and not tally.averaged:
        torch._foreach_mul_(sums, mean_coefficient(tally, clip, scale, norm))
    if not all(tally.used):
        for name, used in zip(program.names, tally.used, strict=True):
            if not used and name in program.local:
                program.local[name].parameter.grad = None
    if adjust is not None:
        adjust()
    if watch is not None:
        watch(program, optimizer)
    optimizer.step()
    reducer.publish()
    for commit in program.on_update:
        commit(tally.uneven)
    return UpdateResult(loss, norm, False, spike=spike)


def _mark_unequal_work(program: Program, tally: StepTotals) -> None:
    """Mark phases with unequal work on the watch page, so that no rank is blamed as slow there."""
    if program.pipe.size > 1:  # stages differ
        phases.mark_unequal_parts(phases.PASSES, phases.BACKWARD, phases.UPDATE, always=True)
    if tally.uneven:
        phases.mark_unequal_parts(phases.DATA, phases.PASSES, phases.BACKWARD)


@dataclass(frozen=True)
class StepResult:
    """Result of one step; the same on every rank.

    Attributes:
        step: number of this step, from 1.
        loss: mean over the targets of all ranks.
        grad_norm: of the mean gradient, before clipping.
        lr: of the first parameter group.
        targets: denominator of the loss: the count of targets, or the sum of their weights.
        skipped: the weights did not move, for `reason`.
        reason: why the update was skipped, or "".
        metrics: means by name over all ranks: metrics, and parts of the loss.
        spike: why loss or norm are far above those of the last steps; "" if they are not.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    targets: float
    skipped: bool
    reason: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    spike: str = ""

    def item(self) -> float:
        """Return the loss, so that `loss.item()` of a script works on `loss = run.step(batch)`."""
        return self.loss


def as_count(count: float) -> float:
    """Return a whole count as an integer, and a fractional sum of weights unchanged."""
    return int(count) if count.is_integer() else count
