"""Run of a replay: its folder beside the run, its settings, its processes, what they computed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shoal.base.errors import ConfigError
from shoal.base.text.units import count_noun

if TYPE_CHECKING:
    from shoal.checkpoint.format.listing import CheckpointEntry
    from shoal.cli.start import PreparedRun
    from shoal.replay.replay_lines import Replay
    from shoal.replay.step_marks import StepRecord

TEMPORARY = ".replay-"
"""Beginning of the name of a replay's folder that is not kept."""
PASSED_OVER = (
    "breakpoint(): passed over, since several processes cannot share this terminal; try: --layout "
    "single"
)
LOG = re.compile("; traceback: [^ ]+")
QUIET = (
    "train.prove=off", "train.validate_every=0", "train.on=", "train.trace=",
    "train.on_oom=stop",
    "checkpoint.remote=", "checkpoint.initial_load_path=", "launch.restarts=0",
)  # fmt: skip
"""Settings of every replay: it neither proves, validates, reports, uploads nor starts again."""


def find_run(path: Path | None, *, with_script: bool = False) -> Path:
    """Return a run's folder, as the user named it.

    Args:
        with_script: the script that made the run is known.

    Raises:
        ConfigError: no folder is named, there is no run, or one that cannot be replayed.
    """
    from shoal.config.load import load_config
    from shoal.view.diagnosis.run_folders import explain_no_run, find_named_run, is_run_folder

    if path is None:
        raise ConfigError("replay: no run is named; try: shoal replay runs/NAME --step N")
    run = find_named_run(path)
    if not (run / "run.toml").is_file():
        if is_run_folder(run) and with_script:
            return run
        if is_run_folder(run):
            raise ConfigError(
                f"{run}: has no run.toml, so a script of your own made it; try: shoal replay {run} "
                f"--step N -- train.py, with the arguments that it had"
            )
        raise ConfigError(explain_no_run(run))
    if with_script:
        raise ConfigError(
            f"{run}: has a run.toml, so `shoal train` made it; leave out the script: shoal replay "
            f"{run} --step N"
        )
    config = load_config(run / "run.toml").config
    if config.layout.updates not in ("", "synchronous"):
        raise ConfigError(
            f"{run}: layout.updates = {config.layout.updates}: the order in which workers met "
            f"their servers is not recorded, so no step can be repeated"
        )
    folders = sorted(run.glob("island-*")) if config.islands.on and not config.islands.at else []
    if folders:
        raise ConfigError(
            f"{run}: is a run of islands, each with steps of its own; try: shoal replay "
            f"{folders[0]} --step N"
        )
    return run


def check_step(run: Path, step: int) -> None:
    """Refuse a step that the run did not take.

    Raises:
        ConfigError: names the run's last step.
    """
    from shoal.replay.replay_folder import read_last_step

    last = read_last_step(run)
    if not last:
        raise ConfigError(f"{run}: no step was taken, so none can be repeated; try: shoal runs")
    if not 1 <= step <= last:
        raise ConfigError(
            f"--step {step}: {run} has steps 1 to {last:,}; try: --step {min(max(step, 1), last)}"
        )


def run_replay(
    run: Path,
    step: int,
    overrides: list[str],
    record_from: int,
    *,
    keep: Path | None = None,
    quiet: bool = False,
    trust: bool = False,
    nudge: float = 0.0,
) -> Replay:
    """Repeat the steps from the nearest checkpoint up to a step.

    Args:
        record_from: first step whose tensors are recorded; 0: none is.
        keep: folder that is kept; None: a temporary one.
        nudge: share of each weight by which it is moved before the first step; 0: none is.

    Raises:
        ConfigError, PlanError: the settings do not fit, or the folder to keep exists.
        typer.Exit: the processes failed; their line was printed.
    """
    from shoal.base.plans.plan import Plan
    from shoal.cli.start import write_run_folder
    from shoal.replay.replay_folder import (
        RECORDED,
        ReplayRequest,
        fill_folder,
        read_rewinds,
        read_rows,
        read_statistics,
    )
    from shoal.replay.replay_lines import Replay, opening_lines, repeats_bits
    from shoal.replay.run_environment import read_run_environment, read_session_record
    from shoal.replay.step_marks import StepRecord

    find = _prepare_start_search(run, step, overrides)
    session = read_session_record(run, step)
    with replay_folder(run, keep) as folder:
        start = fill_folder(run, folder, session, find)
        began = start.step if start else 0
        prepared = _prepare(folder, [*QUIET, *overrides], began, trust=trust)
        write_run_folder(prepared)
        request = ReplayRequest(step, record_from, nudge=nudge, rewinds=read_rewinds(run, began))
        request.write(folder)
        own_rows, processes = (
            read_rows(run, began + 1, step),
            prepared.loaded.config.launch.processes,
        )
        if not quiet:
            shown = (
                f"{prepared.plan.layout.text()} on {count_noun(processes, 'process', 'processes')}"
            )
            typer.echo("\n".join(opening_lines(run, (began, step), shown, own_rows)))
            sys.stdout.flush()
        _train(prepared, make_replay_environment(run), quiet=quiet)
        own, used = (
            (one.layout.text(), one.compute, one.micro_batch)
            for one in (
                Plan.from_json((at / "plan.json").read_text(encoding="utf-8"))
                for at in (run, folder)
            )
        )
        if session:
            own = session["layout"], session["precision"], session["micro_batch"]
        found = StepRecord(str(run), used[0], processes, used[1], micro_batch=used[2])
        why = f"the checkpoint of step {began} is damaged"
        began = report_earlier_start(folder, began, why, quiet=quiet)
        found.rows = read_rows(folder, began + 1, step)
        own_rows = read_rows(run, began + 1, step)
        recorded = json.loads((folder / RECORDED).read_text(encoding="utf-8"))
        complete_record(found, recorded, folder)
        done = Replay(run, began, found, own_rows, own == used, str(own[1]))
        done.statistics = read_statistics(folder, began + 1, step)
    done.own_statistics = read_statistics(run, began + 1, step)
    done.own_environment = read_run_environment(run, step)
    done.repeats_bits = repeats_bits(run) and found.repeats_bits
    return done


def _prepare_start_search(
    run: Path, step: int, overrides: list[str]
) -> Callable[[], Sequence[CheckpointEntry]]:
    """Return the function that finds the checkpoints to begin with; it finds none for fp64.

    Raises:
        ConfigError: a round of islands cannot be repeated so, or the run's data lies elsewhere.
    """
    from shoal.cli.data import check_relative_source
    from shoal.config.load import load_config
    from shoal.replay.island_rounds import find_round_start
    from shoal.replay.replay_folder import find_starts

    find = partial(find_starts, run, step)
    fresh = _changes_stored_format(run, overrides)
    config = load_config(run / "run.toml").config
    if not (config.islands.owned or any(one.startswith("data.source=") for one in overrides)):
        check_relative_source(run, config.data.source, "shoal replay", step)
    if config.islands.groups > 1:
        find = partial(find_round_start, run, step)
        if fresh and find():
            raise ConfigError(
                "precision.compute = fp64: weights of a round's checkpoint are fp32, and rounds "
                "before it are not repeated; try: a step of the first round, or no --precision"
            )
    return list if fresh else find


def report_earlier_start(folder: Path, began: int, why: str, *, quiet: bool) -> int:
    """Return the step after which a replay began in fact; print why it was an earlier one.

    Args:
        folder: of the replay.
        began: step of the nearest checkpoint.
        why: the reason of an earlier start.
    """
    from shoal.replay.replay_folder import read_rows

    first = min(read_rows(folder, 1, began + 1), default=began + 1)
    if first <= began:
        where = f"step {first - 1}" if first > 1 else "its first step"
        typer.echo(f"{why}, so it began at {where}", err=quiet)
    return min(first - 1, began)


def complete_record(record: StepRecord, recorded: dict[str, Any], folder: Path) -> None:
    """Add the tensors of the recorded steps and the environment that the processes wrote.

    A line on stderr reports breakpoints that several processes passed over.

    Args:
        recorded: JSON that rank 0 of the replay wrote.
        folder: of the replay.
    """
    from shoal.base.runlog.damaged_lines import read_object
    from shoal.replay.replay_lines import repeats_bits
    from shoal.replay.run_environment import collect_environment
    from shoal.replay.step_marks import parse_marks

    record.steps = {one.step: one for one in map(parse_marks, recorded["steps"])}
    ranks = read_object(folder / "ranks.json")
    record.environment = collect_environment(recorded["environment"], ranks)
    record.repeats_bits = repeats_bits(folder)
    if recorded.get("passed_over"):
        typer.echo(PASSED_OVER, err=True)


def _changes_stored_format(run: Path, overrides: list[str]) -> bool:
    """Return whether weights are kept in another format than in the run's checkpoints.

    Only fp64 keeps other weights than fp32. Such a replay begins at the run's first step.
    """
    from shoal.base.runlog.damaged_lines import read_object

    asked = [one.partition("=")[2] for one in overrides if one.startswith("precision.compute=")]
    own = str(read_object(run / "plan.json").get("compute", ""))
    return bool(asked) and (asked[-1] == "fp64") != (own == "fp64")


@contextmanager
def replay_folder(run: Path, keep: Path | None) -> Iterator[Path]:
    """Make the replay's folder: the one to keep, or one that is removed afterwards.

    It lies beside the run if that disk can be written, so that checkpoints are linked, not copied.

    Raises:
        ConfigError: the folder to keep exists.
    """
    if keep is not None:
        try:
            keep.mkdir(parents=True)
        except OSError as failure:
            raise ConfigError(f"--keep {keep}: {failure.strerror or failure}") from failure
        yield keep
        return
    beside: Path | None = run.absolute().parent
    if not os.access(run.absolute().parent, os.W_OK):
        beside = None
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=beside))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _prepare(folder: Path, overrides: list[str], began: int, *, trust: bool) -> PreparedRun:
    """Prepare the run of a replay's folder, with the layout and micro-batch that the run chose."""
    from shoal.cli.start import PreparedRun, settle_run
    from shoal.config.resolve import chosen_micro_batch
    from shoal.config.save import restore_origins
    from shoal.config.trust import load_trusted

    path = folder / "run.toml"
    loaded = load_trusted(path, overrides, trust=trust)
    sized = chosen_micro_batch(loaded) > 0
    plan, chosen = settle_run(loaded, None, folder)
    restore_origins(loaded, path)
    loaded.replace("run", "replay", folder=str(folder.parent), name=folder.name)
    return PreparedRun(loaded, folder, plan, began > 0, chosen, force=True, sized=sized)


def make_replay_environment(run: Path) -> dict[str, str]:
    """Return the environment of a replay's processes: with as many threads as the run's ranks.

    Sums of another number of threads differ in their last bits. OMP_NUM_THREADS of the user counts
    first.
    """
    from shoal.base.runlog.damaged_lines import read_object
    from shoal.cli.workers.worker import worker_environment

    found = worker_environment({**os.environ, "SHOAL_RESUME": ""})
    ranks = read_object(run / "ranks.json").get("ranks")
    threads = ranks[0].get("threads") if isinstance(ranks, list) and ranks else None
    if isinstance(threads, int):
        found.setdefault("OMP_NUM_THREADS", str(threads))
    return found


def _train(prepared: PreparedRun, environ: dict[str, str], *, quiet: bool) -> None:
    """Start the processes and wait for their end.

    A single process has this terminal, so that `breakpoint()` in the user's model stops there.

    Raises:
        typer.Exit: they failed; their line was printed.
    """
    from shoal.base.runlog.events import EventLog
    from shoal.cli.workers.worker import worker_imports
    from shoal.launch import supervise
    from shoal.view.phase_lines import PhaseLine, read_current_phases

    folder, config = prepared.folder, prepared.loaded.config
    words = [sys.executable, "-m", "shoal.cli.workers.replay_worker", str(folder)]
    if config.launch.processes == 1:
        to = sys.stderr if quiet else None
        if code := subprocess.run(words, env=environ, stdout=to, check=False).returncode:
            raise typer.Exit(code if code > 0 else 128 - code)
        return
    waiting = PhaseLine(sys.stderr if quiet else sys.stdout)
    outcome = supervise(
        words,
        processes=config.launch.processes,
        folder=folder,
        restarts=0,
        emit=EventLog(folder / "events.jsonl", None).emit,
        on_tick=lambda: waiting.show(read_current_phases(folder)),
        environ=environ,
        imports=worker_imports(config.model, prepared.plan.layout),
    )
    waiting.finish()
    end_if_failed(outcome.exit_code, outcome.message, folder)


def end_if_failed(code: int, message: str, folder: Path) -> None:
    """Print the line of processes that failed, without a log that is removed with its folder.

    Raises:
        typer.Exit: they failed.
    """
    if not code:
        return
    if folder.name.startswith(TEMPORARY):
        message = LOG.sub("; its log stays with: --keep FOLDER", message)
    sys.stderr.write(f"shoal: {message}\n")
    raise typer.Exit(code)
