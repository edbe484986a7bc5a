"""`shoal replay`: repeat a step of an earlier run, and find where two runs part.

The parent process imports no torch. It copies what the run needs into a folder of its own, starts
the processes there as `shoal train` would, and compares what they computed with what the run wrote.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from shoal.base.errors import ConfigError, PlanError, check_choice
from shoal.base.layouts.layout import STRATEGIES
from shoal.cli.words import TRUST, split_arguments

if TYPE_CHECKING:
    from shoal.replay.replay_lines import Replay

ARGUMENTS = typer.Argument(
    None,
    metavar="RUN [SECTION.KEY=VALUE …] [-- SCRIPT …]",
    help="A run's folder, settings of the replay; of a loop of your own: its script.",
)
STEP = typer.Option(None, "--step", metavar="N", help="The step to repeat.")
LAYOUT = typer.Option("", "--layout", metavar="NAME", help="Another layout, say single.")
PRECISION = typer.Option(
    "", "--precision", metavar="FORMAT", help="Another format; fp64 begins at the first step."
)
STATISTICS = typer.Option(
    False, "--statistics", help="Print norms of each gradient, weight and update of the step."
)
RECORD = typer.Option(None, "--record", metavar="FILE", help="Write digests of the tensors there.")
AGAINST = typer.Option(
    None, "--against", metavar="RUN2|FILE", help="Find the first step and tensor that differ."
)
KEEP = typer.Option(None, "--keep", metavar="FOLDER", help="Keep the replay's run folder there.")
JSON = typer.Option(False, "--json", help="Print one JSON document.")

DEGREES = ("dp_replicate", "dp_shard", "pp", "cp", "tp", "ep", "servers", "threads", "chunks")


def replay(
    arguments: list[str] = ARGUMENTS,
    step: int | None = STEP,
    layout: str = LAYOUT,
    precision: str = PRECISION,
    statistics: bool = STATISTICS,
    record: Path = RECORD,
    against: Path = AGAINST,
    keep: Path = KEEP,
    as_json: bool = JSON,
    trust: bool = TRUST,
) -> None:
    """Repeat a step of a run from the nearest checkpoint: same samples, same masks, same sums.

    For example: shoal replay runs/mine --step 412 --statistics
    On the run's own layout and machine every bit repeats; on another one numbers agree to rounding.
    --against names a second run: the first step whose numbers differ, then its first tensor.
    The run's folder is only read. Exit status: 0 repeated (with --against: equal), 3 different,
    2 something to correct, 1 anything else.
    """
    from shoal.cli import torchrun
    from shoal.cli.replay_pair import compare_with
    from shoal.cli.replay_run import check_step, find_run, run_replay
    from shoal.replay.replay_folder import read_last_step
    from shoal.replay.replay_lines import replay_lines, replay_record
    from shoal.replay.step_marks import check_target

    if torchrun.is_launched():
        raise PlanError("shoal replay: starts its own processes; run it without torchrun or srun")
    settings, script = split_script(arguments or [])
    path, overrides = split_arguments(settings)
    run = find_run(path, with_script=bool(script))
    if record is not None:
        check_target(record)
    if step is None and against is None:
        raise ConfigError(f"{run}: which step? try: --step {read_last_step(run) or 1}")
    step = step or 0
    overrides = [*overrides, *_option_overrides(layout, precision)]
    overrides += [f"train.statistics={step}"] if statistics else []
    if against is not None:
        if script:
            from shoal.cli.replay_script import make_script_replays

            repeat = make_script_replays(run, script, layout, quiet=as_json)
        else:
            repeat = partial(_repeat_run, overrides, quiet=as_json, trust=trust)
        found = compare_with(run, step, against, repeat, with_script=bool(script))
        if record is not None:
            found.first.record.write(record)
        typer.echo(json.dumps(found.to_record(), indent=1) if as_json else found.text())
        raise typer.Exit(0 if found.is_equal else 3)
    check_step(run, step)
    record_from = step if record is not None else 0
    if script:
        from shoal.cli.replay_script import replay_script

        asked = step if statistics else 0
        repeat_run = partial(replay_script, run, step, script, layout, statistics=asked)
    else:
        repeat_run = partial(run_replay, run, step, overrides, trust=trust)
    done = repeat_run(record_from, keep=keep, quiet=as_json)
    if done.may_be_rounding():
        typer.echo(NUDGED, err=as_json)
        more = {"from_start": not done.start} if script else {}
        nudged = repeat_run(0, quiet=True, nudge=done.rounding, **more)
        done.nudged_rows = nudged.record.rows
    if record is not None:
        done.record.write(record)
    if as_json:
        typer.echo(json.dumps(replay_record(done, step), indent=1))
    else:
        typer.echo("\n".join(replay_lines(done, step, with_statistics=statistics)))
    raise typer.Exit(0 if done.repeats_run() else 3)


def _repeat_run(
    overrides: list[str], run: Path, step: int, record_from: int, *, quiet: bool, trust: bool
) -> Replay:
    """Replay a run of `shoal train` under some settings."""
    from shoal.cli.replay_run import run_replay

    return run_replay(run, step, overrides, record_from, quiet=quiet, trust=trust)


NUDGED = (
    "different by more than a usual rounding; once more, with each weight moved by one rounding"
)


def split_script(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return (the run and its settings, the script and its own arguments).

    >>> split_script(["runs/a", "train.seed=1"]), split_script(["runs/a", "train.py", "lr=1"])
    ((['runs/a', 'train.seed=1'], []), (['runs/a'], ['train.py', 'lr=1']))
    """
    for at, word in enumerate(arguments[1:], 1):
        if "=" not in word:
            return arguments[:at], arguments[at:]
    return arguments, []


def _option_overrides(layout: str, precision: str) -> list[str]:
    """Return the settings that --layout and --precision stand for.

    Raises:
        ConfigError: the layout has no such name.
    """
    found = [f"precision.compute={precision}"] if precision else []
    if precision and precision != "bf16":
        found.append("precision.residual=fp32")
    if layout:
        check_choice("--layout", layout, STRATEGIES)
        found += [f"layout.{key}=0" for key in DEGREES]
        found += [f"layout.strategy={layout}", "layout.zero=-1", "layout.schedule="]
        found += ["launch.processes=1"] if layout in ("single", "dp") else []
    return found
