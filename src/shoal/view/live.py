"""Live view of a run: events as lines, its current state as a region at the bottom.

On a terminal the last two lines are redrawn in place (one dense step line, one bar). Through a pipe
they become one `key=value` line every two seconds, more rarely the longer a run lasts. The current
phase (data, proof, first step, validation 12/40, save) stands there by name. All of it comes from
the run folder, so the same view works on a copy.
"""

from __future__ import annotations

import math
import os
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal.base.runlog.damaged_lines import is_number
from shoal.base.text.event_sentences import died_text, event_text, strip_control_characters
from shoal.base.text.terminal_encoding import READABLE
from shoal.view.phase_lines import CurrentPhases, WaitLineSchedule, read_current_phases
from shoal.view.progress import RunProgress, count_unit, fit_words, remaining_time_text
from shoal.view.run_folder_reader import RunFolder, last_session_events

Record = dict[str, Any]
PIPE_EVERY_S = 2.0
OPENING_SILENCE_S = 30.0
"""Seconds without a line, before the first step, after which a pipe gets one about the phase."""
PIPE_SHARE = 1 / 25
"""Share of the run's time so far: after a day, a line every two seconds would be too many."""
PIPE_AT_MOST_S = 60.0
DRAW_EVERY_S = 0.25
OPENING_LINES = 5
"""Lines of `shoal train` before its first step line, of which the command itself prints one."""
ENDS_OPENING = ("compute_started", "worker_died", "restarting", "hang", "run_finished")
SHOWN_SPIKES = 3
"""Lines on spikes whose update was made; the report has all of them."""
STYLES = {
    "worker_died": "red",
    "hang": "red",
    "checkpoint_damaged": "red",
    "checkpoint_failed": "yellow",
    "step_skipped": "yellow",
    "sample_left_out": "yellow",
    "drift": "red",
    "spike": "yellow",
    "rewound": "yellow",
    "restarting": "yellow",
    "stop_requested": "yellow",
    "validated": "bold",
    "checkpoint_saved": "dim",
}
"""Emphasis only: the text carries the same information without colour."""


class OpeningLines:
    """Choice of the notices that are shown before a run's first step.

    A notice with `opening`, its importance (1: the most), waits until the model starts to compute;
    then the most important ones fill the room that other lines left. Lines without it, as a
    warning, are always shown, at once.

    Args:
        most: lines before the first step; None: all, and whole instead of `short`.
    """

    def __init__(self, most: int | None) -> None:
        self.most, self.shown = most, 0
        self.waiting: list[Record] | None = []

    def select(self, events: Sequence[Record]) -> list[Record]:
        """Return the events to show now, in the order of time."""
        if self.most is None:
            return list(events)
        found: list[Record] = []
        for event in events:
            if event.get("event") == "notice" and is_number(event.get("opening")):
                if self.waiting is None:
                    found += self._fill([event])
                else:
                    self.waiting.append(event)
                continue
            if event.get("event") in ENDS_OPENING:
                found += self.flush(1 if event.get("validates") else 0)
            found.append(event)
            text = event_text(event)
            self.shown += 0 if text is None else 1 + text.count("\n")
        return found

    def flush(self, reserved: int = 0) -> list[Record]:
        """Return the waiting notices that still have room.

        Args:
            reserved: lines to come that are always shown.
        """
        waiting, self.waiting = self.waiting, None
        return self._fill(waiting or [], reserved)

    def _fill(self, notices: list[Record], reserved: int = 0) -> list[Record]:
        room = max(0, (self.most or 0) - self.shown - reserved)
        chosen = sorted(notices, key=lambda event: float(event["opening"]))[:room]
        self.shown += len(chosen)
        return [
            {**event, "text": event.get("short") or event.get("text")}
            for event in notices
            if event in chosen
        ]


class LiveView:
    """Live display of the run in `folder` on `stream`; call `tick()` often and `finish()` once.

    A stream that can no longer be written (a closed pipe, a lost terminal) ends the drawing, not
    the run.

    Args:
        folder: the run folder; of its earlier events only those of this session are shown, so make
            the view after `run_started` was emitted, or in an empty folder.
        total_steps: length of the run; None: `steps` of plan.json, if present.
        stream: where to write; in place only if it is a terminal.
        colour: False: no colours even on a terminal; never through a pipe, nor if NO_COLOR is set.
        most_opening_lines: notices before the first step; None: all of them.
    """

    def __init__(
        self,
        folder: Path,
        *,
        total_steps: int | None = None,
        stream: TextIO,
        colour: bool = True,
        most_opening_lines: int | None = None,
    ) -> None:
        self.opening = OpeningLines(most_opening_lines)
        self.folder = RunFolder(folder)
        self.untold = last_session_events(self.folder.events.read()[0])
        self.folder.metrics.skip()
        self.progress = RunProgress(total_steps)
        self.stream = stream
        self.on_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        coloured = colour and self.on_terminal and not os.environ.get("NO_COLOR")
        self.console = Console(
            file=stream,
            color_system="auto" if coloured else None,
            force_terminal=self.on_terminal,
            highlight=False,
            markup=False,
            emoji=False,
        )
        self.live: Live | None = None
        self.broken = False
        self.phase = "starting"
        self.made_s = time.monotonic()
        self.began_s, self.drawn_s = self.made_s, -math.inf
        self.drawn_step: int | None = None
        self.told_traceback = ""
        self.spikes = 0
        self.since_s = _workers_start_s(self.untold)
        self.silence = WaitLineSchedule()
        self.drawn_lengths: list[int] = []

    def tick(self) -> None:
        """Read new records and show them; cheap if there are none."""
        self._draw_guarded(self._tick)

    def finish(self) -> None:
        """Show the remaining records, keep the last step as an ordinary line, free the terminal."""
        self._draw_guarded(self._finish)

    def _draw_guarded(self, draw: Any) -> None:
        if self.broken:
            return
        try:
            draw()
        except OSError:
            self.broken = True

    def _tick(self) -> None:
        # In this order, the steps before an event have been read when it is shown.
        events = self.untold + self.folder.events.read()[0]
        self.untold = []
        steps, cut_back = self.folder.metrics.read()
        # The first line of a pipe is the first step's own, if later steps were recorded with it.
        is_first = not (self.on_terminal or cut_back or self.progress.last)
        later = steps[1:] if is_first else []
        self._add_steps(steps[: len(steps) - len(later)], cut_back)
        if self.progress.fraction == 1 and not self._is_drawn():
            self._draw_last()
        for event in self.opening.select(events):
            if later and _is_at_or_after(event, steps[0]):
                later = self._draw_first(later)
            self._write_event(event)
        if later:
            self._draw_first(later)
        if self.on_terminal:
            self._draw_in_place()
        else:
            self._draw_line()

    def _draw_first(self, later: list[Record]) -> list[Record]:
        """Draw the first step, add the later ones, and return that none is left."""
        self._draw_line()
        self._add_steps(later, cut_back=False)
        if self.progress.fraction == 1:
            self._draw_last()
        return []

    def _finish(self) -> None:
        self._tick()
        for event in self.opening.flush():
            self._write_event(event)
        if self.live is not None:
            self.live.stop()
            self.live = None
        if not self._is_drawn():
            self._draw_last()

    def _add_steps(self, records: list[Record], cut_back: bool) -> None:
        self.progress.add(records, cut_back)
        last = self.progress.last
        if last is None or not records:
            return
        if not self.progress.plan:
            self.progress.plan = self.folder.plan()
            steps = self.progress.plan.get("steps")
            if self.progress.total_steps is None and isinstance(steps, int):
                self.progress.total_steps = steps
        if cut_back:
            self.drawn_step = last["step"]  # ran before the cut: not a new step
        elif self.phase != "stopping":
            done = self.progress.fraction == 1
            self.phase, self.began_s = ("finishing" if done else "training"), time.monotonic()

    def _is_drawn(self) -> bool:
        last = self.progress.last
        return last is None or last["step"] == self.drawn_step

    def _draw_last(self) -> None:
        """Draw the last step as a line that stays."""
        width = self.console.width
        text = (
            self.progress.terminal_line(width) if self.on_terminal else self.progress.key_values()
        )
        self._write(text)
        self.drawn_step = self.progress.last["step"] if self.progress.last else None

    def _write_event(self, event: Record) -> None:
        name = str(event.get("event"))
        self.since_s = max(self.since_s, _workers_start_s([event]))
        if name == "restarting":
            self.phase, self.began_s = "restarting", time.monotonic()
        elif name == "validated":
            if event.get("step") != 0:  # a pretrained model's before training: no progress
                self.progress.add_validation(event.get("loss"))
        elif name == "stop_requested":
            self.phase = "stopping"
        elif name == "spike":
            self.spikes += 1
            if self.spikes > SHOWN_SPIKES:
                return
        elif name == "round_committed":
            plan = self.progress.plan or self.folder.plan()
            is_text = count_unit(plan) == "tokens"
            event = event if is_text or not plan else {**event, "unit": "targets"}
        if name == "worker_died":
            self._write_death(event)
        elif (text := event_text(event)) is not None:
            if name == "spike" and self.spikes == SHOWN_SPIKES:
                text += "; later ones are in the report alone"
            self._write(text, STYLES.get(name, ""))

    def _write_death(self, event: Record) -> None:
        # The last death is the outcome of the run, which the launching command reports once.
        if event.get("fatal"):
            return
        trace = strip_control_characters(str(event.get("traceback") or ""))
        if trace.count("\n") and trace != self.told_traceback:
            event = {**event, "traceback": ""}
            body = "\n" + "\n".join(f"  {line}" for line in trace.splitlines())
        else:
            body = ""
        self._write(strip_control_characters(died_text(event)) + body, STYLES["worker_died"])
        self.told_traceback = trace

    def _write(self, text: str, style: str = "") -> None:
        if self.on_terminal:
            if "\n" not in text:
                width = max(20, self.console.width)
                lines = textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)
                text = "\n".join(lines)
            # Longer texts (tracebacks, code) keep their own lines, so that they can be copied.
            self.console.print(Text(text, style=style), soft_wrap=True)
            return
        self.silence.broken()
        encoding = self.stream.encoding or "utf-8"
        self.stream.write(text.encode(encoding, READABLE).decode(encoding) + "\n")
        self.stream.flush()

    def _draw_line(self) -> None:
        now_s = time.monotonic()
        if self._is_drawn() or (self.drawn_step and now_s - self.drawn_s < self._pause_s(now_s)):
            if self._is_quiet(now_s):
                return
            if line := self.silence.line(self._current_phases()):
                self.stream.write(f"{line}\n")
                self.stream.flush()
            return
        self._draw_last()
        self.drawn_s = now_s

    def _is_quiet(self, now_s: float) -> bool:
        """Return whether it is too early for another line about a wait before the first step."""
        early = self.opening.most is not None and self.progress.last is None
        return early and now_s - self.silence.spoken_s < OPENING_SILENCE_S

    def _pause_s(self, now_s: float) -> float:
        """Return the seconds between lines through a pipe."""
        return max(PIPE_EVERY_S, min(PIPE_AT_MOST_S, (now_s - self.made_s) * PIPE_SHARE))

    def _current_phases(self) -> CurrentPhases:
        """Return the current phase of the first worker; none if that worker is gone."""
        return read_current_phases(self.folder.path, self.since_s)

    def _draw_in_place(self) -> None:
        now_s = time.monotonic()
        if self.live is None:
            self.live = Live(
                console=self.console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self.live.start()
        elif now_s - self.drawn_s < DRAW_EVERY_S:
            return
        self.drawn_s = now_s
        width = self.console.width
        # A terminal that became narrower has wrapped the old lines: erase the extra lines first.
        broken = sum(max(0, length - 1) // width for length in self.drawn_lengths)
        if broken:
            self.stream.write("\r" + "\x1b[2K\x1b[1A" * broken)
        region = self._bottom_region(width, now_s)
        text = region if isinstance(region, Text) else region.renderables[0]
        below = [] if isinstance(region, Text) else [width]
        self.drawn_lengths = [text.cell_len if isinstance(text, Text) else width, *below]
        self.live.update(region, refresh=True)

    def _bottom_region(self, width: int, now_s: float) -> Group | Text:
        doing = self._current_phases()
        if self.progress.last is None or self.phase in ("restarting", "finishing"):
            seconds = remaining_time_text(now_s - self.began_s)
            found = doing.text_pieces() if doing.phases else []
            if found and self.phase == "finishing":  # the phase of the worker has the same name
                found[0] = found[0].removeprefix("finish").removeprefix(": ")
            inner = f": {found[0]}" if found and found[0] else ""
            words = [f"{self.phase}{inner}", *(found[1:] or [seconds])]
            return Text(fit_words(words, width, " · ") or words[0][:width], no_wrap=True)
        dense = Text(self.progress.terminal_line(width), no_wrap=True)
        words = doing.text_pieces() if doing.phases else self.progress.waits()
        if self.phase != "training":
            words.insert(0, self.phase)
        fraction = self.progress.fraction
        if fraction is None:
            return Group(dense, Text(fit_words(words, width), no_wrap=True))
        beside = fit_words([f"{fraction:4.0%}", *words], width - 12)
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, width=len(beside))
        bar = ProgressBar(total=1.0, completed=fraction, complete_style="cyan")
        row.add_row(bar, Text(beside))
        return Group(dense, row)


def _is_at_or_after(event: Record, row: Record) -> bool:
    """Return whether an event is of a step's row, or of a later step."""
    return is_number(event.get("step")) and event["step"] >= row["step"]


def _workers_start_s(events: list[Record]) -> float:
    """Return the wall-clock time of the workers' last start; 0 if no event records it."""
    starts = [e for e in events if e.get("event") in ("run_started", "restarting")]
    times = [e["time_s"] for e in starts if is_number(e.get("time_s"))]
    return float(max(times, default=0.0))
