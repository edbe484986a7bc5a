"""Predicted against published step times of runs in bf16 and fp16, source by source.

    python benchmarks/planner/throughput.py [--rows] [--json FILE]

Rows of data/planner_validation.csv that state tokens/s, TFLOP/s or seconds and enough of the run
are turned into cases. What a row leaves blank is filled from its publication; where that does not
say either, the fill is named and the row shown apart, never fitted to. Left out, and counted:
float8, models without a published shape, unknown sequence lengths.

Two predictions: with the default that ships (`calibrations.GPU`, fitted to the stated runs of
torchtitan, llm-foundry and Korthikanti et al. together), and with a default fitted to the other
projects only. Megatron-LM's functional tests are shown but fitted to by neither: they run
deterministic kernels, and some do not say on how many GPUs.
Error = predicted step time / measured − 1.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median

from fit import fit_steps
from planned_case import case_of
from rows import memory_rows

from shoal.base.estimates.cluster import Calibration, Cluster
from shoal.base.estimates.estimate import PlanningCase
from shoal.base.estimates.transformer_shape import TransformerShape
from shoal.base.layouts.layout import Layout
from shoal.forecast.machines.calibrations import GPU, GPU_PRIOR
from shoal.forecast.machines.cluster_syntax import parse_machines
from shoal.forecast.memory.framework_memory import framework_memory
from shoal.forecast.models.published_models import published_shape
from shoal.forecast.models.transformer_costs import Kernels, transformer_facts
from shoal.forecast.time.step_terms import step_terms
from shoal.forecast.time.step_time import predict_time

DATA = Path(__file__).parent / "data" / "planner_validation.csv"
Record = dict[str, str]

MEGATRON_2021 = {
    3.6: (2, 1), 18.4: (8, 1), 39.1: (8, 2), 145.6: (8, 8),
    310.1: (8, 16), 529.6: (8, 35), 1008.0: (8, 64),
}  # fmt: skip
"""Tensor and pipeline degrees by billions of parameters: Narayanan et al. 2021, table 1."""

KORTHIKANTI_CHUNKS = {"GPT3-175B": 3, "Turing-530B": 3, "1T": 1}
"""Interleaved stages per rank: Korthikanti et al. 2022, table 3."""


@dataclass(frozen=True)
class Result:
    """One published run and what was foreseen of it, in seconds per step.

    predicted_s  with the default that ships · apart_s  with one fitted to other projects only
    assumed      what neither the row nor its publication says; "" where nothing is missing
    """

    source: str
    project: str
    model: str
    gpus: int
    device: str
    layout: str
    note: str
    assumed: str
    measured_s: float
    predicted_s: float
    apart_s: float
    parts: dict[str, float]

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def error_apart(self) -> float:
        return self.apart_s / self.measured_s - 1


@dataclass(frozen=True)
class Run:
    """A row as a case."""

    record: Record
    project: str
    case: PlanningCase
    measured_s: float
    assumed: str

    @property
    def fitted(self) -> bool:
        """Whether the default may be fitted to it: stated, and no functional test."""
        return not self.assumed and self.project != "Megatron-LM tests"


def machine(record: Record, cards: str = "") -> Cluster:
    """Nodes of eight of the row's GPU, with the usual network where the source names none."""
    gpus = int(record["gpus"])
    kind = record["gpu_type"].upper().replace("_", "-").replace(" ", "-")
    if "A100" in kind:
        name = "A100-80GB"
    else:
        name = "H100-96GB" if "96GB" in kind or "95GB" in kind else "H100-80GB"
    nodes = f"{-(-gpus // 8)}x{min(8, gpus)}x{name}"
    return parse_machines(f"{nodes},{cards}" if cards else nodes)


def whole(record: Record, key: str, default: int = 0) -> int:
    return int(record[key]) if record[key] else default


def seconds(record: Record, case: PlanningCase, flops: float = 0.0) -> float:
    """The measured step: as stated, or from tokens/s or TFLOP/s per GPU."""
    value, metric = float(record["value"]), record["metric"]
    gpus = case.layout.processes
    if metric == "iteration_time":
        return value if record["unit"] == "s" else value / 1e3
    if metric == "tokens_per_s_per_gpu":
        return case.batch * case.model.sequence / (value * gpus)
    return (flops or 3 * case.model.forward_flops * case.batch) / (value * 1e12 * gpus)


def titan(record: Record) -> tuple[PlanningCase, str]:
    eager = "eager" in record["note"]
    habits = framework_memory("torchtitan")
    facts = transformer_facts(
        published_shape(record["model"].lower()), int(record["seq"]), 2,
        habits.kernels if eager else habits.compiled,
    )  # fmt: skip
    gpus = int(record["gpus"])
    compiled = not eager
    old = "docs/performance" in record["source"]
    case = case_of(
        facts, Layout(dp_shard=gpus, zero=3), machine(record),
        batch=whole(record, "micro_batch") * gpus, micro_batch=whole(record, "micro_batch"),
        recompute=record["recompute"].split()[0], loss="full", framework="torchtitan",
        compile="blocks" if compiled else "none",
    )  # fmt: skip
    return case, "compiled: not stated" if old else ""


def foundry(record: Record) -> tuple[PlanningCase, str]:
    """MPT: ALiBi instead of positions, no biases, tied embedding, flash attention."""
    hidden, heads = int(record["hidden"]), int(record["heads"])
    shape = TransformerShape(
        record["model"], int(record["layers"]), hidden, heads, heads, int(record["ffn"]),
        int(record["vocab"]), gated=False, norm="layer", tied=True,
    )  # fmt: skip
    facts = transformer_facts(shape, int(record["seq"]), 2)
    gpus = int(record["gpus"])
    case = case_of(
        facts, Layout(dp_shard=gpus, zero=3),
        machine(record, "ib=8x200Gb" if "A100" in record["source"] else ""),
        batch=int(record["global_batch"]), micro_batch=int(record["micro_batch"]),
        recompute=record["recompute"], loss="full", framework="llm-foundry",
        reduce="bf16" if "PURE" in record["precision"] else "auto",
    )  # fmt: skip
    return case, ""


def gpt(record: Record, *, positions: int, flash: bool, vocabulary: int) -> TransformerShape:
    hidden = int(record["hidden"])
    heads = whole(record, "heads") or hidden // 128
    return TransformerShape(
        record["model"], int(record["layers"]), hidden, heads, heads, 4 * hidden, vocabulary,
        gated=False, norm="layer", tied=True, biases=True, positions=positions,
        dropout=0.0 if flash else 0.1,
    )  # fmt: skip


def megatron_2021(record: Record) -> tuple[PlanningCase, str]:
    tp, pp = MEGATRON_2021[float(record["params_b"])]
    gpus, chunks = int(record["gpus"]), 2 if pp > 1 else 1
    shape = gpt(record, positions=2048, flash=False, vocabulary=51200)
    if shape.layers % (pp * chunks):
        chunks = 1
    facts = transformer_facts(shape, 2048, 2, Kernels(flash=False))
    layout = Layout(pp=pp, dp_replicate=gpus // (tp * pp), tp=tp)
    case = case_of(
        facts, layout, machine(record, "ib=8x200Gb"), batch=int(record["global_batch"]),
        micro_batch=1, schedule="interleaved" if chunks > 1 else "1f1b", chunks=chunks,
        compute="fp16", recompute="full", sequence_parallel="off", loss="parallel",
        framework="megatron",
    )  # fmt: skip
    return case, "micro-batch 1, two chunks"


def megatron_2024(record: Record) -> tuple[PlanningCase, str]:
    gpus = int(record["gpus"])
    tp, pp = int(record["tp"]), int(record["pp"])
    shape = gpt(record, positions=4096, flash=True, vocabulary=131072)
    layout = Layout(pp=pp, dp_shard=gpus // (tp * pp), tp=tp, zero=1)
    case = case_of(
        transformer_facts(shape, 4096, 2, framework_memory("megatron").kernels), layout,
        machine(record),
        batch=int(record["global_batch"]), micro_batch=1, loss="parallel", framework="megatron",
        schedule="1f1b", compile="blocks",
    )  # fmt: skip
    return case, "micro-batch 1, 1f1b"


def korthikanti(record: Record) -> tuple[PlanningCase, str]:
    chunks = KORTHIKANTI_CHUNKS[record["model"]]
    full = record["recompute"] == "full"
    shape = gpt(record, positions=2048, flash=False, vocabulary=51200)
    layout = Layout(pp=int(record["pp"]), tp=8)
    case = case_of(
        transformer_facts(shape, 2048, 2, Kernels(flash=False)), layout, machine(record),
        batch=int(record["global_batch"]), micro_batch=1, chunks=chunks,
        schedule="interleaved" if chunks > 1 else "1f1b", compute="fp16",
        recompute="full" if full else "selective", loss="parallel", framework="megatron",
        sequence_parallel="off" if full else "on",
    )  # fmt: skip
    return case, ""


def llama_405b(record: Record) -> tuple[PlanningCase, str]:
    """16M tokens per batch; sequences of 8 192, or of 131 072 with 16 context-parallel ranks.

    Weights stay gathered between forward and backward (2407.21783, §3.3.2): zero 2, gradients once.
    """
    cp = int(record["cp"])
    sequence = 131072 if cp > 1 else 8192
    layout = Layout(pp=16, dp_shard=16384 // (16 * 8 * cp), cp=cp, tp=8, zero=2)
    case = case_of(
        transformer_facts(published_shape("llama-3.1-405b"), sequence, 2), layout, machine(record),
        batch=2**24 // sequence, micro_batch=1, schedule="interleaved", chunks=8,
        loss="parallel", framework="megatron", compile="blocks", defer_sync=True,
    )  # fmt: skip
    return case, "eight chunks"


def automodel(record: Record) -> tuple[PlanningCase, str]:
    """Llama only: the mixtures beside it have no shape here; its TFLOP/s repeat its tokens/s."""
    if "Llama" not in record["model"] or record["metric"] != "tokens_per_s_per_gpu":
        raise KeyError(record["model"])
    facts = transformer_facts(published_shape("llama-3-70b"), int(record["seq"]), 2)
    case = case_of(
        facts, Layout(dp_shard=32, cp=2, zero=3), machine(record), batch=128, micro_batch=1,
        recompute="full", loss="full", framework="automodel",
    )  # fmt: skip
    return case, "full recompute"


def megatron_test(record: Record) -> tuple[PlanningCase, str]:
    """The tests of at least 7B, as filled for memory; not T5, which has two sequence lengths."""
    if record["model"].startswith("t5"):
        raise KeyError(record["model"])
    for row in memory_rows(DATA):
        same = row.source == record["source"]
        if same and row.case is not None and row.gated and "GB200" not in record["gpu_type"]:
            cluster = machine({**record, "gpus": str(row.case.layout.processes)})
            return replace(row.case, cluster=cluster), ""
    raise KeyError(record["model"])


READERS: tuple[tuple[str, str, Callable[[Record], tuple[PlanningCase, str]]], ...] = (
    ("torchtitan", "torchtitan", titan),
    ("llm-foundry", "llm-foundry", foundry),
    ("Megatron-LM README images/cases", "Megatron-LM 2021", megatron_2021),
    ("Megatron-LM README images/model", "Megatron-Core 2024", megatron_2024),
    ("Megatron-LM tests", "Megatron-LM tests", megatron_test),
    ("arXiv:2205.05198", "Korthikanti 2022", korthikanti),
    ("Llama-3 paper", "Llama 3 paper", llama_405b),
    ("NVIDIA-NeMo/Automodel", "Automodel", automodel),
)
METRICS = (
    "tokens_per_s_per_gpu", "iteration_time", "model_tflops_per_gpu", "hardware_tflops_per_gpu",
)  # fmt: skip


def runs() -> tuple[list[Run], int]:
    """Every row that can be turned into a case, and how many with a time cannot."""
    found: list[Run] = []
    left = 0
    with DATA.open(encoding="utf-8", newline="") as file:
        for record in csv.DictReader(file):
            if record["metric"] not in METRICS:
                continue
            try:
                if "8" in record["precision"].replace("bf16", "").replace("fp16", ""):
                    raise KeyError("float8")
                _, project, reader = next(
                    row for row in READERS if record["source"].startswith(row[0])
                )
                case, assumed = reader(record)
            except (KeyError, ValueError, StopIteration):
                left += 1
                continue
            flops = 0.0
            if record["metric"] == "hardware_tflops_per_gpu":
                flops = 4 * case.model.forward_flops * case.batch
            found.append(Run(record, project, case, seconds(record, case, flops), assumed))
    return found, left


def fitted(found: list[Run], without: str = "") -> Calibration:
    """The default fitted to every stated run but a project's."""
    kept = [run for run in found if run.fitted and run.project != without]
    terms = [step_terms(run.case) for run in kept]
    return fit_steps(terms, [run.measured_s for run in kept], GPU_PRIOR).calibration


def timed(run: Run, calibration: Calibration) -> Result:
    """A run predicted with the shipped default and with another."""
    case, record = run.case, run.record
    shipped = predict_time(replace(case, cluster=replace(case.cluster, calibration=GPU)))
    apart = predict_time(replace(case, cluster=replace(case.cluster, calibration=calibration)))
    return Result(
        record["source"], run.project, record["model"], case.layout.processes,
        record["gpu_type"], case.layout.text(), record["note"], run.assumed, run.measured_s,
        shipped.step_s, apart.step_s, shipped.parts,
    )  # fmt: skip


def results() -> tuple[list[Result], int]:
    """Every run, predicted with the shipped default and without its own project's runs."""
    found, left = runs()
    projects = {run.project for run in found}
    apart = {project: fitted(found, project) for project in projects}
    return [timed(run, apart[run.project]) for run in found], left


def show(name: str, group: list[Result]) -> None:
    errors = [one.error for one in group]
    apart = [one.error_apart for one in group]
    print(
        f"{name:<36} {len(group):4}  {mean(map(abs, errors)):7.1%} {mean(errors):+7.1%} "
        f"{max(errors, key=abs):+7.1%}   {mean(map(abs, apart)):7.1%} {max(apart, key=abs):+7.1%}"
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--rows", action="store_true", help="every row, with its parts")
    arguments.add_argument(
        "--fit", action="store_true", help="the default's constants, fitted anew"
    )
    given = arguments.parse_args()
    if given.fit:
        calibration = fitted(runs()[0])
        print({k: round(v, 2) for k, v in calibration.efficiency.items()})
        print({k: round(v, 5) for k, v in calibration.constants_s.items()})
        return
    found, left = results()
    groups: dict[str, list[Result]] = defaultdict(list)
    for one in found:
        groups[one.project + (f" ({one.assumed})" if one.assumed else "")].append(one)
    print(f"{'':<36} rows  mean |e|    bias   worst   other projects: mean |e|, worst")
    for name, group in groups.items():
        show(name, group)
        for one in group if given.rows else []:
            parts = " ".join(f"{k} {v:.2f}" for k, v in one.parts.items() if v > 0.005)
            print(
                f"    {one.model[:22]:<22} {one.gpus:6} {one.device[:10]:<10} {one.error:+6.1%} "
                f"{one.error_apart:+6.1%} {one.measured_s:8.2f} s  {parts}"
            )
    judged = [one for one in found if not one.assumed and one.project != "Megatron-LM tests"]
    show("stated runs", judged)
    middle = median(abs(one.error) for one in judged)
    apart = median(abs(one.error_apart) for one in judged)
    print(f"median {middle:.1%}, fitted to other projects only {apart:.1%}; left out: {left} rows")
    if given.json:
        rows = [{**asdict(one), "error": one.error} for one in found]
        given.json.write_text(json.dumps({"rows": rows, "left_out": left}, indent=1) + "\n")


if __name__ == "__main__":
    main()
