"""`shoal replay RUN --step N -- train.py …`: repeat steps of a loop of the user's own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import typer

from shoal.base.errors import CheckpointError, ConfigError, nearest_word
from shoal.base.plans.plan import Plan
from shoal.base.runlog.damaged_lines import is_number, read_object
from shoal.base.runlog.events import EventLog
from shoal.base.text.units import count_noun
from shoal.checkpoint.format.listing import list_checkpoints, read_manifest
from shoal.cli.replay_run import (
    complete_record,
    end_if_failed,
    make_replay_environment,
    replay_folder,
    report_earlier_start,
)
from shoal.cli.script_copy import copy_script_folder
from shoal.replay.replay_folder import (
    RECORDED,
    ReplayRequest,
    fill_folder,
    find_starts,
    read_rows,
    read_statistics,
)
from shoal.replay.replay_lines import Replay, opening_lines, repeats_bits
from shoal.replay.run_environment import read_library, read_run_environment, read_session_record
from shoal.replay.step_marks import StepRecord

SHAPE = ("layout", "precision", "micro_batch")
"""Keys of a checkpoint's record: equal ones repeat a run's bits."""
NO_RUN = "never made this run; try: the script and arguments that made it"


def replay_script(
    run: Path,
    step: int,
    words: Sequence[str],
    layout: str,
    record_from: int,
    *,
    statistics: int = 0,
    named: Path | None = None,
    keep: Path | None = None,
    quiet: bool = False,
    nudge: float = 0.0,
    from_start: bool = False,
) -> Replay:
    """Repeat the steps of a script's run from the nearest checkpoint up to a step.

    A script may hold state that a restore does not set back: a generator for its batches, a
    schedule. If a step differs, the steps are repeated from the first one.

    Args:
        words: the script, and its own arguments.
        layout: replaces the script's; "": the script's.
        record_from: first step whose tensors are recorded; 0: none is.
        statistics: `train.statistics` of the replay; 0: none.
        named: the folder that the script names; None: the run's.
        nudge: share of each weight by which it is moved before the first step; 0: none is.
        from_start: begin at the first step.

    Raises:
        ConfigError: there is no such script, or it does not make the run.
        typer.Exit: the processes failed; their line was printed.
    """
    request = ReplayRequest(step, record_from, layout=layout, statistics=statistics, nudge=nudge)
    named = named or run
    done = _repeat_script(run, named, words, request, keep, quiet=quiet, from_start=from_start)
    if keep is not None or nudge or not _needs_first_step(done):
        return done
    found = done.difference()
    typer.echo(HELD.format(step=found.step if found else step), err=quiet)
    return _repeat_script(run, named, words, request, None, quiet=quiet, from_start=True)


HELD = (
    "different from step {step}, and the script may hold state that its restore does not set back "
    "(a generator for batches, a schedule); once more from the first step"
)
AGAIN_S = 600.0
"""Seconds that the run took, up to which its steps are repeated once more without being asked."""


def _needs_first_step(done: Replay) -> bool:
    """Return whether a replay differs as one whose script restores less than it held."""
    found = done.difference()
    if not done.start or found is None or done.environment_differences():
        return False
    if not done.compares_bits and found.step != done.start + 1:
        return False  # rounding grows from step to step
    found_s = [row.get("step_s") for row in done.own_rows.values()]
    times_s = sorted(one for one in found_s if is_number(one))
    return bool(times_s) and times_s[len(times_s) // 2] * max(done.own_rows) <= AGAIN_S


def _repeat_script(
    run: Path,
    named: Path,
    words: Sequence[str],
    request: ReplayRequest,
    keep: Path | None,
    *,
    quiet: bool,
    from_start: bool,
) -> Replay:
    """Repeat the steps once.

    Args:
        named: the folder that the script names.
        request: what the processes repeat; the script is added.

    Raises:
        ConfigError, typer.Exit: as `replay_script`.
    """
    step, layout, script = request.last_step, request.layout, Path(words[0])
    if not script.is_file():
        near = nearest_word(script.name, [path.name for path in script.parent.glob("*.py")])
        hint = str(script.parent / near) if near else "the script that made the run"
        raise ConfigError(f"{script}: there is no such script; try: {hint}")
    own = read_session_record(run, step) or _read_own_shape(run)
    ranks = read_object(run / "ranks.json").get("ranks", ())
    processes = 1 if layout in ("single", "dp") else max(1, len(ranks))
    if processes < len(ranks) and (library := read_library(run).get("library")):
        raise ConfigError(
            f"--layout {layout}: loaders of {library} deal each process its own samples, so one "
            f"process trains on others than {len(ranks)}; try: no --layout, or --layout zero2"
        )
    # The copy lies elsewhere: below the working folder it would be copied into itself.
    copies = tempfile.TemporaryDirectory(prefix="shoal-replay-")
    with copies as copy, replay_folder(run, keep) as folder:
        find = list if from_start else partial(find_starts, run, step)
        start = fill_folder(run, folder, {}, find)
        began = start.step if start else 0
        here = Path.cwd()
        copied, cwd = copy_script_folder(script, here, Path(copy))
        replace(
            request, script=str(copied), words=tuple(words[1:]), cwd=str(cwd), home=str(here),
            run=str(named.resolve()),
        ).write(folder)  # fmt: skip
        own_rows = read_rows(run, began + 1, step)
        if not quiet:
            on = count_noun(processes, "process", "processes")
            shown = f"{layout or own.get('layout', 'its own layout')} on {on}"
            typer.echo("\n".join(opening_lines(run, (began, step), shown, own_rows)))
            sys.stdout.flush()
        _run_processes(folder, processes, make_replay_environment(run), quiet=quiet)
        if not (folder / RECORDED).exists():
            raise ConfigError(f"{script}: {NO_RUN}")
        used = json.loads((folder / RECORDED).read_text(encoding="utf-8"))
        found = StepRecord(
            str(run), used["layout"], processes, used["precision"],
            micro_batch=used["micro_batch"],
        )  # fmt: skip
        why = "the script restored no checkpoint"
        began = report_earlier_start(folder, began, why, quiet=quiet)
        found.rows, own_rows = (read_rows(one, began + 1, step) for one in (folder, run))
        complete_record(found, used, folder)
        is_same = all(own.get(key, used[key]) == used[key] for key in SHAPE)
        done = Replay(run, began, found, own_rows, is_same, str(own.get("precision", "fp32")))
        done.statistics = read_statistics(folder, min(found.rows, default=step), step)
    done.own_statistics = read_statistics(run, began + 1, step)
    done.own_environment = read_run_environment(run, step)
    done.repeats_bits = repeats_bits(run) and found.repeats_bits
    return done


def make_script_replays(
    run: Path, words: Sequence[str], layout: str, *, quiet: bool
) -> Callable[[Path, int, int], Replay]:
    """Return the function that replays `run` or a run that is compared with it.

    Args:
        run: the first run.
        words: the script and arguments that made it; after a further `--` those of the second run.
            Without them the second run is made by the same words, with its folder for the first's.
        layout: as in `replay_script`.
    """
    at = list(words).index("--") if "--" in words else len(words)
    first, second = list(words[:at]), list(words[at + 1 :])

    def repeat(one: Path, step: int, record_from: int) -> Replay:
        used, named = first, one
        if one.resolve() != run.resolve():
            used = second or [_replace_folder(word, run, one) for word in first]
            named = run if used == first else one  # the script names its folder itself
        return replay_script(one, step, used, layout, record_from, named=named, quiet=quiet)

    return repeat


def _replace_folder(word: str, run: Path, other: Path) -> str:
    """Return an argument with the folder of another run, if it names the run's.

    >>> _replace_folder("--out=runs/a", Path("runs/a"), Path("runs/b"))
    '--out=runs/b'
    """
    key, equals, value = word.rpartition("=")
    if value and not value.startswith("-") and Path(value).resolve() == run.resolve():
        return f"{key}{equals}{other}"
    return word


def _read_own_shape(run: Path) -> dict[str, Any]:
    """Return layout, format and micro-batch of a run.

    They are those of its newest readable checkpoint, or without one those of its plan; a size that
    the plan does not know is left out.
    """
    for one in list_checkpoints(run / "checkpoints"):
        with suppress(CheckpointError):
            return {key: read_manifest(one.path).record.get(key) for key in SHAPE}
    with suppress(OSError, ValueError, KeyError, TypeError):
        plan = Plan.from_json((run / "plan.json").read_text(encoding="utf-8"))
        found = plan.layout.text(), plan.compute, plan.micro_batch
        return {key: one for key, one in zip(SHAPE, found, strict=True) if one}
    return {}


def _run_processes(folder: Path, processes: int, environ: dict[str, str], *, quiet: bool) -> None:
    """Run the script in so many processes, and wait for their end.

    Raises:
        typer.Exit: they failed; their line was printed.
    """
    from shoal.cli.workers.prove_worker import SCRIPT_IMPORTS
    from shoal.launch import supervise
    from shoal.launch.processes import LOOPBACK, free_port

    words = [sys.executable, "-m", "shoal.cli.workers.replay_worker", str(folder.resolve())]
    if processes == 1:
        to = sys.stderr if quiet else None
        if code := subprocess.run(words, env=environ, stdout=to, check=False).returncode:
            raise typer.Exit(code if code > 0 else 128 - code)
        return
    outcome = supervise(
        words,
        processes=processes,
        folder=folder,
        restarts=0,
        emit=EventLog(folder / "events.jsonl", None).emit,
        environ={**environ, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port())},
        imports=SCRIPT_IMPORTS,
    )
    end_if_failed(outcome.exit_code, outcome.message, folder)
