"""The map-style loader: same bits for any rank, degree, workers; its state is one integer."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from shoal.base.errors import ClusterError, ConfigError, UserError
from shoal.data.loading import read_retries
from shoal.data.loading import worker_pool as crews
from shoal.data.loading.loader import Loader


class Numbers(Dataset[Any]):
    """Sample i is i."""

    draws_nothing = True

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Augmented(Numbers):
    """Sample i with noise from all three generators."""

    draws_nothing = False

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = [random.random(), np.random.rand(), torch.rand(()).item()]
        return torch.tensor([float(index), *noise], dtype=torch.float64)


def noisy_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    """Like masked language modelling: draws while joining."""
    return torch.stack(samples) + torch.rand(())


def run(loader: Any, epochs: int = 1) -> list[Any]:
    """Every micro-batch: (epoch, index, start, stop, ids, value)."""
    out = []
    for _ in range(epochs):
        for step in loader:
            for m, ids in zip(step.micro_batches, step.sample_ids, strict=True):
                out.append((step.epoch, m.index, m.start, m.stop, ids, m.value.tolist()))
    return out


def test_one_epoch_holds_every_sample_once_and_the_next_another_order() -> None:
    loader = Loader(Numbers(11), batch=4, micro_batch=2, seed=3)
    epochs = [[v for b in loader for value in b.values for v in value.tolist()] for _ in range(3)]
    assert [sorted(e) for e in epochs] == [list(range(11))] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    assert len(loader) == 3
    assert loader.position == 33


def test_steps_say_where_they_are() -> None:
    loader = Loader(Numbers(11), batch=4, micro_batch=2, seed=3)
    list(loader)
    steps = list(loader)
    assert [(s.position, s.next_position, s.total, s.epoch, len(s)) for s in steps] == [
        (11, 15, 2, 1, 2),
        (15, 19, 2, 1, 2),
        (19, 22, 2, 1, 2),
    ]
    last = steps[-1]
    assert [m.value.tolist() for m in last.micro_batches] == [list(i) for i in last.sample_ids]
    assert len(last.sample_ids[1]) == 1


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_ranks_together_are_one_process(degree: int) -> None:
    alone = run(Loader(Augmented(23), batch=12, micro_batch=2, seed=1), epochs=2)
    ranks = [
        run(Loader(Augmented(23), batch=12, micro_batch=2, seed=1, rank=r, degree=degree), 2)
        for r in range(degree)
    ]
    merged = sorted((m for rank in ranks for m in rank), key=lambda m: m[2])
    assert merged == alone


def test_a_rank_without_work_still_gets_the_step() -> None:
    loader = Loader(Numbers(9), batch=8, micro_batch=2, seed=0, rank=3, degree=4)
    steps = list(loader)
    assert [len(s) for s in steps] == [1, 0]
    assert (steps[1].total, steps[1].position, steps[1].next_position) == (1, 8, 9)
    assert steps[1].values == []
    assert loader.position == 9


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_bits_do_not_depend_on_workers(workers: int) -> None:
    settings: dict[str, Any] = dict(batch=8, micro_batch=2, seed=5, degree=2, rank=1)
    settings["collate"] = noisy_collate
    want = run(Loader(Augmented(21), **settings), epochs=2)
    torch.manual_seed(99)
    assert run(Loader(Augmented(21), workers=workers, **settings), epochs=2) == want


@pytest.mark.parametrize("stop_after", [1, 2, 4, 5])
def test_resume_gives_the_rest_on_any_layout(stop_after: int) -> None:
    whole = run(Loader(Augmented(22), batch=6, micro_batch=2, seed=2), epochs=2)
    first = Loader(Augmented(22), batch=6, micro_batch=2, seed=2)
    position = 0
    for _ in range(2):
        for step in first:
            stop_after -= 1
            position = step.next_position
            if stop_after <= 0:
                break
        if stop_after <= 0:
            break
    state = first.state()
    assert state == {"position": position, "samples": 22}
    rest: list[Any] = []
    for rank in range(3):
        again = Loader(Augmented(22), batch=6, micro_batch=2, seed=2, rank=rank, degree=3)
        again.restore(state)
        rest += run(again, epochs=2 - position // 22)
    assert sorted(rest, key=lambda m: m[2]) == [m for m in whole if m[2] >= position]


def test_position_moves_when_the_step_is_handed_out() -> None:
    loader = Loader(Numbers(10), batch=4, micro_batch=4, seed=0)
    assert [loader.position for _ in loader] == [4, 8, 10]


def test_setting_the_position_ends_a_running_iteration() -> None:
    loader = Loader(Numbers(10), batch=2, micro_batch=2, seed=0)
    seen = []
    for step in loader:
        seen.append(step.position)
        if step.position == 4:
            loader.position = 2
    assert seen == [0, 2, 4]
    assert [s.position for s in loader] == [2, 4, 6, 8]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_models_own_draws_are_not_disturbed(workers: int) -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    want = (random.random(), np.random.rand(), torch.rand(()).item())
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    loader = Loader(Augmented(6), batch=2, micro_batch=2, seed=0, workers=workers)
    for _ in loader:
        pass
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == want


class Broken(Numbers):
    """Sample 3 cannot be read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 3:
            raise OSError("bad image")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_names_epoch_and_sample(workers: int) -> None:
    loader = Loader(Broken(6), batch=2, micro_batch=1, seed=0, workers=workers, shuffle=False)
    with pytest.raises(UserError) as caught:
        list(loader)
    assert str(caught.value) == ("data.source: sample 3 (epoch 0, position 3): OSError: bad image")
    assert "__getitem__" in caught.value.__notes__[0]
    assert loader.position == 2  # the step that failed was not handed out
    assert multiprocessing.active_children() == []


def test_samples_that_cannot_be_joined() -> None:
    ragged = [torch.zeros(2), torch.zeros(3)]
    with pytest.raises(UserError) as caught:
        list(Loader(ragged, batch=2, micro_batch=2, seed=0))
    assert str(caught.value).startswith(
        "collate (data.collate): joining positions 0 … 1 (epoch 0); unequal samples need collate=… "
        "of run.loader (data.collate=pkg.mod:function): RuntimeError: stack expects"
    )


def test_arrays_stay_arrays_in_workers() -> None:
    values = [
        type(next(iter(Loader([1, 2], batch=2, micro_batch=2, seed=0, workers=w, collate=np.array))
             ).micro_batches[0].value)
        for w in (0, 1)
    ]  # fmt: skip
    assert values == [np.ndarray, np.ndarray]


class Suicidal(Numbers):
    """Sample 1 kills the process that reads it, as the kernel does when memory runs out."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_worker_that_is_killed_again_and_again_is_named() -> None:
    loader = Loader(Suicidal(4), batch=1, micro_batch=1, seed=0, workers=1, shuffle=False)
    told: list[str] = []
    loader.tell = told.append
    with pytest.raises(ClusterError) as caught:
        list(loader)
    assert re.fullmatch(
        r"data.workers = 1: loader worker 0 \(pid \d+\) at sample 1 \(position 1\) was killed by "
        r"SIGKILL; out of memory or shared memory is the usual cause: fewer data.workers, .*",
        str(caught.value),
    )
    assert len(told) == crews.MADE_AGAIN
    assert multiprocessing.active_children() == []


class Mortal(Augmented):
    """Some samples, drawn at random, kill or stop the process that reads them, once each."""

    def __init__(self, samples: int, folder: Path, number: int, at: tuple[int, ...]) -> None:
        super().__init__(samples)
        self.folder, self.number, self.at = folder, number, at

    def __getitem__(self, index: int) -> Any:
        mark = self.folder / f"{index}"
        if index in self.at and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), self.number)
        return super().__getitem__(index)


def test_a_dead_worker_is_made_again_and_its_samples_come_in_their_order(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"batch": 4, "micro_batch": 2, "seed": 3}
    want = run(Loader(Augmented(21), **settings), epochs=2)
    told: list[str] = []
    loader = Loader(Mortal(21, tmp_path, signal.SIGKILL, (0, 7, 20)), workers=2, **settings)
    loader.tell = told.append
    assert run(loader, epochs=2) == want, "bits and order, of each sample once"
    assert {one.name for one in tmp_path.iterdir()} == {"0", "7", "20"}, "each killed a process"
    # All are made again at once, so two that died before anybody looked are one line.
    assert 1 <= len(told) <= 3
    assert all(re.search(r"at sample (0|7|20) .*killed by SIGKILL; they are", one) for one in told)
    assert multiprocessing.active_children() == []


def test_a_hung_worker_is_named_then_killed_and_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crews, "LOOK_S", 0.1)
    monkeypatch.setattr(crews, "SILENT_S", 0.3)
    monkeypatch.setattr(crews, "SILENCES", 0)
    settings: dict[str, Any] = {"batch": 4, "micro_batch": 2, "seed": 3}
    want = run(Loader(Augmented(13), **settings), epochs=1)
    told: list[str] = []
    loader = Loader(Mortal(13, tmp_path, signal.SIGSTOP, (7,)), workers=2, **settings)
    loader.tell = told.append
    assert run(loader, epochs=1) == want
    # On a busy machine one that only begins may be silent for as long.
    told = [line for line in told if "at sample 7" in line]
    pid = re.search(r"pid (\d+)", told[0])
    assert pid is not None
    assert re.search(rf"pid {pid[1]}\) at sample 7 .* has not answered for 0 s$", told[0])
    assert re.search(rf"pid {pid[1]}\) at sample 7 .* s and is killed; they are made", told[1])


def test_a_death_is_told_where_a_sample_is_waited_for_and_nowhere_else(tmp_path: Path) -> None:
    """torch's own handler raises in the middle of whatever the trainer does."""
    data = Mortal(12, tmp_path, signal.SIGKILL, (7,))
    loader = Loader(data, batch=2, micro_batch=2, seed=0, workers=1, shuffle=False)
    told: list[str] = []
    loader.tell = told.append
    steps = iter(loader)
    assert [next(steps).position for _ in range(2)] == [0, 2]  # then step 6 is read ahead
    until_s = time.monotonic() + 20
    while not (tmp_path / "7").exists() and time.monotonic() < until_s:
        time.sleep(0.01)
    time.sleep(0.2)  # a step is trained while the worker dies
    assert told == []
    assert [one.position for one in steps] == [4, 6, 8, 10]
    assert len(told) == 1


class Flaky(Augmented):
    """Reads fail so often before they go well."""

    def __init__(self, samples: int, fails: int, error: Exception) -> None:
        super().__init__(samples)
        self.fails, self.error, self.tries = fails, error, 0

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)  # which draws
        if index == 3:
            self.tries += 1
            if self.tries <= self.fails:
                raise self.error
        return sample


@pytest.mark.parametrize("workers", [0, 1])
def test_a_read_error_that_passes_is_tried_again(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_retries, "PAUSES_S", (0.01, 0.01, 0.01))
    settings: dict[str, Any] = {"batch": 4, "micro_batch": 2, "seed": 3}
    want = run(Loader(Augmented(9), **settings), epochs=2)
    error = OSError(errno.EIO, "Input/output error")
    assert run(Loader(Flaky(9, 3, error), workers=workers, **settings), epochs=2) == want
    with pytest.raises(ClusterError, match=r"sample 3 .*Input/output error"):
        run(Loader(Flaky(9, 50, error), workers=workers, **settings), epochs=1)


def test_an_error_that_stays_is_not_waited_for() -> None:
    data = Flaky(9, 50, FileNotFoundError(errno.ENOENT, "no such file"))
    with pytest.raises(UserError, match=r"sample 3 "):
        run(Loader(data, batch=4, micro_batch=2, seed=3), epochs=1)
    assert data.tries <= 3, "in the watch for what it draws, but without a pause"


PARENT = """
import os, pathlib, sys, time
from shoal.data.loading.loader import Loader

class Slow:
    def __len__(self): return 8
    def __getitem__(self, index):
        pathlib.Path(sys.argv[1], str(os.getpid())).touch()
        time.sleep(120)

next(iter(Loader(Slow(), batch=4, micro_batch=1, seed=0, workers=2)))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="parent-death signal is Linux's")
def test_workers_die_with_a_killed_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)])
    try:
        deadline = time.monotonic() + 60
        while len(pids := [int(p.name) for p in tmp_path.iterdir()]) < 2:
            assert time.monotonic() < deadline
            assert parent.poll() is None
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 60  # torch's own watchdog would take until the item is read
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """True for a process that is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"batch": 0}, "train.batch = 0: must be at least 1; try: train.batch=1"),
        ({"micro_batch": 0}, "train.micro_batch = 0: must be at least 1"),
        ({"workers": -1}, "data.workers = -1: must be at least 0"),
        ({"rank": 2, "degree": 2}, "rank = 2: must be 0 … 1, the data-parallel degree"),
        ({"position": -1}, "loader position = -1: must be at least 0 samples"),
    ],
)
def test_impossible_numbers(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Loader(Numbers(4), **{"batch": 2, "micro_batch": 1, "seed": 0, **wrong})
    assert str(caught.value).startswith(text)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.source: the dataset \(list\) has 0 samples"):
        Loader([], batch=2, micro_batch=1, seed=0)


def test_another_datasets_state_is_refused() -> None:
    state = Loader(Numbers(10), batch=2, micro_batch=1, seed=0).state()
    other = Loader(Numbers(12), batch=2, micro_batch=1, seed=0)
    with pytest.raises(ConfigError, match="has 12 samples, the checkpoint was made with 10"):
        other.restore(state)
    other.restore({"position": 4})
    assert other.position == 4
