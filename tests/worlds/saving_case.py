"""Checks of saving beside training that run inside a world of processes."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

from shoal.base.errors import ClusterError
from shoal.base.plans.tensor_shards import Shard
from shoal.checkpoint.format.listing import list_checkpoints, read_manifest, verify
from shoal.checkpoint.load.read import load
from shoal.checkpoint.save import shard_writer
from shoal.checkpoint.save.write import Piece
from shoal.fabric import World
from shoal.trainer.run_folder.run_saves import FAILED, RunSaver

ROWS, WIDTH = 64, 1024
STEPS_AT_MOST = 2000
COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "barrier")


class Told:
    """Events and notices of one rank."""

    def __init__(self, world: World) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.notices: list[str] = []
        self.saving = RunSaver(world, self.emit, self.notices.append)

    def emit(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))


def state(world: World, step: int) -> dict[str, torch.Tensor]:
    """Two replicas of equal size, and one tensor cut by rows over the ranks."""
    rows = ROWS // world.size
    return {
        "model.a": torch.full((ROWS, WIDTH), float(step)),
        "model.b": torch.full((ROWS, WIDTH), step + 0.5),
        "model.c": torch.full((rows, WIDTH), step + world.rank / 8),
    }


def offered(world: World, tensors: dict[str, torch.Tensor]) -> list[Piece]:
    rows = ROWS // world.size
    box = ((world.rank * rows, (world.rank + 1) * rows), (0, WIDTH))
    boxes = {"model.c": box}
    whole = ((0, ROWS), (0, WIDTH))
    return [
        Piece(Shard(name, (ROWS, WIDTH), "float32", (boxes.get(name, whole),)), tensor)
        for name, tensor in tensors.items()
    ]


def begin(told: Told, world: World, root: Path, step: int, keep: int = 3, **more: Any) -> None:
    tensors = state(world, step)
    told.saving.start(root, step, offered(world, tensors), {"step": step}, keep=keep, **more)
    for tensor in tensors.values():
        tensor.fill_(-1.0)  # the optimizer steps on


def right(root: Path, step: int, size: int) -> bool:
    """Whether the checkpoint holds what every rank had at that step, whole and verified."""
    path = root / f"step-{step}"
    names = ("model.a", "model.b", "model.c")
    got = load(path, [Shard.whole(name, (ROWS, WIDTH), "float32") for name in names])
    c = torch.arange(size).repeat_interleave(ROWS // size).unsqueeze(1) / 8 + step
    return (
        verify(path) == []
        and bool((got["model.a"] == step).all())
        and bool((got["model.b"] == step + 0.5).all())
        and bool((got["model.c"] == c).all())
    )


def back_to_back(world: World, folder: str, saves: int) -> dict[str, Any]:
    """Start after start, collectives of training between: none is lost, none hangs."""
    root, told = Path(folder) / "checkpoints", Told(world)
    sums = []
    for step in range(saves):
        begin(told, world, root, step)
        number = torch.tensor([float(step)])
        world.all_reduce(number)
        sums.append(number.item())
    last = told.saving.wait_pending()
    told.saving.close()
    world.barrier()
    return {
        "events": [event for event, _ in told.events],
        "steps": [fields["step"] for _, fields in told.events],
        "kept": [found.step for found in list_checkpoints(root)],
        "right": [right(root, found.step, world.size) for found in list_checkpoints(root)],
        "last": last is not None and last.saved is not None and last.step,
        "sums": sums == [step * world.size for step in range(saves)],
        "files": sorted(os.listdir(root / f"step-{saves - 1}")),
        "notices": told.notices,
    }


@contextmanager
def small_files(limit_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond the limit: write() fails with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def steps_until_told(told: Told, world: World) -> dict[str, Any]:
    """The trainer's loop: each step's all-reduce carries what every rank has heard."""
    for step in range(STEPS_AT_MOST):
        heard = told.saving.report() == FAILED
        number = torch.tensor([float(heard)])
        world.all_reduce(number)
        if number.item():
            outcome = told.saving.wait_pending()
            text = str(outcome.failure) if outcome is not None else "settle gave nothing"
            return {"step": step, "heard": heard, "text": text}
        time.sleep(0.005)
    return {"step": None, "heard": False, "text": "never told"}


def failing_writer(world: World, folder: str) -> dict[str, Any]:
    """Rank 1 cannot write its file: all ranks know at the same step, and go on."""
    root, told = Path(folder) / "checkpoints", Told(world)
    begin(told, world, root, 1)
    told.saving.wait_pending()
    with small_files(100_000 if world.rank == 1 else resource.RLIM_INFINITY):
        begin(told, world, root, 2)
        answer = steps_until_told(told, world)
    world.barrier()
    left = sorted(os.listdir(root))
    world.barrier()
    quiet = told.saving.report()
    begin(told, world, root, 3)
    told.saving.close()
    world.barrier()
    return {
        **answer,
        "left": left,
        "quiet": quiet,
        "right": [right(root, step, world.size) for step in (1, 3)],
        "events": [(event, fields["step"]) for event, fields in told.events],
        "notices": told.notices,
    }


def bad_state_on_one_rank(world: World, folder: str, first: bool) -> dict[str, Any]:
    """What rank 1's training thread finds wrong is known to all, in the first save and later."""
    root, told = Path(folder) / "checkpoints", Told(world)
    if not first:
        begin(told, world, root, 1)
    pieces = offered(world, state(world, 2))
    if world.rank == 1:
        pieces[2] = Piece(pieces[2].shard, torch.ones(3))
    told.saving.start(root, 2, pieces, {}, keep=3)
    answer = steps_until_told(told, world)
    begin(told, world, root, 3)
    told.saving.close()
    world.barrier()
    return {**answer, "kept": [found.step for found in list_checkpoints(root)]}


def record_that_is_no_json(world: World, folder: str) -> dict[str, Any]:
    """The very first word of a rank is a problem, while the others' training threads agree."""
    root, told = Path(folder) / "checkpoints", Told(world)
    record = {"x": float("nan")} if world.rank == 0 else {}
    told.saving.start(root, 1, offered(world, state(world, 1)), record, keep=3)
    answer = steps_until_told(told, world)
    begin(told, world, root, 2)
    told.saving.close()
    world.barrier()
    return {**answer, "kept": [found.step for found in list_checkpoints(root)]}


def offers_of_one_rank_change(world: World, folder: str) -> dict[str, Any]:
    """Optimizer state that appears on one rank only (zero1): the others did not know."""
    root, told = Path(folder) / "checkpoints", Told(world)
    begin(told, world, root, 1)
    for step in (2, 3):
        tensors = state(world, step)
        pieces = offered(world, tensors)
        if world.rank == 1:
            late = torch.full((5,), float(step))
            pieces.append(Piece(Shard.whole("optimizer.late", (5,), "float32"), late))
        told.saving.start(root, step, pieces, {}, keep=3)
    told.saving.close()
    world.barrier()
    late = Shard.whole("optimizer.late", (5,), "float32")
    return {
        "right": [right(root, step, world.size) for step in (1, 2, 3)],
        "late": [load(root / f"step-{s}", [late])["optimizer.late"].tolist() for s in (2, 3)],
        "stored": ["optimizer.late" in read_manifest(root / f"step-{s}").tensors for s in (1, 2)],
    }


class Watch:
    """Who opens files, and who calls collectives: names of threads, while `on`."""

    def __init__(self) -> None:
        self.on = False
        self.opened: list[str] = []
        self.talked: list[str] = []
        sys.addaudithook(self.audit)  # cannot be removed; it is deaf while off

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and (event == "open" or event.startswith("os.")):
            self.opened.append(threading.current_thread().name)

    @contextmanager
    def watching(self) -> Iterator[None]:
        real = {name: getattr(World, name) for name in COLLECTIVES}
        for name, call in real.items():
            setattr(World, name, self.wrapped(call))
        self.on = True
        try:
            yield
        finally:
            self.on = False
            for name, call in real.items():
                setattr(World, name, call)

    def wrapped(self, call: Any) -> Any:
        def talk(*arguments: Any, **more: Any) -> Any:
            self.talked.append(threading.current_thread().name)
            return call(*arguments, **more)

        return talk


def the_training_thread_only_copies(world: World, folder: str) -> dict[str, Any]:
    """After the first save `start` opens no file and says no word: rank 0's returns before the
    others have begun theirs."""
    root, told, watch = Path(folder) / "checkpoints", Told(world), Watch()
    begin(told, world, root, 1)
    told.saving.wait_pending()
    world.barrier()
    with watch.watching():
        if world.is_first:
            begin(told, world, root, 2)
    world.barrier()  # were there a collective in `start`, rank 0 would never come here
    with watch.watching():
        if not world.is_first:
            begin(told, world, root, 2)
        saver = told.saving._saver
        assert saver is not None
        assert saver._running is not None
        assert saver._running.future is not None
        saver._running.future.result(60)
    held_bytes = saver._host._flat.numel()
    told.saving.close()
    world.barrier()
    return {
        "opened": sorted(set(watch.opened)),
        "talked": sorted(set(watch.talked)),
        "right": right(root, 2, world.size),
        "held_bytes": held_bytes,
        "nobody_else": world.traffic.pop_counts()[0].keys() <= {"all_gather", "all_reduce"},
    }


def the_last_one_is_waited_for(world: World, folder: str) -> dict[str, Any]:
    """`save` waits for the one in flight, then writes and returns the checkpoint itself."""
    root, told = Path(folder) / "checkpoints", Told(world)
    begin(told, world, root, 1)
    saved = told.saving.save(root, 2, offered(world, state(world, 2)), {}, keep=3)
    with small_files(1000 if world.rank == 1 else resource.RLIM_INFINITY):
        failed = told.saving.save(root, 3, offered(world, state(world, 3)), {}, keep=3)
    told.saving.close()
    world.barrier()
    return {
        "saved": saved is not None and saved.path.name,
        "failed": failed is None,
        "right": [right(root, step, world.size) for step in (1, 2)],
        "events": [(event, fields["step"]) for event, fields in told.events],
        "notices": told.notices,
    }


def a_rank_dies_in_a_save(world: World, folder: str) -> NoReturn:
    """Rank 1 is killed where it would write its file; rank 0 writes down what it then heard, and ends."""
    root, told = Path(folder) / "checkpoints", Told(world)
    begin(told, world, root, 1, keep=1)
    told.saving.wait_pending()
    if world.rank == 1:
        shard_writer.write_file = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    begin(told, world, root, 2, keep=1)
    try:
        told.saving.wait_pending()
    except ClusterError as failure:
        (Path(folder) / "text").write_text(str(failure))
        os._exit(1)
    os._exit(0)
