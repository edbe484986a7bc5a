"""History of a run, from its events, and its provenance: settings, versions, sources, hosts."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Sequence

from shoal.base.runlog.damaged_lines import Record, is_number
from shoal.base.text.event_sentences import event_text
from shoal.base.text.units import bytes_text, seconds_text
from shoal.report.goodput import Goodput
from shoal.report.markup import Child, Markup, table, tag
from shoal.report.run_contents import RunContents, read_bounded_object
from shoal.report.svg_charts import stacked_bar

QUIET = ("checkpoint_saved", "validated", "worker_started", "memory_peaks", "notice")
"""Events that a table sums up or lists apart: there are many of them."""
SHOWN_EVENTS, SHOWN_NOTICES, SHOWN_SESSIONS = 200, 100, 8
RESUMED = re.compile(r"from step-(\d+)(?! at step)\b")
PART_WORDS = {
    "committed": "steps that count",
    "skipped": "steps without update",
    "start": "processes, data, resume",
    "validation": "held-out samples",
    "saves": "steps waiting for saves",
    "lost": "steps made again",
    "other": "callbacks, samples, end",
}
"""Each part of the goodput in three words."""
MOST_TOML_BYTES = 1 << 18
MOST_MANIFEST_BYTES = 1 << 24


def goodput_section(run: RunContents) -> Markup:
    """Return the share of the wall time that is in committed steps, and where the rest went."""
    found = run.goodput
    if found.session_s <= 0:
        return Markup("")
    parts = [
        (name, seconds)
        for name, seconds in found.parts().items()
        if seconds > 0 and name != "between"
    ]
    names = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in parts)
    looks = [(f"s{at % 8}", seconds) for at, (_, seconds) in enumerate(parts)]
    bar = stacked_bar(looks, found.session_s, names)
    rows: list[Sequence[Child]] = [
        [
            tag("i", class_=f"key s{at % 8}"),
            name,
            seconds_text(seconds),
            f"{seconds / found.session_s:.1%}",
            _part_text(found, name),
        ]
        for at, (name, seconds) in enumerate(parts)
    ]
    sessions = "a session" if found.starts < 2 else f"{found.starts:,} sessions"
    text = (
        f"{found.session_share:.0%} of the {seconds_text(found.session_s)} in which {sessions} ran "
        f"went into {found.steps:,} committed steps: {found.device_hours:.3g} device-hours on "
        f"{found.ranks:,} rank{'s' if found.ranks > 1 else ''}. {_lost_text(found)}"
    )
    between = (
        f"Between the sessions nobody ran it for {seconds_text(found.between_s)}: not counted here."
    )
    return tag(
        "section",
        [
            tag("h2", "Goodput"),
            tag("p", text),
            tag("p", between) if found.between_s > 0 else None,
            bar,
            table(("", "part", "time", "of sessions", "that is"), rows, numeric="  nne"),
        ],
        id="goodput",
    )


def _part_text(found: Goodput, name: str) -> str:
    """Return a part in words; the start of several sessions by session, the newest ones."""
    text = PART_WORDS.get(name, "")
    if name != "start" or len(found.session_starts) < 2:
        return text
    newest = ", ".join(map(seconds_text, found.session_starts[-SHOWN_SESSIONS:]))
    return f"{text}; by session {'… ' * (found.starts > SHOWN_SESSIONS)}{newest}"


def _lost_text(found: Goodput) -> str:
    if not found.lost_steps:
        return "No step was made again."
    if found.lost_steps == 1:
        return "At most one step was made again."
    return f"At most {found.lost_steps:,} steps were made again."


def history_section(run: RunContents) -> Markup:
    """Return starts, kills, resumes, skips and saves of a run, oldest first."""
    events = [event for event in run.events if event["event"] not in QUIET]
    parts: list[Child] = [tag("h2", "History"), tag("p", _saves_text(run))]
    if events:
        shown = events[-SHOWN_EVENTS:]
        rows = [[_clock(event), _step(event), *_words(event)] for event in shown]
        head = ("time", "step", "event", "what")
        parts.append(table(head, rows, numeric=" n w", caption=_left_out(len(events) - len(shown))))
    notices = run.named("notice")[-SHOWN_NOTICES:]
    if notices:
        rows = [[_clock(event), _words(event)[1]] for event in notices]
        summary = tag("summary", f"Notices ({run.event_counts.get('notice', 0):,})")
        parts.append(tag("details", summary, table(("time", "notice"), rows, numeric=" w")))
    return tag("section", parts, id="history")


def _left_out(count: int) -> str:
    return f"{count:,} earlier events are not shown." if count > 0 else ""


def _saves_text(run: RunContents) -> str:
    """Return a sentence on the saves, and one on restarts."""
    saves = run.named("checkpoint_saved")
    count = run.event_counts.get("checkpoint_saved", 0)
    words = []
    if saves:
        seconds = [e["seconds"] for e in saves if is_number(e.get("seconds"))]
        sizes = [e["bytes"] for e in saves if is_number(e.get("bytes"))]
        each = f", {bytes_text(sizes[-1])} each" if sizes else ""
        took = (
            f", written in {seconds_text(statistics.median(seconds))} (median)" if seconds else ""
        )
        words.append(f"{count:,} checkpoint{'s' if count > 1 else ''} saved{each}{took}.")
        if run.rank_times is not None and (waited_s := run.goodput.saves_s) < sum(seconds):
            waits = f"in all the steps waited {seconds_text(waited_s)} for saves"
            words.append(f"Writing goes on in the background: {waits}.")
    if run.saved:
        steps = ", ".join(f"{step:,}" for step in run.saved[-5:])
        words.append(f"On disk: step{'s' if len(run.saved) > 1 else ''} {steps}.")
    elif run.islands:
        words.append("Each island's checkpoints are in its own folder.")
    else:
        words.append("No checkpoint is on disk.")
    for name, word in (("restarting", "restart"), ("resumed", "resume"), ("worker_died", "death")):
        if number := run.event_counts.get(name, 0):
            words.append(f"{number} {word}{'s' if number > 1 else ''}.")
    return " ".join(words)


def _clock(event: Record) -> str:
    try:
        return time.strftime("%m-%d %H:%M:%S", time.localtime(event["time_s"]))
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return "–"


def _step(event: Record) -> str:
    return f"{event['step']:,}" if is_number(event.get("step")) else "–"


def _words(event: Record) -> tuple[str, str]:
    name = str(event["event"])
    text = event_text(event)
    if text is None:
        keys = ("how", "text", "reason", "layout", "attempt", "processes", "device", "compute")
        known = [key for key in keys if isinstance(event.get(key), (str, int))]
        known = [key for key in known if key != "attempt" or event[key]]
        named = [f"{key} {event[key]}" if key in keys[4:] else event[key] for key in known]
        text = ", ".join(map(str, named))
    if name == "resumed":  # the folder's name has the step
        text = RESUMED.sub(r"from checkpoint step-\1", text, count=1)
    return name.replace("_", " "), text


def provenance_section(run: RunContents) -> Markup:
    """Return versions, hosts, source digests and the settings of a run."""
    record = read_saved_record(run)
    parts: list[Child] = [tag("h2", "Provenance")]
    rows: list[Sequence[Child]] = [["folder", str(run.folder.resolve())]]
    versions = record.get("versions")
    if isinstance(versions, dict) and versions:
        rows.append(["versions", ", ".join(f"{name} {one}" for name, one in versions.items())])
    code = record.get("code")
    for name, one in list(code.items())[:40] if isinstance(code, dict) else []:
        if isinstance(one, list) and len(one) == 2:
            rows.append([f"source of {name}", f"{one[0]}, digest {one[1]}"])
    if run.saved:
        manifest = f"checkpoints/step-{run.saved[-1]}/manifest.json"
        rows.append(["from", manifest])
    else:
        rows.append(["versions", "not recorded: they stand in checkpoints, and none is on disk"])
    if hosts := hosts_text(run):
        rows.append(["hosts", hosts])
    if run.metrics.damaged:
        rows.append(["damaged lines", f"{run.metrics.damaged:,} of metrics.jsonl were left out"])
    parts.append(table(("item", "value"), rows, numeric=" w"))
    if text := _settings_text(run):
        parts.append(
            tag(
                "details",
                tag("summary", "run.toml"),
                tag("pre", [[line, "\n"] for line in text.splitlines()]),
            )
        )
    return tag("section", parts, id="provenance")


def hosts_text(run: RunContents) -> str:
    """Return the hosts of a run, each with its device and number of ranks."""
    hosts: dict[str, int] = {}
    for one in run.ranks:
        name = f"{one.get('host')} ({one.get('device_name') or one.get('device') or 'cpu'})"
        hosts[name] = hosts.get(name, 0) + 1
    texts = [f"{name}: {count} rank{'s' if count > 1 else ''}" for name, count in hosts.items()]
    more = f" and {len(texts) - 32} more" if len(texts) > 32 else ""
    return ", ".join(texts[:32]) + more


def read_saved_record(run: RunContents) -> Record:
    """Return the record of the newest checkpoint: versions and source digests."""
    if not run.saved:
        return {}
    path = run.folder / "checkpoints" / f"step-{run.saved[-1]}" / "manifest.json"
    found = read_bounded_object(path, MOST_MANIFEST_BYTES).get("record")
    return found if isinstance(found, dict) else {}


def _settings_text(run: RunContents) -> str:
    try:
        with (run.folder / "run.toml").open("rb") as file:
            return file.read(MOST_TOML_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
