"""Differences of a run that a user's own script made and another launcher started.

No command of Shoal resumes such a run, and no supervisor of Shoal restarts it. Its ranks, or the
watchdog process beside them, report their deaths; a restart shows only in the later events.
"""

from __future__ import annotations

import re
from pathlib import Path

from shoal.base.runlog.damaged_lines import Record
from shoal.base.text.argument_names import SETTINGS, argument_setting

GOES_ON = ("resumed", "checkpoint_saved", "validated")
"""Events after a death which show that the script was started again."""


def is_user_script(folder: Path) -> bool:
    """Return whether a training loop of the user's own made the run."""
    return not (folder / "run.toml").exists()


def is_repeated_death(event: Record, before: list[Record]) -> bool:
    """Return whether another rank has just died of the same error, as all ranks report it."""
    if event.get("event") != "worker_died" or not event.get("traceback"):
        return False
    for one in reversed(before):
        if one.get("event") in (*GOES_ON, "restarting", "run_started"):
            return False
        if one.get("event") == "worker_died" and one.get("rank") != event.get("rank"):
            return _last_line(one) == _last_line(event)
    return False


def _last_line(event: Record) -> str:
    return str(event.get("traceback") or "").rstrip().rpartition("\n")[2]


def has_restarted(after: list[Record], folder: Path) -> bool:
    """Return whether a later start of this session reached its steps; for a script, any start.

    An island's death is fatal to its own supervisor; the launcher of all starts a further attempt.
    """
    for one in after:
        name = one.get("event")
        if name == "compute_started" or (name in GOES_ON and is_user_script(folder)):
            return True
        if name == "run_finished" or (name == "run_started" and not one.get("attempt")):
            return False
    return False


RESUMES = re.compile(r"shoal train --resume (?:'[^']*'|\S+)(?: (?P<key>[\w.]+)=(?P<value>\S+))?")
LOGS = re.compile(r"tail -n 50 \S*/logs/rank-\S+")
KEYS = re.compile(r"\b(?P<key>(?:train|memory|precision)\.\w+)=(?P<value>\w+)")
PLANS = re.compile(r"shoal plan \S+run\.toml.*")
LOOP_CURE = "less work after run.step and in callbacks, or every n-th step"
WAITS = (("comm_exposed_s", "communication"), ("data_wait_s", "data"), ("loop_s", "own code"))
"""Fields of a row that are waits between or in steps, and their words."""
LOOP_SHARE = 0.05
"""Share of a step from which own code between two steps is printed."""
AGAIN = "start the script again; run.restore() goes on from its last checkpoint"
ANEW = "start the script again; nothing was saved, so it begins at its first step"
HEARS = "run.stop_on_signals(), before the loop: all ranks save and stop (docs/start/cluster.md)"


def loader_cure(*, is_loop_timed: bool) -> str:
    """Return the remedy for slow data in a script.

    Args:
        is_loop_timed: the script's own code between two steps is known apart from its data.
    """
    if is_loop_timed:
        return "run.loader(…, workers=2)"
    return "workers=2 of run.loader or the DataLoader, and less work between two steps"


def script_command(command: str) -> str:
    """Rewrite the next command for a script's run, which no command resumes.

    >>> script_command("shoal train --resume runs/own train.spikes=skip")
    'start the script again, with shoal.parallelize(…, spikes="skip")'
    """
    command = PLANS.sub("a larger batch, or another layout, for shoal.parallelize", command)
    command = LOGS.sub("read what that rank printed, where its launcher keeps it", command)
    return RESUMES.sub(_script_words, command)


def _script_words(found: re.Match[str]) -> str:
    key, value = found["key"], found["value"]
    return AGAIN if key is None else f"start the script again, with {_keyword(key, value)}"


def script_settings(command: str) -> str:
    """Rewrite the keys of [train], [memory] and [precision] as arguments of `shoal.parallelize`.

    >>> script_settings("memory.recompute=none"), script_settings("train.micro_batch=8")
    ('shoal.parallelize(…, recompute="none")', 'shoal.parallelize(…, micro_batch=8)')
    """
    return KEYS.sub(lambda found: _keyword(found["key"], found["value"]), command)


def _keyword(key: str, value: str) -> str:
    """Return a setting as a script has it."""
    told = argument_setting(key, value) or f"{key}={value}"
    return told if key in SETTINGS else f"shoal.parallelize(…, {told})"
