"""Statistics of all tensors in some steps: `train.statistics = 100` writes statistics.jsonl.

    {"step": 100,
     "gradient_norm": {"blocks.0.up.weight": 0.013, …}   of the mean gradient, before clipping
     "weight_norm": {…}                                  of the weights that the step met
     "update_ratio": {…}                                 norm of the update ÷ weight_norm
     "activation_rms": {"blocks.0": 1.7, …}              of a block's outputs
     "activation_largest": {…}}                          their largest absolute value

Numbers are those of the whole tensors on every layout:

    after the passes   each rank squares the part of a gradient that it steps, divided by the number
                       of ranks that step the same part
    before the update  the same of the weights, and a copy of them, of this rank's part
    after the update   the new weights are subtracted from the copy, which is squared and dropped
    then               one all-reduce: three numbers a parameter, 2 + ranks numbers a block

The largest value has a place for each rank in the sum, so that one collective is enough. Step 1 has
a line, and every Nth step. In all others nothing is entered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoal.parallel.program import Program
from shoal.trainer.metrics_recorder import MetricsRecorder
from shoal.trainer.statistics.block_activations import BlockActivations
from shoal.trainer.step.optimizer_step import StepTotals, is_off_host, square_terms
from shoal.trainer.step.sampled_steps import append_record
from shoal.trainer.step.whole_gradients import WholeGradients

FILE = "statistics.jsonl"
PER_PARAMETER = ("gradient_norm", "weight_norm", "update_ratio")
PER_BLOCK = ("activation_rms", "activation_largest")


class TensorStatistics:
    """Statistics of the steps of one run on this rank; every rank makes the same calls.

    Args:
        program: the run's.
        every: steps from one record to the next.

    Attributes:
        is_due: the present step is recorded.
    """

    def __init__(self, program: Program, every: int) -> None:
        self.program, self.every, self.is_due = program, every, False
        self.activations = BlockActivations(program)
        self.gradients = WholeGradients(program)
        self.places = {name: place for place, name in enumerate(program.names)}
        self._squares: dict[str, Tensor] = {}
        self._divisor = 0.0
        self._copies: list[Tensor] = []

    def begin_step(self, step: int) -> None:
        """Start to record if the step is due."""
        self.activations.stop()
        self._copies, self._squares = [], {}
        self.is_due = step == 1 or step % self.every == 0
        if self.is_due:
            self.activations.start()

    @torch.no_grad()
    def end_passes(self, tally: StepTotals, scale: float) -> None:
        """Square the sums of gradients, before user code or the update changes them.

        Args:
            tally: totals of the step.
            scale: factor of the loss before backward.
        """
        self.activations.stop()
        self._divisor = tally.count * scale
        held = self.gradients.held(list(self.program.local))
        self._squares["gradient"] = self._shares(dict(held))

    @torch.no_grad()
    def before_update(self) -> None:
        """Square the weights and copy them."""
        weights = self._weights()
        self._squares["weight"] = self._shares(weights)
        self._copies = [weight.clone() for weight in weights.values()]

    @torch.no_grad()
    def after_update(self, step: int, recorder: MetricsRecorder) -> None:
        """Square the update, sum over ranks and write the record; one collective.

        Args:
            step: the step that was taken, or skipped.
            recorder: of the run.
        """
        weights, copies = self._weights(), self._copies
        for new, old in zip(weights.values(), copies, strict=True):
            old.sub_(new)
        self._squares["update"] = self._shares(dict(zip(weights, copies, strict=True)))
        self._copies, self.is_due = [], False
        sums = self._sum_over_ranks()
        if recorder.world.writes_files:
            append_record(recorder, FILE, {"step": step, **self._build_record(sums)})

    def _weights(self) -> dict[str, Tensor]:
        """Return the parts of weights that this rank steps."""
        return {name: one.parameter.detach() for name, one in self.program.local.items()}

    def _shares(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return each tensor's squared norm by parameter, as this rank's share: [parameters]."""
        device = self.program.world.device
        found = torch.zeros(len(self.places), dtype=torch.float64, device=device)
        if tensors:
            places = torch.tensor([self.places[name] for name in tensors], device=device)
            copies = torch.tensor(
                [self.program.copies_of_sum[name] for name in tensors], device=device
            )
            found[places] = squared_norms(list(tensors.values())).to(device) / copies
        return found

    def _sum_over_ranks(self) -> list[float]:
        """Return the sums over ranks: of parameters, then of blocks, then the largest by rank."""
        world, names = self.program.world, self.activations.names
        blocks = torch.zeros(len(names), 2 + world.size, dtype=torch.float64, device=world.device)
        for place, name in enumerate(names):
            if name in self.activations.sums:
                squares, count, largest = self.activations.sums[name]
                blocks[place, 0], blocks[place, 1] = squares, count
                blocks[place, 2 + world.rank] = largest
        parts = [self._squares[name] for name in ("gradient", "weight", "update")]
        sums = torch.cat([*parts, blocks.flatten()])
        world.all_reduce(sums)
        return list(sums.tolist())

    def _build_record(self, sums: Sequence[float]) -> dict[str, dict[str, float | None]]:
        """Return the record of a step; null for numbers that are not finite or divide by zero."""
        count, size = len(self.places), self.program.world.size
        found: dict[str, dict[str, float | None]] = {key: {} for key in PER_PARAMETER + PER_BLOCK}
        for name, place in self.places.items():
            gradient, weight, update = (_root(sums[place + n * count]) for n in range(3))
            found["gradient_norm"][name] = _ratio(gradient, self._divisor)
            found["weight_norm"][name] = _ratio(weight, 1.0)
            found["update_ratio"][name] = _ratio(update, weight)
        start = 3 * count
        for place, name in enumerate(self.activations.names):
            squares, elements, *largest = sums[start + place * (2 + size) :][: 2 + size]
            if elements:  # a step may run no micro-batch through a block
                found["activation_rms"][name] = _ratio(_root(squares), math.sqrt(elements))
                most = math.nan if any(map(math.isnan, largest)) else max(largest)
                found["activation_largest"][name] = _ratio(most, 1.0)
        return {key: values for key, values in found.items() if values}


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the squared norm of each tensor in float64, on their device: [tensors]."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    if is_off_host(tensors[0].device):
        norms = torch._foreach_norm(
            list(tensors), 2, torch.float32 if _is_narrow(tensors) else None
        )
        return torch.stack([norm.double() for norm in norms]).square()
    wide = [one.float() if _is_narrow([one]) else one for one in tensors]
    terms = torch.tensor(square_terms(wide), dtype=torch.float64)
    return terms.view(-1, 2).sum(1)


def _is_narrow(tensors: Sequence[Tensor]) -> bool:
    return tensors[0].element_size() < 4


def _root(square: float) -> float:
    return math.sqrt(square) if square >= 0 else math.nan


def _ratio(value: float, divisor: float) -> float | None:
    """Return value / divisor; None if it is not finite.

    >>> _ratio(1.0, 4.0), _ratio(1.0, 0.0), _ratio(math.nan, 1.0)
    (0.25, None, None)
    """
    found = value / divisor if divisor else math.nan
    return found if math.isfinite(found) else None


def record_statistics(program: Program) -> tuple[TensorStatistics, Program]:
    """Return the statistics that a program's plan asks for, and the program that counts them."""
    found = TensorStatistics(program, program.plan.statistics)
    around = (*program.around, found.activations.micro_batch)
    return found, replace(program, around=around)
