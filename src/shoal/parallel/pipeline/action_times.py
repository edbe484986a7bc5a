"""Clock readings around the actions of a pipeline's rank, in the steps that are sampled.

    request_step ── start_actions ── [wait ─ work] [wait ─ work] … ── pop_step ──> rank's record

An action first waits for its inputs from another stage, then it works. On a CPU the host's clock is
read. On a device, events in the stream that computes are: then `start_actions` and `pop_step` wait
for the device, in that step alone. All other steps read no clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from shoal.base.plans.pipeline_actions import Action
from shoal.fabric.device import is_accelerator, synchronize

READINGS = 3
"""Of an action: before its wait, before its work, after its work."""
MOST_ACTIONS = 1_024
"""Actions of a rank above which a step has no record."""


class ActionTimes:
    """Times of one rank's actions in one step.

    Attributes:
        is_wanted: the next step is sampled.
        mark_action: returns the context of an action, in a run that traces steps; else None.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_wanted = device, False
        self.mark_action: Callable[[Action], AbstractContextManager[None]] | None = None
        self._on_device = is_accelerator(device)
        self._actions: Sequence[Action] = ()
        self._readings: list[Any] = []
        self._began_s = 0.0
        self._first: Any = None

    def request_step(self) -> None:
        """Sample the next step."""
        self.is_wanted, self._actions, self._readings = True, (), []

    def start_actions(self, actions: Sequence[Action]) -> None:
        """Start to read the clock; the actions are run in this order."""
        self.is_wanted, self._actions, self._readings = False, actions, []
        if self._on_device:
            synchronize(self.device)
        self._first = self._read_clock()
        self._began_s = time.time()

    def read(self) -> None:
        """Read the clock once more."""
        self._readings.append(self._read_clock())

    def pop_step(self) -> dict[str, Any]:
        """Return the record of the sampled step; {} if this rank ran no action in it.

        Returns:
            `began_s`, seconds since 1970; `timed_by`, "host" or "device"; `actions`, each as [text,
            start of the wait, start of the work, end], in seconds from `began_s`.
        """
        actions, readings = self._actions, self._readings
        self.is_wanted, self._actions, self._readings = False, (), []
        if not actions or len(actions) > MOST_ACTIONS or len(readings) != READINGS * len(actions):
            return {}
        if self._on_device:
            synchronize(self.device)
        seconds = [round(self._seconds_of(one), 6) for one in readings]
        rows = [
            [act.text(), *seconds[READINGS * n : READINGS * (n + 1)]]
            for n, act in enumerate(actions)
        ]
        by = "device" if self._on_device else "host"
        return {"began_s": self._began_s, "timed_by": by, "actions": rows}

    def _read_clock(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        module: Any = torch.get_device_module(self.device)
        event = module.Event(enable_timing=True)
        event.record(module.current_stream(self.device))
        return event

    def _seconds_of(self, reading: Any) -> float:
        """Return the seconds from the first reading to another."""
        if self._on_device:
            return float(self._first.elapsed_time(reading)) / 1e3
        return float(reading - self._first)
