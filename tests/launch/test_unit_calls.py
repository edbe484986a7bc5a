"""Ranks that stand in collectives of different units, as their pages tell: nobody has to wait."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.launch.watch import hang_watch
from shoal.launch.watch.hang_watch import HangWatch
from shoal.launch.watch.page_reader import OwnedPage
from shoal.launch.watch.unit_mismatch import compare_units
from shoal.launch.worker_failures import make_hang_death
from shoal.wire.phases import PASSES, SUM
from shoal.wire.watch_page import PAGE_VARIABLE, WatchPage

KEY = 7
PAIR = (KEY, KEY)


class Ranks:
    """Pages of ranks that do what they are told, and the watch's end of them."""

    def __init__(self, count: int) -> None:
        self.read = [OwnedPage(f"rank {rank}") for rank in range(count)]
        self.write = [WatchPage.open({PAGE_VARIABLE: one.path}) for one in self.read]
        self.numbers: dict[tuple[int, int], int] = {}

    def gather(self, rank: int, *units: str, key: int = KEY, part: int = PASSES) -> None:
        page = self.write[rank]
        page.record_part(part)
        for unit in units:
            number = self.numbers[rank, key] = self.numbers.get((rank, key), 0) + 1
            page.record_unit_collective(key, number, unit.encode())
            page.record_collective_start("all_gather", 64)

    def other(self, rank: int, part: int = SUM) -> None:
        self.write[rank].record_part(part)
        self.write[rank].record_collective_start("all_reduce", 64)

    def unlike(self, kind: str = "step") -> Any:
        told = {rank: page.read() for rank, page in enumerate(self.read)}
        return compare_units(dict(enumerate(self.read)), told, dict.fromkeys(told, kind))

    def close(self) -> None:
        for page in self.write:
            page._cast(memoryview(bytearray(1 << 20)))
        for page in self.read:
            page.close()


@pytest.fixture
def ranks() -> Any:
    made: list[Ranks] = []

    def make(count: int) -> Ranks:
        made.append(Ranks(count))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_another_unit_at_the_same_place(ranks: Any) -> None:
    both = ranks(3)
    for rank in range(3):
        both.gather(rank, "trunk (forward pass)", "b" if rank == 1 else "a")
    found = both.unlike("")
    assert (found.rank, found.calls) == (1, {0: "a", 1: "b", 2: "a"})
    assert found.line("step 4") == (
        "step 4: ranks run different blocks: a on ranks 0, 2, b on rank 1; fsdp and hsdp gather "
        "weights and sum gradients block by block, so these would be mixed up; "
        "try: layout.strategy=zero2"
    )


def test_one_goes_on_where_the_other_gathers_more(ranks: Any) -> None:
    both = ranks(2)
    for rank in range(2):
        both.gather(rank, "trunk")
    both.gather(0, "head")
    assert both.unlike() is None, "the other one may be slow"
    both.other(1)
    assert both.unlike().calls == {0: "head", 1: "no further block"}
    assert both.unlike("") is None, "where ranks may make other collectives nothing is known"


@pytest.mark.parametrize("keys", [PAIR, (KEY, KEY + 1)])
def test_slow_ranks_and_other_groups_are_none(ranks: Any, keys: Sequence[int]) -> None:
    """Behind in the same order, or in a group of its own (hsdp, another stage)."""
    both = ranks(2)
    for rank in range(2):
        both.gather(rank, "x" if keys[rank] == KEY else "y", key=keys[rank])
        both.other(rank)
    both.gather(0, "z", "z2", key=keys[0])
    both.other(0)
    assert both.unlike() is None


def test_what_is_kept_is_enough_after_many(ranks: Any) -> None:
    both = ranks(2)
    for step in range(300):
        for rank in range(2):
            both.gather(rank, f"unit {step % 7}")
    both.gather(0, "head")
    both.other(1)
    assert both.unlike().calls == {0: "head", 1: "no further block"}


def test_the_watch_names_them_in_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After seconds, though nothing was learnt of the run yet; one that may be slow is none."""
    monkeypatch.setattr(hang_watch, "EVERY_S", 0.0)
    told: list[dict[str, Any]] = []
    made = HangWatch(
        tmp_path, lambda event, **fields: told.append({"event": event, **fields}), 60.0
    )
    paths = made.start_attempt(2)
    pages = [WatchPage.open({PAGE_VARIABLE: path}) for path in paths]
    workers = [SimpleNamespace(rank=rank, pid=0, code=None) for rank in range(2)]
    for page in pages:
        page.record_part(PASSES)
        page.record_unit_collective(KEY, 1, b"trunk")
        page.record_collective_start("all_gather")
    made.poll(workers)

    def stands_for(seconds: float) -> Any:
        """Look until so many seconds of silence are over, by the watch's own clock."""
        until_s = made.clock_s + seconds
        while made.clock_s < until_s:
            made._looked_s -= 0.4
            if (hang := made.poll(workers)) is not None:
                return hang
        return None

    pages[0].record_unit_collective(KEY, 2, b"head")
    pages[0].record_collective_start("all_gather")
    made.poll(workers)
    assert stands_for(90.0) is None, "a slow batch, or a compiler"
    pages[1].record_part(SUM)
    pages[1].record_collective_start("all_reduce")
    made.poll(workers)
    hang = stands_for(10.0)
    assert hang is not None
    assert hang.status == 2
    assert hang.why.startswith("step 1: ranks run different blocks: head on rank 0, no further")
    (event,) = [one for one in told if one["event"] == "collectives_differ"]
    assert event["text"] == hang.why
    worker = SimpleNamespace(rank=0, pid=0, error_path=tmp_path / "e", log_path=tmp_path / "l")
    death = make_hang_death(worker, hang)
    assert (death.code, death.final) == (2, True)
    dead = made.compare(workers, dead=True)
    assert make_hang_death(worker, dead).code == 1, "that of a rank that died"
    for page in pages:
        page._cast(memoryview(bytearray(1 << 20)))
    made.close()
