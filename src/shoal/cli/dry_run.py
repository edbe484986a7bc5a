"""`shoal train --dry-run`: what would be started, and what it is foreseen to cost; nothing starts.

All checks of a real start have been made by then, so a dry run that says nothing wrong starts.
"""

from __future__ import annotations

from dataclasses import replace

import typer

from shoal.base.errors import PlanError
from shoal.base.policies import POLICIES
from shoal.base.units import bytes_text, seconds_text
from shoal.cli.plan_subject import find_subject
from shoal.cli.start import Prepared
from shoal.planner.islands import IslandsFacts
from shoal.planner.islands_choice import RATES_BYTES_PER_S, by_link
from shoal.planner.search import search
from shoal.view.islands import link_lines


def show(prepared: Prepared) -> None:
    """Print the layout, time and memory of a step, and what islands would wait for."""
    loaded = prepared.loaded
    config, islands = loaded.config, loaded.config.islands
    for notice in loaded.notices:
        typer.echo(notice)
    count = islands.count if islands.on else 1
    processes = config.launch.processes
    where = f"{processes} process{'es' if processes > 1 else ''}"
    each = f" in each of {count} islands" if count > 1 else ""
    train = config.train
    typer.echo(
        f"layout: {prepared.plan.layout.text()} on {where}{each}; {train.batch} samples per step, "
        f"micro-batches of {train.micro_batch}"
    )
    try:
        subject = find_subject(loaded, "")
        # A plan would try what recompute saves; a run recomputes what it is told to.
        best = search(subject.case, replace(subject.space, given=frozenset(POLICIES)))[0]
    except PlanError as refusal:
        typer.echo(f"not foreseen: {refusal}")
        return
    step_s = best.time.step_s
    memory = bytes_text(best.memory.peak_bytes)
    typer.echo(f"foreseen: {seconds_text(step_s)} per step, {memory} per process at the peak")
    if islands.on and count > 1:
        facts = IslandsFacts(
            subject.case.model.trainable,
            step_s,
            RATES_BYTES_PER_S[0],
            tokens=train.batch * config.data.sequence,
            ranks=config.launch.processes,
        )
        costs = by_link(islands, facts)
        typer.echo(f"islands: {islands.method}, a merge every {islands.period} steps")
        typer.echo("\n".join(link_lines(list(zip(RATES_BYTES_PER_S, costs, strict=True)))))
    typer.echo("nothing was started")
