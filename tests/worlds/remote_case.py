"""Runs of a small model whose checkpoints are copied to a folder that fails when it is told to."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem

from own_passes_case import BATCH, MICRO_BATCH, Tagger, classes_sum, counted, end, samples
from shoal.base.errors import ShoalError
from shoal.fabric import World
from shoal.trainer.parallelize import parallelize
from shoal.trainer.run import Run


class Flaky(LocalFileSystem):
    """A local folder as a store: `WORD` beside it says what goes wrong, asked at every call."""

    protocol = "flaky"

    @staticmethod
    def wrong(path: str) -> str:
        """What the nearest file `WORD` above says."""
        for folder in Path(path).parents:
            with contextlib.suppress(OSError):
                return (folder / "WORD").read_text()
        return ""

    def put_file(self, here: str, there: str, *_: Any, **__: Any) -> None:
        word = self.wrong(there)
        if word == "full" and "rank-1" in there:
            raise OSError(28, "No space left on device")
        super().put_file(here, there)
        if word == "short" and "rank-1" in there:
            with open(there, "r+b") as file:
                file.truncate(100)

    def get_file(self, there: str, here: Any = None, *_: Any, **__: Any) -> None:
        with (Path(there).parent / "fetched").open("a") as log:
            log.write(f"{Path(there).name}\n")
        super().get_file(there, here)

    def pipe_file(self, path: str, value: bytes, *_: Any, **__: Any) -> None:
        if self.wrong(path) == "manifest":
            raise PermissionError(13, "Permission denied")
        while self.wrong(path) == "hang":
            time.sleep(0.05)
        super().pipe_file(path, value)

    def find(self, path: str, *_: Any, **kwargs: Any) -> Any:
        if self.wrong(path) == "away":
            raise ConnectionError("the store does not answer")
        return super().find(path, **kwargs)


fsspec.register_implementation("flaky", Flaky, clobber=True)


def word(store: str, said: str) -> None:
    """From now on the store does this."""
    Path(store).mkdir(parents=True, exist_ok=True)
    (Path(store) / "WORD").write_text(said)


def run_of(world: World, folder: str, store: str, **more: Any) -> Run:
    torch.manual_seed(0)
    return parallelize(
        Tagger().double(),
        lambda p: torch.optim.AdamW(p, lr=1e-2),
        lambda outputs, targets: (classes_sum(outputs, targets), counted(targets)),
        layout="ddp" if world.size > 1 else "single",
        batch=BATCH,
        micro_batch=MICRO_BATCH,
        folder=folder,
        remote=f"flaky://{store}",
        world=world,
        **more,
    )


def left(run: Run) -> None:
    """Close, as far as members of a world that goes on can: the last copy is waited for."""
    run.checkpoint_saver.close()
    end(run)
    if run.lease is not None:
        run.lease.release()


def files(store: str) -> list[str]:
    """All that lies there."""
    found = [str(p.relative_to(store)) for p in Path(store).rglob("*") if p.is_file()]
    return sorted(name for name in found if name != "WORD" and not name.endswith("fetched"))


def weights(run: Run) -> float:
    return sum(float(p.sum()) for p in run.model.parameters())


def trained(
    world: World, folder: str, store: str, words: list[str], tags: bool = False, **more: Any
) -> dict[str, Any]:
    """A step and a save for each word, which the store does from then on; what is told of it."""
    run = run_of(world, folder, store, **more)
    heard: list[str] = []
    run.add_callback(lambda row: heard.append(row["text"]) if row["event"] == "notice" else None)
    run.restore()
    first = run.step_count
    there = []
    loader = run.loader(samples())
    batches = (batch for _ in range(9) for batch in loader)
    for said in words:
        if world.is_first:
            word(store, said)
        world.barrier()
        run.step(next(batches))
        if tags:
            run.save(tag="best")
        run.save(wait=False)
        run.checkpoint_saver.wait_pending()
        if said != "hang" and world.is_first:
            _until_idle(run)
        world.barrier()
        there.append([name for name in files(store) if "step-" in name])
    left(run)
    return {"first": first, "heard": heard, "there": there, "sum": weights(run)}


def _until_idle(run: Run) -> None:
    """Wait for the copy under way."""
    until_s = time.monotonic() + 20
    hook = next(
        cell.cell_contents
        for listen in run.recorder.events.listeners
        for cell in listen.__closure__ or ()
        if "Uploader" in getattr(cell.cell_contents, "__qualname__", "")
    )
    while hook.__self__._running is not None:
        assert time.monotonic() < until_s
        time.sleep(0.01)


def gone_on(
    world: World, folder: str, store: str, step: int | None = None, tag: str = ""
) -> dict[str, Any]:
    """What a start in this folder goes on from, or its one line; the state of every rank."""
    run = run_of(world, folder, store)
    heard: list[str] = []
    run.add_callback(lambda row: heard.append(row["text"]) if row["event"] == "notice" else None)
    try:
        found: Any = run.restore(step=step, tag=tag)
    except ShoalError as error:
        found = f"{type(error).__name__}: {error}"
    told = {"found": found, "step": run.step_count, "heard": heard, "sum": weights(run)}
    left(run)
    return told


def not_restored(world: World, folder: str, store: str) -> str:
    """The line for a run that would mix its checkpoints with those that lie there."""
    run = run_of(world, folder, store)
    try:
        run.step(next(iter(run.loader(samples()))))
    except ShoalError as error:
        return str(error)
    finally:
        left(run)
    return ""
