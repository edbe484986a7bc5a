"""What islands hear of each other: what is no beat is passed over, and the listening goes on."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from shoal.fabric.islands import heartbeat as pulses
from shoal.fabric.islands.heartbeat import (
    MOST_BYTES,
    HeartbeatMessage,
    HeartbeatThread,
    parse_heartbeat,
)

STRANGE = [
    (b"\xff\xfe", "no JSON"),
    (b"not json", "no JSON"),
    (b"[" * 100_000, f"100000 bytes, at most {MOST_BYTES} are read"),
    (b"[" * 50_000, "no JSON"),
    (b"null", "not the four things"),
    (b"[1, {}, []]", "not the four things"),
    (b'{"a": 1, "b": 2, "c": 3, "d": 4}', "not the four things"),
    (b'["1", {}, [], ""]', "other types"),
    (b'[1, {"all": "2"}, [], ""]', "other types"),
    (b'[1, {"all": true}, [], ""]', "other types"),
    (b'[1, [], [], ""]', "other types"),
    (b"[1, {}, [], 5]", "other types"),
    (b'[1, {}, 2, ""]', "none of 0 … 1"),
    (b'[1, {}, [2], ""]', "none of 0 … 1"),
    (b'[1, {}, [-1], ""]', "none of 0 … 1"),
    (b'[1, {}, ["0"], ""]', "none of 0 … 1"),
]


@pytest.mark.parametrize(("raw", "said"), STRANGE)
def test_what_is_no_beat_is_named(raw: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_heartbeat(raw, 2)


def test_a_beat_is_read() -> None:
    assert parse_heartbeat(
        json.dumps([3, {"all": 5}, [1], "x" * 999]).encode(), 2
    ) == HeartbeatMessage({"all": 5}, ((1,), "x" * 200))


def until(true: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
    until_s = time.monotonic() + 30
    while not true():
        assert time.monotonic() < until_s
        meanwhile()
        time.sleep(0.01)


def is_strange(raw: bytes, count: int) -> bool:
    """Whether it is no beat where there are so many islands."""
    try:
        parse_heartbeat(raw, count)
    except ValueError:
        return True
    return False


def test_a_strange_beat_ends_no_pulse_and_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three islands beat on; when the third is silent later, it is the one that is named."""
    monkeypatch.setattr(pulses, "BEAT_S", 0.05)
    monkeypatch.setattr(pulses, "SILENT_S", 2.0)  # a thread may wait a second for its turn
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    told: list[tuple[int, str]] = []
    members = [
        HeartbeatThread(store, i, 3, lambda line, i=i: told.append((i, line))) for i in range(3)
    ]
    for member in members:
        member.start(5)
    beats = itertools.cycle(raw for raw, _ in STRANGE if is_strange(raw, 3))
    # Island 1 beats over them, so they are sent until each listener met one.
    until(
        lambda: {island for island, _ in told} == {0, 1, 2},
        meanwhile=lambda: store.set("beat/1", next(beats)),
    )
    assert all(member._thread.is_alive() for member in members)
    assert not any(beat.given_up[0] for member in members for beat in member._told)
    # Those written over were no beats of island 1: until each hears it anew, it is silent.
    calm_s = time.monotonic()
    until(lambda: all(min(member._heard_s) > calm_s for member in members))
    assert len(told) == 3, "one line on each island, however many there were"
    assert "a beat of island 1 was passed over: " in told[0][1]
    members[2]._ended.set()
    members[2]._soon.set()
    members[2]._thread.join()
    # On a busy machine its last beat would be heard so late that it seems sent after the failure.
    until(lambda: all(member._raw[2] == store.get("beat/2") for member in members[:2]))
    for member in members[:2]:
        assert member.blame((0, 1, 2), "all") == ((2,), "silent")
    for member in members:
        member.close()


def test_the_island_that_was_silent_before_the_store_is_blamed() -> None:
    """Island 0 gave up on island 1 and ended with the store, before island 2 learnt of it."""
    member = HeartbeatThread.__new__(HeartbeatThread)
    member.index, member.begun = 2, {}
    member._told = [pulses.HeartbeatMessage({}) for _ in range(3)]
    now_s = time.monotonic()
    member._answered_s = now_s - 30
    member._heard_s = [now_s - 30, now_s - 30 - 2.1 * pulses.BEAT_S, now_s]
    words = "silent, and after that island 0, which holds the store"
    assert member.blame((0, 1, 2), "all") == ((1,), words)
    member._heard_s[1] = now_s - 30
    islands, words = member.blame((0, 1, 2), "all")
    assert islands == (0,)
    assert "gave up on another island" in words
