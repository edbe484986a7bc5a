"""Recorder of one process: events and step records in the run folder, notices, callbacks.

The rows of metrics.jsonl are in `step/metrics_rows.py`, which only a run that has them loads.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.base.errors import ConfigError, shorten
from shoal.base.runlog.events import EventLog
from shoal.fabric import World
from shoal.fabric.device import is_accelerator
from shoal.machine.process_memory import peak_memory_bytes
from shoal.wire import phases

if TYPE_CHECKING:  # few runs record their steps
    from shoal.trainer.step_trace import StepTrace


KEY = re.compile(r"\b(?:train|memory|precision|fsdp|layout|optimizer|checkpoint|data|model)\.[a-z]")
"""Finds a key of run.toml in a line."""
STEP_FILES = ("metrics.jsonl", "experts.jsonl", "pipeline.jsonl", "statistics.jsonl")
"""Files with lines of steps, the first of them with every step."""


class MetricsRecorder:
    """Writer of one process's metrics and events into the run folder, if there is one.

    Attributes:
        flops_per_sample, machine_flops_per_s: set once known; MFU is null until then.
        wanted: requests of callbacks, "stop" or "save", until they are done.
        saves_apart: why callbacks cannot request a save, reported once; "": they can.
        reported_differences: what a resume reported to differ from its checkpoint.
        rows, rows_due_s: rows that wait for a write, and when it is due (`metrics_rows.py`).
        trace: profiler of some steps.
        is_own_loop: of a loop of the user's own: lines name arguments, and not keys of run.toml.
        passed: called once if a step is faster than the machine's rate; its text is a notice.

    Raises:
        ConfigError: the folder cannot be made.
    """

    def __init__(self, folder: Path | None, world: World, *, is_own_loop: bool = False) -> None:
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except FileExistsError as failure:
                raise ConfigError(
                    f"folder = {folder}: is a file, a folder is wanted; try: {folder}-run"
                ) from failure
            except OSError as failure:
                raise ConfigError(f"folder = {folder}: cannot be made: {failure}") from failure
        self.folder = folder
        self.world = world
        self.flops_per_sample: float | None = None
        self.machine_flops_per_s: float | None = None
        self.passed: Callable[[], str] = lambda: ""
        self.events = EventLog(folder / "events.jsonl" if folder else None, world.rank)
        self.owner, self.replaced = self.events.owner, False
        self.waiting_since_s = time.perf_counter()
        self.rows, self.rows_due_s = list[dict[str, Any]](), 0.0
        self.wanted, self.reported_differences = set[str](), set[str]()
        self.saves_apart, self._told_apart, self.peaks_logged = "", False, False
        self._went_back_to: int | None = None
        self.trace: StepTrace | None = None
        self.is_own_loop = is_own_loop
        page, self.clock = phases.page, "host"
        if page is not None and is_accelerator(world.device):
            from shoal.trainer.device_timer import DevicePartTimer  # a CPU has no events

            page.timer, self.clock = page.timer or DevicePartTimer(world.device), "device"

    def add_callback(self, hook: Callable[[dict[str, Any]], Any]) -> None:
        """Register a callback for every record; its "stop" or "save" is added to `wanted`.

        Raises:
            ConfigError: the callback returned another word than stop and save.
        """

        def listen(record: dict[str, Any]) -> None:
            word = hook(record)
            if isinstance(word, str) and word not in ("stop", "save"):
                raise ConfigError(
                    f"hook {getattr(hook, '__name__', type(hook).__name__)}: gave "
                    f'"{shorten(word)}"; '
                    f'it may give "stop", "save" or None'
                )
            if word == "save" and self.saves_apart:
                if not self._told_apart:
                    self._told_apart = True  # before the callback gets this notice itself
                    self.notice(self.saves_apart)
            elif isinstance(word, str):
                self.wanted.add(word)

        self.events.listeners.append(listen)

    def log_validation(
        self,
        step: int,
        values: Mapping[str, float],
        by_source: Mapping[str, Any],
        **details: object,
    ) -> None:
        """Emit the results of a validation, by rank 0.

        Args:
            step: after which it was made.
            values: `loss`, `targets` and the metrics by name.
            by_source: the same of each source or owner; empty: left out.
            details: further fields of the event; a value of the same name is no metric then.
        """
        if self.world.writes_files:
            numbers = {"loss": values["loss"], "targets": values["targets"], **details}
            named = {name: value for name, value in values.items() if name not in numbers}
            parts = {"by_source": dict(by_source)} if by_source else {}
            self.events.emit("validated", step=step, **numbers, metrics=named, **parts)

    def notice(self, text: str) -> None:
        """Emit one line for the user by rank 0: as an event, and through `logging` for scripts."""
        text = self._text(text)
        if self.world.writes_files:
            self.events.emit("notice", text=text)
        self.warn(text)

    def emit_notices(self, notices: list[str]) -> None:
        """Emit all lines of a list as notices, and empty the list."""
        while notices:
            self.notice(notices.pop(0))

    def emit_rank_notice(self, text: str) -> None:
        """Emit one line about this rank: as an event, and through `logging`."""
        text = self._text(text)
        text = f"rank {self.world.rank}: {text}" if self.world.size > 1 else text
        self.events.emit("notice", text=text)
        logging.getLogger("shoal").warning("shoal: %s", text)

    def warn(self, text: str) -> None:
        """Log a line by rank 0 through `logging`, for scripts that display no events."""
        if self.world.is_first:
            logging.getLogger("shoal").warning("shoal: %s", self._text(text))

    def _text(self, text: str) -> str:
        if not (self.is_own_loop and KEY.search(text)):
            return text
        from shoal.base.text.argument_names import use_argument_names  # few lines name a key

        return use_argument_names(text)

    def start_step(self, step: int) -> float:
        """Start the record of a step; return the seconds since the last step ended."""
        if self.trace is not None:
            self.trace.before(step)
        phases.record_step_part(phases.PASSES)
        return time.perf_counter() - self.waiting_since_s

    def log_memory_peaks(self) -> None:
        """Emit the peak memory of each rank, once; every rank calls it."""
        if self.folder is None or self.peaks_logged:
            return
        self.peaks_logged = True
        peaks = self.world.gather_json(peak_memory_bytes(self.world.device))
        if self.world.writes_files:
            self.events.emit("memory_peaks", peak_memory_bytes_by_rank=peaks)

    def restart_clock(self) -> None:
        """Restart the clock of the next step; call it after validating or saving."""
        self.waiting_since_s = time.perf_counter()
        self.world.traffic.pop_counts()

    @property
    def has_readers(self) -> bool:
        """Return whether a step's row is used: by a file, a callback or a trace."""
        return bool(self.folder is not None or self.events.listeners or self.trace is not None)

    def end_step_without_row(self, step: int) -> None:
        """End the record of a step whose row nobody reads; the watch page alone notes its end."""
        self.restart_clock()
        phases.record_step_part(phases.HOOKS)
        if phases.page is not None:
            phases.page.record_step_end(step, 0, None)

    def recreate_folder(self) -> bool:
        """Make the run folder anew if it was deleted; call it before a write into it.

        Returns:
            Whether the folder was deleted and made anew.

        Raises:
            OSError: the folder was deleted, and cannot be made.
        """
        if self.folder is not None and self.owner is not None and self.world.writes_files:
            self.replaced = self.replaced or self.owner.state() == "replaced"
            if not self.replaced and (line := self.owner.recreate()):
                self.notice(line)
                return True
        return False

    def mark_rewind(self, step: int) -> None:
        """Note that the next step follows `step`; drop later lines only once that step is recorded.

        So a caller that only reads an older checkpoint keeps the lines written since.
        """
        self._went_back_to = step

    def apply_rewind(self) -> None:
        """Drop the lines of the steps before which the run went back, if they are still there."""
        if self._went_back_to is not None:
            self.cut(self._went_back_to)

    def cut(self, step: int) -> None:
        """Drop the lines of steps that will be repeated, and a half-written last line."""
        self._went_back_to = None
        if self.folder is None or not self.world.writes_files:
            return
        from shoal.base.runlog.truncate_logs import (
            truncate_steps,  # only a resume reads what was written
        )

        for name in STEP_FILES:
            if told := truncate_steps(self.folder / name, step):
                self.notice(told)
