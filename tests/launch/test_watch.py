"""The watch with ranks that need no torch: who hangs, when it is told, what is only slow."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.launch import RunOutcome, supervise
from shoal.launch.watch import hang_watch, silence_deadlines
from shoal.launch.watch.blamed_rank import RankEvidence, blame_rank
from shoal.launch.watch.collective_mismatch import compare_collectives
from shoal.launch.watch.hang_watch import HangWatch
from shoal.launch.watch.page_reader import OwnedPage, PageSnapshot
from shoal.launch.watch.silence_deadlines import FIRST, STEP, SilenceDeadlines, classify_phase
from shoal.wire.phases import DATA, NOWHERE, PASSES, SUM, Phase
from shoal.wire.stack_dumps import dump_stacks, find_blocking_collective, runs_own_code
from shoal.wire.watch_page import PAGE_VARIABLE, WatchPage

MARGIN_S = 0.6
"""In the place of five seconds, so that a test waits less; steps take 0.03 s."""

RANKS = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from shoal.wire.phases import DATA, PASSES
from shoal.wire.stack_dumps import start_stack_thread
from shoal.wire.watch_page import WatchPage
rank, attempt = int(os.environ["RANK"]), int(os.environ["SHOAL_ATTEMPT"])
size, folder = int(os.environ["WORLD_SIZE"]), Path(os.environ["SHOAL_RUN_FOLDER"])
page = WatchPage.open()
start_stack_thread(page)

def forever():
    while True:
        time.sleep(0.005)

def meet(step):
    (folder / f"{attempt}-{step}-{rank}").touch()
    while not all((folder / f"{attempt}-{step}-{one}").exists() for one in range(size)):
        time.sleep(0.002)

def trouble(step):
    pass
TROUBLE
for step in range(1, 31):
    page.record_part(DATA)
    time.sleep(0.02)
    page.record_part(PASSES)
    trouble(step)
    page.record_collective_start("all_reduce", 64)
    page.record_wait_start()
    meet(step)
    page.record_wait_end(1)
    page.record_step_end(step)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": %d}\\n' % step)
page.close()
"""


class Run:
    """Supervises RANKS with a trouble; keeps the events with the time of each."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.events = folder, list[dict[str, Any]]()

    def __call__(self, trouble: str, *, processes: int = 2, **settings: Any) -> RunOutcome:
        (self.folder / "ranks.py").write_text(RANKS.replace("TROUBLE", trouble))
        paths = [str(self.folder), os.environ.get("PYTHONPATH", "")]
        return supervise(
            [sys.executable, "-m", "ranks"],
            processes=processes,
            folder=self.folder,
            restarts=1,
            emit=lambda event, **fields: self.events.append({"event": event, **fields}),
            environ={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            imports=("json",),
            **{"patience_s": 0.5, **settings},
        )

    def named(self, event: str) -> list[dict[str, Any]]:
        return [found for found in self.events if found["event"] == event]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(silence_deadlines, "MARGIN_S", MARGIN_S)
    return Run(tmp_path)


def in_first(act: str, rank: int = 1) -> str:
    """`act` by one rank in step 20 of the first attempt."""
    return f"def trouble(step):\n    if (step, rank, attempt) == (20, {rank}, 0):\n        {act}\n"


STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
KEEP_LOCK = "ctypes.PyDLL(None).sleep(60)"


@pytest.mark.parametrize("processes", [1, 2])
def test_a_rank_that_leaves_with_status_0_has_not_come_to_its_end(run: Run, processes: int) -> None:
    """One process has no peer who could miss it; of two the other one waits, and is not blamed."""
    (run.folder / "plan.json").write_text('{"steps": 30}')
    outcome = run(in_first("os._exit(0)", processes - 1), processes=processes)
    assert outcome == RunOutcome("finished", 0, 2, "")
    (died,) = run.named("worker_died")
    line = (
        "left with status 0 after step 19 of 30, in forward and backward, before the run's end: "
        "something in it calls os._exit(0)"
    )
    assert (died["rank"], died["how"], died["traceback"]) == (processes - 1, "exit code 0", line)
    assert run.named("hang") == []


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (STOP, "its process is stopped (SIGSTOP)"),
        (KEEP_LOCK, "Python does not answer: a call into C keeps its lock"),
        ("forever()", "it is in no collective (ranks.py:14)"),
    ],
    ids=["stopped", "keeps the lock", "loops"],
)
@pytest.mark.parametrize("processes", [2, pytest.param(1, marks=pytest.mark.proof)])
def test_the_rank_that_hangs_is_named_in_time_and_all_start_again(
    run: Run, act: str, why: str, processes: int
) -> None:
    rank = processes - 1
    outcome = run(in_first(act, rank), processes=processes)
    assert outcome == RunOutcome("finished", 0, 2, "")
    (told,) = run.named("hang")
    assert (told["rank"], told["why"]) == (rank, why), told
    assert told["phase"] == "step 20, forward and backward"
    assert told["deadline_s"] == pytest.approx(MARGIN_S + 0.3, abs=0.6), "learnt from the steps"
    assert told["waited_s"] < told["deadline_s"] + 2
    (died,) = run.named("worker_died")
    assert (died["rank"], died["how"]) == (rank, "ended by the watch")
    accounts = Path(told["stacks"]).read_text()
    if processes == 2:
        assert told["collective"] == "all_reduce of 64 B"
        assert "in meet" in accounts, "the stack of the rank that waits"
    if act == "forever()":
        assert "in forever" in accounts
    else:
        assert "did not answer; the kernel says of it:\nState: " in accounts


def test_one_that_is_only_slow_is_told_and_then_left_alone(run: Run) -> None:
    slow = "if (step, rank) == (20, 1):\n        time.sleep(1.8)"
    after = "elif step > 20:\n        time.sleep(0.1)"  # the watch may still be reading stacks
    outcome = run(f"def trouble(step):\n    {slow}\n    {after}\n", patience_s=30.0)
    assert outcome == RunOutcome("finished", 0, 1, "")
    (told,) = run.named("hang")
    assert (told["rank"], told["ends_in_s"]) == (1, 30.0)
    (notice,) = run.named("notice")
    assert "rank 1 goes on after" in notice["text"]


def test_a_hang_at_the_same_place_every_time_is_tried_twice(run: Run) -> None:
    outcome = run(
        "def trouble(step):\n    step == 20 and rank == 0 and forever()\n", patience_s=0.2
    )
    assert (outcome.status, outcome.exit_code, outcome.attempts) == ("failed", 1, 2)
    assert "rank 0" in outcome.message
    assert "hung in step 20, forward and backward: it is in no collective (" in outcome.message


@pytest.mark.proof("faults")
def test_ranks_on_busy_cores_are_no_hang(run: Run) -> None:
    """Each core has three more to serve; steps take as long as they take.

    In `make test` a clock that jumps holds it: test_the_watch_stands_still_while_it_gets_no_core.
    """
    pids = []
    for _ in range(3 * (os.cpu_count() or 1)):
        if (pid := os.fork()) == 0:
            until_s = time.monotonic() + 4
            while time.monotonic() < until_s:
                pass
            os._exit(0)
        pids.append(pid)
    outcome = run("")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert outcome == RunOutcome("finished", 0, 1, "")
    assert run.named("hang") == []


def test_without_a_page_nobody_is_watched(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first test sees comes from the pages."""
    monkeypatch.setattr(hang_watch, "supports_watch_pages", lambda: False)
    body = "page = WatchPage.open({}) or __import__('unittest.mock').mock.MagicMock()\n"
    outcome = run(body + in_first("time.sleep(2)"))
    assert outcome == RunOutcome("finished", 0, 1, "")
    assert run.named("hang") == []


def test_a_page_tells_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = OwnedPage("test")
    assert not watched.read().live
    page = WatchPage.open({PAGE_VARIABLE: watched.path})
    assert page is not None
    page.record_collective_start("all_reduce", 4096)
    page.record_collective_start("send", 8)
    page.record_wait_start()
    page.record_part(PASSES)
    page.record_phases([Phase("proof", of=2, done=1), Phase("build")])
    told = watched.read()
    assert (told.live, told.begun, told.ended, told.last, told.last_bytes) == (
        True,
        2,
        0,
        "send",
        8,
    )
    assert (told.waits, told.part, told.phases) == (True, PASSES, "proof 1/2: build")
    assert told.changed_s == pytest.approx(time.monotonic(), abs=5)
    page.record_wait_end(1)
    assert (watched.read().ended, watched.read().waits) == (1, False)
    page.record_step_end(7)
    told = watched.read()
    assert (told.step, told.part, told.ended, told.changes) == (7, DATA, 2, 7)
    assert watched.answer() is None
    watched.ask()
    page.answer(page.stack_request, {"place": "x.py:1", "stacks": "é" * 100_000})
    found = watched.answer()
    assert found is not None
    assert found["place"] == "x.py:1"
    if (pid := os.fork()) == 0:
        page.record_step_end(99)
        os._exit(0)
    os.waitpid(pid, 0)
    assert watched.read().step == 7, "a process that a rank forked writes to nowhere"


HERE = PageSnapshot(True, 9, 1.0, 3, DATA, 7, 7, "all_reduce", 8, False, "")


def seen(
    rank: int, state: str = "S", answer: dict[str, Any] | None = None, **told: Any
) -> RankEvidence:
    answer = {} if answer is None else answer
    return RankEvidence(rank, 100 + rank, replace(HERE, **told), answer, {"State": state})


def test_where_all_wait_the_one_in_another_collective_is_at_fault() -> None:
    barrier = {"collective": "barrier", "by_user": True, "place": "mine.py:4"}
    inside = {"collective": "all_reduce", "by_user": False}
    found = blame_rank([seen(0, answer=inside, begun=8), seen(1, answer=barrier)])
    assert found is not None
    assert (found.of.rank, found.certain, found.collective) == (1, True, "all_reduce of 8 B")
    assert found.why == (
        "it is in torch.distributed.barrier (mine.py:4), rank 0 in all_reduce of 8 B"
    )
    other = {**barrier, "place": "mine.py:9"}
    ranks = [seen(0, answer=other), *(seen(rank, answer=barrier) for rank in (1, 2))]
    found = blame_rank(ranks)
    assert found is not None
    assert found.of.rank == 0
    behind = seen(1, begun=7, waits=True)
    found = blame_rank([seen(0, begun=8, waits=True, last="all_gather"), behind])
    assert found is not None
    assert (found.of.rank, found.certain) == (1, True)
    found = blame_rank([seen(0, begun=8, waits=True), behind])
    assert found is not None
    assert found.together, "two that are in the same one would go on: what was sent is lost"
    found = blame_rank([seen(rank, waits=True, changed_s=rank) for rank in range(3)])
    assert found is not None
    assert (found.of.rank, found.certain, found.together) == (2, False, True)


def test_a_debugger_is_no_hang() -> None:
    assert blame_rank([seen(0, waits=True), seen(1, state="t")]) is None


def test_a_rank_that_did_not_answer_but_waits_is_not_at_fault() -> None:
    ranks = [RankEvidence(0, 100, replace(HERE, waits=True), None, {"State": "S"}), seen(1)]
    found = blame_rank(ranks)
    assert found is not None
    assert found.of.rank == 1


def test_deadlines_are_learnt_apart() -> None:
    learnt = SilenceDeadlines()
    assert learnt.deadline_s(STEP) == 600
    assert learnt.deadline_s(FIRST) == 1800
    learnt.steps_s.extend([0.1] * 4)
    assert learnt.deadline_s(STEP) == 600, "four steps are not enough"
    learnt.steps_s.append(0.1)
    assert learnt.deadline_s(STEP) == 6
    learnt.learn_silence(["save"], 4.0)
    assert learnt.deadline_s("save") == 600, "it has not ended yet"
    learnt.learn_silence([STEP], 0.1)
    assert learnt.deadline_s("save") == 12
    learnt.learn_silence([STEP], 40.0, told=True)
    assert learnt.deadline_s(STEP) == 60, "it came back after that"
    assert learnt.patience_s(STEP, 60) == 60
    learnt.learn_silence([STEP], 50.0, in_data=True)
    assert learnt.patience_s(STEP, 60) == 150, "an epoch may begin as the run did"
    assert learnt.patience_s("validation", 60) == 1800
    learnt.learn_silence(["validation"], 1.0)
    learnt.learn_silence([STEP], 0.1)
    assert learnt.patience_s("validation", 60) == 60
    assert learnt.patience_s("save", 60) == 1800, "a disk may stand still, whatever it did before"


def test_the_watch_stands_still_while_it_gets_no_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that was asleep, or a whole tree that was stopped and goes on."""
    now_s = [0.0]
    monkeypatch.setattr(hang_watch.time, "monotonic", lambda: now_s[0])
    events = []
    one = HangWatch(tmp_path, lambda event, **fields: events.append(event), 1.0)
    (path,) = one.start_attempt(1)
    page = WatchPage.open({PAGE_VARIABLE: path})
    assert page is not None
    workers: Any = [SimpleNamespace(code=None, rank=0, pid=os.getpid())]
    for step in range(1, 30):
        now_s[0] += 0.11
        page.record_step_end(step)
        assert one.poll(workers) is None
    for _ in range(5):
        now_s[0] += 1000
        assert one.poll(workers) is None
    assert events == []
    for _ in range(20):
        now_s[0] += 1.0
        one.poll(workers)
    assert events == ["hang"]
    one.close()


@pytest.mark.parametrize(("told_s", "hangs"), [([0.03] * 6, True), ([0.03] * 4, False)])
def test_steps_that_pass_between_two_looks_are_learnt_from_the_runs_own_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told_s: list[float], hangs: bool
) -> None:
    """Eight steps of 30 ms, and a save among them, were over before the watch had seen five."""
    now_s = [0.0]
    monkeypatch.setattr(hang_watch.time, "monotonic", lambda: now_s[0])
    events = []
    tell = lambda event, **fields: events.append(event)  # noqa: E731
    one = HangWatch(tmp_path, tell, 1.0, lambda: told_s)
    (path,) = one.start_attempt(1)
    page = WatchPage.open({PAGE_VARIABLE: path})
    assert page is not None
    workers: Any = [SimpleNamespace(code=None, rank=0, pid=os.getpid())]
    page.record_step_end(8)
    for _ in range(100):
        now_s[0] += 0.11
        one.poll(workers)
    assert events == ["hang"] * hangs
    one.close()


@pytest.mark.parametrize("runs", [True, False])
def test_an_island_that_runs_and_waits_for_others_is_not_at_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: bool
) -> None:
    """They hang; it gives up by a deadline of its own. One that does not answer is told as ever."""
    now_s = [0.0]
    monkeypatch.setattr(hang_watch.time, "monotonic", lambda: now_s[0])
    events = []
    one = HangWatch(tmp_path, lambda event, **fields: events.append(event), 0.0, lambda: [0.03] * 6)
    (path,) = one.start_attempt(1)
    page = WatchPage.open({PAGE_VARIABLE: path})
    assert page is not None
    workers: Any = [SimpleNamespace(code=None, rank=0, pid=os.getpid())]
    for step in range(1, 40):
        now_s[0] += 0.11
        page.record_phases([Phase("merge with the other islands")] if step == 20 else [])
        page.record_step_end(step)
        one.poll(workers)
    page.record_phases([Phase("merge with the other islands")])
    asked = page.stack_request
    for _ in range(600):
        now_s[0] += 0.11
        one.poll(workers)
        if runs and page.stack_request != asked:
            asked = page.stack_request
            page.answer(asked, {"stacks": "", "place": "links.py:1"})
    assert events == ["hang"] * (not runs)
    one.close()


class OwnLoop:
    """A watched loop of the user's own after 29 steps of 0.11 s, by a clock of the test's."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, ranks: int = 1) -> None:
        self.now_s, self.events = 0.0, list[dict[str, Any]]()
        monkeypatch.setattr(hang_watch.time, "monotonic", lambda: self.now_s)
        self.watch = HangWatch(
            folder, lambda event, **fields: self.events.append(fields), math.inf, twice=True
        )
        paths = self.watch.start_attempt(ranks)
        self.pages: list[Any] = [WatchPage.open({PAGE_VARIABLE: path}) for path in paths]
        self.workers: Any = [
            SimpleNamespace(code=None, rank=rank, pid=os.getpid()) for rank in range(ranks)
        ]
        self.answered = [0] * ranks
        for step in range(1, 30):
            for page in self.pages:
                page.record_step_end(step)
            self.look()

    def look(self, answer: dict[str, Any] | None = None, later_s: float = 0.11) -> None:
        """Look so much later; ranks that are asked answer so. None of a person's own is ever ended."""
        self.now_s += later_s
        for rank, page in enumerate(self.pages):
            if answer is not None and page.stack_request != self.answered[rank]:
                self.answered[rank] = page.stack_request
                page.answer(page.stack_request, answer)
        assert self.watch.poll(self.workers) is None


@pytest.fixture
def own_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., OwnLoop]]:
    """Makes one of so many ranks."""
    made: list[OwnLoop] = []

    def make(ranks: int = 1) -> OwnLoop:
        made.append(OwnLoop(tmp_path, monkeypatch, ranks))
        return made[-1]

    yield make
    for one in made:
        one.watch.close()


@pytest.mark.parametrize(("stands", "hangs"), [(True, True), (False, False)])
def test_a_loop_of_ones_own_is_told_of_where_it_stood_at_the_same_lines_twice(
    own_loop: Callable[..., OwnLoop], *, stands: bool, hangs: bool
) -> None:
    """It may make collectives that no page tells of: its stacks say that it goes on. Told, it is
    left alone for as long as it likes."""
    loop = own_loop()
    for turn in range(2_500):
        loop.look({"stacks": "line 7" if stands else f"line {turn}"}, later_s=0.44)
    assert [event["rank"] for event in loop.events] == [0] * hangs
    assert [event["ends_in_s"] for event in loop.events] == [None] * hangs
    loop.pages[0].close()
    loop.now_s += 1.0
    loop.look()


@pytest.mark.parametrize(
    ("waits", "compiles", "deadline_s"),
    [(False, False, 600.0), (True, False, 6.1), (False, True, 1800.0)],
)
def test_what_a_loop_of_ones_own_does_between_two_calls_may_take_long(
    own_loop: Callable[..., OwnLoop], *, waits: bool, compiles: bool, deadline_s: float
) -> None:
    """Its own validation stops nobody, unless another rank waits for it in the next step."""
    loop = own_loop(2)
    if waits:
        loop.pages[1].record_collective_start("all_reduce", 64)
        loop.pages[1].record_wait_start()
    began_s = loop.now_s
    while not loop.events:
        answer = {"stacks": "", "between": True, "compiling": compiles}
        loop.look(answer, later_s=0.11 if waits else 0.44)
    assert (loop.events[0]["rank"], loop.events[0]["why"]) == (0, "it is in no collective")
    assert deadline_s <= loop.now_s - began_s < deadline_s + 2


def test_a_loop_of_ones_own_that_a_person_has_stopped_is_left_alone(
    own_loop: Callable[..., OwnLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-Z, or a scheduler that suspends a job: all ranks stand, and will be told to go on."""
    monkeypatch.setattr(hang_watch, "kernel_state", lambda pid: {"State": "T (stopped)"})
    loop = own_loop()
    for _ in range(400):
        loop.look()
    assert [(event["why"], event["ends_in_s"]) for event in loop.events] == [
        ("all processes are stopped, as by Ctrl-Z or a scheduler", None)
    ]


@pytest.mark.parametrize("part", [PASSES, SUM])
def test_a_host_that_waits_for_its_device_is_not_blamed(part: int) -> None:
    """Collectives are enqueued at once there: in none, it waits where Shoal reads a number."""
    reads = PageSnapshot(True, 9, 1.0, 36, part, 40, 40, "all_reduce", 8, False, "")
    own = {"collective": "barrier", "by_user": True, "place": "m.py:3"}
    ranks = [
        RankEvidence(rank, 1, reads, {"place": "x.py:1", "own": True}, {}) for rank in range(2)
    ]
    found = blame_rank([*ranks, RankEvidence(2, 1, replace(reads, part=PASSES), own, {})])
    assert found is not None
    assert (found.of.rank, found.certain) == (2, True)
    together = blame_rank(ranks)
    assert together is not None
    assert together.together
    loops = RankEvidence(2, 1, replace(reads, part=PASSES), {"place": "m.py:3", "own": False}, {})
    loads = RankEvidence(2, 1, replace(reads, part=DATA), {"place": "x.py:1", "own": True}, {})
    for busy in (loops, loads):
        found = blame_rank([*ranks, busy])
        assert found is not None
        assert found.of.rank == 2


def test_kinds_have_names_of_their_own() -> None:
    assert classify_phase(replace(HERE, phases="compile, first step")) == FIRST
    assert classify_phase(replace(HERE, phases="validation 3/10: read")) == "validation"
    assert classify_phase(replace(HERE, part=NOWHERE)) == "start"


def test_a_stack_says_which_collective_it_is_and_who_called() -> None:
    told = dump_stacks(threading.main_thread().ident or 0)
    assert (told["collective"], told["by_user"], told["compiling"]) == ("", False, False)
    assert "test_a_stack_says" in told["stacks"]
    frame: Any = frame_of("/x/torch/distributed/distributed_c10d.py", "barrier", frame_of("/me.py"))
    wrapper: Any = frame_of("/x/torch/distributed/c10d_logger.py", "wrapper", frame)
    assert find_blocking_collective(frame) == ("barrier", True)
    assert find_blocking_collective(wrapper) == ("barrier", True)
    ours = str(Path(hang_watch.__file__).parents[2] / "fabric" / "world.py")
    caller = frame_of(str(Path(ours).parents[1] / "trainer" / "run.py"))
    frame = frame_of("/x/torch/distributed/c10d.py", "all_reduce", frame_of(ours, "add", caller))
    assert find_blocking_collective(frame) == ("add", False)
    reads = frame_of("/x/torch/_tensor.py", "tolist", caller)
    assert [runs_own_code(one) for one in (reads, caller, frame_of("/me.py", "f", caller))] == [
        True,
        True,
        False,
    ]
    assert json.dumps(told)


def frame_of(file: str, name: str = "f", back: Any = None) -> Any:
    return SimpleNamespace(f_code=SimpleNamespace(co_filename=file, co_name=name), f_back=back)


def kept(*calls: str, group: str = "0:0,1,2") -> bytes:
    """What a page keeps: `all_reduce 4 a.py:1` each."""
    return "\n".join(f"{group}\t" + "\t".join(call.split(" ")) for call in calls).encode()


A, B = "all_reduce 4 /m.py:1", "all_reduce 4 /m.py:2"


def test_collectives_that_differ_are_named_with_both_ranks_and_both_lines() -> None:
    assert compare_collectives(3, {rank: kept(A, B) for rank in range(3)}) is None
    found = compare_collectives(3, {0: kept(A, B), 1: kept(A, B), 2: kept(B, A)})
    assert found is not None
    assert (found.rank, found.certain) == (2, True)
    assert "rank 0 calls all_reduce of 4 at m.py:1, rank 2 all_reduce of 4 at m.py:2" in found.line
    found = compare_collectives(3, {0: kept(B, A), 1: kept(A, B), 2: kept(A, B)})
    assert found is not None
    assert found.rank == 0, "the rest agrees"
    found = compare_collectives(3, {0: kept(A), 1: kept(A, B), 2: kept(A)})
    assert found is not None
    assert (found.rank, found.certain) == (1, True)
    assert "rank 0 calls none more, rank 1 all_reduce of 4 at m.py:2" in found.line
    found = compare_collectives(3, {0: kept(A), 1: kept("all_reduce 5 /m.py:1"), 2: kept(A)})
    assert found is not None
    assert found.certain
    found = compare_collectives(3, {0: kept(A, A), 1: kept(A, B), 2: kept(A, A)})
    assert found is not None
    assert (found.rank, found.certain) == (1, False), "it may be meant"
    ours = [
        "all_reduce 4 trainer/step/optimizer_step.py:1",
        "all_reduce 4 trainer/step/optimizer_step.py:2",
    ]
    assert compare_collectives(3, {0: kept(ours[0]), 1: kept(ours[1]), 2: kept(ours[0])}) is None
    assert compare_collectives(-3, {0: kept(A), 1: kept(A, B), 2: kept(A)}) is None, (
        "it may come yet"
    )
    found = compare_collectives(-3, {0: kept(A, B), 1: kept(A, A, B), 2: kept(A)})
    assert found is None
    found = compare_collectives(
        -3, {rank: kept(A, f"all_reduce {4 + rank} /m.py:1") for rank in range(2)}
    )
    assert found is not None
    assert found.certain
    parts = {0: kept(A, group="1:0,1"), 1: kept(A, group="1:0,1"), 2: kept(B, group="2:2")}
    assert compare_collectives(3, parts) is None, "another group's calls are its own business"


def test_a_page_keeps_the_calls_of_its_last_steps() -> None:
    watched = OwnedPage("test")
    page = WatchPage.open({PAGE_VARIABLE: watched.path})
    assert page is not None
    for step in range(1, 11):
        page.write_calls(step, step, f"{step}".encode())
    assert watched.calls(()) == {step: f"{step}".encode() for step in range(3, 11)}
    assert watched.calls(range(10)) == {10: b"10"}
    page.write_calls(11, 11, b"x" * 100_000)
    assert len(watched.calls(range(11))[11]) < 17_000
    page.write_calls(12, 12, kept(*[A] * 1000))
    cut = watched.calls(range(12))[12]
    assert 16_000 < len(cut) < 17_000
    assert compare_collectives(12, {0: cut, 1: kept(*[A] * 1000)}) is None, (
        "what had no room may be there"
    )
    found = compare_collectives(12, {0: cut, 1: kept(B, *[A] * 999)})
    assert found is not None
    assert not found.certain
