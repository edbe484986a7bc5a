"""Facts of a run that its costs and their remedies depend on: plan, loader, memory, devices.

    plan.json      layout, batch, recompute, and the seconds that the planner foresaw by term
    run.toml       loader workers, and own collate functions
    metrics.jsonl  peak memory, and whose clock timed the phases
    devices.jsonl  utilisation and memory of each device, every 10 s
    ranks.json     hosts, so that the memory of this machine is not taken for another's

Each file may be missing, damaged or hostile; a fact that is unknown is None, 0 or "".
"""

from __future__ import annotations

import math
import os
import re
import statistics
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.base.layouts.schedule_names import SCHEDULES
from shoal.base.runlog.damaged_lines import (
    Record,
    is_number,
    iter_newest_lines,
    parse_object,
    read_object,
)
from shoal.view.script_lines import is_user_script

DEVICE_LINES = 200
"""Lines at the end of devices.jsonl that are read."""
SENT = ("gradients", "parameters", "tensor", "context", "experts", "pipeline")
"""Foreseen terms that are communication; a term may end in the placement of its group."""
TABLES = re.compile(r"embed|wte|wpe|tok_|position")
"""Names of weights that are looked up, not multiplied."""


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run.

    Attributes:
        is_script: a loop of the user's own made the run.
        is_loop_timed: its own code between two steps is known apart from its data.
        stages: ranks of a pipeline.
        schedule, chunks: its schedule, and stages of each of its ranks.
        stage_work: elements of the matrices of each stage; () if unknown.
        accumulate, micro_batch: micro-batches of a step, and samples of each.
        recompute, offload, compute: settings of the plan.
        foreseen_s: seconds of a step that the planner foresaw, by term.
        activation_bytes: foreseen activations of a rank; without a forecast its whole peak, which
            holds them.
        workers: loader processes of each rank.
        timed_by: "host" or "device".
        utilisation: median over devices and time, 0 to 1; None if unknown.
        memory_bytes: memory for one rank; 0 if unknown.
        peak_bytes: highest memory of a rank.
    """

    is_script: bool = False
    is_loop_timed: bool = False
    stages: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    stage_work: tuple[float, ...] = ()
    accumulate: int = 1
    micro_batch: int = 1
    recompute: str = "none"
    offload: str = "none"
    compute: str = ""
    device: str = ""
    foreseen_s: dict[str, float] = field(default_factory=dict)
    activation_bytes: float = 0.0
    workers: int = 0
    timed_by: str = "host"
    utilisation: float | None = None
    memory_bytes: float = 0.0
    peak_bytes: float = 0.0

    @property
    def arithmetic_s(self) -> float:
        """Return the predicted seconds of matrix products and element-wise work."""
        return sum(self.foreseen_s.get(term, 0.0) for term in ("matrix", "elementwise"))

    @property
    def launch_s(self) -> float:
        """Return the predicted seconds of launching operations, and of each micro-batch."""
        return self.foreseen_s.get("constants", 0.0)

    @property
    def sent_s(self) -> float:
        """Return the predicted seconds of exposed communication."""
        return sum(s for term, s in self.foreseen_s.items() if term.startswith(SENT))

    def has_room(self, more_bytes: float) -> bool:
        """Return whether a rank's memory would hold so much more, with a tenth to spare."""
        return self.peak_bytes > 0 and self.peak_bytes + more_bytes < 0.9 * self.memory_bytes


def read_run_facts(folder: Path, rows: Sequence[Record], ranks: int) -> RunFacts:
    """Return the facts of a run.

    Args:
        folder: the run's.
        rows: newest lines of metrics.jsonl.
        ranks: number of ranks.
    """
    plan = read_object(folder / "plan.json")
    layout = plan.get("layout")
    stages = _count(layout.get("pp")) if isinstance(layout, dict) else 1
    foreseen = plan.get("predicted")
    foreseen = foreseen if isinstance(foreseen, dict) else {}
    terms, memory = foreseen.get("time"), foreseen.get("memory")
    devices = _read_devices(folder / "devices.jsonl")
    used = [one["utilisation"] for one in devices if is_number(one.get("utilisation"))]
    last, peak_bytes = rows[-1] if rows else {}, max(_peaks(rows), default=0.0)
    device = str(plan.get("device") or "")
    return RunFacts(
        is_script=is_user_script(folder),
        is_loop_timed=bool(rows) and is_number(rows[-1].get("loop_s")),
        stages=stages,
        schedule=_schedule_name(layout),
        chunks=_count(layout.get("chunks")) if isinstance(layout, dict) else 1,
        stage_work=_stage_work(plan.get("placements"), stages),
        accumulate=_count(plan.get("accumulate")),
        micro_batch=_count(plan.get("micro_batch")),
        recompute=str(plan.get("recompute") or "none"),
        offload=str(plan.get("offload") or "none"),
        compute=str(plan.get("compute") or ""),
        device=device,
        foreseen_s=_positive_numbers(terms),
        activation_bytes=_positive_numbers(memory).get("activations", peak_bytes),
        workers=_read_workers(folder / "run.toml"),
        timed_by="device" if last.get("timed_by") == "device" else "host",
        utilisation=min(1.0, max(0.0, statistics.median(used))) if used else None,
        memory_bytes=_rank_memory(folder, devices, device, ranks),
        peak_bytes=peak_bytes,
    )


def _count(value: Any) -> int:
    return int(value) if is_number(value) and 1 <= value <= 1 << 20 else 1


def _schedule_name(layout: Any) -> str:
    name = layout.get("schedule") if isinstance(layout, dict) else None
    return name if isinstance(name, str) and name in SCHEDULES else "1f1b"


def _positive_numbers(found: Any) -> dict[str, float]:
    if not isinstance(found, dict):
        return {}
    return {str(key): float(one) for key, one in found.items() if is_number(one) and one > 0}


def _peaks(rows: Iterable[Record]) -> Iterable[float]:
    for row in rows:
        peak = row.get("peak_memory_bytes")
        if is_number(peak):
            yield float(peak)


def _read_workers(path: Path) -> int:
    try:
        section = tomllib.loads(path.read_text(encoding="utf-8")).get("data")
    except (OSError, ValueError):
        return 0
    workers = section.get("workers") if isinstance(section, dict) else 0
    return int(workers) if is_number(workers) and 0 <= workers <= 1 << 12 else 0


def _read_devices(path: Path) -> list[Record]:
    """Return the entries of the newest lines of devices.jsonl."""
    found: list[Record] = []
    for line in iter_newest_lines(path, DEVICE_LINES):
        entries = (parse_object(line) or {}).get("devices")
        if isinstance(entries, list):
            found += [one for one in entries if isinstance(one, dict)]
    return found


def _rank_memory(folder: Path, devices: list[Record], device: str, ranks: int) -> float:
    """Return the memory of a rank's device, or its share of the host's; 0 if unknown."""
    sizes = [
        one["memory_total_bytes"] for one in devices if is_number(one.get("memory_total_bytes"))
    ]
    if sizes:
        return float(min(sizes))
    entries = read_object(folder / "ranks.json").get("ranks")
    hosts = [str(one.get("host")) for one in entries or () if isinstance(one, dict)]
    if device != "cpu" or any(host != os.uname().nodename for host in hosts):
        return 0.0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / max(1, ranks)


def _stage_work(placements: Any, stages: int) -> tuple[float, ...]:
    """Return the elements of each stage's matrices; () without a pipeline."""
    work = [0.0] * stages
    if stages < 2 or not isinstance(placements, list):
        return ()
    for one in placements:
        shape, at = (one.get("shape"), one.get("stages")) if isinstance(one, dict) else (None, None)
        if not isinstance(shape, list) or not isinstance(at, list) or len(shape) < 2:
            continue
        if TABLES.search(str(one.get("name"))) or not all(is_number(size) for size in shape):
            continue
        for stage in at:
            if isinstance(stage, int) and 0 <= stage < stages:
                work[stage] += math.prod(float(size) for size in shape)
    return tuple(work)
