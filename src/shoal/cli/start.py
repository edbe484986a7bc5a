"""Prepare and supervise a run on this machine, without torch.

Every error of the user is found here, before any process starts: keys and types, layout and world
size, division of the batch, data paths, import paths, the run folder and its owner.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from shoal.base.errors import CheckpointError, ConfigError, PlanError, shorten
from shoal.base.estimates.facts import read_machine_facts
from shoal.base.layouts.island_options import IslandsPolicy
from shoal.base.layouts.parameter_servers import expendable_ranks
from shoal.base.layouts.schedule_names import check_stages
from shoal.base.plans.plan import Plan
from shoal.base.runlog.atomic_files import write_atomically
from shoal.base.runlog.damaged_lines import read_object
from shoal.base.runlog.events import EventLog
from shoal.base.runlog.truncate_logs import quarantine_damage
from shoal.checkpoint.format.lease import RunLease
from shoal.checkpoint.format.listing import list_checkpoints, read_manifest
from shoal.checkpoint.format.weighted_paths import find_weighted_checkpoints
from shoal.cli.ending import (
    SessionEnding,
    error_text,
    islands_exit_status,
    next_lines,
    write_end_report,
)
from shoal.cli.islands import check_islands_resumable, island_folder, island_folders, launch_islands
from shoal.cli.job_file import write_job_name
from shoal.cli.words import split_arguments
from shoal.cli.workers.worker import worker_environment, worker_imports
from shoal.config.differences import (
    compare_configurations,
    compare_environments,
    format_refusal,
    may_fail_when_opened,
)
from shoal.config.load import LoadedConfig, load_config
from shoal.config.owners import list_data_sections, name_owner, resolve_owners
from shoal.config.paths import check_data, check_function
from shoal.config.resolve import (
    check_model_data,
    chosen_micro_batch,
    collect_layout_keys,
    count_processes,
    kind_by_name,
    make_plan,
    micro_batch_is_open,
    resolve_batch,
    resolve_folder,
    resolve_islands,
    resolve_length,
    resolve_validation,
)
from shoal.config.save import restore_origins, to_toml
from shoal.config.sections import Config
from shoal.config.trust import load_trusted
from shoal.forecast.models.hf_presence import is_hf_name, resolve_hf_config
from shoal.forecast.models.model_facts import count_model_blocks as count_blocks
from shoal.forecast.models.model_facts import count_model_parameters as count_parameters
from shoal.launch import supervise
from shoal.planning.layout_guide import check_cores
from shoal.planning.pipeline_bubble import describe_bubble
from shoal.planning.recorded_plan import restore_choice
from shoal.planning.settle import settle_batch, settle_layout
from shoal.view.live import OPENING_LINES, LiveView
from shoal.view.summary import summarise_run


@dataclass
class PreparedRun:
    """A run that may start: its configuration, folder and plan.

    Attributes:
        chosen: the run.toml leaves the layout open, and an earlier start of this run has chosen it.
        force: resume although changed settings or code lead to another result.
        sized: an earlier start, or the run that wrote this run.toml, has chosen the micro-batch.
    """

    loaded: LoadedConfig
    folder: Path
    plan: Plan
    resumed: bool
    chosen: bool = False
    force: bool = False
    sized: bool = False


def prepare_run(
    arguments: list[str],
    resume: Path | None,
    processes: int | None = None,
    *,
    force: bool = False,
    trust: bool = False,
) -> PreparedRun:
    """Check the request and settle what was left open.

    Args:
        processes: the number of processes, if another launcher started them.
        force: a resume continues with settings and code that its checkpoint was not trained with.
        trust: call functions that another user's run.toml names.

    Raises:
        ConfigError, PlanError, CheckpointError: the request is wrong; one line each.
    """
    path, overrides = split_arguments(arguments)
    lines: list[str] = []
    if resume is not None:
        if path:
            raise ConfigError(f"command line: {path}: --resume takes its own run.toml")
        _check_resumable(resume)
        path = resume / "run.toml"
        typed = overrides
        from shoal.cli.member_resume import complete_islands, describe_completed

        overrides = complete_islands(typed, load_config(path).config.islands, resume)
        lines = describe_completed(typed, overrides)
    loaded = load_trusted(path, overrides, trust=trust)
    loaded.notices.extend(lines)
    sized = chosen_micro_batch(loaded) > 0
    plan, chosen = settle_run(loaded, processes, resume)
    folder = resume or resolve_folder(loaded)
    if path == folder / "run.toml":
        restore_origins(loaded, path)
    if resume is not None:
        _check_islands_resume(loaded.config.islands, resume)
        for key, value in (("folder", str(resume.parent)), ("name", resume.name)):
            if value != getattr(loaded.config.run, key):
                loaded.replace("run", "resumed", **{key: value})
        if not force:
            _check_result_unchanged(loaded, resume)
        return PreparedRun(loaded, resume, plan, True, chosen, force, sized)
    # A run that never saved anything has nothing to lose; its lease protects a live one.
    if list_checkpoints(folder / "checkpoints") or island_folders(folder):
        raise ConfigError(
            f"run.name = {loaded.config.run.name}: {folder} holds a run already; to go on with it: "
            f"shoal train --resume {folder}; else another run.name"
        )
    return PreparedRun(loaded, folder, plan, False, sized=sized)


def _check_result_unchanged(loaded: LoadedConfig, folder: Path) -> None:
    """Refuse a resume whose settings or code change the result.

    Only differences that can be found without torch are checked here; the workers check data and
    weights.

    Raises:
        ConfigError: names each difference from the newest checkpoint that changes the result.
    """
    held = island_folders(folder)
    for found in list_checkpoints((held[0] if held else folder) / "checkpoints"):
        try:
            record = read_manifest(found.path).record
        except CheckpointError:
            continue  # the code that restores the checkpoint reports the damage
        then = str(record.get("configuration", ""))
        differences = compare_configurations(then, to_toml(loaded)) if then else []
        differences += compare_environments(record)
        if may_fail_when_opened(differences):
            return  # the workers refuse it, and offer --force only if it can resume
        if line := format_refusal(f"--resume {folder}", found.step, differences):
            raise ConfigError(line)
        return


def settle_run(
    loaded: LoadedConfig, processes: int | None, resume: Path | None = None
) -> tuple[Plan, bool]:
    """Choose processes, layout, batch and length, and set them in `loaded`; check all paths.

    Args:
        loaded: the request.
        processes: the number of processes, if another launcher started them.
        resume: folder of the resumed run, whose choice of a layout is kept.

    Returns:
        The settled plan, and whether an earlier start of the run chose its layout.

    Raises:
        ConfigError, PlanError: one line each, with the nearest legal values.
    """
    config = loaded.config
    machine = read_machine_facts()
    if processes is None and config.launch.nodes > 1:
        raise PlanError(
            f"launch.nodes = {config.launch.nodes}: `shoal train` starts processes on this machine "
            f"only; on several, start the same command with torchrun --nnodes or srun"
        )
    resolve_islands(loaded)
    resolve_owners(loaded)
    section, alone = config.layout, _count_local_islands(loaded.config.islands) == 1
    count = processes or config.launch.processes or count_processes(section, machine)
    if not (alone or processes or config.launch.processes or section.degrees()):
        count = max(1, count // loaded.config.islands.groups)
    check_cores(count, machine)
    loaded.replace("launch", loaded.origins.get("launch.processes", "derived"), processes=count)
    _check_paths(loaded)
    if config.checkpoint.initial_load_path and resume is None:
        find_weighted_checkpoints(config.checkpoint.initial_load_path)
    parameters = None
    if not config.model.build:
        parameters = count_parameters(
            config.model.name, config.model.arguments, sequence=config.data.sequence
        )
    plan = settle_layout(
        make_plan(config), collect_layout_keys(section), count, parameters, machine
    )
    chosen = False
    if resume is not None:
        plan, chosen = restore_choice(plan, collect_layout_keys(section), resume)
    layout = plan.layout
    if layout.servers and config.islands.on:
        raise PlanError(
            "layout.strategy = parameter-server: an island merges the weights that its ranks step, "
            "and workers step none; try: layout.strategy=zero1, or islands.method=none"
        )
    if not config.model.build and (
        found := count_blocks(config.model.name, config.model.arguments)
    ):
        check_stages(layout.schedule, layout.pp, layout.chunks, found, config.model.name)
    plan = settle_run_batch(loaded, plan)
    if pipeline := describe_bubble(layout, plan.batch, plan.micro_batch):
        loaded.notices.append(pipeline)
    resolve_length(loaded)
    resolve_validation(loaded)
    return plan, chosen


def settle_run_batch(loaded: LoadedConfig, plan: Plan) -> Plan:
    """Set batch and micro-batch in `loaded`, and return the plan, whose layout is known, with both.

    A micro-batch that an earlier start chose is kept if it divides the share of a data-parallel
    rank; else the nearest below replaces it, and a line reports that.

    Raises:
        ConfigError, PlanError: the sizes do not divide; the message names the nearest legal values.
    """
    resolve_batch(loaded, plan.layout.data_degree)
    train, chosen = loaded.config.train, chosen_micro_batch(loaded)
    given = 0 if micro_batch_is_open(loaded) else train.micro_batch
    plan = settle_batch(replace(plan, batch=train.batch, micro_batch=given), at_most=chosen)
    if chosen and plan.micro_batch != chosen:
        loaded.notices.append(
            f"train.micro_batch: {chosen} → {plan.micro_batch}, what divides the "
            f"{train.batch // plan.layout.data_degree} samples of a data-parallel rank here; masks "
            f"of dropout and statistics of BatchNorm, which belong to a micro-batch, are others"
        )
    if not given:
        loaded.replace("train", "derived", micro_batch=plan.micro_batch)
    return plan


def _count_local_islands(islands: IslandsPolicy) -> int:
    """Return the number of islands that this command starts on this machine."""
    return 1 if islands.at or not islands.on else islands.groups


def _has_island_folders(islands: IslandsPolicy, folder: Path) -> bool:
    """Return whether islands have their own folders in the run's, even a single remaining one."""
    alone = islands.on and not islands.at and bool(island_folders(folder))
    return alone or _count_local_islands(islands) > 1


def _check_islands_resume(islands: IslandsPolicy, folder: Path) -> None:
    """Refuse to resume a run of islands with a command that starts no islands.

    Raises:
        ConfigError: the folder holds islands, and islands.at or islands.method excludes them.
    """
    held = island_folders(folder)
    if held and not _has_island_folders(islands, folder):
        key = f"at = {islands.at}" if islands.at else f"method = {islands.method}"
        raise ConfigError(
            f"islands.{key}: {folder} was trained by islands, and only islands started from there "
            f"go on with their rounds; try: shoal train --resume {folder} islands.count=1"
        )


def check_tune(config: Config, *, weights: bool = True) -> None:
    """Refuse adapters without pretrained weights to adapt.

    Args:
        weights: whether they must exist; a plan needs the config.json alone.

    Raises:
        ConfigError: peft is missing, the model is one of Shoal's by name, weights do not exist, or
            keys stand beside tune.adapter=none.
    """
    tune, name = config.tune, config.model.name
    if tune.adapter == "none":
        plain = type(tune)()
        for key in ("rank", "alpha", "dropout", "targets"):
            if getattr(tune, key) != getattr(plain, key):
                value = getattr(tune, key)
                shown = ",".join(value) if isinstance(value, tuple) else value
                raise ConfigError(
                    f"tune.{key} = {shorten(str(shown))}: no adapter is asked for; try: "
                    f"tune.adapter=lora"
                )
        return
    where = f"tune.adapter = {tune.adapter}"
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            f"{where}: needs peft, which is not installed; try: pip install 'shoal[tune]'"
        )
    if config.model.build:
        return  # the weights of the user's build function
    if not is_hf_name(name):
        raise ConfigError(
            f"{where}: model.name = {name} starts from random weights, and frozen ones learn "
            f"nothing; try: model.name=hf:FOLDER, say of `shoal checkpoint export`"
        )
    path, stored = resolve_hf_config(name, config.model.arguments)
    if weights and not stored:
        raise ConfigError(
            f"{where}: no safetensors lie beside {path}, and frozen random weights learn nothing; "
            f"try: model.name=hf:FOLDER with its weights, or tune.adapter=none"
        )


def _check_paths(loaded: LoadedConfig) -> None:
    config = loaded.config
    files = [Path(one) for one in loaded.origins.values() if one.endswith(".toml")]
    near = files[0] if files else None
    for section in list_data_sections(config):
        try:
            check_data(section, near)
        except ConfigError as error:
            raise name_owner(config, section, error) from error
    check_tune(config)
    for key, path in (
        ("model.build", config.model.build),
        ("model.loss", config.model.loss),
        *(("train.on", hook) for hook in config.train.on),
    ):
        if path:
            check_function(path, key, near)
    if config.checkpoint.remote:
        from shoal.checkpoint.remote.remote_folder import check_remote

        check_remote(config.checkpoint.remote)
    kind = kind_by_name(config.data.source)
    if kind and not config.model.build:
        check_model_data(config.model.name, config.data.source, lambda: kind)


def no_steps_line(prepared: PreparedRun) -> str:
    """Return the line for a resume that has no step left to train; "" for any other run."""
    from shoal.base.runlog.atomic_files import list_saved_steps
    from shoal.view.progress import no_steps_text

    train = prepared.loaded.config.train
    saved = list_saved_steps(prepared.folder) if prepared.resumed and not train.epochs else []
    return no_steps_text(saved[-1], train.steps) if saved and saved[-1] >= train.steps else ""


def _check_resumable(folder: Path) -> None:
    if not (folder / "run.toml").exists():
        from shoal.view.diagnosis.run_folders import explain_no_run, is_run_folder

        if is_run_folder(folder) or list_checkpoints(folder / "checkpoints"):
            raise ConfigError(
                f"--resume {folder}: has no run.toml, so a script of your own made it with "
                f"shoal.parallelize; start that again: its run.restore() goes on"
            )
        raise ConfigError(f"--resume {explain_no_run(folder)}")
    if _has_island_folders(load_config(folder / "run.toml").config.islands, folder):
        return check_islands_resumable(folder)
    if not list_checkpoints(folder / "checkpoints"):
        RunLease(folder, folder.name).check()  # a run before its first save has none yet
        remote = load_config(folder / "run.toml").config.checkpoint.remote
        there = f", which goes on from what {remote} has" if remote else ""
        raise ConfigError(
            f"--resume {folder}: holds no complete checkpoint; start anew with "
            f"shoal train {folder}/run.toml{there}"
        )
    if not (folder / "run.toml").stat().st_size:
        raise ConfigError(
            f"--resume {folder}: its run.toml is empty; write the run's configuration there again, "
            f"then resume"
        )


def launch_run(prepared: PreparedRun, environ: dict[str, str], *, verbose: bool = False) -> int:
    """Supervise the workers to the end; return the exit code.

    Args:
        verbose: show all lines before the first step.
    """
    most = None if verbose else OPENING_LINES - 1
    folder, config = prepared.folder, prepared.loaded.config
    folder.mkdir(parents=True, exist_ok=True)
    with RunLease(folder, config.run.name):
        files = [folder / name for name in ("run.toml", "plan.json")]
        before = {
            path: path.read_text(encoding="utf-8")
            for path in files
            if prepared.resumed and path.exists()
        }
        events = write_run_folder(prepared)
        write_job_name(folder, environ)
        environ["SHOAL_RESUME"] = "strict" if prepared.resumed and not prepared.force else ""
        if _has_island_folders(config.islands, folder):
            # A run's own choice is one of starts without islands, which left checkpoints here.
            sized = prepared.sized and (
                not prepared.resumed or bool(list_checkpoints(folder / "checkpoints"))
            )
            outcomes = launch_islands(
                prepared.loaded, prepared.plan, folder, environ, events, most, sized=sized
            )
            code, how, lines = islands_exit_status(folder, outcomes)
            if code == ConfigError.exit_code:
                _restore_files(before)
            _print_errors(lines)
            typer.echo(summarise_run(island_folder(folder, 0), islands=island_folders(folder)))
            if line := write_end_report(folder):
                typer.echo(line)
            typer.echo(next_lines(folder, code, how, SessionEnding.of(folder).saved))
            return code
        view = LiveView(folder, stream=sys.stdout, colour=True, most_opening_lines=most)
        environ.update(worker_environment(environ))
        try:
            outcome = supervise(
                [sys.executable, "-m", "shoal.cli.workers.worker", str(folder)],
                processes=config.launch.processes,
                folder=folder,
                # The members of a run of islands are fixed: none rejoins by itself.
                restarts=0 if config.islands.on and config.islands.at else config.launch.restarts,
                emit=events.emit,
                on_tick=view.tick,
                environ=environ,
                imports=worker_imports(config.model, prepared.plan.layout),
                patience_s=config.launch.patience_s,
                grace_s=config.launch.grace_s,
                steps_to_save=2 + (config.islands.period if config.islands.on else 0),
                spare=expendable_ranks(prepared.plan.layout),
            )
        finally:
            view.finish()
        # Only while owner.json exists: it alone reveals a deleted and re-created folder.
        ending = SessionEnding.of(folder := events.owner.current_path() if events.owner else folder)
    is_moved = folder != prepared.folder
    if not is_moved and prepared.resumed and outcome.status == "failed" and not ending.began:
        _restore_files(before)
    if not (is_moved or prepared.resumed) and ending.is_empty(outcome):
        typer.echo(ending.remove_folder())
        return ending.status(outcome)
    if trouble := ending.error_line(outcome):
        _print_errors([trouble])
    if outcome.exit_code == 2:
        return outcome.exit_code
    if ending.made or prepared.resumed:
        typer.echo(summarise_run(folder, view.console.width if view.on_terminal else 80))
        if line := write_end_report(folder):
            typer.echo(line)
    typer.echo(ending.next_command_lines(outcome))
    return ending.status(outcome)


def _print_errors(lines: list[str]) -> None:
    """Print lines on standard error, after flushing standard output so that the order stays."""
    sys.stderr.writelines(error_text(line) for line in lines)
    sys.stderr.flush()


def _restore_files(before: dict[Path, str]) -> None:
    """Restore files after a failed resume: an override that failed does not belong to the run."""
    for path, text in before.items():
        write_atomically(path, text)


def write_run_folder(prepared: PreparedRun, attempt: int = 0) -> EventLog:
    """Write the resolved run.toml and the first event into the run folder; return its event log.

    Args:
        attempt: restarts before this one.
    """
    folder = prepared.folder
    mended = quarantine_damage(folder) if prepared.resumed else []
    write_atomically(folder / "run.toml", to_toml(prepared.loaded))
    # Facts that an earlier attempt recorded about another model do not apply to this one.
    known = read_object(folder / "plan.json") if prepared.resumed else {}
    told = {"chosen": prepared.chosen, "sized": prepared.sized}
    write_atomically(folder / "plan.json", prepared.plan.to_json({**known, **told}))
    events = EventLog(folder / "events.jsonl", None)
    config = prepared.loaded.config
    events.emit(
        "run_started",
        processes=config.launch.processes,
        layout=prepared.plan.layout.text(),
        resumed=prepared.resumed,
        attempt=attempt,
    )
    for notice in [*mended, *prepared.loaded.notices]:
        events.emit("notice", text=notice)
    return events
