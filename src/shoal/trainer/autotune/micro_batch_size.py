"""Choose and record the micro-batch size at a run's first start, if the user leaves it open.

Rank 0 inspects model and machine and broadcasts the choice. Under `shoal train` run.toml and
plan.json record it, and later starts use it (`cli/start.py settle_run_batch`). A user's own loop
gets here only if its first loader does not prove that a share fits (`share_fits.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shoal.base.errors import ShoalError, shorten
from shoal.base.estimates.cluster import Cluster
from shoal.base.estimates.estimate import PlanningCase
from shoal.base.estimates.facts import read_machine_facts
from shoal.base.plans.batches import default_turn
from shoal.base.plans.plan import Plan
from shoal.base.runlog.atomic_files import write_atomically
from shoal.base.runlog.damaged_lines import read_object
from shoal.config.save import MICRO_BATCH, is_derived, write_derived
from shoal.config.sections import Config
from shoal.fabric import World
from shoal.fabric.device import is_accelerator, total_bytes
from shoal.forecast.machines.measured_machine import estimate_this_machine
from shoal.forecast.memory.model_states import WIDTHS
from shoal.forecast.search.case_settings import case_settings
from shoal.forecast.search.layout_search import fastest_micro_batch
from shoal.parallel import precision as formats
from shoal.planning.micro_batch_sizes import micro_batch_sizes, with_micro_batch
from shoal.trainer.autotune.rank_layouts import ModelFactsGetter, read_measured_cluster
from shoal.trainer.autotune.trial_passes import Trial
from shoal.wire.phases import phase


def is_micro_batch_open(folder: Path) -> bool:
    """Return whether Shoal is to choose a run's micro-batch, and no start has chosen it yet."""
    known = read_object(folder / "plan.json")
    return is_derived(folder / "run.toml", MICRO_BATCH) and not known.get("sized")


@phase("plan")
def choose_micro_batch(
    config: Config, plan: Plan, facts: ModelFactsGetter, world: World, folder: Path, trial: Trial
) -> tuple[Plan, str]:
    """Choose the samples of a forward pass, once per run; all ranks call it.

    Args:
        config: the run's.
        plan: with its settled layout.
        facts: returns the model's facts (`facts_of`), on rank 0.
        world: all ranks, of which rank 0 chooses.
        folder: of the run, whose run.toml and plan.json are rewritten.
        trial: measures a model that cannot run on shapes alone.

    Returns:
        The plan with its micro-batch, and a line for the user, "" if the size is the default.
    """
    if not is_micro_batch_open(folder):
        return plan, ""

    said, islands = "train.batch={} train.micro_batch={}", config.islands
    sharing = islands.groups if islands.on and islands.at.startswith("127.") else 1
    further = partial(case_settings, config)
    plan, line = choose_size(plan, facts, further, world, said, trial, sharing=sharing)
    if world.writes_files:
        record_micro_batch(folder, plan)
    return plan, line


def record_micro_batch(folder: Path, plan: Plan) -> None:
    """Write a plan, with the micro-batch that Shoal chose, into a run's run.toml and plan.json."""
    write_derived(folder / "run.toml", "train", micro_batch=plan.micro_batch)
    known = read_object(folder / "plan.json") | {"sized": True}
    write_atomically(folder / "plan.json", plan.to_json(known))


def choose_size(
    plan: Plan,
    facts: ModelFactsGetter,
    further: Callable[[], Mapping[str, Any]],
    world: World,
    said: str,
    trial: Trial,
    *,
    sharing: int = 1,
) -> tuple[Plan, str]:
    """Choose a size on rank 0 and broadcast it; return the plan with it, and a line or "".

    Args:
        plan: with its layout.
        facts: returns the model's facts.
        further: returns the settings of a `PlanningCase` beside plan and model.
        world: all ranks.
        said: how the user writes a batch and a micro-batch, as a format string.
        trial: measures a model of which there are no facts.
        sharing: runs that share this machine's memory, as islands do.
    """
    size, line = plan.micro_batch, ""
    if world.is_first and plan.layout.threads == 1:
        settled = replace(plan, compute=formats.resolve_format(plan.compute, world.device))
        measured = read_measured_cluster(world.size, world.device)
        cluster = measured or estimate_this_machine(read_machine_facts(), world.size)
        # A GPU that was not measured and is not in the catalogue would count as an A100.
        device, here = cluster.device, world.device
        capacity = total_bytes(here) if is_accelerator(here) else device.memory_bytes
        cluster = replace(cluster, device=replace(device, memory_bytes=capacity))
        cluster = _divide_memory(cluster, sharing)
        try:
            known = facts(kernels=cluster.device.kind, element_bytes=WIDTHS[settled.compute])
            case = PlanningCase(known, cluster, settled, **further())
            size = fastest_micro_batch(case, measured=measured is not None)
        except Exception as failure:  # a user's code ran: whatever it raises, training goes on
            tried, memory_bytes = trial(), cluster.device.memory_bytes
            sizes = micro_batch_sizes(plan.layout, plan.batch)
            size = tried.largest(sizes, memory_bytes) if tried else 0
            if not size:
                sizes = micro_batch_sizes(plan.layout, plan.batch, default_turn(plan.batch))
                size = next(iter(sizes), plan.micro_batch)
            if size < plan.micro_batch and not tried:
                line = _unknown_memory_line(plan, size, failure, said)
    size, line = world.broadcast_json([size, line])
    return with_micro_batch(plan, size), line


def _divide_memory(cluster: Cluster, sharing: int) -> Cluster:
    """Return a cluster of which one of several runs has its part of the host's memory."""
    own = cluster.device.memory_bytes / (sharing if cluster.device.kind == "cpu" else 1)
    return replace(
        cluster,
        device=replace(cluster.device, memory_bytes=own),
        node_memory_bytes=cluster.node_memory_bytes / sharing,
    )


def _unknown_memory_line(plan: Plan, size: int, failure: Exception, said: str) -> str:
    """Return the line for a model whose memory cannot be estimated."""
    why = str(failure).partition("; ")[0].partition("\n")[0]
    why = why if isinstance(failure, ShoalError) else f"{type(failure).__name__}: {why}"
    return (
        f"micro-batch: {size} samples, an eighth of the batch, since what a pass needs is not "
        f"known ({shorten(why)}); faster where it fits; try: "
        f"{said.format(plan.batch, plan.micro_batch)}"
    )
