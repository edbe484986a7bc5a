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

from shoal.base.errors import CheckpointError, ConfigError, PlanError, nearest, short
from shoal.base.estimates.facts import this_machine
from shoal.base.layouts.island_options import IslandsPolicy
from shoal.base.layouts.parameter_servers import spare_ranks
from shoal.base.layouts.schedule_names import check_stages
from shoal.base.plans.batches import turn_of
from shoal.base.plans.plan import Plan
from shoal.base.runlog.atomic_files import write_whole
from shoal.base.runlog.damaged_lines import read_object
from shoal.base.runlog.events import EventLog
from shoal.base.runlog.truncate_logs import mend_folder
from shoal.checkpoint.format.lease import RunLease
from shoal.checkpoint.format.listing import find, read_manifest
from shoal.cli.ending import Ending, end_of_islands, next_lines, told
from shoal.cli.islands import check_resumable, island_folder, islands_of, launch_all
from shoal.cli.job_file import note_job
from shoal.cli.words import file_and_overrides
from shoal.cli.workers.worker import imports_of
from shoal.config.differences import (
    of_configurations,
    of_surroundings,
    refusal,
    shows_when_opened,
)
from shoal.config.load import Loaded, load
from shoal.config.paths import check_data, check_function
from shoal.config.resolve import (
    asked_layout,
    check_reads,
    chosen_micro_batch,
    kind_by_name,
    micro_batch_is_open,
    plan_of,
    processes_of,
    resolve_batch,
    resolve_folder,
    resolve_islands,
    resolve_length,
    resolve_validation,
)
from shoal.config.save import keep_origins, to_toml
from shoal.config.sections import Config
from shoal.config.trust import load_own
from shoal.forecast.models.hf_presence import foreign_config, is_foreign
from shoal.forecast.models.model_facts import blocks as count_blocks
from shoal.forecast.models.model_facts import parameters as count_parameters
from shoal.launch import supervise
from shoal.planning.layout_guide import check_cores
from shoal.planning.pipeline_bubble import describe_bubble
from shoal.planning.recorded_plan import keep_choice
from shoal.planning.settle import settle_batch, settle_layout
from shoal.view.live import LiveView
from shoal.view.summary import summary


@dataclass
class Prepared:
    """A run that may start: its configuration, folder and plan.

    Attributes:
        chosen: the run.toml leaves the layout open, and an earlier start of this run has chosen it.
        force: resume although changed settings or code lead to another result.
        sized: an earlier start, or the run that wrote this run.toml, has chosen the micro-batch.
    """

    loaded: Loaded
    folder: Path
    plan: Plan
    resumed: bool
    chosen: bool = False
    force: bool = False
    sized: bool = False


def prepare(
    arguments: list[str],
    resume: Path | None,
    processes: int | None = None,
    *,
    force: bool = False,
    trust: bool = False,
) -> Prepared:
    """Check the request and settle what was left open.

    Args:
        processes: the number of processes, if another launcher started them.
        force: a resume continues with settings and code that its checkpoint was not trained with.
        trust: call functions that another user's run.toml names.

    Raises:
        ConfigError, PlanError, CheckpointError: the request is wrong; one line each.
    """
    path, overrides = file_and_overrides(arguments)
    if resume is not None:
        if path:
            raise ConfigError(f"command line: {path}: --resume takes its own run.toml")
        _check_resumable(resume)
        path = resume / "run.toml"
    loaded = load_own(path, overrides, trust=trust)
    sized = chosen_micro_batch(loaded) > 0
    plan, chosen = settle_run(loaded, processes, resume)
    folder = resume or resolve_folder(loaded)
    if path == folder / "run.toml":
        keep_origins(loaded, path)
    if resume is not None:
        _check_goes_on(loaded.config.islands, resume)
        for key, value in (("folder", str(resume.parent)), ("name", resume.name)):
            if value != getattr(loaded.config.run, key):
                loaded.replace("run", "resumed", **{key: value})
        if not force:
            _check_same(loaded, resume)
        return Prepared(loaded, resume, plan, True, chosen, force, sized)
    # A run that never saved anything has nothing to lose; its lease protects a live one.
    if find(folder / "checkpoints") or islands_of(folder):
        raise ConfigError(
            f"run.name = {loaded.config.run.name}: {folder} holds a run already; to go on with it: "
            f"shoal train --resume {folder}; else another run.name"
        )
    return Prepared(loaded, folder, plan, False, sized=sized)


def _check_same(loaded: Loaded, folder: Path) -> None:
    """Refuse a resume whose settings or code change the result.

    Only differences that can be found without torch are checked here; the workers check data and
    weights.

    Raises:
        ConfigError: names each difference from the newest checkpoint that changes the result.
    """
    held = islands_of(folder)
    for found in find((held[0] if held else folder) / "checkpoints"):
        try:
            record = read_manifest(found.path).record
        except CheckpointError:
            continue  # the code that restores the checkpoint reports the damage
        then = str(record.get("configuration", ""))
        differences = of_configurations(then, to_toml(loaded)) if then else []
        differences += of_surroundings(record)
        if shows_when_opened(differences):
            return  # the workers refuse it, and offer --force only if it can resume
        if line := refusal(f"--resume {folder}", found.step, differences):
            raise ConfigError(line)
        return


def settle_run(
    loaded: Loaded, processes: int | None, resume: Path | None = None
) -> tuple[Plan, bool]:
    """Settle processes, layout, batch and length in `loaded`; check model and data paths.

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
    machine = this_machine()
    if processes is None and config.launch.nodes > 1:
        raise PlanError(
            f"launch.nodes = {config.launch.nodes}: `shoal train` starts processes on this machine "
            f"only; on several, start the same command with torchrun --nnodes or srun"
        )
    resolve_islands(loaded)
    section, alone = config.layout, _islands_here(loaded.config.islands) == 1
    count = processes or config.launch.processes or processes_of(section, machine)
    if not (alone or processes or config.launch.processes or section.degrees()):
        count = max(1, count // config.islands.count)
    check_cores(count, machine)
    loaded.replace("launch", loaded.origins.get("launch.processes", "derived"), processes=count)
    _check_paths(loaded)
    parameters = None
    if not config.model.build:
        parameters = count_parameters(
            config.model.name, config.model.arguments, sequence=config.data.sequence
        )
    plan = settle_layout(plan_of(config), asked_layout(section), count, parameters, machine)
    chosen = False
    if resume is not None:
        plan, chosen = keep_choice(plan, asked_layout(section), resume)
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
    plan = settle_portions(loaded, plan)
    if pipeline := describe_bubble(layout, plan.batch, plan.micro_batch):
        loaded.notices.append(pipeline)
    resolve_length(loaded)
    resolve_validation(loaded)
    return plan, chosen


def settle_portions(loaded: Loaded, plan: Plan) -> Plan:
    """Settle the batch and its division, in `loaded` and in the plan that has its layout.

    A micro-batch that an earlier start chose is kept if it divides the share of a data-parallel
    rank; else the nearest below replaces it, and a line reports that. Islands may have different
    layouts; they begin with an eighth of the batch, which all of them can run.

    Raises:
        ConfigError, PlanError: the sizes do not divide; the message names the nearest legal values.
    """
    resolve_batch(loaded, plan.layout.data_degree)
    train, chosen = loaded.config.train, chosen_micro_batch(loaded)
    given = 0 if micro_batch_is_open(loaded) else train.micro_batch
    most = chosen or (turn_of(train.batch) if loaded.config.islands.on else 0)
    plan = settle_batch(replace(plan, batch=train.batch, micro_batch=given), at_most=most)
    if chosen and plan.micro_batch != chosen:
        loaded.notices.append(
            f"train.micro_batch: {chosen} → {plan.micro_batch}, what divides the "
            f"{train.batch // plan.layout.data_degree} samples of a data-parallel rank here; masks "
            f"of dropout and statistics of BatchNorm, which belong to a micro-batch, are others"
        )
    if not given:
        loaded.replace("train", "derived", micro_batch=plan.micro_batch)
    return plan


def _islands_here(islands: IslandsPolicy) -> int:
    """Return the number of islands that this command starts on this machine."""
    return 1 if islands.at or not islands.on else islands.count


def _in_folders(islands: IslandsPolicy, folder: Path) -> bool:
    """Return whether islands have their own folders in the run's, even a single remaining one."""
    alone = islands.on and not islands.at and bool(islands_of(folder))
    return alone or _islands_here(islands) > 1


def _check_goes_on(islands: IslandsPolicy, folder: Path) -> None:
    """Refuse to resume a run of islands with a command that starts no islands.

    Raises:
        ConfigError: the folder holds islands, and islands.at or islands.method excludes them.
    """
    held = islands_of(folder)
    if held and not _in_folders(islands, folder):
        key = f"at = {islands.at}" if islands.at else f"method = {islands.method}"
        raise ConfigError(
            f"islands.{key}: {folder} was trained by islands, and only islands started from there "
            f"go on with their rounds; try: shoal train --resume {folder} islands.count=1"
        )


def check_tune(config: Config) -> None:
    """Refuse adapters without pretrained weights to adapt.

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
                    f"tune.{key} = {short(str(shown))}: no adapter is asked for; try: "
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
    if not is_foreign(name):
        raise ConfigError(
            f"{where}: model.name = {name} starts from random weights, and frozen ones learn "
            f"nothing; try: model.name=hf:FOLDER, say of `shoal checkpoint export`"
        )
    path, stored = foreign_config(name, config.model.arguments)
    if not stored:
        raise ConfigError(
            f"{where}: no safetensors lie beside {path}, and frozen random weights learn nothing; "
            f"try: model.name=hf:FOLDER with its weights, or tune.adapter=none"
        )


def _check_paths(loaded: Loaded) -> None:
    config = loaded.config
    check_data(config.data)
    check_tune(config)
    for key, path in (
        ("model.build", config.model.build),
        ("model.loss", config.model.loss),
        *(("train.on", hook) for hook in config.train.on),
    ):
        if path:
            check_function(path, key)
    if config.checkpoint.remote:
        from shoal.checkpoint.remote.remote_folder import check_remote

        check_remote(config.checkpoint.remote)
    kind = kind_by_name(config.data.source)
    if kind and not config.model.build:
        check_reads(config.model.name, config.data.source, lambda: kind)


def _check_resumable(folder: Path) -> None:
    if not (folder / "run.toml").exists():
        runs = [p.parent for p in Path("runs").glob("*/run.toml")]
        close = nearest(str(folder), [str(r) for r in runs])
        hint = f"; try: {close}" if close else "; run folders hold a run.toml"
        if find(folder / "checkpoints"):
            raise ConfigError(
                f"--resume {folder}: has checkpoints but no run.toml, so a script of your own made "
                f"it with shoal.parallelize; start that again: its run.restore() goes on"
            )
        raise ConfigError(f"--resume {folder}: no run there{hint}")
    if _in_folders(load(folder / "run.toml").config.islands, folder):
        return check_resumable(folder)
    if not find(folder / "checkpoints"):
        remote = load(folder / "run.toml").config.checkpoint.remote
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


def launch(prepared: Prepared, environ: dict[str, str]) -> int:
    """Supervise the workers to the end; return the exit code."""
    folder, config = prepared.folder, prepared.loaded.config
    folder.mkdir(parents=True, exist_ok=True)
    with RunLease(folder, config.run.name):
        files = [folder / name for name in ("run.toml", "plan.json")]
        before = {
            path: path.read_text(encoding="utf-8")
            for path in files
            if prepared.resumed and path.exists()
        }
        events = write_folder(prepared)
        note_job(folder, environ)
        environ["SHOAL_RESUME"] = "strict" if prepared.resumed and not prepared.force else ""
        if _in_folders(config.islands, folder):
            outcomes = launch_all(prepared.loaded, prepared.plan, folder, environ, events)
            code, how, lines = end_of_islands(folder, outcomes)
            if code == ConfigError.exit_code:
                _put_back(before)
            _print_errors(lines)
            typer.echo(summary(island_folder(folder, 0)))
            typer.echo(next_lines(folder, code, how, Ending.of(folder).saved))
            return code
        view = LiveView(folder, stream=sys.stdout, colour=True)
        paths = [str(Path.cwd()), environ.get("PYTHONPATH", "")]
        environ["PYTHONPATH"] = ":".join(path for path in paths if path)
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
                imports=imports_of(config.model.name, prepared.plan.layout),
                patience_s=config.launch.patience_s,
                grace_s=config.launch.grace_s,
                steps_to_save=2 + (config.islands.period if config.islands.on else 0),
                spare=spare_ranks(prepared.plan.layout),
            )
        finally:
            view.finish()
        # Only while owner.json exists: it alone reveals a deleted and re-created folder.
        ending = Ending.of(folder := events.owner.place() if events.owner else folder)
    is_moved = folder != prepared.folder
    if not is_moved and prepared.resumed and outcome.status == "failed" and not ending.began:
        _put_back(before)
    if not (is_moved or prepared.resumed) and ending.is_empty(outcome):
        typer.echo(ending.forget())
        return ending.status(outcome)
    if trouble := ending.trouble(outcome):
        _print_errors([trouble])
    if outcome.exit_code == 2:
        return outcome.exit_code
    if ending.made or prepared.resumed:
        typer.echo(summary(folder, view.console.width if view.on_terminal else 80))
    typer.echo(ending.next(outcome))
    return ending.status(outcome)


def _print_errors(lines: list[str]) -> None:
    """Print lines on standard error, after flushing standard output so that the order stays."""
    sys.stderr.writelines(told(line) for line in lines)
    sys.stderr.flush()


def _put_back(before: dict[Path, str]) -> None:
    """Restore files after a failed resume: an override that failed does not belong to the run."""
    for path, text in before.items():
        write_whole(path, text)


def write_folder(prepared: Prepared, attempt: int = 0) -> EventLog:
    """Write the resolved run.toml and the first event into the run folder; return its event log.

    Args:
        attempt: restarts before this one.
    """
    folder = prepared.folder
    mended = mend_folder(folder) if prepared.resumed else []
    write_whole(folder / "run.toml", to_toml(prepared.loaded))
    # Facts that an earlier attempt recorded about another model do not apply to this one.
    known = read_object(folder / "plan.json") if prepared.resumed else {}
    told = {"chosen": prepared.chosen, "sized": prepared.sized}
    write_whole(folder / "plan.json", prepared.plan.to_json({**known, **told}))
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
