"""Which rows `shoal compare` has, which of them can run, and what their figures mean together.

All of it is known before any process starts, without torch: names and counts, portions of the
batch, and the memory that the states of all processes take together.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

from shoal.base.errors import ConfigError, PlanError, UserError, one_of
from shoal.base.estimates.facts import MachineFacts
from shoal.base.layouts.layout import PLANNED, STRATEGIES, Layout
from shoal.base.layouts.schedule_names import copies
from shoal.base.layouts.strategies import expand
from shoal.base.plans.batches import turn_of
from shoal.base.plans.plan import Plan
from shoal.base.text.units import bytes_text, count_text
from shoal.planning.layout_guide import STATE_BYTES_PER_PARAMETER
from shoal.planning.micro_batch_sizes import micro_batch_sizes
from shoal.planning.settle import settle_batch

ONE_PROCESS = ("single", "dp")
NOISE = {"fp64": 1e-10, "fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
"""By format: a larger distance from one process than this is more than rounding."""
COMPARED_STEPS = 8
"""First steps in which rows are compared: training magnifies rounding, later steps say nothing."""

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
        """Whether it is worth starting."""
        return not self.reason

    @property
    def processes(self) -> int:
        """How many processes it needs."""
        return 1 if self.strategy in ONE_PROCESS else self.parts


def read_names(text: str) -> list[str]:
    """The layouts of `--layouts`, once each; `single` is always there, as the others' measure.

    Errors: ConfigError for a name outside the vocabulary.

    >>> read_names("ddp,fsdp,ddp")
    ['single', 'ddp', 'fsdp']
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in (*STRATEGIES, *PLANNED):
            raise ConfigError(one_of("--layouts", name, STRATEGIES))
    if not names:
        raise ConfigError("--layouts: is empty; try: --layouts single,ddp")
    return list(dict.fromkeys(names if "single" in names else ["single", *names]))


def read_counts(text: str) -> list[int]:
    """The process counts of `--processes`, ascending, once each.

    >>> read_counts("4,1,2")
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
    """Every row in the order of the table: layouts as they were named, each by rising count.

    One process of a layout that needs several is `single`, and no row of its own. Without a
    micro-batch (0), rows are asked only whether they divide the batch.
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
    if name in PLANNED:
        row.reason = "not built in this version"
        return row
    if name != "single" and count == 1:
        row.reason = "on one process it is single; try: --processes 1,2"
        return row
    try:
        if name == "dp":
            row.layout = expand(name, 1, threads=count)
        else:
            row.layout = expand(name, count)
        settle_batch(Plan(row.layout, batch, micro_batch))
    except UserError as failure:
        row.reason = str(failure)
    return row


def common_micro_batch(rows: list[RowPlan], batch: int) -> int:
    """Return the largest micro-batch that every row can run which can run at all.

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
    return max(set.intersection(*sizes), default=turn_of(batch)) if sizes else turn_of(batch)


def needed_bytes(layout: Layout, parameters: int) -> int:
    """Memory of the states of all ranks of `layout` together, each split as its stage says.

    Formula   per rank 16 bytes = weights 4 + gradients 4 + Adam 8, each of which is divided by
              dp_shard from stage 3, 2, 1 on, and all by tp and pp; a further thread of `dp` holds
              gradients again

    >>> needed_bytes(Layout(dp_replicate=2), 10), needed_bytes(Layout(dp_shard=2, zero=3), 10)
    (320, 160)
    >>> needed_bytes(Layout(tp=2), 10)
    160
    """
    twice = copies(layout.schedule)
    quarter = twice * STATE_BYTES_PER_PARAMETER * parameters / (4 * layout.tp * layout.pp)
    shard = layout.dp_shard
    held = [quarter / (shard if layout.zero >= stage else 1) for stage in (3, 2, 1, 1)]
    replicas = quarter * (layout.threads - 1)
    return math.ceil(layout.processes * sum(held) + replicas)


def check_memory(rows: list[RowPlan], parameters: int, machine: MachineFacts) -> None:
    """Refuse a comparison whose states cannot be held; a GPU's memory is not looked into.

    Errors: PlanError that names the first such row, what it needs and what there is.
    """
    for row in rows:
        if row.layout is None or machine.gpus:
            continue
        need_bytes = needed_bytes(row.layout, parameters)
        if need_bytes > machine.memory_bytes:
            raise PlanError(memory_text(row, need_bytes, parameters, machine))


def memory_text(row: RowPlan, need_bytes: int, parameters: int, machine: MachineFacts) -> str:
    """The line for a row that this machine's memory cannot hold."""
    each_bytes = need_bytes / row.parts
    fewer = int(machine.memory_bytes // each_bytes)
    nearest = f"--processes {fewer}" if 0 < fewer < row.parts else "a smaller model"
    where = f"--processes = {row.parts}" if row.parts > 1 else "single"
    with_layout = f" under {row.strategy}" if row.parts > 1 else ""
    return (
        f"{where}: the states of {count_text(parameters)} parameters take {bytes_text(need_bytes)}"
        f"{with_layout}, this machine has {bytes_text(machine.memory_bytes)}; try: {nearest}"
    )


def finish_rows(rows: list[Record], cores: float) -> None:
    """Add to measured rows what follows from `single`'s: speedup, efficiency, differences.

    Args:
        rows: as in compare.json; changed in place. Blank figures are None.
        cores: that compute: more parts than these wait for each other; inf where GPUs do.
    """
    base = next((row for row in rows if row["layout"] == "single"), None)
    for row in rows:
        row["oversubscribed"] = row["parts"] > cores
        measured, reference = row["per_s"], base["per_s"] if base else None
        row["speedup"] = measured / reference if measured and reference else None
        row["efficiency"] = row["speedup"] / row["parts"] if row["speedup"] else None
        losses = base["losses"] if base else None
        row["spread"] = _spread(row["step_s"])
        row["loss_difference"] = _largest(row["losses"], losses)
        limit = NOISE.get(row["precision"] or "", math.inf)
        known = [row["loss_difference"], row["weight_difference"]]
        row["difference"] = max((one for one in known if one is not None), default=None)
        row["exceeds_noise"] = row["difference"] is not None and row["difference"] > limit
        row["exceeds_noise"] |= bool(row["per_s"]) and None in (row["losses"] or [])


def _spread(step_s: list[float] | None) -> float | None:
    """How far the middle half of the step times lies apart, by their median.

    >>> _spread([1.0, 1.0, 1.0, 1.0, 3.0]), _spread([1.0, 1.5, 2.0, 2.5, 3.0])
    (0.0, 0.5)
    """
    if not step_s or len(step_s) < 2:
        return None
    low, middle, high = statistics.quantiles(step_s, n=4, method="inclusive")
    return (high - low) / middle


def _largest(here: list[float | None] | None, there: list[float | None] | None) -> float | None:
    """Largest relative distance of two sequences of losses at first; None where one is unknown."""
    if not here or not there:
        return None
    both = list(zip(here, there, strict=False))[:COMPARED_STEPS]
    pairs = [(a, b) for a, b in both if a is not None and b]
    return max((abs(a - b) / abs(b) for a, b in pairs), default=None)
