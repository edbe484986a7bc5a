"""Diagnosis of a run from its folder alone: failures, ranks, causes and next commands.

    events.jsonl    events of the run itself: deaths, hangs, skipped steps, failed saves
    metrics.jsonl   figures of its steps: where they wait
    owner.json      the run's owner: one that ended without an event was killed with its launcher

Every finding rests on a file. A fault that the run did not notice is not found here; `shoal doctor`
checks the machine. Neither torch nor the run's own modules are loaded.
"""

from __future__ import annotations

import re
import shlex
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shoal.base.runlog.damaged_lines import Record, is_number
from shoal.base.text.event_sentences import (
    DAMAGED,
    died_text,
    event_text,
    is_outlier,
    numbers_text,
    signal_text,
    slow_text,
    strip_control_characters,
)
from shoal.base.text.units import seconds_text
from shoal.checkpoint.format.lease import read_owner
from shoal.view.run_folder_reader import RunFolder
from shoal.view.script_lines import (
    HEARS,
    has_restarted,
    is_repeated_death,
    is_user_script,
    script_command,
)

WATCHED = "ended by the watch"
"""Death of a rank that hung (`launch/watch/hang_watch.py`)."""
LEFT_OUT = "sample_left_out"
NOTES = ("resumed", "fragmentation")
"""Advice that does not concern speed."""
ENDS = ("worker_died", "hang", "collectives_differ")
LEAST_STEPS = 50
"""Steps from which a wait counts as regular."""
MUCH = 0.2
"""Share of a step's time from which a wait is reported."""


@dataclass(frozen=True)
class RunFinding:
    """One failure of a run, or one cause that makes it slower than need be.

    Attributes:
        kind: an event's name, "killed", or of advice "communication", "data" or "fragmentation".
        what: the failure, with its rank.
        why: the evidence.
        command: the next command to type; "" none.
        rank, step: where known.
        over: whether the run continued after it by itself.
        advice: nothing is wrong: the run could be faster, or differs from before (a resume).
    """

    kind: str
    what: str
    why: str
    command: str
    rank: int | None = None
    step: int | None = None
    over: bool = False
    advice: bool = False

    def record(self) -> Record:
        """Return the finding as a JSON object."""
        return asdict(self)


def diagnose(folder: Path) -> list[RunFinding]:
    """Return the findings about a run, oldest first; advice comes last."""
    run = RunFolder(folder)
    events = run.events.read()[0]
    found: list[RunFinding] = []
    for place, event in enumerate(events):
        name = str(event.get("event"))
        if (look := LOOKS.get(name)) is None or is_repeated_death(event, events[:place]):
            continue
        try:
            seen = look(event, events[place + 1 :], folder)
        except DAMAGED:
            seen = RunFinding(name, f"{name}: its line in events.jsonl is damaged", "", "")
        if seen is not None:
            found.append(seen)
    found = _merge_repeats(_drop_repeated_errors(found))
    told = is_user_script(folder) and bool(found) and found[-1].kind in ENDS and not found[-1].over
    if not told and (end := _diagnose_launcher_death(folder)) is not None:
        found.append(end)
    found += _find_advice(folder, run, {one.kind for one in found})
    if is_user_script(folder):
        found = [replace(one, command=script_command(one.command)) for one in found]
    return found


def findings_text(folder: Path, found: list[RunFinding]) -> str:
    """Return findings as text for a terminal, each with its evidence and the next command."""
    wrong = [one for one in found if not one.advice]
    # Nobody knows who starts a script again: its launcher or a person.
    how = "; the run went on" if is_user_script(folder) else "; the run went on by itself"
    lines = [f"{folder}: nothing wrong"] if not wrong else []
    for number, one in enumerate(wrong, 1):
        lines += _finding_lines(f"{number}. ", one, how)
    for one in found:
        if one.advice:
            lines += _finding_lines("note: " if one.kind in NOTES else "faster: ", one, how)
    return "\n".join(lines)


def _finding_lines(lead: str, one: RunFinding, how: str) -> list[str]:
    over = how if one.over else ""
    lines = [f"{lead}{one.what}{over}"]
    if one.why:
        lines += [f"   why: {one.why}"]
    if one.command:
        lines += [f"   next: {one.command}"]
    return [strip_control_characters(line) for line in lines]


def _drop_repeated_errors(found: list[RunFinding]) -> list[RunFinding]:
    """Drop deaths by an error that an earlier finding already reports."""
    said = tuple(one.what for one in found if one.kind == "drift")
    return [one for one in found if one.kind != "worker_died" or not one.what.endswith(said)]


def _merge_repeats(found: Iterable[RunFinding]) -> list[RunFinding]:
    """Merge repeated equal findings into the last one, with their count."""
    kept: dict[tuple[Any, ...], tuple[RunFinding, int]] = {}
    for one in found:
        # Each unreadable sample is a loss of its own.
        what = one.what if one.kind == LEFT_OUT else re.sub(r"\d+", "#", one.what)
        key = (one.kind, one.rank, what, one.why)
        before = kept.pop(key, None)
        kept[key] = one, 1 if before is None else before[1] + 1
    return [
        one
        if times == 1
        else RunFinding(**{**asdict(one), "what": f"{one.what} (the last of {times} alike)"})
        for one, times in kept.values()
    ]


# ---- events of the run


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


EventDiagnosis = Callable[[Record, list[Record], Path], RunFinding | None]
"""(an event, the events after it, the run folder) → finding; None: nothing is wrong."""

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
        r"islands?: .*(silent|given up after|is lost|are lost)",
        "another island ended, hangs, or the link to it broke; it is no cause of its own",
        "shoal diagnose {all}",
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


def _diagnose_death(event: Record, after: list[Record], folder: Path) -> RunFinding | None:
    if event.get("how") == WATCHED:
        return None  # the hang or the mismatch of collectives before it explains it
    rank = event.get("rank")
    step = _step_before(event)
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
            why = "a SIGKILL leaves no words: a person, a scheduler, or the kernel out of memory"
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
        died_text(event),
        why,
        command.format(**names),
        rank,
        step,
        over=has_restarted(after, folder),
    )


def _diagnose_hang(event: Record, after: list[Record], folder: Path) -> RunFinding:
    stacks = event.get("stacks")
    return RunFinding(
        "hang",
        event_text(event) or f"rank {event.get('rank')} hangs",
        str(event.get("why") or ""),
        f"less {shlex.quote(str(stacks))}" if stacks else "",
        event.get("rank"),
        event.get("step"),
        over=has_restarted(after, folder),
    )


def _diagnosis_from_text(
    kind: str, why: str, command: str = "", *, over: bool = True
) -> EventDiagnosis:
    """Return a diagnosis for an event whose own sentence describes the failure."""

    def format_finding(event: Record, after: list[Record], folder: Path) -> RunFinding:
        names = {
            "run": shlex.quote(str(folder)),
            "toml": shlex.quote(str(folder / "run.toml")),
            **{key: str(value) for key, value in event.items()},
        }
        text = event_text(event) or str(event.get("text") or kind)
        return RunFinding(
            kind,
            text,
            str(event.get("why") or "") or why,
            command.format_map(_DefaultNames(names)),
            _rank_of(event),
            event.get("step"),
            over=over,
        )

    return format_finding


APART = ("ranks wait for each other", "ranks made different calls")
"""Beginnings of the message if ranks make different calls of a run."""


def _diagnose_mismatch(event: Record, after: list[Record], folder: Path) -> RunFinding:
    """Diagnose ranks that made different calls, ran different blocks, or differ in collectives."""
    text, _, cure = str(event.get("text") or "").partition("; try: ")
    why = "what they added up does not belong together"
    if text.startswith(APART):
        why = "each of these calls needs every rank, so none of them could end"
    if " caught an error of " in text:
        why = "the others wait for what this rank would have sent"
    rank, step = event.get("rank"), event.get("step")
    return RunFinding(
        "collectives_differ", text, why, cure, rank, step, over=has_restarted(after, folder)
    )


SLOW_IN: dict[str, tuple[str, str]] = {
    "data": (
        "its samples take longer to read or to prepare (its disk, its files, its own workers), or, "
        "in a loop of one's own, the code between two steps does",
        "shoal train --resume {run} data.workers=2",
    ),
    "hooks": ("code of the user's own that runs after each step on that rank", "tail -n 50 {log}"),
}
"""Part of a step in which a rank is slow → its causes, the next command; otherwise SLOW_ELSE."""
SLOW_ELSE = (
    "its own code, a core that others use too, or a processor that lowers its clock: what it "
    "does there takes longer, and it waits least",
    "ps -eo pid,psr,pcpu,comm --sort=-pcpu | head",
)


def _diagnose_slow_rank(event: Record, after: list[Record], folder: Path) -> RunFinding:
    rank = event.get("rank")
    why, command = SLOW_IN.get(str(event.get("phase")), SLOW_ELSE)
    log = shlex.quote(str(folder / "logs" / f"rank-{rank}.log"))
    names = {"run": shlex.quote(str(folder)), "log": log}
    what, step = slow_text(event), _step_before(event)
    return RunFinding("slow_rank", what, why, command.format(**names), rank, step)


class _DefaultNames(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return "…"


NOTICES: tuple[tuple[str, str, str, str], ...] = (
    (
        r"they are made again",
        "loader",
        "a process that loads data died, or did not answer",
        "dmesg -T | grep -i -e oom -e 'killed process'",
    ),
    (r"is tried again", "loader", "a read failed, and may not the next time", "dmesg -T | tail"),
)
"""(pattern of a notice, the kind of finding, its cause, the next command)."""


def _diagnose_notice(event: Record, after: list[Record], folder: Path) -> RunFinding | None:
    text = str(event.get("text", ""))
    for pattern, kind, why, command in NOTICES:
        if re.search(pattern, text):
            rank = re.search(r"rank (\d+)", text)
            return RunFinding(kind, text, why, command, int(rank[1]) if rank else None, over=True)
    return None


def _diagnose_failed_save(event: Record, after: list[Record], folder: Path) -> RunFinding:
    later = any(
        one.get("event") == "checkpoint_saved" and (one.get("step") or 0) > (event.get("step") or 0)
        for one in after
    )
    reason = str(event.get("reason") or "")
    full = re.search(r"space|free|ENOSPC|quota", reason, re.IGNORECASE)
    command = f"df -h {shlex.quote(str(folder))}" if full else "dmesg -T | tail"
    return RunFinding(
        "checkpoint_failed",
        event_text(event) or "a checkpoint was not saved",
        "the disk is full" if full else "the disk, or the file system, refused",
        command,
        event.get("rank"),
        event.get("step"),
        over=later,
    )


def _diagnose_stop(event: Record, after: list[Record], folder: Path) -> RunFinding | None:
    name = signal_text(str(event.get("signal", "a signal")))
    ended = [one for one in after if one.get("event") in ("run_finished", "run_started")]
    if ended and ended[0].get("event") == "run_finished":
        return None  # requested, and saved
    if any(one.get("event") == "checkpoint_saved" for one in after):
        return None
    return RunFinding(
        "stop_requested",
        f"{name} asked for a stop, and no checkpoint was written after it",
        "what was running then took longer than a stop may, or it could not save",
        f"shoal checkpoint list {shlex.quote(str(folder))}",
        event.get("rank"),
        event.get("step"),
    )


def _diagnose_resume(event: Record, after: list[Record], folder: Path) -> RunFinding | None:
    differs = event.get("differs")
    if not differs or event.get("changes_result") is False:
        return None  # another layout or version: the same result to rounding
    return RunFinding(
        "resumed",
        event_text(event) or "resumed with other settings",
        "what follows is not the continuation of what came before",
        f"shoal checkpoint list {shlex.quote(str(folder))}",
        None,
        event.get("step"),
        advice=True,
    )


LEAPT = "loss or gradient norm leaps out of the last steps: samples that are unlike the others"


def _diagnose_skipped_step(event: Record, after: list[Record], folder: Path) -> RunFinding | None:
    broken = "numbers that are not finite, made of the samples that are named"
    why = LEAPT if is_outlier(event) else broken
    return _diagnosis_from_text("step_skipped", why)(event, after, folder)


def _diagnose_spike(event: Record, after: list[Record], folder: Path) -> RunFinding | None:
    """Diagnose a loss spike whose update was made, so that the weights keep its effect."""
    told = _diagnosis_from_text("spike", LEAPT, "shoal train --resume {run} train.spikes=skip")
    return told(event, after, folder)


def _diagnose_fragmentation(event: Record, after: list[Record], folder: Path) -> RunFinding | None:
    """Diagnose fragmented memory of a device's allocator at the end of the run."""
    told, _, pieces = str(event.get("allocator") or "").partition("; ")
    if "in pieces" not in pieces:
        return None
    setting = re.search(r"[A-Z_]{8,}=\S+", pieces)
    why = "tensors that stay lie between those that are given back: what is free fits no large one"
    if setting is None:
        why += "; expandable_segments is set, and joins no holes between them: make them at once"
    return RunFinding(
        "fragmentation",
        f"the device's memory is in pieces: {told}; {pieces.partition(':')[0]}",
        why,
        f"{setting[0]} shoal train --resume {shlex.quote(str(folder))}" if setting else "",
        advice=True,
    )


def _diagnose_lost_island(event: Record, after: list[Record], folder: Path) -> RunFinding:
    """Diagnose a lost island; its own folder reports more, if it is on this machine."""
    lost = event.get("islands") or []
    own = [folder.parent / f"island-{island}" for island in lost]
    there = [shlex.quote(str(path)) for path in own if path.exists()]
    who = "island {} was" if len(lost) == 1 else "islands {} were"
    return RunFinding(
        "island_lost",
        f"{who.format(numbers_text(lost))} lost in round {int(event.get('round') or 0) + 1}, after "
        f"{seconds_text(event.get('after_s') or 0.0)} without a word",
        "it ended, it hangs, or the link to it broke; what happened to it, it knows itself",
        f"shoal diagnose {there[0]}" if there else f"tail -n 50 {shlex.quote(str(folder))}/logs/*",
        step=event.get("step"),
        over=has_restarted(after, folder),
    )


def _step_before(event: Record) -> int | None:
    step = event.get("step")
    return step if isinstance(step, int) else None


def _rank_of(event: Record) -> int | None:
    ranks = event.get("ranks")
    if isinstance(ranks, list) and ranks and isinstance(ranks[0], int):
        return ranks[0]
    rank = event.get("rank")
    return rank if isinstance(rank, int) else None


LOOKS: dict[str, EventDiagnosis] = {
    "worker_died": _diagnose_death,
    "hang": _diagnose_hang,
    "slow_rank": _diagnose_slow_rank,
    "checkpoint_failed": _diagnose_failed_save,
    "stop_requested": _diagnose_stop,
    "resumed": _diagnose_resume,
    "step_skipped": _diagnose_skipped_step,
    "spike": _diagnose_spike,
    "rewound": _diagnosis_from_text("rewound", LEAPT),
    "run_finished": _diagnose_fragmentation,
    LEFT_OUT: _diagnosis_from_text(
        LEFT_OUT,
        "a disk, a mount or a connection refused it at every try; at most data.unreadable samples "
        "are left out, and a later epoch asks for it again",
        "dmesg -T | tail",
    ),
    "checkpoint_damaged": _diagnosis_from_text(
        "checkpoint_damaged",
        "its bytes on the disk are not those that were written",
        "shoal checkpoint verify {run}",
    ),
    "collectives_differ": _diagnose_mismatch,
    "drift": _diagnosis_from_text(
        "drift", "bits changed in memory, or ranks computed different updates"
    ),
    "notice": _diagnose_notice,
    "island_lost": _diagnose_lost_island,
    "island_refused": _diagnosis_from_text("island_refused", "its change is not like the others'"),
    "round_discarded": _diagnosis_from_text(
        "round_discarded", "islands could not agree on a merge"
    ),
}
"""By event; events that are missing report nothing wrong."""


def _diagnose_launcher_death(folder: Path) -> RunFinding | None:
    """Diagnose a run whose owner is gone without an event: it was killed with its launcher."""
    owner = read_owner(folder)
    if owner is None or not owner.has_ended:
        return None
    who, whose = "its launcher", "a launcher"
    if is_user_script(folder):
        who, whose = "its first process", "a script"
    return RunFinding(
        "killed",
        f"the run ended without a word: {who} ({owner.text()}) was killed, or the machine "
        f"went down",
        f"{whose} takes owner.json away as it ends, and this one is still there",
        f"shoal train --resume {shlex.quote(str(folder))}",
    )


# ---- figures of its steps


def _find_advice(folder: Path, run: RunFolder, kinds: set[str]) -> list[RunFinding]:
    steps = run.last_steps(10 * LEAST_STEPS)
    if len(steps) < LEAST_STEPS or kinds & {"slow_rank"}:
        return []  # waiting for a slow rank looks like waiting for the network
    whole_s = sum(_values(steps, "step_s"))
    toml = shlex.quote(str(folder / "run.toml"))
    asked = {
        "comm_exposed_s": (
            "communication",
            "ranks wait for sums and gathers longer than these can hide behind computation: more "
            "samples a step (train.accumulate) or a layout that sends less",
            f"shoal plan {toml} --top 5",
        ),
        "data_wait_s": (
            "data",
            "samples are read between steps, and not while one computes",
            f"shoal train --resume {shlex.quote(str(folder))} data.workers=2",
        ),
    }
    found = []
    for key, (kind, why, command) in asked.items():
        waits = _values(steps, key)
        if whole_s and sum(waits) > MUCH * whole_s:
            share, each_s = sum(waits) / whole_s, statistics.median(waits)
            what = f"{kind} takes {share:.0%} of a step ({seconds_text(each_s)})"
            found.append(RunFinding(kind, what, why, command, advice=True))
    return found


def _values(steps: list[Record], key: str) -> list[float]:
    return [step[key] for step in steps if is_number(step.get(key))]
