"""Sentences for events that are printed during a run."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from shoal.base.runlog.damaged_lines import Record
from shoal.base.text.units import bytes_text, count_text, seconds_text

SHOWN_RUNS = 6
ENOUGH_TARGETS = 10
"""Held-out targets of a data owner below which its values say little."""
LONG_STEP_S = 5.0
DAMAGED = (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError)
"""Exceptions that `event_text` may raise on a record with malformed fields."""


def event_text(event: Record) -> str | None:
    """Return the printed sentence of an event, or None if it is for the log only.

    >>> event_text({"event": "restarting", "attempt": 1, "of": 3})
    'restart 1 of 3, from the beginning: nothing was saved yet'
    >>> event_text({"event": "worker_started", "rank": 0, "pid": 4711}) is None
    True
    """
    tell = SENTENCES.get(str(event.get("event")))
    if tell is None:
        return None
    try:
        return strip_control_characters(tell(event))
    except DAMAGED:
        return f"{event.get('event')}: its line in events.jsonl is damaged"


def strip_control_characters(text: str) -> str:
    r"""Return text without control characters, since a model may have written it.

    >>> strip_control_characters("a\x1b[31mb\tc")
    'a·[31mb c'
    """
    kept = text.rstrip().expandtabs(4)
    return "".join(letter if letter.isprintable() or letter == "\n" else "·" for letter in kept)


def died_text(event: Record) -> str:
    """Return one line on the worker that died and its cause.

    >>> died_text({"rank": 1, "pid": 4711, "how": "killed by SIGKILL", "traceback": ""})
    'rank 1 (pid 4711): killed by SIGKILL'
    >>> died_text({"rank": 0, "pid": 1, "how": "exit code 1", "traceback": "E: a", "at": "t.py:4"})
    'rank 0 (pid 1): exit code 1: t.py:4: E: a'
    """
    trace = str(event.get("traceback") or "").rstrip()
    last = f": {trace.splitlines()[-1].strip()}" if trace else ""
    last = f": {event['at']}{last}" if event.get("at") else last
    return f"rank {event.get('rank')} (pid {event.get('pid')}): {event.get('how', 'ended')}{last}"


def signal_text(name: str) -> str:
    """Return a signal's name as the user knows it.

    >>> signal_text("SIGINT"), signal_text("SIGTERM")
    ('Ctrl-C', 'SIGTERM')
    """
    return "Ctrl-C" if name == "SIGINT" else name


def _notice(event: Record) -> str:
    body = event.get("body")
    return f"{event.get('text', '')}\n{body}" if body else str(event.get("text", ""))


def _restarting(event: Record) -> str:
    attempt, of = event.get("attempt", "?"), event.get("of", "?")
    saved = event.get("saved")
    where = "the beginning: nothing was saved yet" if saved is None else f"step-{saved}"
    return f"restart {attempt} of {of}, from {where}"


def _hang(event: Record) -> str:
    waited = seconds_text(event.get("waited_s") or 0.0)
    where = f"rank {event.get('rank')} on {event.get('host')} (pid {event.get('pid')})"
    in_what = f"; the last collective: {event['collective']}" if event.get("collective") else ""
    after_s = event.get("ends_in_s") or 0.0
    then = f"; if it does not go on, all start again in {seconds_text(after_s)}" if after_s else ""
    stacks = f"; stacks: {event['stacks']}" if event.get("stacks") else ""
    return (
        f"no rank goes on for {waited}: {where}, {event.get('phase')}: {event.get('why')}"
        f"{in_what}{then}{stacks}"
    )


def slow_text(event: Record) -> str:
    """Return one line on the slow rank: part of the step, and time per step.

    >>> slow_text({"rank": 1, "host": "a", "phase": "data", "extra_s": 0.032, "share": 0.3})
    'rank 1 on a is slow in data: 32.0 ms a step (30%) more than the others, who wait for it'
    """
    return (
        f"rank {event['rank']} on {event.get('host')} is slow in {event['phase']}: "
        f"{seconds_text(event['extra_s'])} a step ({event['share']:.0%}) more than the others, who "
        f"wait for it"
    )


def _damaged(event: Record) -> str:
    place = " ".join(str(event[key]) for key in ("file", "tensor") if event.get(key))
    where = place or event.get("folder", "")
    kept = f"; kept as {event['kept_as']}" if event.get("kept_as") else ""
    return f"checkpoint damaged: {where}: {event.get('reason', 'does not verify')}{kept}"


def _not_saved(event: Record) -> str:
    where = f" at step {event['step']}" if event.get("step") is not None else ""
    return f"checkpoint{where} not saved: {event.get('reason', 'no reason given')}"


def _saved(event: Record) -> str:
    parts = []
    if event.get("bytes") is not None:
        parts.append(bytes_text(event["bytes"]))
    if event.get("seconds") is not None:
        parts.append(seconds_text(event["seconds"]))
    detail = f" ({', '.join(parts)})" if parts else ""
    return f"checkpoint saved: {_folder_name(event)}{detail}"


def _resumed(event: Record) -> str:
    step, folder = event.get("step"), _folder_name(event)
    where = "" if step is None or folder == f"step-{step}" else f" at step {step}"
    differs = event.get("differs") or []
    if isinstance(differs, dict):
        differs = [f"{key} = {value}" for key, value in differs.items()]
    if isinstance(differs, str):
        differs = [differs]
    changes = "; different from then:" if differs else ""
    changes += "".join(f"\n  {one}" for one in differs)
    return f"resumed from {folder}{where}{changes}"


def _folder_name(event: Record) -> str:
    folder = str(event.get("folder") or f"step-{event.get('step')}")
    found = re.search(r"step-\d+$", folder)
    return found[0] if found else folder


def is_outlier(event: Record) -> bool:
    """Return whether a step was skipped for finite outliers (trainer/step/skipped_steps.py).

    >>> is_outlier({"reason": "loss 436.2 is 307 times 1.419, the usual one"})
    True
    """
    return bool(re.search(r"deviations above|, the usual one", str(event.get("reason"))))


def skipped_text(event: Record) -> str:
    """Return one line on a step that moved no weight, the reason, and the ranks with samples."""
    culprits = [_blamed_rank_text(culprit) for culprit in event.get("culprits") or [event]]
    where = "; ".join(culprit for culprit in culprits if culprit)
    reason = event.get("reason", "non-finite numbers")
    text = f"step {event.get('step')} skipped, the weights did not move: {reason}"
    return f"{text} on {where}" if where else text


def left_out_text(event: Record) -> str:
    """Return one line on the sample that a step left out, and the reason."""
    where = f"epoch {event.get('epoch')}, position {event.get('position')}"
    return (
        f"step {event.get('step')}: sample {event.get('sample')} ({where}) could not be read on "
        f"rank {event.get('rank')} and is left out: {event.get('error')}"
    )


def _spike(event: Record) -> str:
    """Return one line on a spike, without its samples: none of them is known to be at fault."""
    cure = f"try: {event.get('cure') or 'train.spikes=skip'} leaves such steps out"
    return f"step {event.get('step')}: {event.get('reason')}; the update was made; {cure}"


def _rewound(event: Record) -> str:
    first, last = event.get("left_out") or ("?", "?")
    return (
        f"step {event.get('step')}: {event.get('reason')}; back to step {event.get('to')}, without "
        f"samples {first} – {last} of the stream"
    )


def _blamed_rank_text(event: Record) -> str:
    words = [f"rank {event['rank']}"] if event.get("rank") is not None else []
    for key in ("micro_batches", "samples"):
        if event.get(key):
            words.append(f"{key.replace('_b', '-b')} {numbers_text(_flatten(event[key]))}")
    return ", ".join(words)


def _flatten(values: Any) -> Any:
    """Return the samples of all micro-batches as one list.

    >>> _flatten([[3, 1], [2]]), _flatten([0, 1]), _flatten(7)
    ([3, 1, 2], [0, 1], 7)
    """
    if not isinstance(values, list):
        return values
    return [one for part in values for one in (part if isinstance(part, list) else [part])]


def numbers_text(values: Any) -> str:
    """Format integers with ranges for runs; only the first few of many.

    >>> numbers_text([3, 4, 5, 9]), numbers_text(7)
    ('3–5, 9', '7')
    """
    numbers = values if isinstance(values, list) else [values]
    runs: list[list[Any]] = []
    for number in numbers:
        if runs and isinstance(number, int) and number - 1 == runs[-1][1]:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(first) if first == last else f"{first}–{last}" for first, last in runs]
    more = f" and {len(texts) - SHOWN_RUNS} more" if len(texts) > SHOWN_RUNS else ""
    return ", ".join(texts[:SHOWN_RUNS]) + more


def _stopping(event: Record) -> str:
    who = f" at rank {event['rank']}" if event.get("rank") is not None else ""
    step_s = event.get("step_s") or 0.0
    after = f" after this step (they take {seconds_text(step_s)})" if step_s >= LONG_STEP_S else ""
    name = signal_text(str(event.get("signal", "a signal")))
    if event.get("steps") is False:
        return f"{name}{who}: stopping, before the first step"
    return f"{name}{who}: saving{after}, then stopping (Ctrl-C again stops at once, unsaved)"


def _validated(event: Record) -> str:
    loss, entropy = event.get("loss"), event.get("unigram_entropy")
    where = f" at step {event['step']}" if event.get("step") is not None else ""
    text = f"validation{where}: loss {number_text(loss, 4)}"
    if entropy is not None:
        text += f", {event.get('baseline', 'unigram entropy')} {number_text(entropy, 4)}"
    if loss is not None and entropy is not None and loss == loss:
        gap = entropy - loss
        text += f" ({abs(gap):.4f} {'below' if gap >= 0 else 'above'} it)"
    if event.get("accuracy") is not None:
        text += f", accuracy {event['accuracy']:.1%}"
    if event.get("bits_per_byte") is not None:
        text += f", {number_text(event['bits_per_byte'], 4)} bits per byte"
    if event.get("targets") is not None:
        text += f", {count_text(event['targets'])} targets"
    if worst := event.get("worst"):
        row = (event.get("by_source") or {}).get(worst) or {}
        owners = len(event.get("by_source") or ())
        text += f"; mean of {owners} owners, worst {worst}: {_owner_loss(row)}"
        if larger := find_larger_worst(worst, event["by_source"]):
            more = _owner_loss(event["by_source"][larger])
            text += f"; worst with {ENOUGH_TARGETS} targets or more {larger}: {more}"
    return text


def find_larger_worst(worst: str, by_owner: Record) -> str:
    """Return the worst data owner of those with enough targets, if the worst of all has fewer.

    >>> find_larger_worst(
    ...     "a", {"a": {"loss": 3.5, "targets": 1}, "b": {"loss": 1.3, "targets": 11}}
    ... )
    'b'
    """
    if (by_owner[worst].get("targets") or 0) >= ENOUGH_TARGETS:
        return ""
    large = {name: row for name, row in by_owner.items() if row.get("targets", 0) >= ENOUGH_TARGETS}
    losses = {name: row["loss"] for name, row in large.items()}
    infinite = float("inf")  # a loss that is not finite is null in the log
    return max(losses, key=lambda name: infinite if (x := losses[name]) is None else x, default="")


def _owner_loss(row: Record) -> str:
    """Return a data owner's loss; for text also its bits per byte, by which owners compare.

    >>> _owner_loss({"loss": 0.98834, "accuracy": 8 / 11, "targets": 11})
    '0.9883, accuracy 72.7% of 11 targets'
    """
    loss = number_text(row.get("loss"), 4)
    if (bits := row.get("bits_per_byte")) is not None:
        return f"{number_text(bits, 4)} bits per byte (loss {loss})"
    if row.get("accuracy") is None or row.get("targets") is None:
        return loss
    return f"{loss}, accuracy {row['accuracy']:.1%} of {count_text(row['targets'])} targets"


def number_text(value: Any, digits: int) -> str:
    """Format a number at fixed precision; a dash for None.

    >>> number_text(3.14159, 2), number_text(None, 2), number_text(float("nan"), 2)
    ('3.14', '–', 'nan')
    """
    return "–" if value is None else f"{float(value):.{digits}f}"


def _met(event: Record) -> str:
    count, at = event.get("count", "?"), event.get("at", "?")
    if count == 1 and event.get("owners"):
        return f"{event['owners']} owners train in turn, in one group of processes"
    if count == 1:
        return "one island: an outer optimizer moves what its own steps have learnt"
    turns = (
        f", in which {event['owners']} owners train" if event.get("owners", count) != count else ""
    )
    if event.get("encrypted") is True:
        return f"{count} islands met at {at}{turns}; their connections are encrypted"
    return (
        f"{count} islands met at {at}{turns}; what they send is not encrypted: between machines "
        f"use a private network or a tunnel"
    )


def _merged(event: Record) -> str:
    admitted = event.get("admitted") or []
    others = "" if not event.get("refused") else f", {len(event['refused'])} refused"
    of = f"of {event['owners']} owners" if event.get("owners") else "islands"
    return (
        f"round {event.get('round')}: {len(admitted)} {of} merged{others}, "
        f"{count_text(event.get('tokens_all') or 0)} {event.get('unit', 'tokens')}; "
        f"{bytes_text(event.get('sent_bytes') or 0)} sent, "
        f"{seconds_text(event.get('exposed_s') or 0)} of {seconds_text(event.get('seconds') or 0)} "
        f"waited"
    )


def _discarded(event: Record) -> str:
    return (
        f"round {event.get('round')} discarded: {event.get('why')}; all islands go on from the "
        f"weights before it"
    )


def _dropped(event: Record) -> str:
    first, last = event.get("first"), event.get("last")
    which = f"round {last}" if first == last else f"rounds {first} – {last}"
    others = "are not those of" if event.get("known") else "are not known to"
    return (
        f"{which} of this island {others} the islands that it meets, which are at round "
        f"{event.get('goes_on')} of another history of this run, started later: it takes their "
        f"weights; its own checkpoints are kept in {event.get('folder')}, a run folder for `shoal "
        f"checkpoint export`"
    )


def _refused(event: Record) -> str:
    return f"{event.get('why')}: refused, the others merged without it"


SENTENCES: dict[str, Callable[[Record], str]] = {
    "notice": _notice,
    "worker_died": died_text,
    "hang": _hang,
    "slow_rank": slow_text,
    "restarting": _restarting,
    "checkpoint_saved": _saved,
    "checkpoint_failed": _not_saved,
    "checkpoint_damaged": _damaged,
    "resumed": _resumed,
    "drift": lambda event: str(event.get("text", "")),
    "step_skipped": skipped_text,
    "sample_left_out": left_out_text,
    "spike": _spike,
    "rewound": _rewound,
    "stop_requested": _stopping,
    "validated": _validated,
    "islands_met": _met,
    "round_committed": _merged,
    "round_discarded": _discarded,
    "rounds_dropped": _dropped,
    "island_refused": _refused,
}
"""Events that are printed; the others stay in the log."""
