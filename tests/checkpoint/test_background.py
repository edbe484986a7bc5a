"""Saving beside training, in one process: what is saved, what waits, what fails, what a kill leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import (
    RECORD,
    Heard,
    alone,
    assert_same,
    pieces,
    save_step,
    state,
    wanted_all,
    whole,
)

from shoal.base.errors import ClusterError, ConfigError
from shoal.base.plans.tensor_shards import Shard
from shoal.checkpoint.agreement.rank_pieces import split_pieces
from shoal.checkpoint.format import folders
from shoal.checkpoint.format.listing import list_checkpoints, read_manifest, verify
from shoal.checkpoint.load import read
from shoal.checkpoint.save import host_copy, shard_writer
from shoal.checkpoint.save.background_save import BackgroundSaver
from shoal.checkpoint.save.write import Piece

DEADLINE_S = 20.0


@pytest.fixture
def saver() -> Iterator[BackgroundSaver]:
    made = BackgroundSaver(alone(), Heard(), deadline_s=DEADLINE_S)
    yield made
    made.close()


def heard(saver: BackgroundSaver) -> Heard:
    assert isinstance(saver._emit, Heard)
    return saver._emit


def start(saver: BackgroundSaver, root: Path, step: int, **more: Any) -> Any:
    return saver.start(root, step, pieces(state(step)), RECORD, keep=9, **more)


def loaded(path: Path) -> dict[str, torch.Tensor]:
    return read.load(path, wanted_all(read_manifest(path)))


class Gate:
    """A writer that waits to be let through; counts how many are in it at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, opened: bool) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()
        self.inside = self.most = 0
        self.threads: set[str] = set()
        real = shard_writer.write_file
        if opened:
            self.open.set()

        def write_file(*arguments: Any) -> Any:
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.threads.add(threading.current_thread().name)
            self.entered.set()
            assert self.open.wait(DEADLINE_S)
            try:
                return real(*arguments)
            finally:
                self.inside -= 1

        monkeypatch.setattr(shard_writer, "write_file", write_file)


def test_what_changes_after_start_is_not_saved(
    saver: BackgroundSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, opened=False)
    full = torch.arange(48, dtype=torch.float32).view(6, 8)
    turned = torch.arange(12.0).view(3, 4).t()
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    boxes = (((0, 2), (0, 8)), ((2, 6), (4, 8)), ((2, 6), (0, 4)))
    flat = torch.cat([full[a:b, c:d].reshape(-1) for (a, b), (c, d) in boxes])
    sources = {**state(5), "turned": turned, "image": image}
    expected = {**{n: t.clone() for n, t in sources.items()}, "cut": full.clone()}
    record: dict[str, Any] = {"lr": [0.1]}
    offered = [*pieces(sources), Piece(Shard("cut", (6, 8), "float32", boxes), flat)]
    assert saver.start(tmp_path, 5, offered, record, keep=1) is None
    for tensor in (*sources.values(), flat):
        tensor.view(-1).view(torch.uint8).fill_(1) if tensor.is_contiguous() else tensor.zero_()
    record["lr"][0] = 0.2
    assert gate.entered.wait(DEADLINE_S)
    assert saver.poll() is None, "it cannot be known yet"
    gate.open.set()
    outcome = saver.wait()
    assert outcome is not None
    assert outcome.saved is not None
    assert verify(outcome.saved.path) == []
    assert_same(loaded(outcome.saved.path), expected)
    assert read_manifest(outcome.saved.path).record == {"lr": [0.1]}
    assert gate.threads == {"shoal-saves_0"}
    assert [name for name, _ in heard(saver).events] == ["checkpoint_saved"]
    assert saver.wait() is None, "an outcome is given once"


def test_a_start_waits_for_the_save_before_it(
    saver: BackgroundSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, opened=True)
    earlier = [start(saver, tmp_path, step) for step in range(6)]
    assert saver.wait() is not None
    assert gate.most == 1
    assert [outcome.step for outcome in earlier[1:]] == [0, 1, 2, 3, 4]
    assert earlier[0] is None
    assert all(outcome.saved for outcome in earlier[1:])
    assert [found.step for found in list_checkpoints(tmp_path)] == [5, 4, 3, 2, 1, 0]
    for found in list_checkpoints(tmp_path):
        assert_same(loaded(found.path), state(found.step))


def test_listeners_hear_in_the_training_thread(tmp_path: Path) -> None:
    threads = []
    saver = BackgroundSaver(alone(), lambda *_, **__: threads.append(threading.get_ident()))
    start(saver, tmp_path, 1)
    saver.close()
    assert threads == [threading.get_ident()]


def test_host_memory_is_used_again() -> None:
    host = host_copy.HostCopy()
    first = [
        block.data.data_ptr()
        for block in host.copy_blocks(list(split_pieces(pieces(state(1)), {}).values()))
    ]
    taken = host.copy_blocks(list(split_pieces(pieces(state(2)), {}).values()))
    assert [block.data.data_ptr() for block in taken] == first
    smaller = host.copy_blocks(list(split_pieces(pieces({"w": torch.ones(3)}), {}).values()))
    assert smaller[0].data.data_ptr() in first
    assert all(pointer % host_copy.ALIGN_BYTES == 0 for pointer in first if pointer)


def test_offers_that_change_are_agreed_anew(saver: BackgroundSaver, tmp_path: Path) -> None:
    states = [
        {"w": torch.ones(4), "momentum": torch.full((3,), 1.0)},
        {"w": torch.full((4,), 2.0), "momentum": torch.full((3,), 2.0), "late": torch.ones(2)},
        {"w": torch.full((4,), 3.0).double(), "late": torch.full((2,), 3.0)},
        {"w": torch.full((4,), 4.0).double(), "late": torch.full((2,), 4.0)},
    ]
    for step, tensors in enumerate(states):
        saver.start(tmp_path, step, pieces(tensors), {}, keep=9)
    outcome = saver.wait()
    assert outcome is not None
    assert outcome.saved is not None
    for step, tensors in enumerate(states):
        assert_same(loaded(tmp_path / f"step-{step}"), tensors)


def test_pieces_of_every_form_save_after_save(saver: BackgroundSaver, tmp_path: Path) -> None:
    """After the first save only bytes are copied: slices, parameters, other strides or shapes."""
    boxes = (((2, 6), (4, 8)), ((0, 2), (0, 8)), ((2, 6), (0, 4)))
    for step in range(4):
        full = torch.arange(48.0).view(6, 8) * step
        flat = torch.cat([full[a:b, c:d].reshape(-1) for (a, b), (c, d) in boxes])
        w = torch.nn.Parameter(torch.full((4, 3), float(step)))
        turned = torch.arange(12.0).view(3, 4).t() + step
        expected = {"cut": full, "w": w.detach().clone(), "turned": turned.clone()}
        offered = [
            Piece(Shard("cut", (6, 8), "float32", boxes), flat.view(2, 24) if step == 2 else flat),
            Piece(whole("w", w), w),
            Piece(whole("turned", turned), turned.contiguous() if step == 3 else turned),
        ]
        saver.start(tmp_path, step, offered, {}, keep=9)
        for tensor in (flat, w.data, turned):
            tensor.zero_()
        outcome = saver.wait()
        assert outcome is not None
        assert outcome.saved is not None
        assert_same(loaded(outcome.saved.path), expected)


def test_ties_that_change_are_agreed_anew(saver: BackgroundSaver, tmp_path: Path) -> None:
    w = torch.ones(4)
    saver.start(tmp_path, 1, pieces({"w": w}), {}, keep=9)
    saver.start(tmp_path, 2, pieces({"w": w}), {}, keep=9, aliases={"v": "w"})
    saver.wait()
    assert read_manifest(tmp_path / "step-1").aliases == {}
    assert read_manifest(tmp_path / "step-2").aliases == {"v": "w"}


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize(
    ("offered", "record", "text"),
    [
        (
            [Piece(whole("w", torch.ones(4)), torch.ones(3))],
            {},
            "checkpoints/step-5 was not saved: w: the data has 3 elements of float32, its shard 4 "
            "of float32; older checkpoints are as they were",
        ),
        (pieces({"w": torch.ones(1)}) * 2, {}, "step-5 was not saved: w is offered twice by one"),
        (pieces(state(5)), {"x": float("nan")}, "not saved: the run's record is not plain JSON"),
    ],
)
def test_what_is_wrong_with_the_state_is_an_outcome(
    saver: BackgroundSaver, tmp_path: Path, offered: Any, record: Any, text: str, after: int
) -> None:
    root = tmp_path / "checkpoints"
    for step in range(after):
        start(saver, root, step)
    saver.wait()
    saver.start(root, 5, offered, record, keep=9)
    outcome = saver.wait()
    assert outcome is not None
    assert text in str(outcome.failure)
    assert outcome.saved is None
    assert len(heard(saver).named("checkpoint_failed")) == 1
    start(saver, root, 6)
    again = saver.wait()
    assert again is not None
    assert again.saved is not None
    assert_same(loaded(root / "step-6"), state(6))
    with pytest.raises(ConfigError, match=r"checkpoint.keep = 0: at least 1; try"):
        saver.start(root, 7, [], {}, keep=0)


def test_a_save_that_does_not_end_is_given_up_with_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, opened=False)
    saver = BackgroundSaver(alone(), Heard(), deadline_s=0.01)
    start(saver, tmp_path / "checkpoints", 5)
    assert gate.entered.wait(DEADLINE_S)
    text = (
        "rank 0: checkpoints/step-5 is still being written after 0.01 s: a disk or another rank "
        "does not answer; older checkpoints are as they were: start the run again"
    )
    for call in (saver.wait, saver.close, lambda: start(saver, tmp_path / "checkpoints", 6)):
        with pytest.raises(ClusterError) as caught:
            call()
        assert str(caught.value) == text
    gate.open.set()
    saver.deadline_s = DEADLINE_S
    outcome = saver.close()
    assert outcome is not None
    assert outcome.saved is not None
    assert os.listdir(tmp_path / "checkpoints") == ["step-5"]


def test_a_thread_that_breaks_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr("shoal.checkpoint.save.write._find_existing", broken)
    saver = BackgroundSaver(alone(), Heard())
    start(saver, tmp_path / "checkpoints", 5)
    for _ in range(2):
        with pytest.raises(ClusterError) as caught:
            saver.wait()
        assert str(caught.value) == (
            "rank 0: checkpoints/step-5 was not saved, and what the other ranks have is not known: "
            "RuntimeError: Connection closed by peer; start the run again"
        )
    outcome = saver.poll()
    assert outcome is not None
    assert outcome.failure is not None
    saver._at_exit()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root with CAP_SYS_ADMIN")
    yield disk
    subprocess.run(["umount", str(disk)], check=True, timeout=20)


def test_a_disk_that_fills_beside_training(
    saver: BackgroundSaver, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = small_disk / "checkpoints"
    start(saver, root, 1)
    (small_disk / "ballast").write_bytes(bytes(1 << 20))
    # Somebody else takes the space after the check.
    monkeypatch.setattr(folders, "check_space", lambda *_: None)
    big = {"w": torch.ones(768, 512)}
    saver.start(root, 2, pieces(big), {}, keep=1)
    outcome = saver.wait()
    assert outcome is not None
    assert "rank-0.safetensors: No space left on device; older checkpoints" in str(outcome.failure)
    assert os.listdir(root) == ["step-1"]
    assert_same(loaded(root / "step-1"), state(1))
    (small_disk / "ballast").unlink()
    saver.start(root, 3, pieces(big), {}, keep=1)
    saver.wait()
    assert os.listdir(root) == ["step-3"]
    told = [name for name, _ in heard(saver).events]
    assert told == ["checkpoint_saved", "checkpoint_failed", "checkpoint_saved"]


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child, which never returns to pytest; gives its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    until_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < until_s:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise TimeoutError("the saving child did not end")


@pytest.mark.parametrize(
    ("call", "number"),
    [("write", 1), ("write", 2), ("write", 5), ("fsync", 1), ("fsync", 3), ("rename", 1)],
)
def test_a_kill_beside_training_leaves_the_older_one(
    tmp_path: Path, call: str, number: int
) -> None:
    """SIGKILL in the second thread's system call, while the training thread computes."""
    root = tmp_path / "checkpoints"
    save_step(root, 1)

    def train_and_die() -> None:
        real, seen = getattr(os, call), 0

        def deadly(*arguments: Any) -> Any:
            nonlocal seen
            seen += threading.current_thread().name == "shoal-saves_0"
            if seen == number:
                if call == "write":
                    real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(DEADLINE_S)
            return real(*arguments)

        setattr(os, call, deadly)
        start(BackgroundSaver(alone(), Heard()), root, 2)
        while True:
            time.sleep(0.001)

    assert os.WTERMSIG(in_child(train_and_die)) == signal.SIGKILL
    assert [found.step for found in list_checkpoints(root)] == [1]
    newest = read.open_newest(root, wanted_all, alone(), Heard())
    assert newest is not None
    assert_same(newest.tensors, state(1))
    saver = BackgroundSaver(alone(), Heard())
    start(saver, root, 2)
    saver.close()
    assert sorted(os.listdir(root)) == ["step-1", "step-2"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_only_queues_the_copy(saver: BackgroundSaver, tmp_path: Path) -> None:
    source = torch.randn(1 << 22, device="cuda")
    for step in range(3):
        expected = source.cpu()
        saver.start(tmp_path, step, pieces({"w": source}), {}, keep=9)
        assert saver._host._flat.is_pinned()
        source.add_(1.0)  # queued behind the copy
        outcome = saver.wait()
        assert outcome is not None
        assert outcome.saved is not None
        assert torch.equal(loaded(outcome.saved.path)["w"], expected)
