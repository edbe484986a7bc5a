"""Memory against the plan: what a step holds on the device beside what the planner said."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from child import Sheet
from device import DEVICE, ON_GPU, SMALL, pick
from machine_case import TINY
from shoal.config.load import load_config
from shoal.data.sources import open_source
from shoal.fabric import World, start_world
from shoal.machine.measure import measure_machine, quick_sizes
from shoal.trainer.jobs.benchmark_row import measure_row
from training_programs import residual_formats

SIZES = pick(
    ["model.dim=1024", "model.layers=12", "data.sequence=1024", "train.batch=16"],
    ["model.dim=64", "model.layers=2", "data.sequence=32", "train.batch=4"],
)
CASES = [
    ("bf16", "fp32", "none", "none"),
    ("bf16", "bf16", "none", "none"),
    ("bf16", "bf16", "full", "none"),
    ("bf16", "fp32", "full", "none"),
    ("bf16", "fp32", "selective", "none"),
    ("fp32", "fp32", "none", "none"),
    ("bf16", "fp32", "none", "activations"),
]
"""compute, residual, recompute, offload; by value, since time may run out."""
BOUND = 0.15


def memory(sheet: Sheet) -> None:
    """Every case: bytes foreseen and held, step time foreseen and measured."""
    world = start_world()
    world.device = DEVICE
    for precision, residual, recompute, offload in CASES:
        if offload != "none" and not ON_GPU:
            continue  # there is no host beside the device
        name = f"{precision}, residual {residual}, recompute {recompute}, offload {offload}"
        with sheet.row(name) as told:
            if residual not in residual_formats():
                told["reason"] = "not run: this source has no precision.residual"
                continue
            words = [f"precision.compute={precision}", f"memory.recompute={recompute}"]
            words += [f"precision.residual={residual}"] if residual != "fp32" else []
            told.update(one(world, [*words, f"memory.offload={offload}"], "single"))
            if not SMALL:
                assert abs(told["held_bytes"] / told["foreseen_bytes"] - 1) < BOUND


def one(world: World, words: list[str], layout: str, compared: int = 1) -> dict[str, Any]:
    """A few steps of the demo's model at another size; weights are written after `compared` steps."""
    sizes = [*SIZES, f"train.micro_batch={pick(8, 2)}", "train.steps=8", "data.source=synthetic"]
    config = load_config(None, [*sizes, *words]).config
    source = open_source(config.data, config.train.seed)
    with tempfile.TemporaryDirectory() as folder:
        measure_machine(
            world, Path(os.environ["SHOAL_CACHE"]), TINY if SMALL else quick_sizes(DEVICE)
        )
        row = measure_row(
            config, source, world, layout, steps=3, compared=compared, folder=Path(folder)
        )
    assert "reason" not in row, row["reason"]
    held = max(sum(v or 0 for v in rank.values()) for rank in row["memory"])
    predicted = row["predicted"]
    assert "reason" not in predicted, predicted["reason"]
    return {
        "held_bytes": held,
        "foreseen_bytes": round(predicted["allocated_bytes"]),
        "held": row["memory"][0],
        "foreseen": {k: round(v) for k, v in predicted["memory"].items()},
        "step_s": row["step_s"],
        "foreseen_step_s": predicted["step_s"],
        "losses": row["losses"],
        "parameters": row["parameters"],
    }
