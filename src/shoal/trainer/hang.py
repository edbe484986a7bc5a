"""Says which calls keep ranks waiting for each other, from what each of them tells the others.

Made where a rank has waited for some seconds (lockstep.py), or was asked by one that has.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import torch.distributed as dist

from shoal.base.errors import ConfigError
from shoal.base.frames import place_in
from shoal.base.streams import flush_streams, write_error

SURE_S, FRESH_S, TELL_S = 8.0, 3.0, 30.0
SEEN_S = 1.0
"""After which the others have seen why all end."""

ASKS = 16
"""Ranks of larger worlds ask the first one and their neighbour only."""

COLLECTIVES = ("distributed_c10d.py",)
"""Files in which a rank stands while a collective of torch's waits."""


class Hang:
    """What one rank tells, and finds in what the others tell.

    key          under which the store keeps it
    model_call   how a forward pass is called in the lists
    """

    def __init__(self, store: dist.Store, rank: int, size: int, key: str, model_call: str) -> None:
        self.store, self.rank, self.size, self.key = store, rank, size, key
        self.model_call = model_call
        self._main = threading.main_thread().ident or 0
        self._heard: dict[int, tuple[str, float]] = {}
        self._next_line_s, self._stood_s = TELL_S, 0.0

    def look(self, mine: dict[str, Any], *, waits: bool, now_s: float) -> None:
        """Tell the others of this rank's calls, and where it waits compare theirs with them.

        mine   runs joined, turns begun, the last calls, whether inside of one, for how long
        """
        if self.store.check([f"{self.key}/told"]):
            self._end_with("")
        mine |= self._place()
        if mine["stood_s"] < self._stood_s:
            self._next_line_s = TELL_S
        self._stood_s = mine["stood_s"]
        self.store.set(f"{self.key}/{self.rank}", json.dumps(mine))
        if not waits:
            return
        heard = {}
        for rank in self._others():
            if self.store.check([f"{self.key}/{rank}"]):
                heard[rank] = self._hear(rank, now_s)
                self._compare(mine, rank, heard[rank])
        self._find_absent(mine, heard, now_s)

    def _place(self) -> dict[str, str]:
        """Where the main thread stands."""
        frame = sys._current_frames().get(self._main)
        inner = frame.f_code.co_filename if frame is not None else ""
        name = frame.f_code.co_name if frame is not None else ""
        place = place_in(frame)
        del frame
        return {"place": place, "collective": name if inner.endswith(COLLECTIVES) else ""}

    def _hear(self, rank: int, now_s: float) -> dict[str, Any]:
        """What a rank told last, and whether it did so just now."""
        text = self.store.get(f"{self.key}/{rank}").decode()
        before, heard_s = self._heard.get(rank, ("", now_s))
        if text != before:
            heard_s = now_s
        self._heard[rank] = (text, heard_s)
        told: dict[str, Any] = json.loads(text)
        return told

    def _others(self) -> list[int]:
        near = range(self.size) if self.size <= ASKS else (0, (self.rank + 1) % self.size)
        return [rank for rank in near if rank != self.rank]

    def _compare(self, mine: dict[str, Any], rank: int, theirs: dict[str, Any]) -> None:
        if mine["runs"] != theirs["runs"]:
            return
        first = max(_first(mine), _first(theirs))
        for turn in range(first, min(mine["turn"], theirs["turn"])):
            here = mine["calls"][turn - _first(mine)]
            there = theirs["calls"][turn - _first(theirs)]
            if here != there:
                self._name(mine, here, rank, theirs, there)

    def _find_absent(
        self, mine: dict[str, Any], heard: dict[int, dict[str, Any]], now_s: float
    ) -> None:
        """One rank that waits in a collective of its own, for those that wait here for it."""
        fresh = {r: one for r, one in heard.items() if now_s - self._heard[r][1] < FRESH_S}
        away = [rank for rank, one in fresh.items() if not one["inside"]]
        if not away:
            return
        absent = fresh[away[0]]
        still = len(fresh) == self.size - 1 and len(away) == 1 and absent["collective"]
        if still and min(one["stood_s"] for one in (mine, *fresh.values())) >= SURE_S:
            call = f"torch.distributed.{absent['collective']}"
            self._name(mine, _call(mine), away[0], absent, call)
        if mine["stood_s"] >= self._next_line_s:
            self._next_line_s *= 2
            write_error(
                f"shoal: rank {self.rank} has waited {mine['stood_s']:.0f} s in {_call(mine)}"
                f"{_at(mine)} for rank {away[0]}, which is elsewhere{_at(absent)}"
            )

    def _name(
        self, mine: dict[str, Any], here: str, rank: int, theirs: dict[str, Any], there: str
    ) -> None:
        both = sorted([(self.rank, here, _at(mine)), (rank, there, _at(theirs))])
        said = ", ".join(f"rank {number} called {call}{at}" for number, call, at in both)
        model = any(call == self.model_call for _, call, _ in both)
        cure = (
            "call the model on every rank, since each holds a part of the weights, or use "
            "run.evaluate(data, metrics)"
            if model
            else "make the same calls on every rank, in the same order and equally often"
        )
        self._end_with(f"shoal: ranks wait for each other: {said}; try: {cure}")

    def _end_with(self, line: str) -> None:
        """Every rank ends, and one of them says why."""
        if line and self.store is not None and self.store.add(f"{self.key}/told", 1) == 1:
            write_error(line)
            time.sleep(SEEN_S)  # the others see it before the store may go with this process
        flush_streams()
        os._exit(ConfigError.exit_code)  # the main thread stands in a collective for ever


def _first(told: dict[str, Any]) -> int:
    """The number of the first call that is told."""
    return int(told["turn"]) - len(told["calls"])


def _call(told: dict[str, Any]) -> str:
    return str(told["calls"][-1]) if told["calls"] else "shoal.parallelize"


def _at(told: dict[str, Any]) -> str:
    return f" ({told['place']})" if told["place"] else ""
