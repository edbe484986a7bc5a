"""`run.epochs`: a run that goes on, wherever it stopped, ends where one without a break would."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from proof_rows import chosen
from shoal.trainer.process import stop_signals
from shoal.trainer.process.stop_signals import install_stop_handlers

SAMPLES, BATCH, EPOCHS = 20, 8, 3  # steps of 8, 8 and 4: nine in all


class Rows:
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return row, row[:2] * 2


class Stream:
    """The same from front to back, with a state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self):
        while self.at < SAMPLES:
            self.at += 1
            yield Rows()[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def opened(folder: Path) -> shoal.Run:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run = shoal.parallelize(
        model, optimizer, lambda o, t: (o - t) ** 2, batch=BATCH, folder=folder, keep=99
    )
    run.restore()
    return run


class Killed(Exception):
    pass


def script(folder: Path, data, *, save_after: int = 0, die_after: int = 0) -> tuple[int, list[int]]:
    """The README's loop; it may save at a step, and be killed after one."""
    run = opened(folder)
    seen: list[int] = []
    try:
        for epoch in run.epochs(EPOCHS):
            seen.append(epoch)
            for batch in run.loader(data):
                run.step(batch)
                if run.step_count == save_after:
                    run.save()
                if run.step_count == die_after:
                    raise Killed
            run.save()
    except Killed:
        pass
    weights.append(run.state_dict()["weight"])
    steps = run.step_count
    run.close()
    return steps, seen


weights: list[torch.Tensor] = []


@functools.cache
def unbroken(data) -> torch.Tensor:
    """Weights of a run without a break, once for all tests."""
    with tempfile.TemporaryDirectory() as folder:
        assert script(Path(folder), data()) == (9, [0, 1, 2])
    return weights[-1]


BROKEN: list[tuple[int, int, list[int]]] = [
    (4, 4, [1, 2]),  # in the middle of epoch 1
    (4, 5, [1, 2]),  # a step after the save is lost
    (3, 3, [1, 2]),  # at the last step of epoch 0, inside of its loop
    (6, 6, [2]),
    (0, 7, [2]),  # by the save at the end of epoch 1
    (9, 9, []),  # everything is trained
]
KEPT = [(Stream, 4, 5), (Stream, 3, 3), (Rows, 4, 5), (Rows, 0, 7), (Rows, 9, 9)]
"""A stream's own state counts inside of an epoch; between epochs both have none."""


@pytest.mark.parametrize(
    ("data", "save", "die", "left"),
    chosen([(data, *row) for data in (Rows, Stream) for row in BROKEN], KEPT),
)
def test_a_resumed_run_ends_as_one_without_a_break(
    tmp_path: Path, data, save: int, die: int, left: list[int]
) -> None:
    script(tmp_path / "cut", data(), save_after=save, die_after=die)
    assert script(tmp_path / "cut", data()) == (9, left)
    assert torch.equal(weights[-1], unbroken(data))
    for _ in range(2):  # and it trains no more, however often it is started
        assert script(tmp_path / "cut", data()) == (9, [])
    assert torch.equal(weights[-1], unbroken(data))


def stopped(folder: Path, data, at: int, *, inside: bool) -> tuple[int, list[int]]:
    """The page's loop, asked to stop in its step `at`; it saves inside of its epochs, or after."""
    run = opened(folder)
    before = signal.getsignal(signal.SIGUSR1)
    run.stop_on_signals()
    seen: list[int] = []
    for epoch in run.epochs(EPOCHS):
        seen.append(epoch)
        for batch in run.loader(data):
            if run.step_count == at - 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            run.step(batch)
            if run.stopping:
                break
        if inside:
            run.save()
    run.save()
    weights.append(run.state_dict()["weight"])
    run.close()
    assert signal.getsignal(signal.SIGUSR1) == before
    return run.step_count, seen


STOPS = [(2, [0], [0, 1, 2], True), (5, [0, 1], [1, 2], False), (6, [0, 1], [2], False)]


@pytest.mark.parametrize(
    ("data", "at", "first", "left", "inside"),
    chosen(
        [(data, *row) for data in (Rows, Stream) for row in STOPS],
        [(Rows, 2), (Stream, 5), (Rows, 6)],
    ),
)
def test_a_stop_by_a_signal_costs_nothing(
    tmp_path: Path, data, at: int, first: list[int], left: list[int], inside: bool
) -> None:
    """The rest of an epoch that a stop has cut short is trained by the next start."""
    assert stopped(tmp_path / "cut", data(), at, inside=inside) == (at, first)
    assert stopped(tmp_path / "cut", data(), -1, inside=inside) == (9, left)
    assert torch.equal(weights[-1], unbroken(data))


def test_a_second_ctrl_c_ends_a_loop_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """An echo of the first does not; a thread that hears no signals says so, and goes on."""
    asked, told = [], []
    put_back = install_stop_handlers(lambda: asked.append(1), told.append)
    try:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        monkeypatch.setattr(stop_signals, "ECHO_S", -1.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        put_back()
    assert asked == [1, 1, 1]
    thread = threading.Thread(target=install_stop_handlers, args=(asked.clear, told.append))
    thread.start()
    thread.join()
    assert [line.partition(":")[0] for line in told] == ["run.stop_on_signals"]


TWO_RANKS = """
import os, signal, sys, torch, shoal

class Rows:
    def __len__(self):
        return 20
    def __getitem__(self, index):
        if index == 7 and os.environ["RANK"] == "1" and not os.path.exists("asked"):
            open("asked", "w").close()
            os.kill(os.getpid(), signal.SIGUSR1)
        return torch.ones(4) * index, torch.ones(2)

model, my_dataset = torch.nn.Linear(4, 2), Rows()
run = shoal.parallelize(
    model, torch.optim.SGD(model.parameters(), lr=1e-4), lambda o, t: (o - t) ** 2,
    batch=8, micro_batch=2, folder="run", layout="ddp",
)
run.restore()
"""


def test_the_pages_loop_is_stopped_by_a_signal_to_one_rank(tmp_path: Path, programs: Any) -> None:
    """docs/start/cluster.md, as it stands there: all ranks save, and the rest is trained afterwards."""
    page = (Path(__file__).parents[2] / "docs" / "start" / "cluster.md").read_text()
    (loop,) = re.findall(r"```python\n(run\.stop_on_signals.*?)```", page, re.DOTALL)
    (tmp_path / "loop.py").write_text(TWO_RANKS + loop)
    for code in (143, 0):
        ended = programs.world(2, "loop.py", cwd=tmp_path)
        assert [one.returncode for one in ended] == [code] * 2, ended
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [row["step"] for row in steps] == list(range(1, 10))
    places = [place for row in steps for place in range(*row["samples"])]
    assert places == list(range(60))


def test_epochs_of_ones_own_batches(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They end with their saves; one that was left in the middle is begun again, with a line."""
    batches = [torch.utils.data.default_collate([Rows()[n]] * 8) for n in range(3)]

    def script(stop: int) -> tuple[int, int]:
        with opened(tmp_path) as run:
            for _ in run.epochs(EPOCHS):
                for batch in batches:
                    run.step(batch)
                    if run.step_count == stop:
                        run.save()
                        return run.epoch, run.step_count
                run.save()
            return run.epoch, run.step_count

    assert script(5) == (1, 5)
    greeting = len(caplog.messages)
    assert greeting == 2
    assert script(-1) == (3, 11)  # 5, and two whole epochs
    assert [line for line in caplog.messages[2 * greeting :] if "resumed from" not in line] == [
        "shoal: epoch 1 is begun again, and 2 of its 3 steps are repeated: batches of your own "
        "cannot be entered in the middle; run.loader's can"
    ]
    assert script(-1) == (3, 11)


def test_run_epoch_counts_without_run_epochs(tmp_path: Path) -> None:
    run, data = opened(tmp_path), Rows()
    seen = [run.epoch]
    for _ in range(2):
        for batch in run.loader(data):
            run.step(batch)
        seen.append(run.epoch)
    assert seen == [0, 1, 2]
    run.save()
    run.close()
    assert opened(tmp_path).epoch == 2


def test_a_loop_that_is_left_early_is_an_epoch(tmp_path: Path) -> None:
    """As with `range`: so many turns, however long they are."""
    run, data, turns = opened(tmp_path), Rows(), []
    for epoch in run.epochs(EPOCHS):
        turns.append(epoch)
        for batch in run.loader(data):
            run.step(batch)
            break
    assert turns == [0, 1, 2]


def test_a_run_is_a_context(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        run.step(next(iter(run.loader(Rows()))))
    with pytest.raises(shoal.ConfigError, match=r"run\.step was called after run\.close"):
        run.step(torch.ones(1))
