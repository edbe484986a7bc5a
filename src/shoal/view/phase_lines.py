"""The current phase of a run as text: `validation 120/299 · 23 s`, or as `key=value`.

The text comes from `phase.json` of a run folder, which the first worker keeps up to date. A file
older than the newest start belongs to a worker that is gone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from shoal.base.runlog.damaged_lines import is_number, read_object
from shoal.view.progress import remaining_time_text
from shoal.wire.phases import FILE_NAME, Phase, set_phase_listener

WAIT_S = 2.0
"""Seconds of silence after which a wait is reported."""

LONGEST_SILENCE_S = 60.0


@dataclass(frozen=True)
class CurrentPhases:
    """Phases in progress, outermost first; `now_s` is the wall clock when they were read."""

    phases: tuple[Phase, ...]
    now_s: float

    @property
    def seconds(self) -> float:
        """Return the seconds that the innermost phase has lasted."""
        return max(0.0, self.now_s - self.phases[-1].began_s) if self.phases else 0.0

    @property
    def left_s(self) -> float | None:
        """Return the seconds left of the innermost phase at its pace; None if unknown."""
        if not self.phases or self.seconds < WAIT_S:
            return None
        inner = self.phases[-1]
        if not 0 < inner.done <= inner.of:
            return None
        return self.seconds / inner.done * (inner.of - inner.done)

    def names(self) -> str:
        """Return the names of the phases with their progress.

        >>> CurrentPhases((Phase("proof", of=2, done=1), Phase("build")), 0.0).names()
        'proof 1/2: build'
        """
        return ": ".join(f"{one.name}{_progress(one)}" for one in self.phases)

    def text_pieces(self) -> list[str]:
        """Return the pieces of one line, the most informative first.

        >>> CurrentPhases(
        ...     (Phase("validation", of=299, done=120, began_s=100.0),), 112.0
        ... ).text_pieces()
        ['validation 120/299', '12 s', '18 s left']
        """
        left_s = self.left_s
        more = [] if left_s is None else [f"{remaining_time_text(left_s)} left"]
        return [self.names(), remaining_time_text(self.seconds), *more]

    def text(self) -> str:
        """Return the phases as one line.

        >>> CurrentPhases((Phase("first step", began_s=100.0),), 109.4).text()
        'first step · 9 s'
        """
        return " · ".join(self.text_pieces())

    def key_values(self) -> str:
        """Return the phases for a pipe, values without blanks.

        >>> CurrentPhases((Phase("first step", of=8, done=2, began_s=100.0),), 109.4).key_values()
        'phase=first-step done=2/8 seconds=9 left=28s'
        """
        name = "/".join(one.name.replace(" ", "-") for one in self.phases)
        inner, left_s = self.phases[-1], self.left_s
        done = f" done={_progress(inner).strip()}" if _progress(inner) else ""
        left = "" if left_s is None else f" left={remaining_time_text(left_s).replace(' ', '')}"
        return f"phase={name}{done} seconds={self.seconds:.0f}{left}"


def _progress(one: Phase) -> str:
    if one.of:
        return f" {min(one.done, one.of)}/{one.of}"
    return f" {one.done}" if one.done else ""


def read_current_phases(folder: Path, since_s: float = 0.0) -> CurrentPhases:
    """Read the current phases of a run from `folder/phase.json`.

    Args:
        since_s: seconds since 1970: an older file counts as missing.

    Returns:
        no phases if the file is missing, torn or too old.
    """
    record = read_object(folder / FILE_NAME)
    rows, told_s = record.get("phases"), record.get("time_s")
    if not isinstance(rows, list) or not is_number(told_s) or told_s < since_s:
        return CurrentPhases((), time.time())
    return CurrentPhases(
        tuple(one for row in rows if (one := _phase(row)) is not None), time.time()
    )


def _phase(row: Any) -> Phase | None:
    try:
        return Phase(str(row["name"]), int(row["of"]), int(row["done"]), float(row["began_s"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


class WaitLineSchedule:
    """Schedule of lines about a wait through a pipe: after two seconds, then ever less often."""

    def __init__(self) -> None:
        self.spoken_s, self.pause_s, self.told = time.monotonic(), WAIT_S, ""

    def broken(self) -> None:
        """Restart the schedule because another line was written."""
        self.spoken_s, self.pause_s = time.monotonic(), WAIT_S

    def line(self, doing: CurrentPhases) -> str:
        """Return the line to write now; "" before it is due."""
        now_s = time.monotonic()
        if not doing.phases:
            return ""
        name = "/".join(one.name for one in doing.phases)
        if name != self.told and doing.seconds >= WAIT_S:
            self.pause_s = WAIT_S  # another wait
        if now_s - self.spoken_s < self.pause_s or doing.seconds < WAIT_S:
            return ""
        self.told, self.spoken_s = name, now_s
        self.pause_s = min(2 * self.pause_s, LONGEST_SILENCE_S)
        return doing.key_values()


class PhaseLine:
    """Display of the current phase in one line; call `hear` or `show` often, then `finish`.

    On a terminal the line is redrawn in place; elsewhere a `key=value` line is written after 2 s of
    one phase, then ever more rarely. `hear` takes phases of this process (a listener of
    `base.phases`); `show(read_current_phases(folder))` draws those of a run folder.

    Args:
        title: stands before the phases on a terminal.
    """

    def __init__(self, stream: TextIO, title: str = "") -> None:
        self.stream, self.title = stream, title
        self.silence, self.drawn, self.drawn_s = WaitLineSchedule(), False, 0.0

    def update(self, phases: list[Phase]) -> None:
        """Draw this process's phases; a listener of `base.phases`."""
        self.show(CurrentPhases(tuple(phases), time.time()))

    def show(self, doing: CurrentPhases) -> None:
        """Draw the current phases; cheap, call it often."""
        if not self.stream.isatty():
            if line := self.silence.line(doing):
                self._write(f"{line}\n")
            return
        now_s = time.monotonic()
        if doing.phases and now_s - self.drawn_s >= 0.1:
            self._write(f"\r{self.title}{doing.text()}\x1b[K")
            self.drawn, self.drawn_s = True, now_s

    def finish(self) -> None:
        """Clear the line."""
        if self.drawn:
            self._write("\r\x1b[K")
            self.drawn = False

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:
            return  # a closed pipe ends the drawing, not the work


@contextlib.contextmanager
def show_phases(stream: TextIO) -> Iterator[None]:
    """Draw this thread's phases into a stream until the `with` block ends, and clear the line."""
    line = PhaseLine(stream)
    set_phase_listener(line.update)
    try:
        yield
    finally:
        set_phase_listener(None)
        line.finish()
