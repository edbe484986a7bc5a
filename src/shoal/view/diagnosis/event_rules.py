"""Meaning of each event of a run for `shoal diagnose`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from shoal.base.layouts.changing_members import GOODBYE
from shoal.base.runlog.damaged_lines import Record
from shoal.base.text.event_sentences import (
    event_text,
    is_outlier,
    numbers_text,
    signal_text,
    slow_text,
)
from shoal.base.text.units import seconds_text
from shoal.view.diagnosis.death_rules import diagnose_death
from shoal.view.diagnosis.finding import EventDiagnosis, RunFinding, rank_of, step_of
from shoal.view.script_lines import has_restarted

LEFT_OUT, LEFT_ISLAND = "sample_left_out", "island_left"
WAITS = re.compile(r"waits for .*, at most [\d.]+ s")
"""Notice of an island without which others may not go on."""
OTHERS_WENT_ON = "its process, its machine or the link to it failed; the others went on"


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
            rank_of(event),
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
        "from the end of a step until its next batch it takes longer than the other ranks",
        "shoal train --resume {run} data.workers=2",
    ),
    "hooks": ("code of the user's own that runs after each step on that rank", "tail -n 50 {log}"),
}
"""Part of a step in which a rank is slow → its causes, the next command; otherwise SLOW_ELSE."""
SLOW_ELSE = (
    "what it does there takes longer than on the other ranks, and it waits least",
    "ps -eo pid,psr,pcpu,comm --sort=-pcpu | head",
)


def _diagnose_slow_rank(event: Record, after: list[Record], folder: Path) -> RunFinding:
    rank = event.get("rank")
    why, command = SLOW_IN.get(str(event.get("phase")), SLOW_ELSE)
    log = shlex.quote(str(folder / "logs" / f"rank-{rank}.log"))
    names = {"run": shlex.quote(str(folder)), "log": log}
    what, step = slow_text(event), step_of(event)
    return RunFinding("slow_rank", what, why, command.format(**names), rank, step, advice=True)


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
MET = ("islands_met", "round_committed", "run_started")
"""Events after which no island waits as before."""


def _diagnose_notice(event: Record, after: list[Record], folder: Path) -> RunFinding | None:
    text = str(event.get("text", ""))
    if WAITS.search(text) and not any(one.get("event") in MET for one in after):
        show = f"shoal islands show {shlex.quote(str(folder))}"
        return RunFinding("island_wait", text, "too few islands are there to go on", show)
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


LEAPT = "far above the last steps, often because of samples that are unlike the others"


def _why_it_leapt(event: Record, folder: Path) -> str:
    """Return the cause of a leap, and the command that shows the samples by loss."""
    if event.get("step") is None or not (folder / "run.toml").exists():
        return LEAPT  # an own loop's data are not opened
    run = shlex.quote(str(folder))
    return f"{LEAPT}; shoal data look {run} --step {event['step']} shows them by loss"


def _diagnose_skipped_step(event: Record, after: list[Record], folder: Path) -> RunFinding | None:
    broken = "numbers that are not finite, made of the samples that are named"
    why = _why_it_leapt(event, folder) if is_outlier(event) else broken
    return _diagnosis_from_text("step_skipped", why)(event, after, folder)


def _diagnose_spike(event: Record, after: list[Record], folder: Path) -> RunFinding | None:
    """Diagnose a loss spike whose update was made, so that the weights keep its effect."""
    why, cure = _why_it_leapt(event, folder), "shoal train --resume {run} train.spikes=skip"
    return _diagnosis_from_text("spike", why, cure)(event, after, folder)


def _diagnose_rewind(event: Record, after: list[Record], folder: Path) -> RunFinding | None:
    """Diagnose a leap after which the run went back, and left its samples out."""
    return _diagnosis_from_text("rewound", _why_it_leapt(event, folder))(event, after, folder)


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


def _diagnose_left_islands(event: Record, after: list[Record], folder: Path) -> RunFinding | None:
    """Diagnose islands that come and go: who left in a round. A goodbye is no fault."""
    left = [str(why) for why in (event.get("left") or {}).values()]
    if not left:
        return None
    said = [why.partition(": ")[::2] for why in left]
    how = "; ".join(f"{whom} left in round {event['round']}: {why}" for whom, why in said)
    names = {int(name) for name in event["left"]}
    joined = {name for one in after for name in one.get("joined") or ()}
    is_back = names <= joined
    is_goodbye = all(why == GOODBYE for _, why in said)
    return RunFinding(
        LEFT_ISLAND,
        how + ("; it is back" if is_back and len(names) == 1 else ""),
        "somebody stopped it" if is_goodbye else OTHERS_WENT_ON,
        f"shoal islands show {shlex.quote(str(folder))}",
        step=event.get("step"),
        over=not is_goodbye,
        advice=is_goodbye,
    )


LOOKS: dict[str, EventDiagnosis] = {
    "worker_died": diagnose_death,
    "hang": _diagnose_hang,
    "slow_rank": _diagnose_slow_rank,
    "checkpoint_failed": _diagnose_failed_save,
    "stop_requested": _diagnose_stop,
    "resumed": _diagnose_resume,
    "step_skipped": _diagnose_skipped_step,
    "spike": _diagnose_spike,
    "rewound": _diagnose_rewind,
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
    "round_committed": _diagnose_left_islands,
    "rounds_dropped": _diagnosis_from_text(
        "rounds_dropped",
        "an island began on an empty disk, or went on alone, while others trained on",
        "shoal checkpoint list {folder}",
    ),
    "island_refused": _diagnosis_from_text("island_refused", "its change is not like the others'"),
    "round_discarded": _diagnosis_from_text(
        "round_discarded", "islands could not agree on a merge"
    ),
}
"""By event; events that are missing report nothing wrong."""
