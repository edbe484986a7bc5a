"""Summary at the end of a run: outcome, speed, memory, bytes sent and checkpoints.

Counts and times are of the last session only, as another process timed a resumed run's earlier
steps.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.base.runlog.damaged_lines import Record, is_number
from shoal.base.text.event_sentences import (
    DAMAGED,
    died_text,
    is_outlier,
    left_out_text,
    number_text,
    numbers_text,
    signal_text,
    strip_control_characters,
)
from shoal.base.text.forecast_text import forecast_text, plan_comment
from shoal.base.text.units import bytes_text, count_text, rate_text, seconds_text
from shoal.view.island_lines import islands_summary_line
from shoal.view.live import SHOWN_SPIKES
from shoal.view.progress import count_unit, mfu_text, no_steps_text, step_amount
from shoal.view.run_folder_reader import RunFolder, last_session_events
from shoal.view.script_lines import LOOP_SHARE, WAITS

LABEL_WIDTH = 13
LEAST_WIDTH = 40
SHOWN_STEPS = 10_000
"""Last steps of a session from which times and bytes are computed; a longer session has more."""


def summarise_run(folder: Path, width: int = 80, islands: Sequence[Path] = ()) -> str:
    """Summarise the last session of a run folder: lines of at most `width` columns, 40 at least.

    Missing or damaged records are left out; they raise no error.

    Args:
        islands: folders of all islands of a run, of which `folder` is one: their steps add up.
    """
    run = RunFolder(folder)
    events = last_session_events(run.events.read()[0])
    start = _first_step(events)
    steps = run.last_steps(SHOWN_STEPS, start)
    plan = run.plan()
    rows: list[tuple[str, Callable[[], str]]] = [
        ("trained", lambda: _islands_trained_text(islands) if islands[1:] else ""),
        (f"{folder.name}" if islands[1:] else "trained", lambda: _trained_text(steps, plan, start)),
        ("took", lambda: _duration_text(steps, events)),
        ("step", lambda: _speed(steps, plan)),
        ("memory", lambda: _memory(steps, events)),
        ("allocator", lambda: _allocator(events)),
        ("sent", lambda: _sent_text(steps)),
        ("foreseen", lambda: _forecast_text(plan, steps, events)),
        ("", lambda: _comment_text(plan, steps)),
        (
            "islands",
            lambda: islands_summary_line(events, _islands_forecast(plan), _round_unit(plan)),
        ),
        ("waited", lambda: _waits_text(steps, events)),
        ("restarts", lambda: _restarts(events)),
        ("skipped", lambda: _skipped_text(events)),
        ("spikes", lambda: _spikes_text(events)),
        ("left out", lambda: _unreadable_text(events)),
        ("validation", lambda: _validation(events)),
        ("checkpoints", lambda: _checkpoints(run, events)),
    ]
    lines = textwrap.wrap(
        _row_text(lambda: _outcome_text(events, steps, run.checkpoints(), plan)),
        max(LEAST_WIDTH, width),
    )
    for label, tell in rows:
        if text := _row_text(tell):
            lines += _row(label, text, max(LEAST_WIDTH, width))
    return "\n".join(lines)


def _row_text(tell: Callable[[], str]) -> str:
    """Return a row's text; "" if the records behind it are damaged."""
    try:
        return tell()
    except DAMAGED:
        return ""


def _row(label: str, text: str, width: int) -> list[str]:
    """Return a label and its wrapped text; two lines of a very long text."""
    found = textwrap.wrap(text, width - LABEL_WIDTH - 2, break_on_hyphens=False)
    if len(found) > 2:
        found = [found[0], f"{found[1][: width - LABEL_WIDTH - 3]}…"]
    return [
        f"  {label if number == 0 else '':<{LABEL_WIDTH}}{line}"
        for number, line in enumerate(found)
    ]


def _events_named(events: list[Record], name: str) -> list[Record]:
    return [event for event in events if event.get("event") == name]


def _first_step(events: list[Record]) -> int:
    """Return the step from which a session's first attempt resumed; 0 if it started anew."""
    for event in events:
        if event.get("event") == "restarting":
            return 0
        if event.get("event") == "resumed":
            return int(event["step"]) if is_number(event.get("step")) else 0
    return 0


def _outcome_text(events: list[Record], steps: list[Record], saved: list[int], plan: Record) -> str:
    at = f" at step {steps[-1]['step']}" if steps else " before the first step"
    deaths = [event for event in _events_named(events, "worker_died") if event.get("fatal")]
    if deaths:
        return strip_control_characters(f"failed{at}: {died_text(deaths[-1])}")
    stops, ends = _events_named(events, "stop_requested"), _events_named(events, "run_finished")
    by = f", by {signal_text(str(stops[-1].get('signal', 'a signal')))}" if stops else ""
    if not steps and ends and ends[-1].get("steps_here") == 0:
        step, of = int(ends[-1].get("step") or 0), plan.get("steps")
        if is_number(of) and 0 < of <= step:
            return f"completed at step {step}; {no_steps_text(step, int(of))}"
    if ends:
        how, mark, trouble = str(ends[-1].get("how", "finished")).partition(";")
        return strip_control_characters(f"{how}{at}{by}{mark}{trouble}")
    if stops:
        newest = f"the newest checkpoint is step-{saved[-1]}" if saved else "nothing was saved"
        return f"stopped{at}{by}; {newest}"
    return f"no end recorded; last seen{at}"


def _trained_text(steps: list[Record], plan: Record, start: int) -> str:
    if not steps:
        return ""
    loss = number_text(steps[-1].get("loss"), 4)
    if len(steps) == SHOWN_STEPS and (made := steps[-1]["step"] - start) > SHOWN_STEPS:
        return f"{made} steps; below: of the last {SHOWN_STEPS}; last loss {loss}"
    total = sum(step_amount(record, count_unit(plan)) or 0 for record in steps)
    times = _values(steps, "step_s")
    took = f" in {seconds_text(sum(times))}" if times else ""
    word = "step" if len(steps) == 1 else "steps"
    return f"{len(steps)} {word}, {count_text(total)} {count_unit(plan)}{took}; last loss {loss}"


def _round_unit(plan: Record) -> str:
    """Return what the rounds of islands count."""
    return "target" if plan and count_unit(plan) != "tokens" else "token"


def _islands_trained_text(folders: Sequence[Path]) -> str:
    """Return steps and amounts of all islands together, and the mean of their newest losses."""
    from shoal.view.run_table import weigh_losses  # the start of a run does without

    made, total, losses, unit = 0, 0.0, [], ""
    for folder in folders:
        run = RunFolder(folder)
        start = _first_step(last_session_events(run.events.read()[0]))
        steps, unit = run.last_steps(SHOWN_STEPS, start), count_unit(run.plan())
        if not steps or len(steps) == SHOWN_STEPS:
            return ""
        made += len(steps)
        total += sum(step_amount(record, unit) or 0 for record in steps)
        if is_number(steps[-1].get("loss")):
            losses.append((steps[-1]["loss"], step_amount(steps[-1], unit)))
    loss = number_text(weigh_losses(losses), 4)
    return (
        f"{made} steps, {count_text(total)} {unit} in {len(folders)} islands; mean of last losses "
        f"{loss}"
    )


def _duration_text(steps: list[Record], events: list[Record]) -> str:
    """Format the session's wall time, and its seconds of start, steps and validation."""
    times = [event["time_s"] for event in events if is_number(event.get("time_s"))]
    if len(times) < 2 or not steps:
        return ""
    began = [
        e["time_s"] for e in _events_named(events, "compute_started") if is_number(e.get("time_s"))
    ]
    parts = {
        "starting": min(began) - min(times) if began else 0.0,
        "steps": sum(_values(steps, "step_s")),
        "validation": sum(_values(_events_named(events, "validated"), "seconds")),
    }
    whole = max(times) - min(times)
    told = [f"{seconds_text(s)} {word}" for word, s in parts.items() if s > whole / 1000]
    return f"{seconds_text(whole)}: {', '.join(told)}" if told else ""


def _values(steps: list[Record], key: str) -> list[float]:
    return [record[key] for record in steps if is_number(record.get(key))]


def _speed(steps: list[Record], plan: Record) -> str:
    # The first step of a session includes warm-up and differs from the others.
    steady = steps[1:] or steps
    if not (times := _values(steady, "step_s")):
        return ""
    parts = [f"{seconds_text(statistics.median(times))} median"]
    unit = count_unit(plan)
    timed = [(step_amount(record, unit), record.get("step_s")) for record in steady]
    if rates := [done / step_s for done, step_s in timed if done and is_number(step_s) and step_s]:
        parts.append(f"{rate_text(statistics.median(rates))} {unit}/s")
    if mfus := _values(steady, "mfu"):
        parts += filter(None, [mfu_text(statistics.median(mfus), plan)])
    return ", ".join(parts)


def _memory(steps: list[Record], events: list[Record]) -> str:
    peaks = _peaks(steps, events)
    if not peaks:
        return ""
    each = ", ".join(map(bytes_text, peaks))
    where = f"per rank ({each} by rank)" if len(peaks) > 1 else "on rank 0"
    return f"{bytes_text(max(peaks))} peak {where}"


def _peaks(steps: list[Record], events: list[Record]) -> list[float]:
    """Return peak memory by rank from the event at the run's end; before it, that of rank 0 alone.

    Rows of versions before 0.2 hold the peaks of all ranks.
    """
    told = [record.get("peak_memory_bytes_by_rank") for record in (*steps, *events)]
    rows = [row for row in told if isinstance(row, list) and all(map(is_number, row))]
    if not rows:
        own = _values(steps, "peak_memory_bytes")
        return [max(own)] if own else []
    return [max(each) for each in zip(*rows, strict=False)]


def _allocator(events: list[Record]) -> str:
    """Return how full the fullest device's allocator was at the end; "" on a CPU."""
    told = [
        event["allocator"]
        for event in _events_named(events, "run_finished")
        if "allocator" in event
    ]
    return strip_control_characters(str(told[-1])) if told else ""


def _sent_text(steps: list[Record]) -> str:
    kinds: dict[str, list[float]] = {}
    for record in steps:
        found = record.get("comm_bytes_by_kind") or record.get("comm_bytes")
        for kind, sent in found.items() if isinstance(found, dict) else [("", found)]:
            if is_number(sent):
                kinds.setdefault(kind, []).append(sent)
    means = {kind: sum(sent) / len(steps) for kind, sent in kinds.items()}
    total = sum(means.values())
    if not total:
        return ""
    parts = [f"{kind} {bytes_text(mean)}" for kind, mean in means.items() if kind and mean]
    detail = f" ({', '.join(parts)})" if parts else ""
    return f"{bytes_text(total)} per step and rank{detail}"


def _forecast_text(plan: Record, steps: list[Record], events: list[Record]) -> str:
    """Return the planner's prediction before the run beside the measurement."""
    said = plan.get("predicted")
    if not isinstance(said, dict) or "reason" in said or not steps:
        return ""
    steady = steps[1:] or steps
    measured = {
        "step_s": statistics.median(_values(steady, "step_s") or [0.0]),
        "peak_memory_bytes": max(_peaks(steps, events) or [0.0]),
        "sent_bytes": statistics.median(_values(steady, "comm_bytes") or [0.0]),
    }
    words = (("step_s", "step", seconds_text), ("peak_memory_bytes", "peak", bytes_text))
    parts = []
    for key, word, text in (*words, ("sent_bytes", "sent", bytes_text)):
        if is_number(said.get(key)) and said[key] and measured[key]:
            parts.append(f"{word} {forecast_text(said[key], measured[key], text)}")
    return ", ".join(parts)


def _comment_text(plan: Record, steps: list[Record]) -> str:
    """Return why the forecast of a step is far off; "" if it is not."""
    times_s = _values(steps[1:] or steps, "step_s")
    return plan_comment(plan, statistics.median(times_s) if times_s else None)


def _islands_forecast(plan: Record) -> Record:
    """Return the planner's prediction for the islands, `IslandsCost.record` in plan.json."""
    said = plan.get("predicted")
    found = said.get("islands") if isinstance(said, dict) else None
    return found if isinstance(found, dict) else {}


def _waits_text(steps: list[Record], events: list[Record]) -> str:
    """Return rank 0's waits, and slow ranks; waiting for a slow rank counts as communication."""
    total_s = sum(_values(steps, "step_s"))
    parts = []
    for key, word in WAITS:
        waits = _values(steps, key)
        if key == "comm_exposed_s" and not any(record.get("comm_bytes") for record in steps):
            continue  # one process: no communication
        if waits and total_s > 0 and (key != "loop_s" or sum(waits) > LOOP_SHARE * total_s):
            mean_s = sum(waits) / len(waits)
            parts.append(f"{seconds_text(mean_s)} {word} ({sum(waits) / total_s:.1%})")
    told = _events_named(events, "slow_rank")
    slow = dict.fromkeys(f"rank {one['rank']} ({one['phase']})" for one in told)
    for_whom = f"; all wait for {', '.join(slow)}" if slow else ""
    return strip_control_characters(f"per step {', '.join(parts)}{for_whom}") if parts else ""


def _restarts(events: list[Record]) -> str:
    restarts = _events_named(events, "restarting")
    deaths = [event for event in _events_named(events, "worker_died") if not event.get("fatal")]
    if not restarts:
        return ""
    last = f"; last: {died_text(deaths[-1])}" if deaths else ""
    return strip_control_characters(f"{len(restarts)}{last}")


def _skipped_text(events: list[Record]) -> str:
    """Return the number of skipped steps, by cause."""
    told = [event for event in _events_named(events, "step_skipped") if "step" in event]
    leapt = sorted({event["step"] for event in told if is_outlier(event)})
    broken = sorted({event["step"] for event in told} - set(leapt))
    parts = {"non-finite": broken, "leapt out": leapt}
    words = [f"{name}: {numbers_text(steps)}" for name, steps in parts.items() if steps]
    return ", ".join([str(len(broken) + len(leapt)), *words]) if words else ""


def _spikes_text(events: list[Record]) -> str:
    """Return the number of spikes whose update was made, if the run's lines left some out."""
    count = len(_events_named(events, "spike"))
    return (
        f"{count}, their updates were made: the report marks them" if count > SHOWN_SPIKES else ""
    )


def _unreadable_text(events: list[Record]) -> str:
    found = _events_named(events, "sample_left_out")
    if not found:
        return ""
    samples = "1 sample" if len(found) == 1 else f"{len(found)} samples"
    return strip_control_characters(
        f"{samples} that could not be read; last: {left_out_text(found[-1])}"
    )


def _validation(events: list[Record]) -> str:
    if not (found := _events_named(events, "validated")):
        return ""
    loss, entropy = found[-1].get("loss"), found[-1].get("unigram_entropy")
    name = found[-1].get("baseline", "unigram entropy")
    beside = f", {name} {number_text(entropy, 4)}" if entropy is not None else ""
    right = found[-1].get("accuracy")
    share = f", accuracy {right:.1%}" if right is not None else ""
    before = ""
    if len(found) > 1 and found[0].get("step") == 0:
        before = f" ({number_text(found[0].get('loss'), 4)} before training)"
    return f"loss {number_text(loss, 4)}{before}{beside}{share}{_best_validation(found)}"


def _best_validation(found: list[Record]) -> str:
    """Return the best of several validations, if the last one is worse."""
    losses = [(e["loss"], e["step"]) for e in found if is_number(e.get("loss")) and "step" in e]
    best, step = min(losses, default=(0.0, 0))
    if not losses or losses[-1][0] <= best:
        return ""
    return f"; best {number_text(best, 4)} at step {step}"


def _checkpoints(run: RunFolder, events: list[Record]) -> str:
    if not (complete := run.checkpoints()):
        return ""
    sizes = [
        event["bytes"] for event in _events_named(events, "checkpoint_saved") if "bytes" in event
    ]
    size = f", {bytes_text(sizes[-1])} each" if sizes else ""
    names = ", ".join(f"step-{step}" for step in complete[-3:])
    earlier = f" and {len(complete) - 3} earlier" if len(complete) > 3 else ""
    return f"{names}{earlier}{size}"
