"""Islands that come and go, as tests ask, kill and start them."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cli_run import lines
from shoal.cli.islands import _free_ports
from worlds import Islands

ASKED = {
    "model": "towers",
    "batch": 2,
    "period": 2,
    "method": "diloco",
    "wait_s": 25.0,
    "cosine": -1.0,
}


class Coming:
    """Islands of one run whose processes are asked, killed and started again one by one."""

    def __init__(self, islands: Islands, folder: Path, **asked: Any) -> None:
        """own   what each island is asked besides"""
        self.islands, self.folder, self.asked = islands, folder, {**ASKED, **asked}
        self.own: list[dict[str, Any]] = [{} for _ in islands.worlds]
        self.asked_of: set[int] = set()
        ports = free_ports(len(islands.worlds), islands.size)
        self.addresses = [f"127.0.0.1:{port}" for port in ports]

    def start(self, index: int, **more: Any) -> None:
        worlds = self.islands.worlds
        if any(process.poll() is not None for process in worlds[index].processes):
            worlds[index] = self.islands._start(index)
        asked = {**self.asked, **self.own[index], **more}
        self.asked_of.add(index)
        known = asked.pop("known", len(self.addresses))
        worlds[index].ask(
            "member_case:train", index=index, addresses=self.addresses[:known],
            folder=str(self.folder), **asked,
        )  # fmt: skip

    def start_witness(self, index: int, known: int) -> None:
        """Start a witness of the first islands in the processes of island `index`."""
        worlds = self.islands.worlds
        if any(process.poll() is not None for process in worlds[index].processes):
            worlds[index] = self.islands._start(index)
        self.asked_of.add(index)
        worlds[index].ask(
            "member_case:witness", addresses=self.addresses[:known], listen=self.addresses[index]
        )

    def kill(self, index: int) -> None:
        """Kill the processes that live, and wait until all are dead."""
        for process in self.islands.worlds[index].processes:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
        self.ended(index)

    def ended(self, index: int, deadline_s: float = 60.0) -> None:
        """Wait until the processes are dead."""
        until_s = time.monotonic() + deadline_s
        for process in self.islands.worlds[index].processes:
            while process.poll() is None:
                assert time.monotonic() < until_s, f"island {index} lives"
                time.sleep(0.02)

    def collect(self, *indices: int) -> list[dict[str, Any]]:
        """What the islands end with; the ranks of each agree."""
        found = []
        for index in indices:
            first, *others = self.islands.worlds[index].collect(90.0)
            for other in others:
                assert {**other, "seconds": 0.0} == {**first, "seconds": 0.0}
            found.append(first)
        self.asked_of -= set(indices)
        return found

    def wait_for(self, index: int, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Wait for a turn in the events of an island."""
        self._wait(lambda: any(map(wanted, self.turns(index))), f"island {index}")

    def wait_for_line(self, index: int, text: str) -> None:
        """Wait for a notice of an island."""
        file = self.folder / f"island-{index}" / "events.jsonl"
        self._wait(lambda: any(text in str(e.get("text")) for e in lines(file)), text)

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + 60.0
        while not ready():
            assert time.monotonic() < until_s, f"{what}: {self.describe_stacks()}"
            time.sleep(0.05)

    def describe_stacks(self) -> str:
        """Where the processes that live are."""
        worlds = self.islands.worlds
        return "\n".join(w._stacks(rank) for w in worlds for rank in range(w.size))

    def turns(self, index: int) -> list[dict[str, Any]]:
        """Events of the turns that an island installed."""
        events = lines(self.folder / f"island-{index}" / "events.jsonl")
        return [e for e in events if e["event"] in ("round_committed", "round_discarded")]


def free_ports(count: int, width: int = 1) -> list[int]:
    """Free ports; each is the first of `width` in a row."""
    return _free_ports(count, width)


def check_drawn_faults(coming: Coming, seed: int, rounds: int = 250) -> None:
    """25 s of kills, restarts and pauses; all islands end with the same bits and one history."""
    draw, down, count = random.Random(seed), set[int](), len(coming.islands.worlds)
    asked = {"rounds": rounds, "step_s": 0.05, "outer_lr": 0.3, "outer_momentum": 0.5}
    asked |= {"bound": 1e9, "refusals": 10**6, "wait_s": 60.0}
    for index in range(count):
        coming.start(index, **asked)
    until_s = time.monotonic() + 25.0
    while time.monotonic() < until_s:
        time.sleep(draw.uniform(0.3, 2.0))
        if down and (draw.random() < 0.5 or len(down) == count - 1):
            index = draw.choice(sorted(down))
            down.discard(index)
            if draw.random() < 0.15:
                shutil.rmtree(coming.folder / f"island-{index}" / "checkpoints", ignore_errors=True)
            coming.start(index, **asked)
            continue
        index = draw.choice(sorted({*range(count)} - down))
        if draw.random() < 0.9:
            coming.kill(index)
            down.add(index)
            continue
        processes = coming.islands.worlds[index].processes
        for process in processes:
            os.kill(process.pid, signal.SIGSTOP)
        time.sleep(draw.uniform(0.2, 1.0))
        for process in processes:
            os.kill(process.pid, signal.SIGCONT)
    for index in sorted(down):
        coming.start(index, **asked)
    told = coming.collect(*range(count))
    assert [one.get("finished") for one in told] == [True] * count, told
    assert len({one["weights"] for one in told}) == 1
    merged: dict[int, set[str]] = {}
    for turn in (turn for index in range(count) for turn in coming.turns(index)):
        if turn["event"] == "round_committed":
            merged.setdefault(turn["round"], set()).add(f"{turn['digest']} {turn['members']}")
    assert sorted(merged) == list(range(rounds))
    assert {len(found) for found in merged.values()} == {1}, "two histories"
