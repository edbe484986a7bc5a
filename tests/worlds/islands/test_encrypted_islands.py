"""Real islands with keys: the same bits, a man in the middle, a key that is taken out and put back."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_run import lines
from made_keys import key_settings, make_keys
from wire_proxy import TAMPERS, Proxy
from worlds import Islands

ASKED = {
    "model": "towers",
    "batch": 2,
    "period": 2,
    "method": "diloco",
    "wait_s": 60.0,
    "cosine": -1.0,
}


class Keyed:
    """Islands of one run, with a key each and one file that lists all."""

    def __init__(self, islands: Islands, folder: Path, *, with_keys: bool = True) -> None:
        self.islands, self.folder = islands, folder
        self.count = len(islands.worlds)
        taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(self.count)]
        self.ports = [one.getsockname()[1] for one in taken]
        for one in taken:
            one.close()
        self.keys: dict[str, str] = {}
        self.listed = folder / "all.pub"
        if with_keys:
            self.lines = make_keys(folder, self.count)
            self.keys = key_settings(folder)

    def list_keys(self, *names: int) -> None:
        new = self.folder / "new.pub"
        new.write_text("".join(self.lines[name] for name in names))
        os.replace(new, self.listed)

    def start(self, index: int, **asked: Any) -> None:
        worlds = self.islands.worlds
        if any(process.poll() is not None for process in worlds[index].processes):
            worlds[index] = self.islands._start(index)
        worlds[index].ask(
            "keyed_member_case:train", index=index, folder=str(self.folder),
            addresses=[f"127.0.0.1:{port}" for port in self.ports],
            **{**ASKED, **self.keys, **asked},
        )  # fmt: skip

    def collect(self) -> list[dict[str, Any]]:
        return [world.collect(120.0)[0] for world in self.islands.worlds]

    def events(self, index: int) -> list[dict[str, Any]]:
        return lines(self.folder / f"island-{index}" / "events.jsonl")

    def turns(self, index: int) -> list[dict[str, Any]]:
        return [event for event in self.events(index) if event["event"] == "round_committed"]

    def wait_for(self, index: int, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        until_s = time.monotonic() + 60.0
        while not (found := [turn for turn in self.turns(index) if wanted(turn)]):
            assert time.monotonic() < until_s, "waited in vain"
            time.sleep(0.05)
        return found[0]


def test_islands_with_keys_train(islands, tmp_path: Path) -> None:
    run = Keyed(islands(2), tmp_path)
    for index in range(2):
        run.start(index, rounds=2)
    told = run.collect()
    assert [one.get("finished") for one in told] == [True] * 2, told
    assert len({one["weights"] for one in told}) == 1
    (met,) = [event for event in run.events(0) if event["event"] == "islands_met"]
    assert met["encrypted"] is True
    assert any("connections are encrypted" in str(event.get("text")) for event in run.events(0))


@pytest.mark.proof
def test_the_bits_are_those_of_plain_connections(islands, tmp_path: Path) -> None:
    digests = set()
    for kind in (True, False):
        (tmp_path / str(kind)).mkdir()
        run = Keyed(islands(3), tmp_path / str(kind), with_keys=kind)
        for index in range(3):
            run.start(index, rounds=4, model="llama", optimizer="adamw", batch=4)
        told = run.collect()
        assert [one.get("finished") for one in told] == [True] * 3, told
        digests |= {one["weights"] for one in told}
    assert len(digests) == 1


@pytest.mark.proof
def test_rounds_go_on_with_a_man_in_the_middle(islands, tmp_path: Path) -> None:
    """Each connection of three islands passes a relay that alters, repeats, drops, swaps or cuts.

    All rounds are merged by all three, with the bits of a run that nobody disturbed.
    """
    digests = set()
    for disturbed in (False, True):
        folder = tmp_path / str(disturbed)
        folder.mkdir()
        run = Keyed(islands(3), folder)
        relays = {index: [Proxy(port) for port in run.ports] for index in range(3)}
        for index, own in relays.items():
            others = {str(k): one.address for k, one in enumerate(own) if k != index}
            run.start(index, rounds=12, step_s=0.1, relays=others)
        ended = threading.Event()
        work = threading.Thread(target=disturb, args=(relays, ended))
        if disturbed:
            work.start()
        told = run.collect()
        ended.set()
        if disturbed:
            work.join()
        assert [one.get("finished") for one in told] == [True] * 3, told
        digests |= {one["weights"] for one in told}
        merged = [[name for name, *_ in turn["members"]] for turn in run.turns(0)]
        assert merged == [[0, 1, 2]] * 12
        every = [relay for own in relays.values() for relay in own]
        tampered = sum(relay.tampered for relay in every)
        assert (tampered >= 10) == disturbed
        for relay in every:
            relay.close()
    assert len(digests) == 1


def disturb(relays: dict[int, list[Proxy]], ended: threading.Event) -> None:
    """Arm a relay twice a second; those that need two records fit the pieces of a fetch alone."""
    draw = random.Random(4)
    while not ended.wait(0.2):
        proxy = draw.choice([one for own in relays.values() for one in own])
        how = draw.choice(("altered", "replayed", "cut"))
        proxy.arm(TAMPERS[how], to_server=draw.random() < 0.5)


@pytest.mark.proof
def test_a_key_that_is_taken_out_leaves_at_the_next_round_and_may_come_back(
    islands, tmp_path: Path
) -> None:
    run = Keyed(islands(3), tmp_path)
    for index in range(3):
        run.start(index, rounds=60, step_s=0.1)
    run.wait_for(0, lambda turn: turn["round"] >= 1)
    run.list_keys(0, 1)  # island 2 reads the same file, and finds itself not in it
    turn = run.wait_for(0, lambda turn: turn["seats"] == [0, 1])
    assert turn["left"] == {"2": "island 2: its key was taken out"}
    run.list_keys(0, 1, 2)
    run.wait_for(0, lambda turn: turn["seats"] == [0, 1, 2] and turn["joined"] == [2])
    told = run.collect()
    assert [one.get("finished") for one in told] == [True] * 3, told
    assert len({one["weights"] for one in told}) == 1
    texts = [str(event.get("text")) for event in run.events(2)]
    assert any("took this island's key" in text for text in texts)
    texts = [str(event.get("text")) for event in run.events(0)]
    assert any("(host-2) is taken out" in text for text in texts)
    assert any("(host-2) may join" in text for text in texts)
