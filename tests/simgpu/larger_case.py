"""One rank of a model that is larger than its device: legs of one training, each on another layout.

    python larger_case.py '{"model": {…}, "optimizer": "sgd", "legs": ["fsdp", {…}], "folder": …}'

as RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT say. Every leg builds, goes on from what the one before
saved, trains, saves and exports. The last line of each rank tells what its device held at most in
each of these instants, and its losses, as JSON. With `plain` there is one leg, of all steps, in one
process: it writes the weights of a plain build to `initial.safetensors`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn.attention import SDPBackend, sdpa_kernel

import shoal
from shoal.checkpoint.export.export_file import export_file
from shoal.fabric import World, start_world
from shoal.machine.process_memory import trim_heap
from shoal.models.catalog import build
from shoal.parallel.build import shared_build
from shoal.trainer.state.run_state import collect_model_shards

SEQUENCE, VOCABULARY, STEPS = 4, 768, 3
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-4, eps=1e-4),
}
INITIAL = "initial.safetensors"


def tokens(number: int) -> torch.Tensor:
    """A sample, (5,); the same everywhere."""
    draws = torch.Generator().manual_seed(number)
    return torch.randint(VOCABULARY, (SEQUENCE + 1,), generator=draws)


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """A few, for layouts that look at what the model does with them."""
    whole = torch.stack([tokens(1001), tokens(1002)])
    return whole[:, :-1], whole[:, 1:]


class Tokens:
    """The samples of all steps, in order of their number."""

    draws_nothing = True

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = tokens(index)
        return row[:-1], row[1:]


class Host:
    """What the processes of a node hold of its memory, at most, in bytes; simulated devices aside.

    The processes are alone in a memory cgroup, of which the kernel keeps the most that it ever held:
    private memory and pages of files. Simulated devices would lie in it too, so their memory is a
    file that was filled from outside: a page counts where it was written first.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.used = Path(os.environ["CGROUP_USED"])
        # Under version 2 the most is since what this descriptor wrote.
        self.descriptor = os.open(os.environ["CGROUP_PEAK"], os.O_RDWR)
        _devices_from(Path(os.environ["DEVICES_FILE"]), world)

    def begin(self) -> int:
        """Forget the most so far; gives what is held now."""
        trim_heap()
        self.world.barrier()
        if self.world.is_first:
            os.pwrite(self.descriptor, b"0", 0)
        self.world.barrier()
        return int(self.used.read_text())

    def most(self) -> int:
        """The most since then, on any rank's way to here."""
        self.world.barrier()
        return int(os.pread(self.descriptor, 64, 0))

    @contextmanager
    def within(self, more_bytes: int) -> Iterator[None]:
        """Let the processes have so much more inside than they hold now; the kernel kills them else.

        Pages of files that are on a disk do not count as held: it drops them for others.
        """
        trim_heap()
        self.world.barrier()
        limit = Path(os.environ["CGROUP_LIMIT"])
        if self.world.is_first:
            stat = (self.used.parent / "memory.stat").read_text().split()
            told = dict(zip(stat[::2], map(int, stat[1::2]), strict=True))
            on_disk = told["cache" if "cache" in told else "file"] - told["shmem"]
            limit.write_text(str(int(self.used.read_text()) - on_disk + more_bytes))
        self.world.barrier()
        try:
            yield
        finally:
            self.world.barrier()
            if self.world.is_first:
                limit.write_text(str(2**40))
            self.world.barrier()


def _devices_from(path: Path, world: World) -> None:
    """Let this rank's simulated device lie in its part of a file.

    Source   mmap(2): MAP_FIXED takes the place of what is mapped there
    """
    part_bytes = path.stat().st_size // world.size
    here = torch.ones(1, device=world.device).data_ptr()  # in the first segment, at its start
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    libc, simulator = ctypes.CDLL(None, use_errno=True), ctypes.CDLL(os.environ["SIM_LIBRARY"])
    to_host = simulator["_ZN6simgpu7to_hostEPKv"]
    to_host.restype, to_host.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    words: list[Any] = [ctypes.c_void_p] + [ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, words
    place, fixed = to_host(here), mmap.MAP_SHARED | 0x10  # MAP_FIXED
    with path.open("r+b") as file:
        start = world.rank * part_bytes
        access = mmap.PROT_READ | mmap.PROT_WRITE
        got = libc.mmap(place, part_bytes, access, fixed, file.fileno(), start)
    assert got == place, os.strerror(ctypes.get_errno())


class Instants:
    """What a device, and the node's host, hold at most while something is done, in bytes."""

    def __init__(self, world: World, host: Host | None) -> None:
        self.world, self.host, self.held = world, host, dict[str, dict[str, int]]()

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        if self.world.device.type == "cpu":
            yield
            return
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = self.host.begin() if self.host else 0
        try:
            yield
            torch.cuda.synchronize()
        finally:
            self.held[name] = {
                "device": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
                **({"host": self.host.most() - before} if self.host else {}),
            }
            sys.stderr.write(f"{name} {self.held[name]}\n")


def apart(run: Any, path: Path) -> list[str]:
    """Tensors of which this rank's part has other bits than a file of whole ones."""
    found = []
    with safe_open(path, "pt") as file:
        for name, (part, shard) in collect_model_shards(run).items():
            whole = file.get_slice(name)
            boxes = [whole[tuple(slice(a, b) for a, b in box)].reshape(-1) for box in shard.slices]
            if shard.slices and not torch.equal(part.cpu().reshape(-1), torch.cat(boxes)):
                found.append(name)
    return found


def started(world: World, asked: dict[str, Any], layout: Any, model: dict[str, Any]) -> Any:
    """A run on a layout; under "offload" it says which policy it needs there."""
    plain, policies = asked.get("plain"), {}
    if isinstance(layout, dict) and "offload" in layout:
        layout = {**layout}
        policies["offload"] = layout.pop("offload")
    return shoal.parallelize(
        lambda: build("llama", model, vocabulary=VOCABULARY, sequence=SEQUENCE),
        OPTIMIZERS[asked["optimizer"]],
        layout=layout,
        batch=asked["batch"],
        micro_batch=1,
        precision=asked["precision"],
        sample=samples,
        folder=None if plain or model["layers"] < asked["model"]["layers"] else asked["folder"],
        world=world,
        **policies,
    )


def read_through(folder: Path) -> None:
    """Read all files of a folder once: their pages are in the page cache then."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(2**20):
                    pass


def drop_cached(folder: Path) -> None:
    """Let go of all pages of a folder's files in the page cache."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def left(run: Any) -> None:
    """All of `run.close` but leaving the world."""
    for part in (run.checkpoint_saver, run.guards):
        part.close()
    for undo in run.program.on_close:
        undo()
    if run.lease is not None:
        run.lease.release()


def in_memory(size_bytes: int) -> int:
    """What a tensor takes of a device: its allocator gives blocks of 512 bytes."""
    return -(-size_bytes // 512) * 512


def leg(world: World, asked: dict[str, Any], number: int, host: Host | None) -> dict[str, Any]:
    """Build, go on, train, save, export: on one layout."""
    folder, layout, plain = Path(asked["folder"]), asked["legs"][number], asked.get("plain")
    if host:  # what a layout imports is no part of the model
        left(started(world, asked, layout, {**asked["model"], "layers": 4}))
        gc.collect()
    instants = Instants(world, host)
    with instants.during("build"):
        run = started(world, asked, layout, asked["model"])
    blocks = run.program.twin.blocks if run.program.twin is not None else run.model.blocks
    parts = [part for part, _ in collect_model_shards(run).values()]
    each_bytes = {"fp32": 4, "fp64": 8}[asked["precision"]]
    in_blocks = {id(p) for p in blocks.parameters()}
    whole = run.program.twin if run.program.twin is not None else run.model
    rest = [p for p in whole.parameters() if id(p) not in in_blocks]
    units = (blocks[0].parameters(), rest)
    told: dict[str, Any] = {
        "layout": run.plan.layout.text(),
        "weights": each_bytes * run.plan.parameters,
        "share": sum(in_memory(part.nbytes) for part in parts),
        "on host": sum(part.nbytes for part in parts if part.device.type == "cpu"),
        "unit": max(sum(in_memory(each_bytes * p.numel()) for p in unit) for unit in units),
    }
    if plain:
        save_file(run.state_dict(), folder / INITIAL)
    else:
        told["apart"] = [] if number else apart(run, folder / INITIAL)
        if host and world.is_first:
            read_through(folder / "checkpoints")
        with instants.during("resume"):
            told["resumed"] = run.restore()
        if host and number and asked.get("narrow"):  # once more, cold, in what it may have
            told["cold"] = cold(run, host, folder, told, asked["narrow"][number])
    losses: list[float] = []
    with instants.during("train"):
        for batch in run.loader(Tokens()):
            losses.append(float(run.step(batch).loss))
            if len(losses) == (asked["steps"] if plain else STEPS):
                break
    if not plain:
        with instants.during("save"):
            saved = run.save()
        out = folder / f"exported-{number}.safetensors"
        with instants.during("export"):
            if world.is_first:
                export_file(saved, out)
            world.barrier()
        told["exported apart"] = apart(run, out)
    left(run)
    return {**told, "losses": losses, "held": instants.held}


def cold(run: Any, host: Host, folder: Path, told: dict[str, Any], narrow_bytes: int) -> int:
    """Go on from a checkpoint that is on the disk alone; gives what the node had for it, in bytes.

    narrow_bytes   what a narrow model took
    """
    of_all = sum(run.world.gather_json(told["share"]))
    more_bytes = narrow_bytes + of_all + told["unit"]
    if run.world.is_first:
        drop_cached(folder)
    with host.within(more_bytes):
        assert run.restore()
    return more_bytes


def main() -> None:
    torch.set_num_threads(1)
    asked = json.loads(sys.argv[1])
    world = start_world()
    host = Host(world) if asked.get("host") else None
    if host:
        shared_build.LEAST_BYTES = 0  # the narrow model starts as the one that it is compared with
    told = []
    for number in range(len(asked["legs"])):
        with sdpa_kernel(SDPBackend.MATH):  # what the device has
            told.append(leg(world, asked, number, host))
        gc.collect()
        if world.device.type != "cpu":
            torch.cuda.empty_cache()
    sys.stdout.write(json.dumps({"device": str(world.device), "legs": told}) + "\n")
    sys.stdout.flush()
    world.close()


if __name__ == "__main__":
    main()
