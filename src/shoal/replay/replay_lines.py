"""A replay as lines for a terminal, and as one JSON document."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shoal import __version__
from shoal.base.runlog.damaged_lines import Record, is_number, read_object
from shoal.base.text.units import count_noun, seconds_text
from shoal.replay.first_difference import (
    ROUNDED,
    NumberDifference,
    StatisticDifference,
    find_largest_difference,
    find_number_difference,
    find_statistic_difference,
)
from shoal.replay.run_environment import list_environment_differences
from shoal.replay.step_marks import DATA, StepRecord

BOUNDS = {"fp64": 1e-10, "fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
"""Relative difference of a number that is rounding in any step, by format: as `shoal compare`."""
ROUNDINGS = {"fp64": 2.0**-52, "fp32": 2.0**-23, "bf16": 2.0**-7, "fp16": 2.0**-10}
"""One rounding of a number, by format."""
NUDGE_TIMES = 10.0
"""A difference is rounding up to this multiple of what one rounding of each weight does by then."""
BLIND = 0.1
"""Relative difference by one rounding of each weight; later steps cannot be compared beyond it."""
MOST_ROWS, MOST_TENSORS, MOST_KEYS = 6, 40, 8
DISTANT_STEPS = 20
"""Steps without a checkpoint from which the price of a replay is told."""


@dataclass
class Replay:
    """One replay that ended.

    Attributes:
        run: the run's folder.
        start: step of the checkpoint from which it began; 0: from the run's first step.
        record: what it computed.
        own_rows: what the run wrote of these steps.
        is_same_layout: the run's layout, format and micro-batch were repeated.
        own_compute: format of the run's products.
        statistics: lines of statistics.jsonl by step, as the replay wrote them.
        own_statistics: the run's lines of these steps.
        own_environment: versions, sources and machine of the run, as far as its folder has them.
        nudged_rows: rows of the same replay with each weight moved by one rounding; {}: not needed.
        repeats_bits: the devices of the run and of the replay repeat their sums.
    """

    run: Path
    start: int
    record: StepRecord
    own_rows: dict[int, Record]
    is_same_layout: bool
    own_compute: str
    statistics: dict[int, Record] = field(default_factory=dict)
    own_statistics: dict[int, Record] = field(default_factory=dict)
    own_environment: dict[str, str] = field(default_factory=dict)
    nudged_rows: dict[int, Record] = field(default_factory=dict)
    repeats_bits: bool = True

    @property
    def compares_bits(self) -> bool:
        """Return whether equal bits are expected: the same layout, on devices that repeat them."""
        return self.is_same_layout and self.repeats_bits

    @property
    def bound(self) -> float:
        """Return the largest relative difference that counts as equal; 0: none does."""
        if self.compares_bits:
            return 0.0
        return max(BOUNDS.get(one, BOUNDS["bf16"]) for one in self._formats)

    @property
    def rounding(self) -> float:
        """Return one rounding in the coarser format of run and replay, as a share of a number."""
        return max(ROUNDINGS.get(one, ROUNDINGS["bf16"]) for one in self._formats)

    @property
    def _formats(self) -> tuple[str, str]:
        return self.own_compute, self.record.compute

    def bound_at(self, step: int) -> float:
        """Return the largest relative difference that counts as equal in a step."""
        return max(self.bound, NUDGE_TIMES * self.rounding_at(step)) if self.bound else 0.0

    def rounding_at(self, step: int) -> float:
        """Return what one rounding of each weight moved up to a step; 0 if it was not measured."""
        until = {at: row for at, row in self.nudged_rows.items() if at <= step}
        found = find_largest_difference(until, self.record.rows)
        return found.relative if found else 0.0

    def may_be_rounding(self) -> bool:
        """Return whether numbers differ by more than the bound, and rounding could grow to that."""
        found = self.difference()
        return self.bound > 0 and found is not None and found.key in ROUNDED

    @property
    def compared_steps(self) -> int:
        """Return the number of steps that both the run and the replay recorded."""
        return len(self.own_rows.keys() & self.record.rows.keys())

    def difference(self) -> NumberDifference | None:
        """Return the first number that is not the run's; None: all are."""
        return find_number_difference(self.own_rows, self.record.rows, bound_at=self.bound_at)

    def repeats_run(self) -> bool:
        """Return whether every recorded number is the run's."""
        return self.difference() is None and self.tensor_difference() is None

    def tensor_difference(self) -> StatisticDifference | None:
        """Return the first norm of a tensor that is not the run's, where it recorded statistics."""
        if not self.compares_bits:
            return None
        return find_statistic_difference(self.own_statistics, self.statistics)

    def environment_differences(self) -> list[str]:
        """Return what differs between the environments of the run and of the replay, as texts."""
        return list_environment_differences(self.own_environment, self.record.environment)


def opening_lines(
    run: Path, steps: tuple[int, int], shown: str, rows: Mapping[int, Record]
) -> list[str]:
    """Return the lines before a replay: the steps, the start, the layout, and a long one's price.

    Args:
        steps: the checkpoint's step (0: none), and the last step.
        shown: the layout in words.
        rows: the run's rows of these steps.
    """
    began, step = steps
    start = f"from its checkpoint of step {began}" if began else "from its first step"
    count = count_noun(step - began, "step")
    lines = [f"shoal {__version__}: replaying step {step} of {run}, {start}: {count}, {shown}"]
    times_s = sorted(float(row["step_s"]) for row in rows.values() if is_number(row.get("step_s")))
    if step - began > DISTANT_STEPS and times_s:
        whole_s = times_s[len(times_s) // 2] * (step - began)
        lines.append(
            f"these steps took the run about {seconds_text(whole_s)}; checkpoint.every and "
            f"checkpoint.keep of a run decide where its replays begin"
        )
    if not repeats_bits(run):
        how = (
            "train.deterministic=true"
            if (run / "run.toml").is_file()
            else "torch.use_deterministic_algorithms(True) before shoal.parallelize"
        )
        lines.append(
            "its ranks computed on GPUs, whose kernels add in another order each time, so numbers "
            f"agree to rounding only; for equal bits, try in the next run: {how}"
        )
    return lines


def repeats_bits(run: Path) -> bool:
    """Return whether the devices of a run or replay repeat their sums to the bit.

    All do, except for CUDA without deterministic kernels.
    """
    ranks = read_object(run / "ranks.json").get("ranks")
    entries = [one for one in ranks if isinstance(one, dict)] if isinstance(ranks, list) else []
    with contextlib.suppress(OSError, ValueError):
        text = (run / "run.toml").read_text(encoding="utf-8")
        if tomllib.loads(text).get("train", {}).get("deterministic"):
            return True
    return not any(
        str(one.get("device", "")).startswith("cuda") and not one.get("deterministic")
        for one in entries
    )


def replay_lines(done: Replay, step: int, *, with_statistics: bool = False) -> list[str]:
    """Return what a replay found: its last steps, the verdict, and the step's statistics."""
    lines = _table(done)
    lines.append(_verdict(done))
    lines += difference_lines(done)
    if with_statistics and step in done.statistics:
        lines += ["", *statistics_lines(done.statistics[step])]
    if done.own_rows.get(step, {}).get("samples"):  # else the script drew its batches itself
        lines.append(f"next: shoal data look {done.run} --step {step}")
    return lines


def _table(done: Replay) -> list[str]:
    newest = list(done.record.rows.items())[-MOST_ROWS:]
    lines = [f"{'step':>8}  {'loss':>12}  {'grad norm':>10}  {'lr':>10}  against the run"]
    for number, row in newest:
        values = [_number(row.get(key)) for key in ("loss", "grad_norm", "lr")]
        lines.append(
            f"{number:>8}  {values[0]:>12}  {values[1]:>10}  {values[2]:>10}  "
            f"{_against(done, number)}"
        )
    return lines


def _number(value: Any) -> str:
    return f"{value:.6g}" if is_number(value) else "–"


def _against(done: Replay, step: int) -> str:
    if step not in done.own_rows:
        return "not in the run's metrics.jsonl"
    one = {step: done.own_rows[step]}, {step: done.record.rows[step]}
    found = find_largest_difference(*one) or find_number_difference(*one)
    if found is None:
        return "same bits"
    return f"{found.key} {difference_text(found)}"


def difference_text(found: NumberDifference) -> str:
    """Return how far two numbers are apart.

    >>> difference_text(NumberDifference(3, "loss", (2.0, 2.5)))
    '2 → 2.5 (20 % apart)'
    >>> difference_text(NumberDifference(3, "loss", (2.0, 2.0000001)))
    'apart by 5.0e-08'
    """
    first, second = found.values
    if not (is_number(first) and is_number(second)):
        return f"{first} → {second}"
    if found.relative < 1e-3:
        return f"apart by {found.relative:.1e}"
    return f"{first:.6g} → {second:.6g} ({100 * found.relative:.2g} % apart)"


def difference_lines(done: Replay) -> list[str]:
    """Return why a replay did not repeat its run's bits: the first tensor, the environment."""
    if not done.compares_bits or done.repeats_run():
        return []
    lines = []
    if one := done.tensor_difference():
        lines.append(
            f"first different tensor in statistics.jsonl: step {one.step}, {one.kind}, {one.name}: "
            f"{_number(one.values[0])} → {_number(one.values[1])} ({one.differing} of "
            f"{one.compared} differ)"
        )
    keys = done.environment_differences()
    lines += [f"differs: {one} (then → now)" for one in keys[:MOST_KEYS]]
    if not keys:
        known = ", ".join(dict.fromkeys(_kind_of_key(key) for key in done.own_environment))
        lines.append(
            f"equal then and now: {known or 'nothing was recorded'}; so it was a fault of that "
            f"moment (a flipped bit), or data or settings that changed since"
        )
    return lines


def _kind_of_key(key: str) -> str:
    """Return a key of an environment without the name of the library or file.

    >>> _kind_of_key("version of torch"), _kind_of_key("threads")
    ('versions', 'threads')
    """
    for start, kind in (("version of ", "versions"), ("source of ", "sources")):
        if key.startswith(start):
            return kind
    return key


def _verdict(done: Replay) -> str:
    found, count = done.difference(), done.compared_steps
    if not count:
        return f"nothing to compare: {done.run}/metrics.jsonl has none of these steps"
    steps = count_noun(count, "step")
    if found is None and (tensor := done.tensor_difference()):
        return f"different from step {tensor.step}: a tensor; loss and gradient norm are equal"
    if found is None and done.compares_bits:
        return f"repeated: {steps} with the run's bits in loss, gradient norm, rate and samples"
    if found is None:
        return (
            f"repeated: {steps} equal to the run's but for rounding ({_rounding_text(done)}; bound "
            f"{done.bound:.0e}{_nudge_text(done)})"
        )
    if found.key in DATA:
        return (
            f"different from step {found.step}: {found.key} {difference_text(found)}: the step met "
            f"other samples"
        )
    why = (
        ""
        if done.compares_bits
        else f", more than rounding ({done.bound:.0e}{_nudge_text(done, found.step)})"
    )
    return f"different from step {found.step}: {found.key} {difference_text(found)}{why}"


def _rounding_text(done: Replay) -> str:
    """Return why bits are not compared."""
    return "GPUs without deterministic kernels" if done.is_same_layout else "other layout or format"


def _nudge_text(done: Replay, step: int = 0) -> str:
    """Return what one rounding of each weight does up to a step; "" if it was not measured."""
    if not done.nudged_rows:
        return ""
    moved = done.rounding_at(step or max(done.nudged_rows))
    text = f"; one rounding of each weight moves these numbers by {moved:.1e}"
    blind = [at for at in done.nudged_rows if done.rounding_at(at) > BLIND]
    if step or not blind:
        return text
    return (
        f"{text}, so steps from {blind[0]} on cannot be compared; BatchNorm and fp32 do that; "
        f"try: an earlier --step, or shoal prove, in fp64"
    )


def statistics_lines(record: Record) -> list[str]:
    """Return two tables of a step's line of statistics.jsonl: of parameters, and of blocks.

    >>> statistics_lines({"weight_norm": {"w": 2.0}, "gradient_norm": {"w": None}})[1]
    '           2              –                –  w'
    """
    lines = [f"{'weight norm':>12}  {'gradient norm':>13}  {'update ÷ weight':>15}  parameter"]
    columns = [record.get(key, {}) for key in ("weight_norm", "gradient_norm", "update_ratio")]
    rows = [
        "  ".join(
            [
                *(
                    f"{_number(one.get(name)):>{w}}"
                    for one, w in zip(columns, (12, 13, 15), strict=True)
                ),
                name,
            ]
        )
        for name in columns[0]
    ]
    lines += _first_rows(rows)
    most = record.get("activation_largest", {})
    rows = [
        f"{_number(value):>12}  {_number(most.get(name)):>13}  {name}"
        for name, value in record.get("activation_rms", {}).items()
    ]
    if rows:
        lines += [f"{'output rms':>12}  {'largest value':>13}  block", *_first_rows(rows)]
    return lines


def _first_rows(rows: list[str]) -> list[str]:
    if len(rows) <= MOST_TENSORS:
        return rows
    return [*rows[:MOST_TENSORS], f"… {len(rows) - MOST_TENSORS} more; --json has all of them"]


def replay_record(done: Replay, step: int) -> dict[str, Any]:
    """Return a replay as one JSON document."""
    found = done.difference()
    return {
        "run": str(done.run),
        "from_step": done.start,
        "layout": done.record.layout,
        "processes": done.record.processes,
        "compute": done.record.compute,
        "same_layout": done.is_same_layout,
        "repeats_bits": done.repeats_bits,
        "compared_steps": done.compared_steps,
        "repeats": found is None,
        "difference": asdict(found) if found else None,
        "rows": list(done.record.rows.values()),
        "tensors": {step: asdict(one)["marks"] for step, one in done.record.steps.items()},
        "statistics": done.statistics.get(step, {}),
        "tensor": asdict(tensor) if (tensor := done.tensor_difference()) else None,
        "differing_keys": done.environment_differences() if done.compares_bits else [],
    }
