"""`shoal plan --table memory|speedup`: two widely copied tables, recomputed in full."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer

from shoal.base.errors import PlanError, check_choice
from shoal.forecast.machines.cluster_syntax import parse_machines
from shoal.teach.text_tables import (
    MEMORY_SEQUENCE,
    SPEED_MICRO_BATCH,
    SPEED_SEQUENCE,
    MemoryRow,
    SpeedRow,
    gpu_counts,
    memory_table,
    shape_names,
    speedup_table,
)

TABLES = ("memory", "speedup")
COLUMNS = ("ddp", "zero1", "zero2", "fsdp")
USUAL = "8xA100-80GB"
SPEED_MODEL = "gpt-3-1.3b"


def print_table(table: str, models: str, gpus: str, machines: str, as_json: bool) -> None:
    """Print the widely copied table `memory` or `speedup`, recomputed, as text or JSON.

    Args:
        models: names with commas, as "7b,llama-3-70b"; `speedup` uses only the first.
        gpus: counts with commas, as "2,4,8".
        machines: as `shoal plan --on`; "": 8xA100-80GB.

    Raises:
        PlanError: another table, an unknown model or machine, or a count that is none.
    """
    check_choice("--table", table, TABLES, kind=PlanError)
    cluster = parse_machines(machines or USUAL)
    counts = gpu_counts(gpus)
    if table == "memory":
        rows = memory_table(shape_names(models), counts, cluster)
        text = memory_lines(rows)
        record = [asdict(row) for row in rows]
    else:
        name = SPEED_MODEL if models in ("", "7b,13b,70b") else shape_names(models)[0]
        speeds = speedup_table(name, counts, cluster)
        text = speed_lines(speeds, counts, name, machines or USUAL)
        record = [asdict(row) for row in speeds]
    typer.echo(json.dumps(record, indent=1) if as_json else "\n".join(text))


def memory_lines(rows: list[MemoryRow]) -> list[str]:
    """Return the memory table as text."""
    lines = [
        "memory per GPU, GB (10⁹ bytes): Adam, bf16 over fp32 masters, fp32 gradients;",
        f"peak: sequence {MEMORY_SEQUENCE}, 1 sample per micro-batch, nothing recomputed,",
        "with the device's context and the allocator's slack",
        "",
        f"{'model':<14}{'GPUs':>5}  {'':<7}" + "".join(f"{name:>9}" for name in COLUMNS),
    ]
    for row in rows:
        states = "".join(f"{row.states_bytes[name] / 1e9:9.1f}" for name in COLUMNS)
        peaks = "".join(f"{row.peak_bytes[name] / 1e9:9.1f}" for name in COLUMNS)
        lines.append(f"{row.model:<14}{row.gpus:>5}  {'states':<7}{states}")
        lines.append(f"{'':<14}{'':>5}  {'peak':<7}{peaks}")
    copied = {row.model: row.copied_bytes for row in rows if row.copied_bytes}
    if copied:
        lines += ["", "as notes copy it from each other (fp32 weights alone, no GPU count):"]
        for model, figures in copied.items():
            words = ", ".join(f"{name} {size / 1e9:.0f}" for name, size in figures.items())
            lines.append(f"{model:<14}  {words}")
    return lines


def speed_lines(rows: list[SpeedRow], counts: list[int], model: str, machines: str) -> list[str]:
    """Return the speed-up table as text."""
    lines = [
        f"throughput over one GPU, predicted: {model}, sequence {SPEED_SEQUENCE}, "
        f"{SPEED_MICRO_BATCH} samples per GPU and step, bf16,",
        f"on nodes as in {machines}; in brackets: as notes copy it, without model or hardware",
        "",
        f"{'GPUs':<8}" + "".join(f"{count:>17}" for count in counts),
    ]
    for row in rows:
        cells = []
        for count in counts:
            value, copied = row.speedups[count], row.copied.get(count)
            text = "one node" if value is None else f"{value:.2f}"
            cells.append(f"{text + (f' ({copied:g})' if copied else ''):>17}")
        lines.append(f"{row.name.upper():<8}" + "".join(cells).rstrip())
    lines += [
        "",
        "DP: one process; weights, outputs and gradients pass through one GPU, nothing overlaps.",
        "FSDP moves 1.5 times DDP's bytes; it wins back the optimizer's step, which it splits.",
    ]
    return lines
