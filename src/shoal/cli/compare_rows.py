"""Rows of `shoal compare`: which can run, and what follows from their figures together.

All of it is known before any process starts, without torch: names and counts, the division of the
batch, and the memory that the training states of all processes take together.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

from shoal.base.errors import ConfigError, PlanError, UserError, check_choice
from shoal.base.estimates.facts import MachineFacts
from shoal.base.layouts.layout import STRATEGIES, Layout
from shoal.base.layouts.schedule_names import model_copies
from shoal.base.layouts.strategies import expand_strategy
from shoal.base.plans.batches import default_turn
from shoal.base.plans.plan import Plan
from shoal.base.text.units import bytes_text, count_text
from shoal.planning.layout_guide import STATE_BYTES_PER_PARAMETER
from shoal.planning.micro_batch_sizes import micro_batch_sizes
from shoal.planning.settle import settle_batch

ONE_PROCESS = ("single", "dp")
NOISE = {"fp64": 1e-10, "fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
"""Tolerance by format: a larger relative distance from one process is more than rounding."""
COMPARED_STEPS = 8
"""First steps compared between rows; training magnifies rounding, so later steps prove nothing."""

Record = dict[str, Any]


@dataclass
class RowPlan:
    """One row: a layout on `parts` processes (`dp`: threads), and the reason if it cannot run."""

    strategy: str
    parts: int
    layout: Layout | None = None
    reason: str = ""

    @property
    def runs(self) -> bool:
        """Return whether the row can run."""
        return not self.reason

    @property
    def processes(self) -> int:
        """Return the number of processes that the row needs."""
        return 1 if self.strategy in ONE_PROCESS else self.parts


def parse_layout_names(text: str) -> list[str]:
    """Return the layout names of `--layouts`, once each; the baseline `single` always comes first.

    Raises:
        ConfigError: a name is no layout.

    >>> parse_layout_names("ddp,fsdp,ddp")
    ['single', 'ddp', 'fsdp']
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        check_choice("--layouts", name, STRATEGIES)
    if not names:
        raise ConfigError("--layouts: is empty; try: --layouts single,ddp")
    return list(dict.fromkeys(names if "single" in names else ["single", *names]))


def parse_process_counts(text: str) -> list[int]:
    """Return the process counts of `--processes`, ascending, once each.

    >>> parse_process_counts("4,1,2")
    [1, 2, 4]
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdigit() and int(word) for word in words):
        raise ConfigError(
            f"--processes = {text}: whole numbers from 1 are wanted, with commas; try: "
            f"--processes 1,2"
        )
    return sorted({int(word) for word in words})


def plan_rows(names: list[str], counts: list[int], batch: int, micro_batch: int) -> list[RowPlan]:
    """Return every row in the order of the table: layouts as named, each by rising process count.

    A layout that needs several processes has no row at count 1; `single` is that row.

    Args:
        micro_batch: samples; 0 checks only whether each row divides the batch.
    """
    rows = []
    for name in names:
        several = [count for count in counts if count > 1]
        wanted = [1] if name == "single" else several
        for count in wanted or [1]:
            rows.append(_plan_row(name, count, batch, micro_batch))
    return rows


def _plan_row(name: str, count: int, batch: int, micro_batch: int) -> RowPlan:
    row = RowPlan(name, count)
    if name != "single" and count == 1:
        row.reason = "on one process it is single; try: --processes 1,2"
        return row
    try:
        if name == "dp":
            row.layout = expand_strategy(name, 1, threads=count)
        else:
            row.layout = expand_strategy(name, count)
        settle_batch(Plan(row.layout, batch, micro_batch))
    except UserError as failure:
        row.reason = str(failure)
    return row


def common_micro_batch(rows: list[RowPlan], batch: int) -> int:
    """Return the largest micro-batch that all rows can run that are able to run.

    Equal sizes make rows comparable: masks of dropout and statistics of BatchNorm belong to a
    micro-batch.

    Args:
        rows: of a table, planned without a micro-batch.
        batch: samples per optimizer step.

    Returns:
        Samples per forward pass; an eighth of the batch where rows have no size in common.
    """
    layouts = [row.layout for row in rows if row.layout and not row.reason]
    sizes = [set(micro_batch_sizes(layout, batch)) for layout in layouts]
    return (
        max(set.intersection(*sizes), default=default_turn(batch)) if sizes else default_turn(batch)
    )


def training_state_bytes(layout: Layout, parameters: int) -> int:
    """Return the bytes of training state of all ranks of `layout` together.

    Formula   per rank 16 bytes = weights 4 + gradients 4 + Adam 8, each of which is divided by
              dp_shard from stage 3, 2, 1 on, and all by tp and pp; a further thread of `dp` holds
              gradients again

    >>> (
    ...     training_state_bytes(Layout(dp_replicate=2), 10),
    ...     training_state_bytes(Layout(dp_shard=2, zero=3), 10),
    ... )
    (320, 160)
    >>> training_state_bytes(Layout(tp=2), 10)
    160
    """
    twice = model_copies(layout.schedule)
    quarter = twice * STATE_BYTES_PER_PARAMETER * parameters / (4 * layout.tp * layout.pp)
    shard = layout.dp_shard
    held = [quarter / (shard if layout.zero >= stage else 1) for stage in (3, 2, 1, 1)]
    replicas = quarter * (layout.threads - 1)
    return math.ceil(layout.processes * sum(held) + replicas)


def check_memory(rows: list[RowPlan], parameters: int, machine: MachineFacts) -> None:
    """Refuse a comparison whose training states exceed host memory; GPU memory is not checked.

    Raises:
        PlanError: names the first such row, the bytes it needs and the bytes available.
    """
    for row in rows:
        if row.layout is None or machine.gpus:
            continue
        need_bytes = training_state_bytes(row.layout, parameters)
        if need_bytes > machine.memory_bytes:
            raise PlanError(memory_shortage_text(row, need_bytes, parameters, machine))


def memory_shortage_text(
    row: RowPlan, need_bytes: int, parameters: int, machine: MachineFacts
) -> str:
    """Return the reason for a row whose states exceed this machine's memory."""
    each_bytes = need_bytes / row.parts
    fewer = int(machine.memory_bytes // each_bytes)
    nearest = f"--processes {fewer}" if 0 < fewer < row.parts else "a smaller model"
    where = f"--processes = {row.parts}" if row.parts > 1 else "single"
    with_layout = f" under {row.strategy}" if row.parts > 1 else ""
    return (
        f"{where}: the states of {count_text(parameters)} parameters take {bytes_text(need_bytes)}"
        f"{with_layout}, this machine has {bytes_text(machine.memory_bytes)}; try: {nearest}"
    )


def add_relative_figures(rows: list[Record], cores: float) -> None:
    """Add to measured rows the figures relative to `single`: speedup, efficiency, differences.

    Args:
        rows: as in compare.json; changed in place. Unknown figures are None.
        cores: cores that compute; if a row has more processes than that, they wait for each other.
            inf on GPUs.
    """
    base = next((row for row in rows if row["layout"] == "single"), None)
    for row in rows:
        row["oversubscribed"] = row["parts"] > cores
        measured, reference = row["per_s"], base["per_s"] if base else None
        row["speedup"] = measured / reference if measured and reference else None
        row["efficiency"] = row["speedup"] / row["parts"] if row["speedup"] else None
        losses = base["losses"] if base else None
        row["spread"] = _spread(row["step_s"])
        row["loss_difference"] = _largest_difference(row["losses"], losses)
        limit = NOISE.get(row["precision"] or "", math.inf)
        known = [row["loss_difference"], row["weight_difference"]]
        row["difference"] = max((one for one in known if one is not None), default=None)
        row["exceeds_noise"] = row["difference"] is not None and row["difference"] > limit
        row["exceeds_noise"] |= bool(row["per_s"]) and None in (row["losses"] or [])


def _spread(step_s: list[float] | None) -> float | None:
    """Return the interquartile range of the step times, relative to their median.

    >>> _spread([1.0, 1.0, 1.0, 1.0, 3.0]), _spread([1.0, 1.5, 2.0, 2.5, 3.0])
    (0.0, 0.5)
    """
    if not step_s or len(step_s) < 2:
        return None
    low, middle, high = statistics.quantiles(step_s, n=4, method="inclusive")
    return (high - low) / middle


def _largest_difference(
    here: list[float | None] | None, there: list[float | None] | None
) -> float | None:
    """Return the largest relative difference of two rows' first losses; None if unknown."""
    if not here or not there:
        return None
    both = list(zip(here, there, strict=False))[:COMPARED_STEPS]
    pairs = [(a, b) for a, b in both if a is not None and b]
    return max((abs(a - b) / abs(b) for a, b in pairs), default=None)
