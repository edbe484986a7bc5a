"""Reading end of the page in which a rank reports its progress (`wire/watch_page.py`).

A rank never loads this module: the launcher does, or the watchdog next to torchrun's ranks.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import struct
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.base.runlog.rank_records import RankStep
from shoal.wire.phases import DATA, HOOKS
from shoal.wire.watch_page import (
    ANSWER_AT,
    ANSWERED,
    ASKED,
    BEGUN,
    CALLS_AT,
    CHANGED_S,
    CHANGES,
    ENDED,
    EXIT,
    FORMAT,
    INSIDE,
    KEPT,
    KINDS,
    LAST_BEGUN,
    LAST_BYTES,
    NAME,
    NAMES,
    NAMES_AT,
    PAGE,
    PAGE_BYTES,
    PART,
    PARTS,
    ROW,
    SLOT_BYTES,
    STEP,
    STEPS_AT,
    TEXT_AT,
    UNIT,
    UNITS_AT,
    WAIT,
    WAITS,
)

TOGETHER_S = 0.7
"""Delay until ranks end that are ordered to: all have read the order by then."""


@dataclass(frozen=True)
class PageSnapshot:
    """Contents of a page when it was read; the fields are the words of the same names.

    Attributes:
        live: its rank has opened it.
        phases: as text, "" without an open phase.
        inside: the name of the call in which the rank is, of those that all ranks must make.
    """

    live: bool
    changes: int
    changed_s: float
    step: int
    part: int
    begun: int
    ended: int
    last: str
    last_bytes: int
    waits: bool
    phases: str
    inside: str = ""

    @property
    def activity(self) -> str:
        """Return the phase or part of the rank as text, without the step."""
        part = PARTS[self.part] if 0 <= self.part < len(PARTS) else ""
        return self.phases or part or "the start"


@dataclass(frozen=True)
class RecordedUnitCall:
    """A collective of a unit: the count of collectives enqueued before it, and the unit."""

    begun: int
    text: str


class PageReader:
    """Reading end of a page, in any memory.

    Args:
        memory: PAGE_BYTES of it.
        host: the machine of its rank.
    """

    def __init__(self, memory: mmap.mmap | bytearray, host: str) -> None:
        self.memory, self.host = memory, host
        self._requests = 0

    def read(self) -> PageSnapshot:
        """Return the present contents."""
        words = struct.unpack_from("=3qd12q", self.memory)
        (length,) = struct.unpack_from("=H", self.memory, TEXT_AT)
        raw = self.memory[TEXT_AT + 2 : TEXT_AT + 2 + length]
        last = words[LAST_BEGUN]
        return PageSnapshot(
            live=words[PAGE] == FORMAT,
            changes=words[CHANGES],
            changed_s=words[CHANGED_S],
            step=words[STEP],
            part=words[PART],
            begun=words[BEGUN],
            ended=words[ENDED],
            last=KINDS[last] if 0 <= last < len(KINDS) else "",
            last_bytes=words[LAST_BYTES],
            waits=words[WAITS] > 0,
            phases=raw.decode(errors="replace"),
            inside=self._name(words[INSIDE] - 1),
        )

    def _name(self, slot: int) -> str:
        if not 0 <= slot < NAMES:
            return ""
        _, _, raw = NAME.unpack_from(self.memory, NAMES_AT + slot * NAME.size)
        return str(raw.rstrip(b"\0").decode(errors="replace"))

    def ask(self) -> None:
        """Request the stacks of the rank."""
        self._requests += 1
        struct.pack_into("=q", self.memory, 8 * ASKED, self._requests)

    def answer(self) -> dict[str, Any] | None:
        """Return the rank's answer to the newest request; None without one."""
        (answered,) = struct.unpack_from("=q", self.memory, 8 * ANSWERED)
        if answered != self._requests or not self._requests:
            return None
        (length,) = struct.unpack_from("=I", self.memory, ANSWER_AT)
        raw = self.memory[ANSWER_AT + 4 : ANSWER_AT + 4 + length]
        try:
            told = json.loads(raw)
        except ValueError:  # cut, or written by something else
            return {}
        return told if isinstance(told, dict) else {}

    def calls(self, known: Container[int]) -> dict[int, bytes]:
        """Return the collectives of each step in the page, except those of `known` steps.

        The number of a step under way is negative.
        """
        found = {}
        for at in range(CALLS_AT, STEPS_AT, SLOT_BYTES):
            step, length = struct.unpack_from("=qq", self.memory, at)
            if step and step not in known:
                lines = bytes(self.memory[at + 16 : at + 16 + length])
                if struct.unpack_from("=qq", self.memory, at) == (step, length):
                    found[step] = lines
        return found

    def steps(self) -> dict[int, tuple[float, ...]]:
        """Return the last steps, by number: seconds of each part without waiting, then of waiting.

        Signs as in the page; NaN for a part in which ranks have different work in that step.
        """
        rows = ROW.iter_unpack(self.memory[STEPS_AT:UNITS_AT])
        return {
            step: _mask_incomparable(seconds, int(apart))
            for step, *seconds, apart, _, _, _ in rows
            if step
        }

    def recorded_step(self, done: int) -> int:
        """Return the newest of `done` completed steps whose row is in the page.

        A device's times come one step later.
        """
        (step,) = struct.unpack_from("=q", self.memory, STEPS_AT + done % KEPT * ROW.size)
        return done if step == done else max(0, done - 1)

    def rank_steps(self, rank: int, *, after_s: float) -> list[RankStep]:
        """Return the last steps that ended after a time, oldest first.

        Args:
            rank: of this page.
            after_s: seconds since 1970.
        """
        found: list[RankStep] = []
        (done,) = struct.unpack_from("=q", self.memory, 8 * STEP)
        for number in range(self.recorded_step(done), max(0, done - KEPT), -1):
            step, *told = ROW.unpack_from(self.memory, STEPS_AT + number % KEPT * ROW.size)
            if step != number or told[-1] <= after_s:
                break  # not this rank's, or known
            seconds = [abs(one) for one in told[: WAIT + 1]]
            loop_s = min(told[-3], seconds[DATA])
            seconds[DATA], seconds[HOOKS] = seconds[DATA] - loop_s, seconds[HOOKS] + loop_s
            found.append(RankStep(step, rank, 1, told[-1], int(told[-2]), tuple(seconds)))
        return found[::-1]

    def units(self) -> dict[int, dict[int, RecordedUnitCall]]:
        """Return the last collectives of gathered units, by the group's key and their number."""
        found: dict[int, dict[int, RecordedUnitCall]] = {}
        for begun, key, number, raw in UNIT.iter_unpack(self.memory[UNITS_AT:NAMES_AT]):
            if number:
                text = raw.rstrip(b"\0").decode(errors="replace")
                found.setdefault(key, {})[number] = RecordedUnitCall(begun, text)
        return found

    def names(self) -> dict[int, dict[int, str]]:
        """Return the last calls that all ranks must make, by the run's key and their number."""
        found: dict[int, dict[int, str]] = {}
        for key, number, raw in NAME.iter_unpack(self.memory[NAMES_AT:PAGE_BYTES]):
            if number:
                found.setdefault(key, {})[number] = raw.rstrip(b"\0").decode(errors="replace")
        return found

    def end(self, status: int) -> None:
        """Order the rank's process to end with this status; its Python must answer."""
        at_ms = int((time.monotonic() + TOGETHER_S) * 1e3)
        struct.pack_into("=q", self.memory, 8 * EXIT, at_ms << 8 | 1 + status)

    def close(self) -> None:
        """Free the memory."""


def _mask_incomparable(seconds: Sequence[float], apart: int) -> tuple[float, ...]:
    """Return the seconds of a step for a comparison of ranks."""
    return tuple(math.nan if apart >> part & 1 else one for part, one in enumerate(seconds))


class OwnedPage(PageReader):
    """Reading end of a page that this process makes; `path` is passed to the rank's process.

    Raises:
        OSError: there is no memory for it.
    """

    def __init__(self, name: str) -> None:
        self._file = os.memfd_create(name)
        os.truncate(self._file, PAGE_BYTES)
        self._whole = mmap.mmap(self._file, PAGE_BYTES)
        super().__init__(self._whole, os.uname().nodename)
        # Owned by this process, which outlives the rank: the kernel frees it in any case.
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def close(self) -> None:
        """Free the memory."""
        with contextlib.suppress(BufferError):
            self._whole.close()
        os.close(self._file)
