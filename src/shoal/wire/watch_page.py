"""Watch page: shared memory in which a rank reports its activity to an outside observer.

A process that is stopped, or whose C code holds the GIL, answers no request; its earlier writes
stay readable. So the launcher creates one page per rank, in memory that no disk can delay, and
passes its path to the rank (`PAGE_VARIABLE`). The rank writes, the launcher reads and requests
stacks in the same page (`stack_dumps.py`). The reading end: `launch/watch/page_reader.py`.

    bytes 0–127      16 words of 8 bytes, native order: `PAGE`, `PID`, …, below
    bytes 128–1023   the open phases as text: its length in 2 bytes, then UTF-8
    bytes 1024–      the last answer, JSON: its length in 4 bytes, then UTF-8
    from `CALLS_AT`  8 slots, each of one step whose collectives are kept by name: the step and the
                     length in 8 bytes each, then a line per call
                     (`trainer/guards/collective_log.py`)
    from `STEPS_AT`  the last `KEPT` steps, `ROW` each: its number, then seconds by part in which
                     this rank did not wait for a collective, then those in which it did; negative
                     where ranks have different work in that part; then the sum of 2ᵖ over the
                     parts p in which they do in this step, the seconds of `data` in which
                     the user's loop ran and not its loader, the most memory held by then, in
                     bytes, and the time, since 1970; a device's times come one step later
    from `UNITS_AT`  the last `UNITS` collectives of units that are gathered, `UNIT` each: how many
                     collectives of any kind were enqueued before it, the group's key, its number in
                     that group, then what it is of as UTF-8, filled up with zeros
    from `NAMES_AT`  the last `NAMES` calls that all ranks of a run must make, `NAME` each: the
                     run's key, the call's number, then its name as UTF-8, filled up with zeros

Each word is written atomically. A reader may see half-written text, but never that of a rank that
stands still. Cost: docs/lab-log.md, "A page per rank".
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from shoal.wire import phases
from shoal.wire.phases import DATA, SUM, Phase

PAGE_VARIABLE = "SHOAL_WATCH_PAGE"
TEXT_AT, ANSWER_AT, CALLS_AT = 128, 1024, 1 << 16
SLOTS, SLOT_BYTES = 8, 1 << 14
STEPS_AT, KEPT = CALLS_AT + SLOTS * SLOT_BYTES, 64
FORMAT = 0x5348_4F41_4C04
(PAGE, PID, CHANGES, CHANGED_S, STEP, PART, BEGUN, ENDED, LAST_BEGUN, LAST_BYTES, LAST_ENDED,
 WAITS, ASKED, ANSWERED, INSIDE, EXIT) = range(16)  # fmt: skip
"""The words: format · process · number of changes, time of the last (monotonic, a double) · steps
done, part of the present step · collectives enqueued and completed, in total · kind and bytes of
the last one enqueued, kind of the last one completed · open waits · requests for stacks, and
answered ones · 1 + the slot of a call that all ranks must make, during the call, else 0 · 1 + the
exit status that the watchdog orders, and from bit 8 on its time (monotonic, in milliseconds),
else 0."""

PARTS = ("", "data", "forward and backward", "sum over ranks", "optimizer", "hooks", "backward")
"""Parts of a step, as phases.py numbers them."""
WAIT = len(PARTS)
ROW = struct.Struct(f"=q{WAIT + 5}d")
UNITS, UNIT_TEXT = 64, 104
UNIT = struct.Struct(f"=qqq{UNIT_TEXT}s")
UNITS_AT = STEPS_AT + KEPT * ROW.size
NAMES, NAME_TEXT = 64, 48
NAME = struct.Struct(f"=qq{NAME_TEXT}s")
NAMES_AT = UNITS_AT + UNITS * UNIT.size
PAGE_BYTES = NAMES_AT + NAMES * NAME.size

KINDS = (
    *("", "all_reduce", "all_gather", "broadcast", "reduce_scatter", "send", "receive"),
    *("all_to_all", "barrier", "another"),
)
_NUMBERS = {name: number for number, name in enumerate(KINDS)}
_ANOTHER = KINDS.index("another")


class PartTimer(Protocol):
    """Timer of the parts of a step on a device, for which the host does not wait."""

    def mark(self, part: int) -> None:
        """Record the start of a part on the device."""

    def end_step(self) -> list[float] | None:
        """End a step; return the seconds by part of the step before, then those of waiting.

        Returns:
            None if the device has not done that step yet, or there was none.
        """


class WatchPage:
    """Writer of a watch page: the activity of one rank.

    Each `record_…` method takes under a microsecond; `record_phases`, a listener of wire/phases.py,
    takes a few. A forked process does not write to the page.

    Attributes:
        on_step: called with the number of each finished step.
        told: fields added to every answer.
        folder: the run whose steps are recorded; None: any run.
        timer: times the steps' parts on a device; None: the host's clock does.
    """

    timer: PartTimer | None = None

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self._whole = memoryview(memory)
        self._cast(self._whole)
        self._words[PAGE], self._words[PID] = FORMAT, os.getpid()
        self.on_step: Callable[[int], None] = lambda step: None
        self.told: Mapping[str, Any] = {}
        self.folder: Path | None = None
        self._spent_s, self._in, self._busy = [0.0] * (WAIT + 1), 0, False
        self._own, self._apart, self._loop_s = tuple[int, ...](), 0, 0.0
        self._units = self._calls = self._marked = 0
        self._held: tuple[int, list[float], int, float, int, float] | None = None
        os.register_at_fork(after_in_child=self._mute)

    @staticmethod
    def open(environ: Mapping[str, str] = os.environ) -> WatchPage | None:
        """Open the page that the launcher created for this process; None without one."""
        path = environ.get(PAGE_VARIABLE)
        if not path:
            return None
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return WatchPage(mmap.mmap(file, PAGE_BYTES))
        except (OSError, ValueError):
            return None
        finally:
            os.close(file)

    def record_collective_start(self, kind: str, payload_bytes: int = 0) -> None:
        """Record that a collective was enqueued.

        Args:
            kind: name of the collective, as all_reduce.
            payload_bytes: bytes of its message.
        """
        words = self._words
        words[BEGUN] += 1
        words[LAST_BEGUN] = _NUMBERS.get(kind, _ANOTHER)
        words[LAST_BYTES] = payload_bytes
        self._changed()

    def record_unit_collective(self, key: int, number: int, text: bytes) -> None:
        """Record a collective of an fsdp unit, such as a block's all-gather.

        Args:
            key: identifies the process group (`UnitCalls.key`).
            number: count of the group's collectives.
            text: names the unit.
        """
        at = UNITS_AT + self._units % UNITS * UNIT.size
        self._units += 1
        UNIT.pack_into(self._whole, at, self._words[BEGUN], key, number, text)

    def record_call_start(self, key: int, number: int, name: bytes) -> None:
        """Record that this rank entered a call that every rank must make, as run.step.

        Args:
            key: identifies the run.
            number: count of such calls of the run, from 1.
            name: name of the call, for messages.
        """
        slot = self._calls % NAMES
        self._calls += 1
        NAME.pack_into(self._whole, NAMES_AT + slot * NAME.size, key, number, name)
        self._words[INSIDE] = 1 + slot
        self._changed()

    def rename_call(self, number: int, name: bytes) -> None:
        """Give the call that this rank is in another name.

        Args:
            number: as in `record_call_start`.
            name: the new one.
        """
        at = NAMES_AT + (self._words[INSIDE] - 1) * NAME.size
        key, present, _ = NAME.unpack_from(self._whole, at)
        if self._words[INSIDE] and present == number:
            NAME.pack_into(self._whole, at, key, number, name)

    def record_call_end(self) -> None:
        """Record that the call of `record_call_start` has returned."""
        self._words[INSIDE] = 0

    def record_wait_start(self) -> None:
        """Record that this rank starts to wait for collectives."""
        self._words[WAITS] += 1
        self._changed()

    def record_wait_end(self, count: int) -> None:
        """Record that this rank has waited for `count` collectives."""
        words = self._words
        words[WAITS] -= 1
        words[ENDED] = min(words[BEGUN], words[ENDED] + count)
        words[LAST_ENDED] = words[LAST_BEGUN]
        self._changed()

    def record_part(self, part: int) -> None:
        """Record the start of a part of a step, as DATA or PASSES."""
        self._words[PART] = part
        self._changed()

    def record_step_end(self, step: int, peak_bytes: int = 0, folder: Path | None = None) -> None:
        """Record that a step is done, with every collective that it started.

        Args:
            step: number of the step.
            peak_bytes: peak memory of this rank.
            folder: the run's folder, if it has one.
        """
        words = self._words
        words[STEP], words[PART], words[ENDED] = step, DATA, words[BEGUN]
        self._changed()
        if self.folder not in (None, folder):
            return self.on_step(step)
        row = step, self._spent_s, self._apart, self._loop_s, peak_bytes, time.time()
        self._spent_s, self._apart, self._loop_s = [0.0] * (WAIT + 1), 0, 0.0
        if self.timer is None:
            self._write_row(*row)
        else:
            self._write_held_row(self.timer)
            self._held = row
        self.on_step(step)

    def _write_held_row(self, timer: PartTimer) -> None:
        """Write the row of the step before, unless the device has not done it: then none is."""
        held, self._held = self._held, None
        device_s = timer.end_step()
        if held is not None and device_s is not None:
            step, _, *others = held
            self._write_row(step, device_s, *others)

    def _write_row(self, step: int, spent_s: Sequence[float], *others: float) -> None:
        at = STEPS_AT + step % KEPT * ROW.size
        struct.pack_into("=q", self._whole, at, 0)  # nobody reads a half-written one
        if self._own:
            spent_s = [-one if part in self._own else one for part, one in enumerate(spent_s)]
        told = *spent_s, *map(float, others)
        struct.pack_into(f"={WAIT + 5}d", self._whole, at + 8, *told)
        struct.pack_into("=q", self._whole, at, step)

    def record_unequal_parts(self, parts: Sequence[int], *, always: bool = False) -> None:
        """Record parts of the step in which ranks have unequal work by plan.

        Args:
            always: in all later steps, not in this one only.
        """
        if always:
            self._own = tuple(parts)
            return
        for part in parts:
            self._apart |= 1 << part

    def record_loop_time(self, seconds: float) -> None:
        """Record for how long the user's loop ran before this step's passes, and not its loader."""
        self._loop_s = seconds

    def record_phases(self, phases: Sequence[Phase]) -> None:
        """Record the open phases, outermost first."""
        text = ": ".join(
            f"{one.name} {one.done}/{one.of}" if one.of else one.name for one in phases
        )
        raw = text.encode()[: ANSWER_AT - TEXT_AT - 2]
        self._whole[TEXT_AT + 2 : TEXT_AT + 2 + len(raw)] = raw
        struct.pack_into("=H", self._whole, TEXT_AT, len(raw))
        self._busy = bool(phases)  # no part of a step
        self._changed()

    @property
    def stack_request(self) -> int:
        """Number of the newest request for stacks."""
        return self._words[ASKED]

    @property
    def exit_order(self) -> tuple[int, float] | None:
        """Exit status and time that the watchdog orders for this process; None without an order."""
        order = self._words[EXIT]
        return ((order & 255) - 1, (order >> 8) / 1e3) if order else None

    @property
    def is_closed(self) -> bool:
        """True after the rank has left, so that the watchdog ignores it."""
        return not self._words[PAGE]

    def answer(self, request: int, told: Mapping[str, Any]) -> None:
        """Answer a request; cut `told["stacks"]` at the end if it does not fit."""
        room = CALLS_AT - ANSWER_AT - 4
        raw = json.dumps(told).encode()
        if len(raw) > room:
            stacks = str(told.get("stacks", ""))[: max(0, room // 8)]
            raw = json.dumps({**told, "stacks": stacks}).encode()[:room]
        self._whole[ANSWER_AT + 4 : ANSWER_AT + 4 + len(raw)] = raw
        struct.pack_into("=I", self._whole, ANSWER_AT, len(raw))
        self._words[ANSWERED] = request

    def write_calls(self, slot: int, step: int, lines: bytes) -> None:
        """Write the collectives of a step to a slot; −`step` while it is unfinished.

        If they do not fit, write the first ones; a text that ends in a line break was truncated.
        """
        at, room = CALLS_AT + slot % SLOTS * SLOT_BYTES, SLOT_BYTES - 16
        if len(lines) > room:
            lines = lines[: lines.rfind(b"\n", 0, room) + 1] or b"\n"
        struct.pack_into("=qq", self._whole, at, 0, 0)  # nobody reads a half-written one
        self._whole[at + 16 : at + 16 + len(lines)] = lines
        struct.pack_into("=qq", self._whole, at, step, len(lines))

    def close(self) -> None:
        """Record that the watchdog must no longer watch this rank."""
        if self.timer is not None and self._held is not None and not self.is_closed:
            self._write_held_row(self.timer)
        self._words[PAGE] = 0

    def _changed(self) -> None:
        words, times, now_s = self._words, self._times, time.monotonic()
        words[CHANGES] += 1
        self._spent_s[self._in] += now_s - (times[CHANGED_S] or now_s)
        times[CHANGED_S] = now_s
        self._in = 0 if self._busy else WAIT if words[WAITS] > 0 else words[PART]
        if self.timer is None or self._in == self._marked:
            return
        if self._in != WAIT or words[PART] == SUM:  # the many waits within passes are not timed
            self._marked = self._in
            self.timer.mark(self._in)

    def _mute(self) -> None:
        self._cast(memoryview(bytearray(PAGE_BYTES)))

    def _cast(self, whole: memoryview) -> None:
        self._whole = whole
        self._words, self._times = whole[:TEXT_AT].cast("q"), whole[:TEXT_AT].cast("d")


def attach_page(page: WatchPage) -> None:
    """Report this thread's phases (`listen`), steps and collectives to a page."""
    phases.page = page
    phases.set_phase_listener(page.record_phases)


def supports_watch_pages() -> bool:
    """Return whether two processes can share memory by a name in /proc: Linux."""
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")
