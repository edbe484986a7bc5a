"""Writes what each step did: one JSON line in metrics.jsonl, by rank 0.

Keys every line has: step loss grad_norm lr tokens step_s tokens_per_s mfu peak_memory_bytes
comm_bytes comm_exposed_s data_wait_s; besides, bytes by kind of collective, the peak of every rank,
the stream positions [from, to) that the step consumed, and whether it was skipped.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from pathlib import Path
from typing import Any

from shoal.base.errors import ConfigError
from shoal.base.events import EventLog, append_line
from shoal.fabric import World
from shoal.profile.memory import gpu_utilisation


class Recorder:
    """The run folder as one process sees it; without a folder nothing is written.

    flops_per_sample, machine_flops_per_s   set once known; MFU is null until then
    Errors   ConfigError when the folder cannot be made
    """

    def __init__(self, folder: Path | None, world: World) -> None:
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as failure:
                raise ConfigError(f"folder = {folder}: cannot be made: {failure}") from failure
        self.folder = folder
        self.world = world
        self.flops_per_sample: float | None = None
        self.machine_flops_per_s: float | None = None
        self.events = EventLog(folder / "events.jsonl" if folder else None, world.rank)
        self.waiting_since_s = time.perf_counter()

    def notice(self, text: str) -> None:
        """One line for the user, by rank 0: an event, and through `logging`, for scripts."""
        if self.world.is_first:
            self.events.emit("notice", text=text)
            logging.getLogger("shoal").warning("shoal: %s", text)

    def data_wait_s(self) -> float:
        """Seconds since the last step ended: what the loader and the user's own code took."""
        return time.perf_counter() - self.waiting_since_s

    def restart_clock(self) -> None:
        """Time from here on belongs to the next step: call after validating or saving."""
        self.waiting_since_s = time.perf_counter()
        self.world.traffic.take()

    def step(self, row: dict[str, Any], *, samples: int) -> dict[str, Any]:
        """Complete and write one step's row; gives the row.

        row      step, loss, grad_norm, lr, tokens, data_wait_s and extras
        samples  samples of the whole step, over all ranks
        """
        now_s = time.perf_counter()
        step_s = now_s - self.waiting_since_s
        self.waiting_since_s = now_s
        sent, exposed_s = self.world.traffic.take()
        mfu = None
        if self.flops_per_sample and self.machine_flops_per_s and step_s > 0:
            mfu = self.flops_per_sample * samples / step_s / self.machine_flops_per_s
        row = {
            **row,
            "step_s": step_s,
            "tokens_per_s": row["tokens"] / step_s if step_s > 0 else 0.0,
            "mfu": mfu,
            "comm_bytes": sum(sent.values()),
            "comm_bytes_by_kind": sent,
            "comm_exposed_s": exposed_s,
            "gpu_utilisation": gpu_utilisation(self.world.device),
        }
        if self.folder is not None and self.world.is_first:
            try:
                append_line(self.folder / "metrics.jsonl", _finite(row))
            except OSError:
                self.events.dropped += 1  # a full disk must not stop training
        for listen in self.events.listeners:
            listen({"event": "step", "rank": self.world.rank, **row})
        return row

    def cut(self, step: int) -> None:
        """Drop the lines of steps that will be run again, and a half-written last line."""
        if self.folder is None or not self.world.is_first:
            return
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return
        kept = []
        for line in path.read_text().splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line)
            except (ValueError, KeyError):
                continue
        fresh = path.with_suffix(".fresh")
        fresh.write_text("".join(f"{line}\n" for line in kept))
        os.replace(fresh, path)


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no NaN: such numbers become null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
