"""`shoal plan`: rank layouts by step time and memory, with reasons, before anything runs.

It takes the arguments of `shoal train`, needs no GPU, and imports torch only to trace a model of
the user's own (or with --measure).
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer

from shoal.cli.words import ARGUMENTS, TRUST, split_arguments

ON = typer.Option("", "--on", metavar="MACHINES", help='Such as "16x8xH100-80GB"; default: here.')
TOP = typer.Option(5, "--top", min=1, max=40, help="How many layouts to show.")
JSON = typer.Option(False, "--json", help="The whole plan as JSON.")
WRITE = typer.Option(None, "--write", metavar="FILE", help="Write the best layout as a run.toml.")
TABLE = typer.Option("", "--table", metavar="memory|speedup", help="A well-known table instead.")
MODELS = typer.Option("7b,13b,70b", "--models", help="For --table memory.")
GPUS = typer.Option("2,4,8,16", "--gpus", help="For the tables.")
EXPLAIN = typer.Option(False, "--explain", help="What becomes of every parameter, and why.")
MEASURE = typer.Option(False, "--measure", help="Measure this machine first (under a minute).")


def plan(
    arguments: list[str] = ARGUMENTS,
    on: str = ON,
    top: int = TOP,
    as_json: bool = JSON,
    write: Path = WRITE,
    table: str = TABLE,
    models: str = MODELS,
    gpus: str = GPUS,
    measure: bool = MEASURE,
    explain: bool = EXPLAIN,
    trust: bool = TRUST,
) -> None:
    """Rank layouts before a run: step time, memory, what fills them, and what to change.

    Examples: shoal plan model.name=llama-3-8b --on 8xH100-80GB
    shoal plan --explain layout.tp=2 layout.dp_shard=2
    shoal plan model.build=my.module:build data.source=my.module:data launch.processes=2
    shoal plan --table memory --models 7b,70b --gpus 8,64
    Exit status: 0 something fits, 1 nothing does, 2 something to correct.
    """
    if table:
        from shoal.teach.plan_tables import print_table

        print_table(table, models, gpus, on, as_json)
        return
    if explain:
        from shoal.cli.plan_explain import explain as explain_layout

        explain_layout(arguments or [], on, as_json, trust=trust)
        return
    if measure:
        from shoal.cli.measure import measure_this_machine
        from shoal.forecast.machines.cluster_syntax import parse_machines

        if on:
            parse_machines(on)  # reports a wrong machine before half a minute of measuring
        measure_this_machine(arguments or [])
    record, best = _make_plan(arguments or [], on, top, trust=trust)
    if write is not None:
        from shoal.cli.plan_write import write_plan

        record["next"], notes = write_plan(best, arguments or [], write)
        record["notes"] += notes
    if as_json:
        typer.echo(json.dumps(record, indent=1))
    else:
        from shoal.view.plan_lines import print_plan

        print_plan(record, sys.stdout)
    raise typer.Exit(0 if best.fits else 1)


def _make_plan(
    arguments: list[str], on: str, top: int, *, trust: bool
) -> tuple[dict[str, Any], Any]:
    """Return the plan's document, and its best candidate."""
    from shoal.cli.plan_subject import narrow_model_facts, resolve_subject
    from shoal.config.trust import load_trusted
    from shoal.forecast.search.layout_search import search_layouts
    from shoal.forecast.search.plan_document import plan_record

    loaded = load_trusted(*split_arguments(arguments), trust=trust)
    subject = resolve_subject(loaded, on)
    found = search_layouts(subject.case, subject.space)
    record = plan_record(
        found,
        subject.space,
        top=top,
        notes=subject.notes,
        narrow=lambda: narrow_model_facts(loaded, subject.case),
    )
    best = found[0]
    if best.memory.others_bytes:
        from shoal.forecast.time.replica_costs import describe_replicas

        record["notes"].append(
            describe_replicas(best.case, best.memory, sum(best.time.bytes.values()))
        )
    record["next"] = _next_command(best, record, arguments, on)
    return record, best


def _next_command(best: Any, record: dict[str, Any], arguments: list[str], on: str) -> str:
    """Return the next command: a run, a plan that fits, or the plan as a file."""
    import shlex

    shown = ["--on", on] if on else []
    if not best.runs:
        fix = record["fixes"][0]["set"].split() if record["fixes"] else []
        words = [*_drop_replaced_arguments(arguments, fix), *fix, *shown]
        return f"shoal plan {shlex.join(words)}" if fix else ""
    if not on:
        chosen = _non_default_keys(best.case)
        given = {word.partition("=")[0] for word in arguments}
        if "layout.strategy" in given:  # a strategy names a whole layout
            chosen = {key: value for key, value in chosen.items() if not key.startswith("layout.")}
        settings = [f"{key}={value}" for key, value in chosen.items() if key not in given]
        return f"shoal train {shlex.join([*arguments, *settings])}".rstrip()
    return f"shoal plan {shlex.join([*arguments, *shown, '--write', 'run.toml'])}"


def _drop_replaced_arguments(arguments: list[str], fix: list[str]) -> list[str]:
    """Return the arguments without those that a fix replaces: degrees also replace a strategy."""
    said = {word.partition("=")[0] for word in fix}
    data = {"layout.strategy", "layout.dp_replicate", "layout.dp_shard", "layout.zero"}
    data |= {"layout.servers", "layout.updates", "layout.staleness", "layout.serves"}
    if said & data:
        said |= data
    return [word for word in arguments if word.partition("=")[0] not in said]


ORDER = ("schedule", "chunks")
"""Keys of a pipeline schedule, given only where they are not the default."""


def _non_default_keys(case: Any) -> dict[str, Any]:
    """Return the keys with which a run becomes this case, where its own defaults differ."""
    from shoal.base.layouts.policies import MemoryPolicy
    from shoal.base.layouts.schedule_names import DEFAULT
    from shoal.planning.settle import layout_keys

    layout, chosen = case.layout, {}
    if layout.is_derived:  # `auto` alone would not choose it
        words = layout_keys(layout)
        chosen = {f"layout.{key}": n for key, n in words.items() if key not in ORDER}
    if layout.pp > 1 and case.schedule != DEFAULT:
        chosen["layout.schedule"] = case.schedule
        if layout.chunks > 1:
            chosen["layout.chunks"] = layout.chunks
    for key in fields(MemoryPolicy):
        if (value := getattr(case.plan, key.name)) != key.default:
            chosen[f"memory.{key.name}"] = value
    return chosen
