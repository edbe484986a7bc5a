"""Writes what each step did: one JSON line in metrics.jsonl, by rank 0 (`World.keeps`).

Keys every line has: step loss grad_norm lr tokens step_s tokens_per_s mfu peak_memory_bytes
comm_bytes comm_exposed_s data_wait_s; besides, bytes by kind of collective, the peak of every rank,
the stream positions [from, to) that the step consumed, and whether it was skipped.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.base.errors import ConfigError, short
from shoal.base.runlog.events import EventLog, append_line
from shoal.fabric import World
from shoal.fabric.device import utilisation
from shoal.machine.process_memory import peak_memory_bytes
from shoal.wire import phases

if TYPE_CHECKING:  # few runs record their steps
    from shoal.trainer.step_trace import StepTrace


class Recorder:
    """The run folder as one process sees it; without a folder nothing is written.

    Attributes:
        flops_per_sample, machine_flops_per_s: set once known; MFU is null until then.
        wanted: what hooks asked for, "stop" or "save", until it is done.
        saves_apart: why hooks cannot ask for a save, told once; "": they can.
        trace: records some steps, operation by operation.
        passed: told once when steps pass the machine's rate; what it says is a notice.

    Raises:
        ConfigError: when the folder cannot be made.
    """

    def __init__(self, folder: Path | None, world: World) -> None:
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
        self.wanted = set[str]()
        self.saves_apart, self._told_apart, self.peaks_logged = "", False, False
        self._went_back_to: int | None = None
        self.trace: StepTrace | None = None

    def hear(self, hook: Callable[[dict[str, Any]], Any]) -> None:
        """Call a hook with every record from now on; what it gives is in `wanted`, if it is a word.

        Errors: ConfigError for another word than stop and save.
        """

        def listen(record: dict[str, Any]) -> None:
            word = hook(record)
            if isinstance(word, str) and word not in ("stop", "save"):
                raise ConfigError(
                    f'hook {getattr(hook, "__name__", type(hook).__name__)}: gave "{short(word)}"; '
                    f'it may give "stop", "save" or None'
                )
            if word == "save" and self.saves_apart:
                if not self._told_apart:
                    self._told_apart = True  # before the hook hears the line itself
                    self.notice(self.saves_apart)
            elif isinstance(word, str):
                self.wanted.add(word)

        self.events.listeners.append(listen)

    def validated(self, step: int, values: Mapping[str, float]) -> None:
        """Tell what an evaluation in a loop of the user's own found, by rank 0."""
        if self.world.keeps:
            numbers = {"loss": values["loss"], "targets": values["targets"]}
            named = {name: value for name, value in values.items() if name not in numbers}
            self.events.emit("validated", step=step, **numbers, metrics=named)

    def notice(self, text: str) -> None:
        """One line for the user, by rank 0: an event, and through `logging`, for scripts."""
        if self.world.keeps:
            self.events.emit("notice", text=text)
        self.warn(text)

    def tell(self, notices: list[str]) -> None:
        """Give a list's lines to the user, and empty it."""
        while notices:
            self.notice(notices.pop(0))

    def here(self, text: str) -> None:
        """One line on what happened to this rank: an event, and through `logging`."""
        text = f"rank {self.world.rank}: {text}" if self.world.size > 1 else text
        self.events.emit("notice", text=text)
        logging.getLogger("shoal").warning("shoal: %s", text)

    def warn(self, text: str) -> None:
        """What an event tells already, for scripts that show none, by rank 0 through `logging`."""
        if self.world.is_first:
            logging.getLogger("shoal").warning("shoal: %s", text)

    def begin(self, step: int) -> float:
        """A step begins. Gives seconds since the last one ended: the loader's and the user's."""
        if self.trace is not None:
            self.trace.before(step)
        phases.part(phases.PASSES)
        return time.perf_counter() - self.waiting_since_s

    def log_memory_peaks(self) -> None:
        """Tell the most memory that each rank held, once; every rank calls it."""
        if self.folder is None or self.peaks_logged:
            return
        self.peaks_logged = True
        peaks = self.world.gather_json(peak_memory_bytes(self.world.device))
        if self.world.keeps:
            self.events.emit("memory_peaks", peak_memory_bytes_by_rank=peaks)

    def restart_clock(self) -> None:
        """Time from here on belongs to the next step: call after validating or saving."""
        self.waiting_since_s = time.perf_counter()
        self.world.traffic.take()

    def step(self, row: dict[str, Any], *, samples: int) -> dict[str, Any]:
        """Complete and write one step's row; gives the row.

        Args:
            row: step, loss, grad_norm, lr, tokens, data_wait_s and extras.
            samples: samples of the whole step, over all ranks.
        """
        if self._went_back_to is not None:
            self.cut(self._went_back_to)
        now_s = time.perf_counter()
        step_s = now_s - self.waiting_since_s
        self.waiting_since_s = now_s
        sent, exposed_s = self.world.traffic.take()
        mfu = self._mfu(samples, step_s)
        row = {
            **row,
            "step_s": step_s,
            "tokens_per_s": row["tokens"] / step_s if step_s > 0 else 0.0,
            "mfu": mfu,
            "comm_bytes": sum(sent.values()),
            "comm_bytes_by_kind": sent,
            "comm_exposed_s": exposed_s,
            "gpu_utilisation": utilisation(self.world.device),
        }
        if self.folder is not None and self.world.keeps:
            try:
                self.remake_folder()
                place = self.owner.place() if self.owner is not None else self.folder
                append_line(place / "metrics.jsonl", _finite(row))
            except OSError:
                self.events.dropped += 1  # a full disk must not stop training
        phases.part(phases.HOOKS)
        for listen in self.events.listeners:
            listen({"event": "step", "rank": self.world.rank, **row})
        if phases.page is not None:
            phases.page.stepped(row["step"], row.get("peak_memory_bytes", 0), self.folder)
        if self.trace is not None:
            self.trace.after(row["step"])
        return row

    def remake_folder(self) -> bool:
        """Look at the run folder before something is written there.

        Returns:
            Whether it was deleted, and is made anew.

        Raises:
            OSError: it was deleted, and cannot be made.
        """
        if self.folder is not None and self.owner is not None and self.world.keeps:
            self.replaced = self.replaced or self.owner.state() == "replaced"
            if not self.replaced and (line := self.owner.remake()):
                self.notice(line)
                return True
        return False

    def _mfu(self, samples: int, step_s: float) -> float | None:
        """The share of the machine's rate that a step used; None where that cannot be right."""
        if not (self.flops_per_sample and self.machine_flops_per_s and step_s > 0):
            return None
        share = self.flops_per_sample * samples / step_s / self.machine_flops_per_s
        if share <= 1:
            return share
        self.machine_flops_per_s = None
        if self.world.is_first:
            self.notice(self.passed())
        return None

    def went_back(self, step: int) -> None:
        """The next step follows this one: lines of later steps go when it is there, no sooner.

        Who only looks at an older checkpoint keeps what was written since.
        """
        self._went_back_to = step

    def cut(self, step: int) -> None:
        """Drop the lines of steps that will be run again, and a half-written last line."""
        self._went_back_to = None
        if self.folder is None or not self.world.keeps:
            return
        from shoal.base.runlog.truncate_logs import (
            cut_lines,  # only a resume reads what was written
        )

        if told := cut_lines(self.folder / "metrics.jsonl", step):
            self.notice(told)


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no NaN: such numbers become null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
