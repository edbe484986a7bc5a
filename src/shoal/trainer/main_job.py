"""Main job: the work of one process of `shoal train` from start to end.

It reads the resolved run.toml of the run folder, joins the other processes, opens the data, builds
the model and resumes from the newest checkpoint if there is one. It steps until the end, a signal
or a failure. It writes events and metrics into the run folder; other processes display them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch

from shoal.base.errors import UNSAVED_CODE, ShoalError, TrainingError
from shoal.base.estimates.facts import usable_cores
from shoal.base.layouts.policies import CompilePolicy
from shoal.base.plans.plan import Plan
from shoal.base.pretrained_folders import pretrained_folder
from shoal.base.runlog.atomic_files import cache_folder
from shoal.config.load import load_config
from shoal.config.resolve import collect_layout_keys, make_plan
from shoal.config.save import MICRO_BATCH, is_derived
from shoal.config.sections import Config
from shoal.data.sources import Source
from shoal.fabric import World, start_world
from shoal.forecast.search.case_settings import optimizer_state_bytes
from shoal.machine.measure import measure_machine, quick_sizes
from shoal.machine.process_memory import reset_peak_memory
from shoal.parallel.compose import check_here
from shoal.parallel.spmd.verified_blocks import skip_verified_blocks
from shoal.planning.settle import Words, is_layout_open
from shoal.trainer.autotune.micro_batch_size import choose_micro_batch, is_micro_batch_open
from shoal.trainer.autotune.rank_layouts import choose_run_layout
from shoal.trainer.autotune.trial_passes import run_trial_passes
from shoal.trainer.islands.island_job import STOPPED, train_rounds
from shoal.trainer.islands.island_join import (
    IslandConnection,
    forecast_rounds,
    join_islands,
    resume_islands,
)
from shoal.trainer.islands.owner_data import (
    open_first_source,
    share_tokenizer,
)
from shoal.trainer.jobs.configured_run import (
    build_model,
    count_total_steps,
    import_object,
    open_run,
)
from shoal.trainer.jobs.opening_lines import count_flops, write_opening
from shoal.trainer.jobs.out_of_memory import apply_reduced_micro_batch, handle_out_of_memory
from shoal.trainer.jobs.replayed_steps import ReplayedSteps, ReplayEnd
from shoal.trainer.jobs.run_end import emit_run_end
from shoal.trainer.jobs.run_forecast import (
    ModelFactsGetter,
    StepTimeFeedback,
    collect_model_facts,
    describe_local_cluster,
    forecast_run,
    read_resident_bytes,
)
from shoal.trainer.jobs.validation import make_validator
from shoal.trainer.process.stop_signals import install_stop_handlers
from shoal.trainer.run import Run
from shoal.trainer.run_folder.hub_files import write_hub_tokenizer
from shoal.trainer.state.initial_weights import load_initial_weights
from shoal.trainer.state.replaced_folder import save_if_deleted
from shoal.trainer.state.rewind import rewind_run
from shoal.wire import phases
from shoal.wire.phases import phase

Prove = Callable[[Config, Source, World, Path, Plan, Words | None], str]
"""Function that runs the proof of (configuration, data, world, run folder, plan, layout in words if
the layout is open) before the run is built; returns a line for the user, "" if it did nothing.
"""


def train(
    folder: Path,
    prove: Prove,
    *,
    world: World | None = None,
    replayed: ReplayedSteps | None = None,
) -> int:
    """Train the run whose resolved configuration is `folder/run.toml`; return the exit code.

    Args:
        replayed: stop early and observe each step; None: train to the end.

    Raises:
        ShoalError: any of its classes; the caller turns it into one line and an exit code.
    """
    config = load_config(folder / "run.toml").config
    world = world or start_world()
    if config.islands.owned:
        config = share_tokenizer(config, folder, world)
    if config.layout.updates not in ("", "synchronous"):
        return _train_with_servers(config, folder, world, prove)
    run, source, total_steps, joined = _prepare(
        config, folder, world, prove, alone=replayed is not None
    )
    put_back = install_stop_handlers(run.request_stop)
    phases.record_step_part(
        phases.NOWHERE
    )  # the proof's steps are over; the first batch may be slow
    if phases.page is not None and world.group is not None:
        from shoal.trainer.guards.collective_log import CollectiveRecorder

        CollectiveRecorder(phases.page, run.step_count + 1)
    try:
        with handle_out_of_memory(run, config, folder):
            if joined is not None:
                return train_rounds(run, joined, source, config, total_steps, replayed)
            if replayed is not None:
                return _repeat_steps(run, source, config, replayed)
            return _run_steps(run, source, config, total_steps)
    except TrainingError:
        with contextlib.suppress(ShoalError):  # all ranks work: finish the save in flight
            run.checkpoint_saver.wait_pending()
        raise
    finally:
        put_back()


@skip_verified_blocks()
def _prepare(
    config: Config, folder: Path, world: World, prove: Prove, *, alone: bool
) -> tuple[Run, Source, int, IslandConnection | None]:
    """Prepare all that the first step needs: data, model, plan, state, the islands if not alone."""
    source = _open_data(config, world)
    if world.size <= usable_cores():  # else scheduling decides the rates
        measure_machine(world, cache_folder(), quick_sizes(world.device))
    # Ranking of an open layout and the run's forecast both use these facts: computed once.
    facts: ModelFactsGetter = cache(partial(collect_model_facts, config, source))
    plan, said = choose_run_layout(
        config, facts, world, folder, is_open_size=is_micro_batch_open(folder)
    )
    make, call = partial(build_model, config, source), plan.call
    trial = partial(run_trial_passes, make, source.train, source.collate, call)
    plan, sized = choose_micro_batch(config, plan, facts, world, folder, trial)
    plan = apply_reduced_micro_batch(plan, config, folder, writes=world.writes_files)
    proven = prove(config, source, world, folder, plan, said)
    gc.collect()
    reset_peak_memory(world.device)  # the proof's memory is not the run's
    held_bytes = read_resident_bytes()
    with phase("set up"):
        given = not is_derived(folder / "run.toml", MICRO_BATCH)
        run = open_run(config, source, world, plan, said, folder=folder, is_cut_by_user=given)
    load_initial_weights(run, config.checkpoint.initial_load_path)
    for line, importance in ((sized, 5), (proven, 4)) if world.writes_files else ():
        if line:
            run.recorder.events.emit("notice", text=line, opening=importance)
    for path in config.train.on:
        hook = import_object("train.on", path)
        run.add_callback(hook(folder) if isinstance(hook, type) else hook)
    if source.tokenizer is not None and world.writes_files:
        write_hub_tokenizer(source.tokenizer, config.data.tokenizer, folder)
    joined = None
    if config.islands.on:  # they agree on the micro-batch before a loader cuts by it
        joined = join_islands(
            run, config.islands, is_open_size=not given, tokenizer=source.tokenizer, alone=alone
        )
    run.extra_record["configuration"] = (folder / "run.toml").read_text(encoding="utf-8")
    run.extra_record.pop("settings", None)  # "configuration" has all of them
    # The loader exists before a checkpoint's data is compared with it.
    run.loader(source.train, workers=config.data.workers, collate=source.collate)
    if joined is not None:
        resume_islands(run, joined, alone=alone)
    elif not run.restore():
        run.recorder.cut(0)  # an earlier attempt may have left lines, but no checkpoint
    total_steps = count_total_steps(config, source, run.plan.batch)
    run.rate.length.total_steps = total_steps
    cluster = describe_local_cluster(world.size, world.device, held_bytes)
    foreseen = (
        forecast_run(config, facts, run.plan, cluster, run.program.travel)
        if world.writes_files
        else {}
    )
    if joined is not None and foreseen.get("step_s"):
        sequence = config.data.sequence if source.kind == "tokens" else 1
        inner_bytes = optimizer_state_bytes(config.optimizer)
        foreseen["islands"] = forecast_rounds(
            run, joined, foreseen["step_s"], sequence, inner_bytes
        )
    told = {
        "model": config.model.build or config.model.name,
        "chosen": is_layout_open(collect_layout_keys(config.layout)),
        "sized": True,
        "predicted": foreseen,
    }
    validates = source.validation is not None and _is_fresh_pretrained(run, config)
    steps = 0 if config.islands.owned else total_steps  # those of owners are counted later
    write_opening(run, run.plan, source, steps, folder, told, validates=validates)
    if world.is_first and joined is None:  # islands on one machine disturb each other's times
        learner = StepTimeFeedback(foreseen, run.plan.compute, world)
        run.recorder.events.listeners.append(learner.on_event)
    return run, source, total_steps, joined


def _open_data(config: Config, world: World) -> Source:
    """Check what can be refused within a second, then open the data."""
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    check_here(make_plan(config), world.device)
    return world.run_local_first(lambda: open_first_source(config))


def _train_with_servers(config: Config, folder: Path, world: World, prove: Prove) -> int:
    """Train under an asynchronous parameter server; the proof runs with a synchronous one."""
    from shoal.base.layouts.parameter_servers import make_server_layout
    from shoal.trainer.servers.worker_loop import train_with_servers

    source = _open_data(config, world)
    plan = Plan.from_json((folder / "plan.json").read_text(encoding="utf-8"))
    waiting = make_server_layout(world.size, plan.layout.servers)
    proven = prove(config, source, world, folder, replace(plan, layout=waiting), None)
    gc.collect()
    reset_peak_memory(world.device)
    return train_with_servers(config, source, folder, world, plan, proven)


def _run_steps(run: Run, source: Source, config: Config, total_steps: int) -> int:
    """Step to the end, with saves and validation on the way; return the exit code."""
    every = config.checkpoint.every or max(1, total_steps // 5)
    loader = run.loader(source.train, workers=config.data.workers, collate=source.collate)
    validate = make_validator(run, source, config)
    began_s, first_step = time.perf_counter(), run.step_count
    if _is_fresh_pretrained(run, config) and validate() is None and run.stopping:
        return _stop_run(run)
    run.recorder.restart_clock()
    while run.step_count < total_steps:
        for batch in loader:
            if run.step_count == first_step:
                count_flops(run, batch)
                run.recorder.restart_clock()
                compiled = run.plan.differs_from_default(CompilePolicy)
                with phase("compile, first step" if compiled else "first step"):
                    result = run.step(batch)
            else:
                result = run.step(batch)
            if rewind_run(run, result.spike, batch):
                break
            if run.stopping:
                return _stop_run(run)
            if run.step_count >= total_steps:
                break
            if config.train.validate_every and run.step_count % config.train.validate_every == 0:
                validate()
                if run.stopping:
                    return _stop_run(run)
            if run.step_count % every == 0:
                run.save(wait=False)
    run.skips.check_moved(first_step, run.step_count)
    saved = run.save()
    values = validate()
    saved = save_if_deleted(run, saved)
    if run.stopping:
        return _stop_run(run, saved)
    wall_s, steps = time.perf_counter() - began_s, run.step_count - first_step
    how = "completed" if saved else "completed; the last checkpoint could not be written"
    emit_run_end(run, source, values, steps=steps, wall_s=wall_s, how=how)
    run.close()
    return 0 if saved else UNSAVED_CODE


def _repeat_steps(run: Run, source: Source, config: Config, replayed: ReplayedSteps) -> int:
    """Step to the last step of a replay and save it; return the exit code."""
    loader = run.loader(source.train, workers=config.data.workers, collate=source.collate)
    with contextlib.suppress(ReplayEnd):
        while not run.stopping:
            for batch in loader:
                result = replayed.run_step(run, batch)
                if rewind_run(run, result.spike, batch):
                    replayed.count_rewind(run, result.step)
                    break
                if run.stopping:
                    break
                if replayed.needs_save(result.step):
                    run.save()
    return _stop_run(run)


def _is_fresh_pretrained(run: Run, config: Config) -> bool:
    """Return whether a run begins with pretrained weights, whose loss is worth a validation."""
    name = "" if config.model.build else config.model.name
    return run.step_count == 0 and pretrained_folder(name) is not None


def _stop_run(run: Run, saved: Path | None = None) -> int:
    """Save unless this step is saved already, and close the run; return the exit code."""
    saved = save_if_deleted(run, saved or run.save())
    run.recorder.log_memory_peaks()
    if run.world.writes_files:
        run.recorder.events.emit(
            "run_finished",
            step=run.step_count,
            how="stopped on request" if saved else "stopped on request; the last save failed",
        )
    run.close()
    return STOPPED if saved else UNSAVED_CODE
