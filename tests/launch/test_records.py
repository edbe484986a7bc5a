"""What each rank did in each step, kept by who watches: read whole, cut back, rolled up, torn."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.base.runlog.rank_records import (
    FOLDER,
    PARTS,
    RankStep,
    decode_rank_steps,
    read_rank_steps,
)
from shoal.launch.watch import step_records
from shoal.launch.watch.page_reader import OwnedPage
from shoal.launch.watch.step_records import StepRecordFile
from shoal.wire.phases import DATA, HOOKS, PASSES, SUM
from shoal.wire.watch_page import PAGE_VARIABLE, WAIT, WatchPage


class Node:
    """Ranks that do steps, and who keeps them."""

    def __init__(self, folder: Path, count: int) -> None:
        self.read = {rank: OwnedPage(f"rank {rank}") for rank in range(count)}
        self.write = [WatchPage.open({PAGE_VARIABLE: one.path}) for one in self.read.values()]
        self.records = StepRecordFile(folder)

    def steps(self, *numbers: int, ranks: tuple[int, ...] = (0, 1)) -> None:
        for number in numbers:
            for rank in ranks:
                self.write[rank].record_part(PASSES)
                self.write[rank].record_step_end(number, peak_bytes=1000 * rank + number)

    def look(self) -> None:
        self.records.append_steps(self.read)

    def close(self) -> None:
        for page in self.write:
            page._cast(memoryview(bytearray(1 << 20)))
        for one in self.read.values():
            one.close()


@pytest.fixture
def node(tmp_path: Path) -> Any:
    made = []

    def make(count: int = 2) -> Node:
        made.append(Node(tmp_path, count))
        return made[-1]

    yield make
    for one in made:
        one.close()


def kept(folder: Path) -> list[tuple[int, int]]:
    rows = read_rank_steps(folder)
    assert rows is not None
    return [(one.step, one.rank) for one in rows]


def test_a_run_that_nobody_watched_has_none(tmp_path: Path) -> None:
    assert read_rank_steps(tmp_path) is None


def test_each_rank_and_step_once(tmp_path: Path, node: Any) -> None:
    one = node()
    one.steps(1, 2, 3)
    one.look()
    one.look()
    one.steps(4)
    one.look()
    assert kept(tmp_path) == [(step, rank) for step in (1, 2, 3, 4) for rank in (0, 1)]
    (first, *_, last) = read_rank_steps(tmp_path) or ()
    assert (last.peak_memory_bytes, last.steps) == (1004, 1)
    assert first.end_s < last.end_s
    assert len(last.encode()) == 64
    assert len(last.seconds) == len(PARTS)


def test_seconds_lie_under_their_parts(tmp_path: Path, node: Any) -> None:
    one, page = node(1), None
    page = one.write[0]
    page.record_part(DATA)
    page.record_unequal_parts([HOOKS])  # ranks have other work there in this step
    page.record_step_end(1)
    page.record_unequal_parts([DATA], always=True)
    page.record_part(PASSES)
    page.record_step_end(2)
    one.look()
    first, second = read_rank_steps(tmp_path) or ()
    assert first.seconds[PARTS.index("hooks")] == 0.0, "a time all the same"
    assert first.seconds[PARTS.index("data")] > 0
    assert second.seconds[PARTS.index("data")] > 0, "the sign is for who compares ranks"
    assert PARTS.index("passes") == PASSES


def test_own_code_of_a_loop_is_no_data(tmp_path: Path, node: Any) -> None:
    one = node(1)
    for step, loop_s in ((1, 0.0), (2, 0.02), (3, 99.0), (4, 0.0)):
        time.sleep(0.03)  # in `data`, as no part has begun since the step before
        one.write[0].record_part(PASSES)
        one.write[0].record_loop_time(loop_s)
        one.write[0].record_step_end(step)
    one.look()
    found = {row.step: row.seconds for row in read_rank_steps(tmp_path) or ()}
    data, hooks = PARTS.index("data"), PARTS.index("hooks")
    assert found[2][hooks] == pytest.approx(0.02)
    assert found[2][data] >= 0.009
    assert found[3][data] == 0.0, "at most all of it"
    assert found[3][hooks] >= 0.029
    assert (found[4][hooks], found[4][data] >= 0.029) == (0.0, True)


def test_what_was_overwritten_is_missing(tmp_path: Path, node: Any) -> None:
    one = node()
    one.steps(*range(1, 201))
    one.look()
    assert [step for step, rank in kept(tmp_path) if rank == 0] == list(range(137, 201))


def test_steps_that_are_made_again_take_the_place_of_the_first(tmp_path: Path, node: Any) -> None:
    """Back to a checkpoint within a run; a rank may be seen to go back before the other."""
    one = node()
    one.steps(*range(1, 21))
    one.look()
    one.steps(6, 7, ranks=(0,))
    one.look()
    one.steps(6, 7, 8, ranks=(1,))
    one.look()
    assert kept(tmp_path) == [(s, r) for s in range(1, 8) for r in (0, 1)] + [(8, 1)]


def test_a_resume_cuts_back(tmp_path: Path, node: Any) -> None:
    """The next attempt has one rank less."""
    one = node()
    one.steps(*range(1, 11))
    one.look()
    path = tmp_path / FOLDER / "node-0.bin"
    path.write_bytes(path.read_bytes()[:-10])  # and the end was torn
    again = node(1)
    again.steps(6, 7, ranks=(0,))
    again.look()
    assert kept(tmp_path) == [(s, r) for s in range(1, 6) for r in (0, 1)] + [(6, 0), (7, 0)]


@pytest.mark.parametrize("content", [b"", b"x" * 64, b"not one" * 100])
def test_what_is_no_such_file_is_no_row(content: bytes) -> None:
    assert list(decode_rank_steps(content)) == []


def test_old_steps_are_rolled_up(
    tmp_path: Path, node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_records, "KEPT", 40)
    monkeypatch.setattr(step_records, "GROUP", 10)
    one = node()
    for step in range(1, 1001):
        one.steps(step)
        one.look()
    rows = [row for row in read_rank_steps(tmp_path) or () if row.rank == 1]
    assert sum(row.steps for row in rows) == 1000, "no step is lost"
    assert len(rows) <= 2 * 40 + 1000 // 10
    assert [row.steps for row in rows[-40:]] == [1] * 40
    assert max(row.steps for row in rows) == 10
    assert rows[0].peak_memory_bytes == 1000 + rows[0].step


def test_a_folder_that_is_deleted_and_made_anew(tmp_path: Path, node: Any) -> None:
    one = node()
    folder = tmp_path / "run"
    folder.mkdir()
    one.records = StepRecordFile(folder)
    one.steps(1, 2)
    one.look()
    shutil.rmtree(folder)
    one.steps(3)
    one.look()
    folder.mkdir()
    one.steps(4)
    one.look()
    assert kept(folder) == [(3, 0), (3, 1), (4, 0), (4, 1)]


def test_steps_of_another_run_of_the_process_are_not_kept(tmp_path: Path, node: Any) -> None:
    one = node(1)
    one.steps(1, 2, ranks=(0,))
    one.write[0].folder = tmp_path
    one.write[0].record_step_end(7, folder=tmp_path / "another")
    one.write[0].record_step_end(2)
    one.write[0].record_step_end(3, folder=tmp_path)
    one.look()
    assert kept(tmp_path) == [(1, 0), (2, 0), (3, 0)]


def test_a_folder_that_is_gone_is_not_made_anew(tmp_path: Path, node: Any) -> None:
    one = node()
    one.records.folder = tmp_path / "gone"
    one.steps(1)
    one.look()
    assert not (tmp_path / "gone").exists()


def test_a_row_of_another_rank_count_is_read(tmp_path: Path) -> None:
    """By the documented layout: step, rank, steps, end, memory, eight singles."""
    row = RankStep(7, 3, 1, 1.5, 2**40, tuple(float(n) for n in range(8)))
    assert row.encode().hex() == (
        "07000000000000000300000001000000000000000000f83f0000000000010000"
        "000000000000803f0000004000004040000080400000a0400000c0400000e040"
    )


class Marks:
    """A timer of parts on a device that is one step behind."""

    def __init__(self) -> None:
        self.parts: list[int] = []
        self.ended = 0
        self.done = True

    def mark(self, part: int) -> None:
        self.parts.append(part)

    def end_step(self) -> list[float] | None:
        self.ended += 1
        return [float(self.ended - 1)] * 8 if self.done and self.ended > 1 else None


def test_a_devices_times_come_one_step_later(node: Any, tmp_path: Path) -> None:
    """Waits count in the sum alone; a step of which nothing is known in time has no row."""
    one = node(count=1)
    page = one.write[0]
    page.timer = timer = Marks()
    for step in (1, 2, 3, 4):
        timer.done = step != 3
        for part in (DATA, PASSES, SUM):
            page.record_part(part)
            page.record_wait_start()
            page.record_wait_end(1)
        page.record_part(HOOKS)
        page.record_step_end(step)
        one.look()
        found = {row.step: row.seconds[1] for row in read_rank_steps(tmp_path) or []}
        assert found == {1: {}, 2: {1: 1.0}, 3: {1: 1.0}, 4: {1: 1.0, 3: 3.0}}[step]
    assert timer.parts == [DATA, PASSES, SUM, WAIT, SUM, HOOKS] + 3 * [
        *(DATA, PASSES, SUM, WAIT, SUM, HOOKS),
    ] + [DATA]
    page.close()
    one.look()
    assert [row.step for row in read_rank_steps(tmp_path) or []] == [1, 3, 4]
