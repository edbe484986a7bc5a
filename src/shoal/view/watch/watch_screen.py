"""Screen of a watched run: a pure function of its state and a terminal's size.

top        name, state, step, time left, loss, validation; progress, layout, rates
middle     curves, ranks, events: all three, or one of them alone
bottom     foreseen beside measured, waits, keys
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.base.text.event_sentences import number_text
from shoal.base.text.units import count_noun, rate_text, seconds_text
from shoal.view.diagnosis.folder_state import WRONG
from shoal.view.progress import local_time_text, short_unit
from shoal.view.run_table import RunRow
from shoal.view.watch.letter_curves import draw_curve
from shoal.view.watch.rank_table import draw_ranks, fit_legend
from shoal.view.watch.styled_lines import (
    Line,
    Span,
    cell_width,
    clean_text,
    cut_line,
    cut_text,
    fit_spans,
    pad_text,
)
from shoal.view.watch.watch_state import EventLine, IslandState, WatchedRun

SNAPSHOT_EVENTS, SAVED = 10, "checkpoint saved: "
"""Lines of events in a snapshot · beginning of the text of a save."""
FAULT_S = 600.0
"""Seconds for which a fault stays on the screen, whatever happens after it."""
VIEWS = ("all", "curves", "ranks", "events")
STATE_STYLES = {
    "running": "bold green",
    "ended": "bold cyan",
    "starting": "bold",
    **dict.fromkeys(("silent", "stopped", "abandoned", "unstarted"), "bold yellow"),
    **dict.fromkeys(("hung", "killed", "failed", "diverged"), "bold red"),
    **dict.fromkeys(("damaged", "unsaved", "refused"), "bold red"),
}
KEYS = "q quit  tab next view  arrows scroll  l log axis  p pause  ? help"
SIGN_S = 30.0
"""Seconds without a sign of life after which the screen says so."""
HELP = (
    "q, Ctrl-C     quit; the run goes on",
    "tab           next view: all, curves, ranks, events",
    "arrows, PgUp, PgDn, Home   scroll ranks or events",
    "l             logarithmic axis of the curves, or linear",
    "p, space      pause the screen, and go on",
    "?             this help, and back",
    "",
    "late          how long the others wait for a rank in a usual step",
    "foreseen      the planner's figures before the start, beside the measured ones",
    "time, bar     the mean of a rank's newest 20 steps, by part; the last line has the letters",
)


@dataclass(frozen=True)
class ScreenOptions:
    """Choices of the person who watches.

    Attributes:
        view: one of VIEWS.
        log: logarithmic axes.
        first: rows that were scrolled away.
        paused: the screen shows an older moment.
        help: show the keys instead.
        braille: the terminal has braille letters.
    """

    view: str = "all"
    log: bool = False
    first: int = 0
    paused: bool = False
    help: bool = False
    braille: bool = True


def render_screen(
    run: WatchedRun, width: int, height: int, options: ScreenOptions, now_s: float
) -> list[Line]:
    """Return a screen of exactly `height` lines of at most `width` columns.

    Args:
        now_s: the time, seconds since 1970.
    """
    top = _top_lines(run, width, options, now_s)
    bottom = [cut_line([(_keys_text(options), "reverse")], width)]
    if options.help:
        middle: list[Line] = [cut_line([(text, "")], width) for text in HELP]
    else:
        figures = _figure_lines(run, width)
        room = height - len(top) - len(figures) - len(bottom)
        middle = [*_middle_lines(run, width, max(0, room), options), *figures]
    room = max(0, height - len(top) - len(bottom))
    lines = [*top, *middle[:room], *([()] * (room - len(middle))), *bottom]
    return [cut_line(line, width) for line in lines[:height]]


def render_snapshot(
    run: WatchedRun, width: int, options: ScreenOptions, now_s: float
) -> list[Line]:
    """Return the state of a run as lines for a pipe: as many as it needs, without keys."""
    lines = _top_lines(run, width, options, now_s)
    if run.points:
        lines += _curve_lines(run, width, 9, options)
    lines += _island_lines(run.islands, width)
    lines += draw_ranks(run.ranks, width, 34)
    lines += _figure_lines(run, width)
    lines += _event_lines(_drop_older_saves(run.events), width, SNAPSHOT_EVENTS)
    return lines


def _drop_older_saves(events: Sequence[EventLine]) -> list[EventLine]:
    """Return events without saves that another save follows at once: they push out the others."""
    saves = [event.text.startswith(SAVED) for event in events]
    return [
        event
        for event, is_save, is_next in zip(events, saves, [*saves[1:], False], strict=False)
        if not (is_save and is_next)
    ]


def _keys_text(options: ScreenOptions) -> str:
    paused = "paused  " if options.paused else ""
    view = "" if options.view == "all" else f"[{options.view}]  "
    return f" {paused}{view}{KEYS} "


def _top_lines(run: WatchedRun, width: int, options: ScreenOptions, now_s: float) -> list[Line]:
    if run.row is None:
        return [cut_line([(run.message, "bold")], width)]
    lines = [cut_line([(run.message, "bold yellow")], width)] if run.message else []
    row, found = run.row, dict(run.progress.fields())
    state: Span = (row.state, STATE_STYLES.get(row.state, ""))
    words: list[Span] = [(run.name, "bold"), state]
    if "step" in found:
        words.append((f"step {found['step']}", ""))
    if run.left and row.state == "running":
        words.append((run.left, ""))
    if run.islands and row.loss is not None:
        words.append((f"mean loss {row.loss:.4f}", "bold"))
    elif "loss" in found:
        words.append((f"loss {found['loss']}", "bold"))
    if "validation" in found:
        words.append((run.progress.validation_form().format(found["validation"]), "bold"))
    lines.append(fit_spans(words, width))
    lines.append(_progress_line(run, width, found, options.braille))
    lines.append(fit_spans(_state_spans(run, row, width, now_s), width))
    return lines


def _state_spans(run: WatchedRun, row: RunRow, width: int, now_s: float) -> list[Span]:
    """Return the third line: how the run ended, its phase, its last sign, and what to try."""
    found: list[Span] = []
    cure = clean_text(f"try: shoal diagnose {row.path}") if row.state in WRONG else ""
    if row.how:
        room = max(width // 2, width - cell_width(cure) - 3)
        found.append((cut_text(row.how, room), STATE_STYLES.get(row.state, "")))
    if cure:
        found.append((cure, "bold"))
    found += [(text, "cyan") for text in run.phases.text_pieces()] if run.phases.phases else []
    silent_s = now_s - row.last_sign_s
    if row.last_sign_s and silent_s > SIGN_S:
        style = "yellow" if row.alive else "dim"
        found.append((f"last sign of life {seconds_text(silent_s)} ago", style))
    elif row.last_sign_s and silent_s < -SIGN_S:
        found.append((f"its clock is {seconds_text(-silent_s)} ahead", "dim"))
    elif row.started_s and not found:
        clock = local_time_text(row.started_s, "%m-%d %H:%M")
        ago = seconds_text(max(0.0, now_s - row.started_s))
        found.append((f"started {clock}, {ago} ago", "dim"))
    if run.done and row.state == "running":
        found.append((run.done, ""))
    return found


def _progress_line(run: WatchedRun, width: int, found: dict[str, str], unicode: bool) -> Line:
    fraction, row = run.progress.fraction, run.row
    spans: list[Span] = []
    if fraction is not None:
        bar = max(10, min(40, width // 4))
        full = round(fraction * bar)
        done, left = "━─" if unicode else "#."
        spans = [(done * full, "cyan"), (left * (bar - full), "dim"), (f" {fraction:.0%}  ", "")]
    room = width - sum(len(text) for text, _ in spans)
    rate = row.rate if row and run.islands else run.progress.rate()
    words: list[Span] = [(row.layout if row else "", "")]
    if run.islands:
        islands = count_noun(len(run.islands), "island")
        words = [(f"{islands}, each {row.layout}" if row and row.layout else islands, "")]
    if run.ranks:
        words.append((count_noun(len(run.ranks), "rank"), ""))
    if rate is not None and row:
        words.append((f"{rate_text(rate)} {row.unit}/s", ""))
    for key, form in (("mfu", "MFU {}"), ("matmul", "{} of matmul rate"), ("gpu", "GPU {}")):
        if key in found:
            words.append((form.format(found[key]), ""))
    if "grad_norm" in found:
        words.append((f"grad {found['grad_norm']}", ""))
    if "lr" in found:
        words.append((f"lr {found['lr']}", ""))
    return (*spans, *fit_spans(words, room))


def _figure_lines(run: WatchedRun, width: int) -> list[Line]:
    """Return predicted and measured figures, the waits of a step, and the letters of the bars."""
    rows = [("foreseen → now", run.forecast), ("rank 0 waits", run.waits)]
    lines = [
        fit_spans([(f"{label:<14}", "dim"), *((text, "") for text in texts)], width, "  ")
        for label, texts in rows
        if texts
    ]
    if run.comment:
        lines.insert(1, cut_line([(run.comment, "yellow")], width))
    if run.ranks:
        lines.append(cut_line([(fit_legend(width), "dim")], width))
    return lines


def _middle_lines(run: WatchedRun, width: int, room: int, options: ScreenOptions) -> list[Line]:
    if options.view == "curves":
        return _all_curves(run, width, room, options)
    islands = _island_lines(run.islands, width)
    if options.view == "ranks":
        ranks = draw_ranks(run.ranks, width, room - len(islands), first=options.first)
        return [*islands, *(ranks or _no_ranks(run))]
    if options.view == "events":
        return _event_lines(run.events, width, room, options.first, room)
    islands = islands[: max(0, room // 4)]
    events = len(_event_lines(run.events, width, min(12, max(3, room // 4))))
    rank_rows = len(run.ranks) + 1 if run.ranks else 1
    ranks_h = max(0, min(rank_rows, (room - len(islands)) * 2 // 5))
    curve_h = room - len(islands) - events - ranks_h
    most = max(8, width // 5)
    if curve_h > most:
        ranks_h = min(rank_rows, ranks_h + curve_h - most)
        curve_h = min(most, room - len(islands) - events - ranks_h)
        events = room - len(islands) - ranks_h - curve_h
    lines = _curve_lines(run, width, curve_h, options) if curve_h >= 3 else []
    lines += islands
    lines += draw_ranks(run.ranks, width, ranks_h) or _no_ranks(run)[:ranks_h]
    return lines + _event_lines(run.events, width, room - len(lines))


def _no_ranks(run: WatchedRun) -> list[Line]:
    if run.row is None:
        return []
    if run.row.state == "starting":
        return [(("no rank has made a step yet", "dim"),)]
    return [(("no rank has made a step, or the run has no watchdog that records them", "dim"),)]


def _curve_lines(run: WatchedRun, width: int, height: int, options: ScreenOptions) -> list[Line]:
    return draw_curve(
        [(point.step, point.loss) for point in run.points],
        width,
        height,
        braille=options.braille,
        log=options.log,
        marks=run.validations,
    )


def _all_curves(run: WatchedRun, width: int, room: int, options: ScreenOptions) -> list[Line]:
    """Return the loss, and in high terminals the gradient norm and the seconds of a step."""
    names = {
        "loss (o: validation)": "loss",
        "gradient norm": "grad_norm",
        "seconds a step": "step_s",
    }
    count = max(1, min(len(names), room // 9))
    lines: list[Line] = []
    for place, (title, key) in enumerate(list(names.items())[:count]):
        height = room * (place + 1) // count - room * place // count
        points = [(point.step, getattr(point, key)) for point in run.points]
        marks = run.validations if key == "loss" else ()
        lines.append(((title, "dim"),))
        lines += draw_curve(
            points, width, height - 1, braille=options.braille, log=options.log, marks=marks
        )
    return lines


def _island_lines(islands: Sequence[IslandState], width: int) -> list[Line]:
    if not islands:
        return []
    head = (
        f"{'island':<12}{'state':<11}{'step':>12}{'loss':>10}{'rate':>14}{'merged':>8}{'waits':>7}"
    )
    lines: list[Line] = [cut_line([(head, "dim")], width)]
    for one in islands:
        row = one.row
        of = f"{row.step}/{row.steps}" if row.steps else str(row.step)
        rate = f"{rate_text(row.rate)} {short_unit(row.unit)}/s" if row.rate else "–"
        share = "–" if one.exposed_share is None else f"{one.exposed_share:.0%}"
        merged = f"{one.rounds}" + (f"-{one.discarded}" if one.discarded else "")
        spans: list[Span] = [
            (pad_text(row.name, 11) + " ", ""),
            (pad_text(row.state, 11), STATE_STYLES.get(row.state, "")),
            (f"{of:>12}{number_text(row.loss, 4):>10}{rate:>14}{merged:>8}{share:>7}", ""),
        ]
        lines.append(cut_line(spans, width))
    return lines


def _event_lines(
    events: Sequence[EventLine], width: int, room: int, first: int = 0, most: int = 3
) -> list[Line]:
    """Return the newest events, wrapped, oldest of them first; a recent fault is among them.

    Args:
        room: lines for all events.
        first: newest events that were scrolled away.
        most: lines of one event.
    """
    if room <= 0:
        return []
    shown = events[: len(events) - first] if first else events
    if first or not (fault := _recent_fault(shown)):
        return _newest_events(shown, width, room, most)
    # A rank's death is not pushed out by what its restart reports.
    above = _newest_events([fault], width, max(1, room // 2), most)
    below = _newest_events(
        [one for one in shown if one is not fault], width, room - len(above), most
    )
    whole = _newest_events(shown, width, room, most)
    return whole if any(above[0] == line for line in whole) else above + below


def _recent_fault(events: Sequence[EventLine]) -> EventLine | None:
    """Return the newest fault, if it is at most `FAULT_S` older than the newest event."""
    faults = [one for one in events if one.style == "red"]
    return faults[-1] if faults and events[-1].time_s - faults[-1].time_s < FAULT_S else None


def _newest_events(events: Sequence[EventLine], width: int, room: int, most: int) -> list[Line]:
    found: list[Line] = []
    for event in reversed(events):
        clock = local_time_text(event.time_s, "%H:%M:%S ") if event.time_s else ""
        lines = _wrap_event(event, clock, width, min(most, room))
        if found and len(found) + len(lines) > room:
            break
        found = lines + found
    return found[:room]


def _wrap_event(event: EventLine, clock: str, width: int, most: int) -> list[Line]:
    """Return an event in at most `most` lines; a cut one ends with an ellipsis."""
    columns = max(10, width - len(clock))
    whole = " ".join(event.text.split())  # a sample of code is mostly blanks
    text = whole[: most * columns]
    pieces = textwrap.wrap(text, columns, break_on_hyphens=False) or [""]
    if len(pieces) > most or text != whole:
        pieces = pieces[:most]
        pieces[-1] = cut_text(f"{pieces[-1]}{' ' * columns}", columns)
    blank = " " * len(clock)
    return [
        cut_line([(blank if k else clock, "dim"), (piece, event.style)], width)
        for k, piece in enumerate(pieces)
    ]


def next_view(options: ScreenOptions) -> ScreenOptions:
    """Return the options with the next of VIEWS, unscrolled."""
    place = (VIEWS.index(options.view) + 1) % len(VIEWS)
    return replace(options, view=VIEWS[place], first=0)
