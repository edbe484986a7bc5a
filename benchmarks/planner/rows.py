"""Rows of the published measurements as cases that the planner can predict.

A row of data/planner_validation.csv states a figure and most of the run; what it leaves blank is
filled here from the cited test's own configuration (named per fill). A row that cannot be filled
says why and is not judged by.

Source   data/planner_validation.csv cites every row. Fills: Megatron-LM, tests/functional_tests/
         test_cases/*/model_config.yaml; torchtitan at 9dec370, benchmarks/llama3_h100_202412_
         torchtitan.md and torchtitan/models/llama/__init__.py
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_tests import CASES, FILLS, STEADY, Fill, small_fill, t5_facts
from planned_case import case_of

from shoal.base.estimates.cluster import Cluster, Device, Link
from shoal.base.estimates.estimate import PlanningCase
from shoal.base.layouts.layout import Layout
from shoal.forecast.fit.peak_memory import predict_memory
from shoal.forecast.memory.framework_memory import framework_memory
from shoal.forecast.models.published_models import published_shape
from shoal.forecast.models.transformer_costs import transformer_facts

DATA = Path(__file__).parent / "data" / "planner_validation.csv"
UNITS = {"GiB": 2.0**30, "GB": 1e9, "MiB": 2.0**20, "bytes": 1.0}
PEAKS = {
    "peak_memory": "reserved",
    "memory_used": "used",
    "max_reserved": "reserved",
    "max_allocated": "allocated",
    "max_allocated_bytes": "allocated",
    "peak_active": "allocated",
}
"""Metrics that are a peak, and which quantity of torch's allocator they are."""


@dataclass(frozen=True)
class Row:
    """One measured peak: what was measured where, and the case that should predict it.

    line       of the CSV file · what  "reserved" or "allocated" · stage  −1: the last rank
    group      project + model + layout; all GPU types together
    case       None where the row cannot be filled: `why` says what is missing
    gated      judged by: bf16, at least 7B, published model and layout
    filled     what the row leaves blank, with its source
    steady_bytes  the same run's states, where it reports them
    """

    line: int
    source: str
    device: str
    group: str
    what: str
    measured_bytes: float
    case: PlanningCase | None = None
    stage: int | None = None
    gated: bool = False
    why: str = ""
    filled: tuple[str, ...] = ()
    steady_bytes: float = 0.0


def memory_rows(path: Path = DATA) -> list[Row]:
    """Every measured peak of the file, in its order."""
    with path.open(encoding="utf-8", newline="") as file:
        records = list(csv.DictReader(file))
    steady: dict[tuple[str, str], float] = {}
    for record in records:
        if record["metric"] == "allocated_bytes_steady":
            steady[record["source"], record["model"]] = float(record["value"])
    gpus = _gpus(steady)
    rows = []
    for line, record in enumerate(records, 2):
        if record["metric"] not in PEAKS:
            continue
        row = Row(
            line=line,
            source=record["source"],
            device=record["gpu_type"],
            group="",
            what=PEAKS[record["metric"]],
            measured_bytes=float(record["value"]) * UNITS[record["unit"]],
            steady_bytes=steady.get((record["source"], record["model"]), 0.0),
        )
        rows.append(_filled(row, record, gpus))
    return rows


def _gpus(steady: dict[tuple[str, str], float]) -> dict[str, int]:
    """GPUs of the tests that do not say: whole nodes, batch divided evenly, states as measured."""
    measured = defaultdict(list)
    for (_, model), size in steady.items():
        measured[model].append(size)
    found = {}
    for model, fill in FILLS.items():
        if fill.gpus or model not in measured:
            continue
        ranks = fill.tp * fill.pp * fill.cp
        least = math.lcm(8, ranks, fill.pp * fill.ep * (fill.expert_tp or fill.tp))
        legal = [
            world
            for world in range(least, 97 * least, least)
            if fill.batch % (fill.micro_batch * world // ranks) == 0
        ]
        misses = {
            world: sum(
                abs(math.log(_states(_megatron_case(fill, world, "")) / size))
                for size in measured[model]
            )
            for world in legal
        }
        found[model] = min(misses, key=lambda world: misses[world])
    return found


def _states(case: PlanningCase) -> float:
    parts = predict_memory(case, -1).parts
    return parts["weights"] + parts["gradients"] + parts["optimizer"]


def _filled(row: Row, record: dict[str, str], gpus: dict[str, int]) -> Row:
    if record["source"].startswith("torchtitan"):
        return _titan(row, record)
    if record["source"].startswith("Megatron-LM"):
        return _megatron(row, record, gpus)
    group = f"{record['source']} · {record['model']}"
    return replace(row, group=group, why="sequence, micro-batch or model not stated by the source")


def _cluster(gpus: int, device: str) -> Cluster:
    """Devices of the row; links do not matter to memory."""
    link = Link("any", 0.0, 1e11)
    return Cluster(Device(device, 80e9, {}, 2e12), max(1, gpus // 8), min(8, gpus), link, link)


def _titan(row: Row, record: dict[str, str]) -> Row:
    """torchtitan states everything but the vocabulary, which is the model's."""
    name = record["model"].lower()
    group = f"torchtitan · {record['model']} · FSDP × {record['gpus']}"
    eager = "eager" in record["note"]
    wide = "bf16" in record["precision"]
    why = "" if wide else "float8: reported, not judged by"
    habits = framework_memory("torchtitan")
    kernels = habits.kernels if eager else habits.compiled
    facts = transformer_facts(published_shape(name), int(record["seq"]), 2, kernels)
    gpus, cp = int(record["gpus"]), int(record["cp"] or 1)
    year = "torchtitan" if "202412" in record["source"] else "torchtitan-2025"
    tp, pp = int(record["tp"] or 1), int(record["pp"] or 1)
    layout = Layout(pp=pp, dp_shard=gpus // (cp * tp * pp), cp=cp, tp=tp, zero=3)
    # a pipeline cuts the local batch (8 in the note) into as many micro-batches as it has stages
    micro_batch = int(record["micro_batch"] or 1)
    case = case_of(
        facts,
        layout,
        _cluster(gpus, record["gpu_type"]),
        batch=micro_batch * layout.data_degree * pp,
        micro_batch=micro_batch,
        recompute=record["recompute"],
        loss="full",
        compile="none" if eager else "blocks",
        framework=year,
    )
    filled = ("vocabulary 128256: published shape",)
    return replace(row, group=group, case=case, gated=wide, why=why, filled=filled)


def _megatron(row: Row, record: dict[str, str], gpus: dict[str, int]) -> Row:
    """Megatron's functional tests log torch's allocated peak of the last rank."""
    name = record["model"]
    group = f"Megatron-LM · {name}"
    fill = FILLS.get(name)
    if fill is None:
        fill = small_fill(record)
        if fill is None:
            why = "encoder and decoder, or parts that the planner has no shape for"
            return replace(row, group=group, stage=-1, why=why)
        case = _megatron_case(fill, int(record["gpus"]), row.device)
        return replace(row, group=group, stage=-1, case=case, why="below 7B: reported")
    world = fill.gpus or gpus[name]
    folder = next((kind for kind in ("mixtral", "t5") if name.startswith(kind)), "gpt")
    filled = (
        f"vocabulary, ffn, dropout, batch, chunks: {CASES.format(f'{folder}/{name}')}",
        f"{world} GPUs: {'recipe, 1 node of 8' if fill.gpus else STEADY}",
    )
    case = _megatron_case(fill, world, row.device)
    return replace(row, group=group, case=case, stage=-1, gated=True, filled=filled)


def _megatron_case(fill: Fill, gpus: int, device: str) -> PlanningCase:
    kernels = replace(framework_memory("megatron").kernels, flash=fill.flash)
    t5 = fill.shape.name.startswith("t5")
    facts = (
        t5_facts(fill.shape, kernels)
        if t5
        else transformer_facts(fill.shape, fill.sequence, 2, kernels)
    )
    return case_of(
        facts,
        Layout(
            pp=fill.pp,
            dp_shard=gpus // (fill.tp * fill.pp * fill.cp),
            cp=fill.cp,
            tp=fill.tp,
            zero=int(fill.distributed),
        ),
        _cluster(gpus, device),
        batch=fill.batch,
        micro_batch=fill.micro_batch,
        ep=fill.ep,
        expert_tp=fill.expert_tp,
        schedule="interleaved" if fill.chunks > 1 else "1f1b",
        chunks=fill.chunks,
        recompute=fill.recompute,
        sequence_parallel="on" if fill.sequence_parallel else "off",
        loss="full",
        framework="megatron",
    )
