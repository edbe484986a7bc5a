"""Two widely copied tables of memory and speed-up, with full accounting.

Memory: bytes per GPU of single/ddp, ZeRO-1, -2, -3. The copied table counts fp32 weights alone and
names no number of GPUs. Here all states are counted (weights, gradients, optimizer) and, beside
them, the whole peak of a micro-batch. Speed: throughput on n GPUs over one, each GPU with the same
number of samples. The copied table names no hardware and no model, and no single serial share fits
its rows.

Both come from the functions that rank layouts. Only nn.DataParallel, which is no layout of Shoal,
has its own line of arithmetic: one device broadcasts the weights, gathers the outputs, reduces the
gradients and runs the optimizer alone, without any overlap with compute.
Source of the copied figures: planning notes of the field, without source of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.base.errors import PlanError, nearest_word
from shoal.base.estimates.cluster import Cluster
from shoal.base.estimates.estimate import ModelFacts, PlanningCase
from shoal.base.layouts.layout import Layout
from shoal.base.plans.plan import Plan
from shoal.forecast.fit.peak_memory import predict_memory
from shoal.forecast.memory.model_states import ParameterElements, predict_state_bytes
from shoal.forecast.models.published_models import SHAPES, published_shape
from shoal.forecast.models.transformer_costs import transformer_facts
from shoal.forecast.time.step_time import predict_time
from shoal.teach.calculators.scaling import FOLK_GPUS, FOLK_SPEEDUPS

SIZES = {"7b": "llama-2-7b", "13b": "llama-2-13b", "70b": "llama-2-70b"}
"""Sizes as the copied table names them."""

FOLK_MEMORY_GB = {7e9: (28, 14, 7), 13e9: (52, 26, 13), 70e9: (280, 140, 70)}
"""Parameters → GB in the widely copied table for one device, ZeRO-2 and ZeRO-3."""

COPIED_GB = {
    f"llama-2-{round(parameters / 1e9)}b": dict(zip(("single", "zero2", "fsdp"), row, strict=True))
    for parameters, row in FOLK_MEMORY_GB.items()
}
COPIED_SPEEDUP = {
    name.lower(): dict(zip(FOLK_GPUS, row, strict=True)) for name, row in FOLK_SPEEDUPS.items()
}
STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3}
MEMORY_SEQUENCE, SPEED_SEQUENCE, SPEED_MICRO_BATCH = 4096, 2048, 4


def shape_names(text: str) -> list[str]:
    """Return the published names of a list such as "7b,13b,llama-3-70b".

    Raises:
        PlanError: an unknown name; the message names the nearest.

    >>> shape_names("7b, llama-3-70b")
    ['llama-2-7b', 'llama-3-70b']
    """
    names = []
    for word in (word.strip().lower() for word in text.split(",")):
        name = SIZES.get(word, word)
        if name not in SHAPES:
            close = nearest_word(name, [*SIZES, *SHAPES]) or "7b"
            raise PlanError(f"--models {word}: no published model; try: --models {close}")
        names.append(name)
    return names


def gpu_counts(text: str) -> list[int]:
    """Return the numbers of GPUs of a list such as "2,4,8".

    Raises:
        PlanError: an entry is no whole number of at least 1.
    """
    counts = []
    for word in text.split(","):
        if not word.strip().isdecimal() or int(word) < 1:
            raise PlanError(f"--gpus {word.strip()}: whole numbers of at least 1; try: 2,4,8,16")
        counts.append(int(word))
    return counts


@dataclass(frozen=True)
class MemoryRow:
    """One model on one number of GPUs: bytes per GPU by layout; copied: the copied figures."""

    model: str
    parameters: int
    gpus: int
    states_bytes: dict[str, float]
    peak_bytes: dict[str, float]
    copied_bytes: dict[str, float]


def memory_table(models: list[str], counts: list[int], cluster: Cluster) -> list[MemoryRow]:
    """Return bytes per GPU, training with Adam in bf16 over fp32 masters, micro-batch 1.

    >>> from shoal.forecast.machines.cluster_syntax import parse_machines
    >>> row = memory_table(["llama-2-7b"], [8], parse_machines("8xA100-80GB"))[0]
    >>> [round(row.states_bytes[name] / row.parameters, 2) for name in ("ddp", "zero1", "fsdp")]
    [18.0, 7.5, 2.0]
    """
    rows = []
    for name in models:
        model = transformer_facts(published_shape(name), MEMORY_SEQUENCE, 2)
        for gpus in counts:
            states, peaks = {}, {}
            for layout, stage in STAGES.items():
                case = _case(model, cluster, gpus, stage, 1)
                states[layout] = sum(
                    predict_state_bytes(case, ParameterElements(float(model.trainable), 0.0))
                )
                peaks[layout] = predict_memory(case).peak_bytes
            copied = {k: v * 1e9 for k, v in COPIED_GB.get(name, {}).items()}
            rows.append(MemoryRow(name, model.trainable, gpus, states, peaks, copied))
    return rows


@dataclass(frozen=True)
class SpeedRow:
    """One layout: number of GPUs → throughput over one GPU's; None if it cannot run."""

    name: str
    speedups: dict[int, float | None]
    copied: dict[int, float]


def speedup_table(name: str, counts: list[int], cluster: Cluster) -> list[SpeedRow]:
    """Return throughput on n GPUs over one for DP, DDP and FSDP, in micro-batches of 4 samples.

    Args:
        cluster: the kind of machine: its devices and links; as many nodes of it as n needs.
    """
    model = transformer_facts(published_shape(name), SPEED_SEQUENCE, 2)
    one_s = predict_time(_case(model, cluster, 1, 0, SPEED_MICRO_BATCH)).step_s
    found: dict[str, dict[int, float | None]] = {"dp": {}, "ddp": {}, "fsdp": {}}
    for gpus in counts:
        in_one = one_s + _data_parallel_s(model, cluster, gpus)
        found["dp"][gpus] = gpus * one_s / in_one if gpus <= cluster.per_node else None
        for layout in ("ddp", "fsdp"):
            case = _case(model, cluster, gpus, STAGES[layout], SPEED_MICRO_BATCH)
            found[layout][gpus] = gpus * one_s / predict_time(case).step_s
    return [SpeedRow(key, value, COPIED_SPEEDUP[key]) for key, value in found.items()]


def _data_parallel_s(model: ModelFacts, cluster: Cluster, gpus: int) -> float:
    """Return the seconds that nn.DataParallel adds to a step, as device 0 handles all traffic."""
    if gpus == 1:
        return 0.0
    head = model.units[-1]
    words = head.loss_bytes / 12
    outputs_bytes = 2 * 2 * words * SPEED_MICRO_BATCH * (gpus - 1)
    copies_bytes = 2 * 4 * model.trainable
    return (outputs_bytes + copies_bytes) / cluster.inside.bytes_per_s


def _case(
    model: ModelFacts, cluster: Cluster, gpus: int, stage: int, micro_batch: int
) -> PlanningCase:
    per_node = min(gpus, cluster.per_node)
    some = replace(cluster, nodes=-(-gpus // per_node), per_node=per_node)
    split = Layout(dp_shard=gpus, zero=stage) if stage and gpus > 1 else Layout(dp_replicate=gpus)
    plan = Plan(split, gpus * micro_batch, micro_batch, compute="bf16")
    return PlanningCase(model, some, plan)
