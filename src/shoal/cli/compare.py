"""`shoal compare`: measure parallel layouts on this machine, with the user's model and data.

The parent process never imports torch. It checks the request, starts the worker processes of each
process count, one count after another, and draws what they wrote. The same model, samples, global
batch and threads per process serve every row (strong scaling), and rows run one after another.
Everything lies in `compare/NAME/`, beside the folder of the runs.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shoal import __version__
from shoal.base.errors import ConfigError, PlanError
from shoal.cli.words import ARGUMENTS, TRUST, split_arguments

if TYPE_CHECKING:
    from shoal.cli.compare_measure import LayoutComparison
    from shoal.config.sections import Config, LayoutSection

LAYOUTS = typer.Option(
    "single,dp,ddp,zero1,zero2,fsdp", "--layouts", metavar="A,B,…", help="Strategies to compare."
)
PROCESSES = typer.Option(
    "", "--processes", metavar="N,M,…", help="Process counts; default: 1 and 2, or all GPUs."
)
STEPS = typer.Option(6, "--steps", metavar="N", min=1, help="Timed steps per row.")
JSON = typer.Option(False, "--json", help="Print compare.json instead of the table.")
PNG = typer.Option(None, "--png", metavar="FILE", help="Also draw the chart there (matplotlib).")

SMALLER = {
    ("model.",): ("model.layers=2",),
    ("train.batch", "train.micro_batch", "train.accumulate"): (
        "train.batch=8",
        "train.micro_batch=2",
    ),
}
"""Keys that shrink a row, where the user sets none of the group: seconds instead of a minute."""


def compare(
    arguments: list[str] = ARGUMENTS,
    layouts: str = LAYOUTS,
    processes: str = PROCESSES,
    steps: int = STEPS,
    as_json: bool = JSON,
    png: Path = PNG,
    trust: bool = TRUST,
) -> None:
    """Measure layouts × process counts: speed, memory, bytes sent, distance from one process.

    For example: shoal compare run.toml --layouts ddp,zero2,fsdp --processes 1,2,4
    Overrides are section.key=value, as for `shoal train`. Nothing is trained to keep: a few steps
    per row. Of two runs that exist: shoal report A B. Exit status: 0 with a table, 2 something to
    correct, 1 anything else.
    """
    from shoal.cli import torchrun
    from shoal.cli.compare_measure import measure_rows
    from shoal.view.chart import check_matplotlib, draw_comparison
    from shoal.view.compare import print_comparison

    if torchrun.is_launched():
        raise PlanError("shoal compare: starts its own processes; run it without torchrun or srun")
    if png is not None:
        check_matplotlib("--png")
    comparison = plan_comparison(arguments or [], layouts, processes, steps, trust=trust)
    code = measure_rows(comparison, quiet=as_json)
    if code:
        raise typer.Exit(code)
    record = comparison_record(comparison)
    text = json.dumps(record, indent=1)
    (comparison.folder / "compare.json").write_text(text + "\n", encoding="utf-8")
    kept = [comparison.folder / "compare.json"]
    for path in (comparison.folder / "compare.png", png):
        if path is not None and draw_comparison(record, path):
            kept.append(path)
    if as_json:
        typer.echo(text)
    else:
        print_comparison(record, sys.stdout, [str(path) for path in kept])
    raise typer.Exit(0 if any(row["per_s"] for row in record["rows"]) else 1)


def plan_comparison(
    arguments: list[str], layouts: str, processes: str, steps: int, *, trust: bool = False
) -> LayoutComparison:
    """Check the request and plan the rows.

    Raises:
        ConfigError, PlanError: the request is wrong; one line each.
    """
    from shoal.base.estimates.facts import read_machine_facts
    from shoal.cli.compare_measure import LayoutComparison
    from shoal.cli.compare_rows import (
        check_memory,
        common_micro_batch,
        parse_layout_names,
        parse_process_counts,
        plan_rows,
    )
    from shoal.config.resolve import micro_batch_is_open, resolve_batch, resolve_length
    from shoal.config.trust import load_trusted
    from shoal.forecast.models.model_facts import count_model_parameters as count_parameters

    path, overrides = split_arguments(arguments)
    names, machine = parse_layout_names(layouts), read_machine_facts()
    counts = parse_process_counts(processes or f"1,{machine.gpus if machine.gpus > 1 else 2}")
    smaller = [] if path else _shrink_default_job(overrides)
    loaded = load_trusted(path, [*smaller, *overrides], trust=trust)
    _check_paths(loaded.config)
    train = loaded.config.train
    # `accumulate` applies to one layout: the one with the most processes.
    resolve_batch(loaded, max(counts) if train.accumulate else 1)
    resolve_length(loaded)
    _check_layout_keys(loaded.config.layout)
    config, parameters = loaded.config, None
    if not config.model.build:
        parameters = count_parameters(
            config.model.name, config.model.arguments, sequence=config.data.sequence
        )
    given = 0 if micro_batch_is_open(loaded) else config.train.micro_batch
    rows = plan_rows(names, counts, config.train.batch, given)
    if not given:
        size = common_micro_batch(rows, config.train.batch)
        loaded.replace("train", "the largest that every row can run", micro_batch=size)
    if parameters is not None:
        check_memory(rows, parameters, machine)
    return LayoutComparison(
        loaded, rows, parameters, machine, steps, _make_comparison_folder(loaded.config)
    )


def _shrink_default_job(overrides: list[str]) -> list[str]:
    """Return overrides that shrink the default main job where the user sets no key."""
    chosen: list[str] = []
    for keys, values in SMALLER.items():
        if not any(override.startswith(keys) for override in overrides):
            chosen += values
    return chosen


def _check_paths(config: Config) -> None:
    """Check that the data and the user's functions exist, without importing them."""
    from shoal.cli.start import check_tune
    from shoal.config.paths import check_data, check_function

    check_data(config.data)
    check_tune(config)
    for key, path in (("model.build", config.model.build), ("model.loss", config.model.loss)):
        if path:
            check_function(path, key)


def _check_layout_keys(section: LayoutSection) -> None:
    """Refuse degrees in [layout]: the rows compare layouts, and a degree would fit one row only.

    Raises:
        ConfigError: a degree is set; the message names the layout to compare.
    """
    for key in ("dp_replicate", "dp_shard", "pp", "cp", "tp"):
        if getattr(section, key):
            raise ConfigError(
                f"layout.{key} = {getattr(section, key)}: shoal compare takes layouts by name; "
                f"try: --layouts {'ddp' if key == 'dp_replicate' else 'fsdp'}"
            )


def _make_comparison_folder(config: Config) -> Path:
    """Make `compare/NAME-N` beside the folder of the runs, with the first free N."""
    from shoal.config.resolve import model_label

    parent = Path(config.run.folder).parent / "compare"
    model = model_label(config.model)
    stem = config.run.name or f"{model}-{config.data.source.split(':')[0].replace('.', '-')}"
    number = 1
    while True:
        folder = parent / f"{stem}-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        return folder


BLANK = {
    "reason": "", "text": None, "precision": None, "parameters": None, "per_s": None,
    "step_s": None, "losses": None, "sent_bytes": None, "memory": None, "weight_difference": None,
    "predicted": None,
}  # fmt: skip


def comparison_record(comparison: LayoutComparison) -> dict[str, Any]:
    """Return the whole comparison as JSON values; an unknown figure is null."""
    from shoal.cli.compare_rows import add_relative_figures

    said = comparison.said.get("machine", {})
    rows = [
        {
            "layout": row.strategy,
            "parts": row.parts,
            "processes": row.processes,
            **BLANK,
            "reason": row.reason,
            **comparison.found.get(number, {}),
        }
        for number, row in enumerate(comparison.rows)
    ]
    on_cpu = said.get("device", "cpu") == "cpu"
    add_relative_figures(rows, comparison.machine.cores if on_cpu else math.inf)
    config, machine = comparison.loaded.config, comparison.machine
    return {
        "shoal": __version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": {
            "cores": machine.cores,
            "memory_bytes": machine.memory_bytes,
            "gpus": machine.gpus,
            "busy": comparison.busy,
            **said,
        },
        "model": config.model.build or config.model.name,
        "parameters": comparison.parameters,
        "data": config.data.source,
        "batch": config.train.batch,
        "micro_batch": config.train.micro_batch,
        "steps": comparison.steps,
        "seed": config.train.seed,
        "unit": comparison.said.get("unit", "samples"),
        "notices": comparison.loaded.notices,
        "rows": rows,
    }
