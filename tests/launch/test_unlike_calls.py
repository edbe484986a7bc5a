"""Calls that every rank must make, as pages tell of them: whose differ, and who waits for whom."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.launch.watch import hang_watch
from shoal.launch.watch.call_mismatch import compare_calls
from shoal.launch.watch.hang_watch import HangWatch
from shoal.launch.watch.page_reader import OwnedPage
from shoal.trainer.guards.call_log import CollectiveCallLog
from shoal.wire import phases
from shoal.wire.phases import PASSES
from shoal.wire.watch_page import PAGE_VARIABLE, WatchPage

RUN = 7


class Ranks:
    """A watch, and the pages into which its ranks write what a test says."""

    def __init__(self, folder: Path, count: int) -> None:
        self.told: list[dict[str, Any]] = []
        self.watch = HangWatch(folder, self._tell, 1e9, twice=True)
        paths = self.watch.start_attempt(count)
        self.pages = [WatchPage.open({PAGE_VARIABLE: path}) for path in paths]
        self.workers = [SimpleNamespace(rank=rank, pid=0, code=None) for rank in range(count)]
        self.numbers = [0] * count
        self.answers: dict[int, dict[str, Any]] = {}
        for page in self.pages:
            page.record_part(PASSES)

    def _tell(self, event: str, **fields: Any) -> None:
        self.told.append({"event": event, **fields})

    def call(self, rank: int, *names: str, run: int = RUN) -> None:
        for name in names:
            self.numbers[rank] += 1
            self.pages[rank].record_call_start(run, self.numbers[rank], name.encode())

    def differ(self) -> dict[int, str]:
        return compare_calls(dict(enumerate(self.watch.pages)))

    def stand(self, seconds: float) -> Any:
        """Look until so many seconds of silence are over, by the watch's own clock."""
        self.watch.poll(self.workers)
        until_s = self.watch.clock_s + seconds
        while self.watch.clock_s < until_s:
            for rank, page in enumerate(self.pages):
                page.answer(page.stack_request, {"stacks": "", **self.answers.get(rank, {})})
            self.watch._looked_s -= 0.4
            if (hang := self.watch.poll(self.workers)) is not None:
                return hang
        return None

    def lines(self) -> list[str]:
        return [one["text"] for one in self.told if one["event"] == "notice"]

    def close(self) -> None:
        for page in self.pages:
            page._cast(memoryview(bytearray(1 << 20)))
        self.watch.close()


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(hang_watch, "EVERY_S", 0.0)
    (tmp_path / "logs").mkdir()
    made: list[Ranks] = []

    def make(count: int) -> Ranks:
        made.append(Ranks(tmp_path, count))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_the_rare_call_is_named_beside_another(ranks: Any) -> None:
    three = ranks(3)
    for rank in range(3):
        three.call(rank, "run.step", "run.save" if rank == 1 else "run.step")
    assert three.differ() == {1: "run.save", 0: "run.step"}


def test_who_is_behind_may_be_slow(ranks: Any) -> None:
    both = ranks(2)
    both.call(0, "run.step", "run.step", "run.save")
    both.call(1, "run.step")
    assert both.differ() == {}
    assert both.stand(20.0) is None


def test_calls_of_different_runs_are_not_compared(ranks: Any) -> None:
    both = ranks(2)
    both.call(0, "run.save", run=1)  # of a run that this rank has alone
    both.call(1, "run.step", run=2)
    both.numbers[:] = [0, 0]
    for rank in range(2):
        both.call(rank, "run.step", run=3)
    assert both.differ() == {}


def test_what_is_kept_is_enough_after_many(ranks: Any) -> None:
    both = ranks(2)
    for rank in range(2):
        both.call(rank, *["run.step"] * 1000)
    both.call(0, "run.evaluate")
    both.call(1, "run.step")
    assert both.differ() == {0: "run.evaluate", 1: "run.step"}


def test_the_watch_names_them_after_seconds(ranks: Any) -> None:
    both = ranks(2)
    both.answers = {0: {"place": "train.py:7"}, 1: {"place": "train.py:9"}}
    both.call(0, "run.model(…)")
    both.call(1, "run.step")
    hang = both.stand(10.0)
    assert hang.status == 2
    (event,) = both.told
    assert event["event"] == "collectives_differ"
    assert (
        event["text"]
        == hang.why
        == (
            "ranks wait for each other: rank 0 called run.model(…) (train.py:7), rank 1 called "
            "run.step (train.py:9); try: call the model on every rank, since each holds a part of the "
            "weights, or use run.evaluate(data, metrics)"
        )
    )


def test_batches_of_other_shapes_on_ranks_that_share_samples(ranks: Any) -> None:
    both = ranks(2)
    both.answers = {0: {"place": "train.py:7"}, 1: {"place": "train.py:7"}}
    for rank in range(2):
        both.call(rank, "run.step", "run.step")
    both.pages[1].rename_call(1, b"an older one")
    assert both.differ() == {}
    both.pages[1].rename_call(2, b"run.step of [8, 5], [8, 3]")
    hang = both.stand(10.0)
    assert hang.why == (
        "ranks wait for each other: rank 0 called run.step (train.py:7), rank 1 called run.step of "
        "[8, 5], [8, 3] (train.py:7); try: a batch of equal shapes on every rank, since these ranks "
        "share its samples"
    )


def test_new_shapes_of_a_batch_are_in_the_name_of_the_call(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each form; a batch may be any nesting of tensors."""
    both = ranks(2)
    monkeypatch.setattr(phases, "page", both.pages[0])
    world = SimpleNamespace(rank=0, size=2, group=None, ranks=(0, 1))
    log = CollectiveCallLog(world, None)
    log.open_run()
    names = []
    for batch in (
        (torch.ones(8, 6), torch.ones(8, 3)),
        (torch.ones(8, 6), torch.ones(8, 3)),
        {"x": torch.ones(8, 5), "name": "one"},
    ):
        with log.at("run.step"):
            log.record_batch_form(batch)
        (calls,) = both.watch.pages[0].names().values()
        names.append(calls[log.turn])
    assert names == ["run.step of [8, 6], [8, 3]", "run.step", "run.step of [8, 5]"]


def test_one_rank_alone_in_a_collective_of_the_users_own(ranks: Any) -> None:
    three = ranks(3)
    for rank in range(3):
        three.call(rank, "run.step")
    three.pages[1].record_call_end()
    for rank in (0, 2):
        three.call(rank, "run.step")
        three.pages[rank].record_wait_start()
    alone = {"collective": "barrier", "by_user": True, "place": "train.py:7"}
    three.answers = {1: alone, 0: {"place": "train.py:9"}, 2: {"place": "train.py:9"}}
    assert three.stand(7.0) is None
    hang = three.stand(4.0)
    assert hang.why == (
        "ranks wait for each other: rank 0 called run.step (train.py:9), rank 1 called "
        "torch.distributed.barrier (train.py:7); try: make the same calls on every rank, in the "
        "same order and equally often"
    )


def test_one_rank_alone_before_its_first_call_of_the_run(ranks: Any) -> None:
    """A barrier of `if rank == 0:` before step 1: its page has no call of the run yet."""
    two = ranks(2)
    two.call(1, "run.step")
    two.pages[1].record_wait_start()
    two.answers = {
        0: {"collective": "barrier", "by_user": True, "place": "train.py:7"},
        1: {"place": "train.py:9"},
    }
    assert two.stand(7.0) is None
    hang = two.stand(4.0)
    assert hang.why.startswith(
        "ranks wait for each other: rank 0 called torch.distributed.barrier (train.py:7), rank 1 "
        "called run.step (train.py:9)"
    )


def test_others_may_still_be_in_a_call_that_one_has_ended(ranks: Any) -> None:
    """A tree of ranks hands large weights on: the first one is done long before the last."""
    three = ranks(3)
    for rank in range(3):
        three.call(rank, "run.restore")
        three.pages[rank].record_wait_start()
    three.pages[1].record_call_end()
    three.answers = {1: {"collective": "barrier", "by_user": True, "place": "train.py:7"}}
    assert three.stand(100.0) is None


CAUGHT = {"caught": "run.step (ValueError: bad batch)", "place": "train.py:9"}


def test_an_error_that_one_rank_caught_while_the_other_waits(ranks: Any) -> None:
    both = ranks(2)
    both.call(0, "run.step")
    both.pages[0].record_wait_start()
    both.call(1, "run.step", "run.step")
    both.answers = {0: {"place": "train.py:9"}, 1: CAUGHT}
    hang = both.stand(8.0)
    assert hang.status == 2
    assert hang.why == (
        "rank 1 caught an error of run.step (ValueError: bad batch) and goes on (train.py:9), while "
        "rank 0 waits in run.step (train.py:9); try: let the error end the process, or catch it on "
        "every rank"
    )


def test_an_error_that_the_other_may_still_meet(ranks: Any) -> None:
    """All ranks catch it, and one is slow: it computes, and waits for nobody."""
    both = ranks(2)
    both.call(0, "run.step")
    both.call(1, "run.step", "run.step")
    both.answers = {1: CAUGHT}
    assert both.stand(100.0) is None


def test_two_ranks_in_one_of_their_own_may_go_on(ranks: Any) -> None:
    """A group of their own may exchange much, while the third one waits."""
    three = ranks(3)
    three.call(0, "run.step")
    three.pages[0].record_wait_start()
    own = {"collective": "all_reduce", "by_user": True, "place": "train.py:7"}
    three.answers = {1: own, 2: own}
    assert three.stand(100.0) is None


def test_who_waits_for_whom_is_said_now_and_then(ranks: Any) -> None:
    both = ranks(2)
    both.call(0, "run.step")
    both.pages[0].record_wait_start()
    both.answers = {0: {"place": "train.py:7"}, 1: {"place": "plots.py:3"}}
    assert both.stand(29.0) is None
    assert both.lines() == []
    assert both.stand(99.0) is None
    assert [line.partition(" s in ")[2] for line in both.lines()] == [
        "run.step (train.py:7) for rank 1, which is elsewhere (plots.py:3)"
    ] * 3


def test_a_rank_ends_as_the_watch_wants() -> None:
    page = OwnedPage("rank 0")
    code = (
        "import sys, time; from shoal.wire.stack_dumps import start_page_reports; start_page_reports(); "
        "sys.stdout.write('held back'); print(flush=True); sys.stdout.write('end'); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={PAGE_VARIABLE: page.path}, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held back\n"
    page.end(2)
    assert process.wait(20) == 2
    assert process.stdout.read() == b"end"
    assert not page.read().live, "it is over, and did not die"
    process.stdout.close()
    page.close()
