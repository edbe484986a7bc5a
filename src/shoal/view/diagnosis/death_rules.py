"""Cause and next command of a rank's death, from its error."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from shoal.base.runlog.damaged_lines import Record
from shoal.view.diagnosis.finding import RunFinding, death_line, step_of
from shoal.view.script_lines import HEARS, has_restarted, is_user_script

WATCHED = "ended by the watch"
"""Death of a rank that hung (`launch/watch/hang_watch.py`)."""
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
"""Same setting as in machine/device_pool.py, which would load torch."""
ASKED = re.compile(
    r"out of memory\. Tried to allocate ([\d.]+) (\w+)\b.*?"
    r"([\d.]+) (\w+) is reserved by PyTorch but unallocated"
)
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _is_fragmented(words: str) -> bool:
    """Return whether the error of an allocator reports more unused memory than was asked for.

    >>> tail = "2.50 GiB is reserved by PyTorch but unallocated"
    >>> [_is_fragmented(f"out of memory. Tried to allocate {n} GiB. {tail}") for n in (2.0, 3.0)]
    [True, False]
    """
    found = ASKED.search(words)
    if found is None:
        return False
    asked, free = (float(found[n]) * UNITS.get(found[n + 1], 0) for n in (1, 3))
    return 0 < asked <= free


CAUSES: tuple[tuple[str, str, str], ...] = (
    (
        r"out of memory|can't allocate memory|cannot allocate memory|MemoryError",
        "memory: it asked for more than there is",
        "shoal plan {toml} --explain",
    ),
    (
        r"No space left on device|ENOSPC",
        "the disk is full",
        "df -h {run}",
    ),
    (
        r"DataLoader worker|data\.workers",
        "a process that loads data ended",
        "tail -n 50 {log}",
    ),
    (
        r"sample \d+ \(epoch",
        "the data: this sample cannot be read or joined",
        "tail -n 50 {log}",
    ),
    (
        r"islands?: .*(silent|given up (?:after|at once)|is lost|are lost)",
        "another island ended, hangs, or the link to it broke; it is no cause of its own",
        "shoal diagnose {all}",
    ),
    (
        r"islands: .*waited [\d.]+ s \(islands\.wait_s\)",
        "other islands were not there; it is no cause of its own",
        "shoal islands show {run}",
    ),
    (
        r"calls os\._exit",
        "code of the user's, or a library's, ends that process; the run was not done",
        "tail -n 50 {log}",
    ),
    (
        r"closed by peer|reset by peer|Connection refused|timed out waiting|did not come to|"
        r"remote process exited|ConnectionError",
        "the link to another rank broke, or that rank ended; it is no cause of its own",
        "tail -n 50 {logs}",
    ),
    (
        r"non-finite|diverged",
        "the numbers: loss or gradients are no longer finite",
        "shoal train --resume {run} optimizer.lr=…",
    ),
    (
        r"collective mismatch|ranks wait for each other|other collective",
        "ranks made different calls: what one of them calls, all must",
        "tail -n 50 {log}",
    ),
)
"""(pattern of a death's error, the cause, the next command), first match wins."""


SLIVERS = (
    "",
    "memory in pieces: more was free than it asked for, and no piece was large enough",
    ALLOCATOR + " shoal train --resume {run}",
)


def diagnose_death(event: Record, after: list[Record], folder: Path) -> RunFinding | None:
    """Diagnose the death of a rank; None if an earlier finding explains it.

    Args:
        after: the events after it.
    """
    if event.get("how") == WATCHED:
        return None  # the hang or the mismatch of collectives before it explains it
    rank = event.get("rank")
    step = step_of(event)
    words = str(event.get("traceback") or "")
    how = str(event.get("how", "ended"))
    log = shlex.quote(str(folder / "logs" / f"rank-{rank}.log"))
    names = {
        "run": shlex.quote(str(folder)),
        "toml": shlex.quote(str(folder / "run.toml")),
        "log": log,
        "logs": f"{shlex.quote(str(folder))}/logs/rank-*.log",
        "all": shlex.quote(str(folder.parent)),
    }
    why, command = "", "tail -n 50 {log}"
    for pattern, cause, next_command in (SLIVERS,) if _is_fragmented(words) else CAUSES:
        if re.search(pattern, words, re.IGNORECASE):
            why, command = cause, next_command
            break
    else:
        if "SIGKILL" in how:
            why = (
                "nothing is known of the sender: a person, a scheduler, or the kernel out of memory"
            )
            command = "dmesg -T | grep -i -e oom -e 'killed process'"
        elif is_user_script(folder) and re.search(r"SIG(TERM|INT|USR1)", how):
            why, command = "it was asked to stop, and this loop does not hear it", HEARS
        elif how.startswith("ended"):
            why = "it left no words: a signal, os._exit, or a library in C"
        elif "SIG" in how:
            why = f"{how}: the program itself, or a library in C"
        elif how == "exit code 2" and "Traceback" not in words:
            why, command = "something to correct, which the line says", ""
        elif words:
            why = "an exception that nobody caught, in the code that its traceback names"
    return RunFinding(
        "worker_died",
        death_line(event),
        why,
        command.format(**names),
        rank,
        step,
        over=has_restarted(after, folder),
    )
