"""What is different about a run that a script of the user's own made, and that others started.

No command of ours resumes it, and nobody of ours restarts it: its ranks are told of by themselves,
or by the process beside them, and that it was started again shows in what it did afterwards.
"""

from __future__ import annotations

import re
from pathlib import Path

from shoal.base.runlog.damaged_lines import Record

GOES_ON = ("resumed", "checkpoint_saved", "validated")
"""After a death: a loop of the user's own was started again."""


def is_script(folder: Path) -> bool:
    """Whether a loop of the user's own made the run."""
    return not (folder / "run.toml").exists()


def is_echo(event: Record, before: list[Record]) -> bool:
    """Whether another rank has just died of the same words: of what all refuse, each tells."""
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


def went_on(after: list[Record], folder: Path) -> bool:
    """Whether a later start of this session came to its steps; of a script whether any did.

    An island's death is fatal to its own supervisor; the launcher of all starts a further attempt.
    """
    for one in after:
        name = one.get("event")
        if name == "compute_started" or (name in GOES_ON and is_script(folder)):
            return True
        if name == "run_finished" or (name == "run_started" and not one.get("attempt")):
            return False
    return False


RESUMES = re.compile(r"shoal train --resume (?:'[^']*'|\S+)(?: (?P<key>[\w.]+)=(?P<value>\S+))?")
LOGS = re.compile(r"tail -n 50 \S*/logs/rank-\S+")
PLANS = re.compile(r"shoal plan \S+run\.toml.*")
WORDS = {
    "data.workers": "run.loader(…, workers={})",
    "optimizer.lr": "a smaller learning rate",
}
"""What keys are in a script, where they are no keyword of shoal.parallelize."""
AGAIN = "start the script again; run.restore() goes on from its last checkpoint"
HEARS = "run.stop_on_signals(), before the loop: all ranks save and stop (docs/cluster.md)"


def in_a_script(command: str) -> str:
    """The next command, for a run that a script of the user's own made: no command resumes it.

    >>> in_a_script("shoal train --resume runs/own train.spikes=skip")
    'start the script again, with shoal.parallelize(…, spikes="skip")'
    """
    command = PLANS.sub("a larger batch, or another layout, for shoal.parallelize", command)
    command = LOGS.sub("read what that rank printed, where its launcher keeps it", command)
    return RESUMES.sub(_its_words, command)


def _its_words(found: re.Match[str]) -> str:
    key, value = found["key"], found["value"]
    if key is None:
        return AGAIN
    word = WORDS.get(key, f'shoal.parallelize(…, {key.rpartition(".")[2]}="{{}}")')
    return f"start the script again, with {word.format(value)}"
