"""What training waits for when a checkpoint is saved beside it, in units of the host copy.

A world of processes holds weights and two moments as `ddp` does: equal on all ranks, so each writes
an equal share. A pair is one `RunSaver.start` (pieces built, share copied, thread begun) and one
plain `copy_` of the same share, tensor by tensor, into memory that was used before; before each all
ranks meet at a barrier, the order alternates, and the slowest rank's wall-clock time counts. Every
save has ended before the next pair. Beside it: the copy against itself (the noise), the first save,
and a matrix product again and again, alone and while a save runs: what training feels.

    python benchmarks/saving.py [--mib 256] [--pairs 100] [--processes 2]

Prints the gate (stall ≤ 1.2 × host copy, upper end of the interval), then all raw times as JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from processes import machine, run_together
from ratios import ratio

LIMIT, DEADLINE_S = 1.2, 1200
LAYERS, KINDS = 24, ("model.{}", "optimizer.{}.exp_avg", "optimizer.{}.exp_avg_sq")
WIDTHS = {"attention": 4, "up": 6, "down": 2}  # relative sizes of a layer's matrices
PRODUCTS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--mib", type=int, default=256, help="state of the run, all ranks together")
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--folder", help="where checkpoints are written; default: a temporary one")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        measure(json.loads(options.rank_of))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        job = {"mib": options.mib, "pairs": options.pairs, "folder": folder}
        command = [str(Path(__file__).resolve()), "--rank-of", json.dumps(job)]
        run_together(command, options.processes, deadline_s=DEADLINE_S)
        measured = json.loads((Path(folder) / "times.json").read_text())
    report(measured)
    print(json.dumps({"machine": machine(), "processes": options.processes, **job, **measured}))


def measure(job: dict[str, Any]) -> None:
    """One rank."""
    import torch

    from shoal.base.plans.tensor_shards import Shard
    from shoal.checkpoint.save.write import Piece
    from shoal.fabric import start_world
    from shoal.trainer.run_folder.run_saves import RunSaver

    torch.set_num_threads(1)
    world = start_world()
    tensors = state(job["mib"] * 2**20)
    root = Path(job["folder"]) / "checkpoints"
    saving = RunSaver(world, lambda *_, **__: None, print)
    step = 0
    own_cpu_s: list[float] = []

    def timed(work: Any) -> float:
        """Seconds of the slowest rank; processor seconds of this rank's thread go to a list."""
        world.barrier()
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        work()
        wall_s = time.perf_counter() - began_s
        own_cpu_s.append(time.thread_time() - began_cpu_s)
        return max(world.gather_json(wall_s))

    def begin() -> None:
        nonlocal step
        step += 1
        pieces = [Piece(Shard.whole(n, tuple(t.shape), "float32"), t) for n, t in tensors.items()]
        saving.start(root, step, pieces, {"step": step}, keep=1)

    def settle() -> float:
        outcome = saving.wait_pending()
        if outcome is None or outcome.saved is None:
            raise RuntimeError(f"the save failed: {outcome}")
        return outcome.saved.save_s

    first_s = timed(begin)
    settle()
    share = [tensors[name] for name, _ in saving._saver._agreement.share]
    room = [torch.zeros_like(t) for t in share]

    def copy() -> None:
        for target, source in zip(room, share, strict=True):
            target.copy_(source)

    names = ("stall_s", "copy_s", "again_s", "save_s", "stall_cpu_s", "copy_cpu_s", "again_cpu_s")
    times: dict[str, list[float]] = {name: [] for name in names}
    for pair in range(job["pairs"]):
        works = [("stall_s", begin), ("copy_s", copy), ("again_s", copy)]
        for name, work in works[:: -1 if pair % 2 else 1]:
            times[name].append(timed(work))
            times[name.replace("_s", "_cpu_s")].append(own_cpu_s[-1])
            if name == "stall_s":
                times["save_s"].append(settle())
    beside = products(timed, begin, settle)
    saving.close()
    share_bytes = sum(t.nbytes for t in share)
    if world.is_first:
        answer = {"share_bytes": share_bytes, "tensors": len(share), "first_s": first_s}
        Path(job["folder"], "times.json").write_text(json.dumps({**answer, **times, **beside}))
    world.barrier()
    world.close()


def state(size_bytes: int) -> dict[str, Any]:
    """Weights and two moments of a model of this many bytes, by name."""
    import torch

    unit = size_bytes // (4 * len(KINDS) * LAYERS * sum(WIDTHS.values()))
    return {
        kind.format(f"blocks.{layer}.{name}"): torch.randn(width, unit)
        for kind in KINDS
        for layer in range(LAYERS)
        for name, width in WIDTHS.items()
    }


def products(timed: Any, begin: Any, settle: Any) -> dict[str, list[float]]:
    """Seconds of a matrix product, alone and while a save runs."""
    import torch

    a = torch.randn(900, 900)
    torch.mm(a, a)
    alone = [timed(lambda: torch.mm(a, a)) for _ in range(PRODUCTS)]
    beside: list[float] = []
    saves = 0
    while len(beside) < PRODUCTS and saves < 50:
        begin()
        saves += 1
        # The same number of products on every rank: they meet at barriers.
        beside += [timed(lambda: torch.mm(a, a)) for _ in range(6)]
        settle()
    return {"product_alone_s": alone, "product_beside_s": beside}


def report(measured: dict[str, Any]) -> None:
    """The table."""

    def middle(name: str) -> float:
        return sorted(measured[name])[len(measured[name]) // 2]

    share_mib = measured["share_bytes"] / 2**20
    print(f"{measured['tensors']} tensors, {share_mib:.1f} MiB per rank")
    for name in ("stall_s", "copy_s", "save_s", "product_alone_s", "product_beside_s"):
        print(f"{name.removesuffix('_s'):16}{1000 * middle(name):9.2f} ms")
    print(f"{'first stall':16}{1000 * measured['first_s']:9.2f} ms  (agreement, new memory)")
    noise = ratio(measured["again_s"], measured["copy_s"])
    stall = ratio(measured["stall_s"], measured["copy_s"])
    processor = ratio(measured["stall_cpu_s"], measured["copy_cpu_s"])
    beside = middle("product_beside_s") / middle("product_alone_s")
    print(f"copy / copy     {noise.value:.3f} [{noise.low:.3f}, {noise.high:.3f}]")
    print(
        f"stall / copy    {stall.value:.3f} [{stall.low:.3f}, {stall.high:.3f}]   "
        f"{stall.verdict(LIMIT)} (≤ {LIMIT})"
    )
    print(
        f"  in CPU time   {processor.value:.3f} [{processor.low:.3f}, {processor.high:.3f}]   "
        f"(rank 0's training thread; a busy machine disturbs it less; no gate)"
    )
    print(f"training beside {beside:.3f} × alone")


if __name__ == "__main__":
    main()
