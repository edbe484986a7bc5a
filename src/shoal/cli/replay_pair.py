"""`shoal replay --against`: the first step and the first tensor in which two runs part."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shoal.base.errors import ConfigError
from shoal.base.runlog.damaged_lines import read_object
from shoal.base.text.units import count_noun
from shoal.cli.replay_run import check_step, find_run
from shoal.replay.first_difference import (
    NumberDifference,
    TensorDifference,
    find_number_difference,
    find_tensor_difference,
)
from shoal.replay.replay_folder import read_last_step, read_rows
from shoal.replay.replay_lines import (
    BOUNDS,
    Replay,
    difference_lines,
    difference_text,
    repeats_bits,
)
from shoal.replay.run_environment import list_environment_differences
from shoal.replay.step_marks import BEFORE, DATA, FORWARD, StepRecord, read_record
from shoal.report.comparison.key_differences import list_key_differences, read_run_keys
from shoal.report.run_contents import read_run

MOST_KEYS = 8


@dataclass
class PairFinding:
    """First step and tensor in which two runs part.

    Attributes:
        first: the replay of the first run.
        other: name of the second run, or of the file of its record.
        steps: number of steps that both wrote.
        number: the first number that differs in what they wrote; None: none does.
        tensor: the first tensor that differs, in the order of time; None: none was found.
        keys: settings, versions and sources that differ, each in one text.
        unrepeated: lines on each run that did not repeat its own bits.
        bound: relative difference of loss and gradient norm that counts as equal; 0: bits.
    """

    first: Replay
    other: str
    steps: int
    number: NumberDifference | None = None
    tensor: TensorDifference | None = None
    keys: list[str] = field(default_factory=list)
    unrepeated: list[str] = field(default_factory=list)
    bound: float = 0.0

    @property
    def is_equal(self) -> bool:
        """Return whether no number and no tensor differs."""
        return self.number is None and self.tensor is None

    def text(self) -> str:
        """Return the finding in a few lines: step, tensor, and what differs before it."""
        other = f"; compared to rounding, {self.bound:.0e}" if self.bound else ""
        if self.is_equal:
            steps = count_noun(self.steps, "step")
            return f"equal: {steps} of {self.first.run} and {self.other}{other}"
        lines = []
        if self.number is not None:
            lines.append(
                f"first different number: step {self.number.step}, {self.number.key} "
                f"{difference_text(self.number)}"
            )
        if self.tensor is not None:
            one = self.tensor
            lines.append(
                f"first different tensor: step {one.step}, {one.kind}, {one.name}"
                f"{_gap_text(one)} ({one.differing} of {one.compared} differ{other})"
            )
            lines.append(f"so: {self.cause(one)}")
        elif self.bound:
            lines.append(
                f"no tensor differs by more than {self.bound:.0e} of all tensors of its kind, so "
                f"it may be rounding; try: --precision fp64"
            )
        lines += [f"differs: {one}" for one in self.keys[:MOST_KEYS]]
        if len(self.keys) > MOST_KEYS:
            lines.append(f"differs: {len(self.keys) - MOST_KEYS} more keys; --json has all")
        lines += self.unrepeated
        return "\n".join(lines)

    def cause(self, tensor: TensorDifference) -> str:
        """Return what the kind of the first tensor means, in one sentence."""
        if self.number is not None and self.number.key in DATA:  # before any tensor differs
            return "the step met other samples: look at data, seed, order and batch"
        if tensor.kind == BEFORE and tensor.step == 1:
            return "the runs began with other weights"
        if tensor.kind == BEFORE:
            return "an earlier step left other weights"
        if tensor.kind == FORWARD:
            return "weights are equal and this part's output is not: its inputs, masks or code"
        if tensor.kind == "gradients":
            return "outputs are equal and this gradient is not: the loss, a backward pass, or sums"
        return "gradients are equal and the updates are not: the optimizer's numbers or its state"

    def to_record(self) -> dict[str, Any]:
        """Return the finding as one JSON document."""
        return {
            "run": str(self.first.run),
            "against": self.other,
            "equal": self.is_equal,
            "steps": self.steps,
            "number": asdict(self.number) if self.number else None,
            "tensor": asdict(self.tensor) if self.tensor else None,
            "cause": self.cause(self.tensor) if self.tensor else "",
            "differing_keys": self.keys,
            "reproduced": not self.unrepeated,
            "unrepeated": self.unrepeated,
            "bound": self.bound,
        }


def _gap_text(one: TensorDifference) -> str:
    return f", apart by {one.gap:.1e}" if math.isfinite(one.gap) else ""


Repeat = Callable[[Path, int, int], Replay]
"""Function that replays (a run, up to a step, recording tensors from another step on)."""


def compare_with(
    run: Path, step: int, other: Path, repeat: Repeat, *, with_script: bool = False
) -> PairFinding:
    """Find the first step and tensor in which a run and another one, or a record, part.

    Args:
        step: the last step to compare; 0: the last that both have.
        repeat: replays one of the runs.
        with_script: the scripts that made the runs are known.

    Raises:
        ConfigError: the second is neither run nor record, or they have no step in common.
    """
    if other.is_file():
        return _compare_with_record(run, step, other, repeat)
    second = find_run(other, with_script=with_script)
    last = min(read_last_step(run), read_last_step(second), step or sys.maxsize)
    if not last:
        raise ConfigError(f"--against {other}: the runs have no step in common")
    rows = read_rows(run, 1, last), read_rows(second, 1, last)
    shared = len(rows[0].keys() & rows[1].keys())
    exact = repeats_bits(run) and repeats_bits(second)
    bound = pair_bound(*(read_shape(one) for one in (run, second)), exact=exact)
    number = find_number_difference(*rows, bound_at=lambda step: bound)
    keys = _differing_keys(run, second)
    at, width = number.step if number else last, 1
    unrepeated: dict[Path, list[str]] = {}
    while True:
        # A loss shows what the steps before it left, so these are recorded too.
        begin = max(1, at - width)
        done = [repeat(one, at, begin) for one in (run, second)]
        for one in done:
            if not one.repeats_run():
                unrepeated[one.run] = unrepeated_lines(one)
        tensor = _first_tensor(done[0].record, done[1].record)
        if tensor is None or (tensor.step, tensor.kind) != (begin, BEFORE) or begin == 1:
            lines = [line for each in unrepeated.values() for line in each]
            return PairFinding(done[0], str(other), shared, number, tensor, keys, lines, bound)
        at, width = begin - 1, 2 * width  # an earlier step left other weights, and the same loss


def unrepeated_lines(done: Replay) -> list[str]:
    """Return the lines on a run whose replay did not repeat its bits."""
    found = done.difference()
    if found is None:
        return [f"{done.run}: did not repeat its bits", *difference_lines(done)]
    head = f"{done.run}: its step {found.step} did not repeat: {found.key} {difference_text(found)}"
    return [head, *difference_lines(done)]


Shape = tuple[str, str, int]
"""Layout in words, format of products, and micro-batch of a run or record."""


def read_shape(run: Path) -> Shape:
    """Return the shape of a run from its plan.json; of missing keys "" and 0."""
    plan = read_object(run / "plan.json")
    layout = json.dumps(plan.get("layout", ""), sort_keys=True)
    return layout, str(plan.get("compute", "")), int(plan.get("micro_batch") or 0)


def pair_bound(first: Shape, second: Shape, *, exact: bool = True) -> float:
    """Return the relative difference of loss and norm that counts as equal between two shapes.

    Another format alone is a difference, and not rounding: bits are compared.

    Args:
        exact: the devices of both repeat their sums to the bit.

    >>> (
    ...     pair_bound(("ddp", "fp32", 2), ("single", "fp32", 2)),
    ...     pair_bound(("", "fp32", 2), ("", "bf16", 2)),
    ... )
    (0.0001, 0.0)
    """
    sizes = {first[2], second[2]} - {0}  # records of older versions have none
    if exact and first[0] == second[0] and len(sizes) < 2:
        return 0.0
    return max(BOUNDS.get(one[1], BOUNDS["bf16"]) for one in (first, second))


def _compare_with_record(run: Path, step: int, file: Path, repeat: Repeat) -> PairFinding:
    """Compare a run with a record that `--record` wrote, on this machine or another one."""
    record = read_record(file)
    recorded = sorted(record.steps)
    if not recorded:
        raise ConfigError(f"--against {file}: has no tensors; record it with --record {file}")
    at = step or recorded[-1]
    if at not in record.steps:
        raise ConfigError(f"--step {at}: {file} has {', '.join(map(str, recorded))}")
    check_step(run, at)
    begin = min(one for one in recorded if one <= at)
    done = repeat(run, at, begin)
    rows = done.record.rows, {one: row for one, row in record.rows.items() if one <= at}
    bound = _record_bound(done.record, record)
    number = find_number_difference(*rows, bound_at=lambda step: bound)
    tensor = _first_tensor(done.record, record)
    shared = len(rows[0].keys() & rows[1].keys())
    keys = list_environment_differences(record.environment, done.record.environment)
    lines = [] if done.repeats_run() else unrepeated_lines(done)
    return PairFinding(done, str(file), shared, number, tensor, keys, lines, bound)


def _record_bound(first: StepRecord, second: StepRecord) -> float:
    shapes = [(one.layout, one.compute, one.micro_batch) for one in (first, second)]
    return pair_bound(*shapes, exact=first.repeats_bits and second.repeats_bits)


def _first_tensor(first: StepRecord, second: StepRecord) -> TensorDifference | None:
    bound = _record_bound(first, second)
    for step in sorted(first.steps.keys() & second.steps.keys()):
        if found := find_tensor_difference(first.steps[step], second.steps[step], bound):
            return found
    return None


def _differing_keys(*runs: Path) -> list[str]:
    """Return the settings, versions and sources that differ, as `key: value → value`."""
    found = list_key_differences([read_run_keys(read_run(run)) for run in runs])
    return [f"{one.key}: {' → '.join(one.values)}" for one in found]
