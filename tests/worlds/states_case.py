"""Counts the bytes of live states after a backward pass, in two ways that do not know each other."""

from __future__ import annotations

import ctypes
import gc
import time
from typing import Any

import torch

from peak_case import kept_bytes
from shoal.fabric import World
from shoal.machine.states import count_state_bytes
from shoal.models.catalog import build
from shoal.trainer.parallelize import parallelize
from shoal.trainer.run import Run

SEQUENCE, VOCABULARY, ROWS = 16, 256, 2
BIG_BYTES = 16 * 1024  # activations and numbers of the step are smaller
LET_GO_S = 20.0

HEAP_FIELDS = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd",
    "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip


class HeapBytes(ctypes.Structure):
    """What glibc's `mallinfo2` tells of the heap."""

    _fields_ = [(name, ctypes.c_size_t) for name in HEAP_FIELDS]


def allocated_bytes() -> int:
    """Bytes that this process has allocated and not freed, whoever holds them; -1 without glibc."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return -1
    ask.restype = HeapBytes
    heap = ask()
    return int(heap.uordblks + heap.hblkhd)


def big_tensor_bytes() -> int:
    """Bytes of all storages that some Python tensor looks into, small ones left out."""
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and not hasattr(thing, "stands_for"):
            tensor = thing.to_local() if hasattr(thing, "to_local") else thing
            storage = tensor.untyped_storage()
            if storage.nbytes() > BIG_BYTES and tensor.device.type != "meta":
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def settled_bytes(limit_bytes: float) -> int:
    """Bytes of big tensors, once they are no more than the limit or the wait is over.

    gloo's threads let go of what they sent a moment after a collective ends.
    """
    until_s = time.monotonic() + LET_GO_S
    while True:
        gc.collect()
        found = big_tensor_bytes()
        if found <= limit_bytes or time.monotonic() > until_s:
            return found
        time.sleep(0.01)


def measure_all(world: World, wanted: list[list[str]]) -> list[dict[str, Any]]:
    """An answer of this rank for every (layout, precision).

    The first run of a precision is not counted: what kernels and libraries allocate once is no
    state.
    """
    warm: set[str] = set()
    answers = []
    gc.collect()
    gc.freeze()  # half a million objects of torch itself need no look
    for layout, precision in wanted:
        if precision not in warm:
            measure(world, layout, precision)
            warm.add(precision)
        answers.append(measure(world, layout, precision))
    gc.unfreeze()
    return answers


def measure(world: World, layout: str, precision: str) -> dict[str, Any]:
    """State bytes of this rank after the second step's last backward pass."""
    gc.collect()
    tensors_before, heap_before = big_tensor_bytes(), allocated_bytes()
    torch.manual_seed(0)
    arguments = {"dim": 256, "layers": 2, "heads": 4, "kv_heads": 4}
    run = parallelize(
        build("llama", arguments, vocabulary=VOCABULARY, sequence=SEQUENCE),
        lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
        layout=layout,
        batch=2 * ROWS * world.size,
        micro_batch=ROWS,
        precision=precision,
        world=world,
    )
    torch.manual_seed(world.rank)  # each rank its own samples
    tokens = torch.randint(0, VOCABULARY, (2 * ROWS, SEQUENCE))
    run.step((tokens, tokens))  # after it Adam has its moments
    run.forward_backward((tokens, tokens))
    counted = count_state_bytes(run)
    transfers = kept_bytes(run.program.reducer)
    most = tensors_before + 1.02 * (counted.total + transfers)
    tensors = settled_bytes(most) - tensors_before
    answer = {
        "elements": run.plan.parameters,
        "weights": counted.weights,
        "gradients": counted.gradients,
        "optimizer": counted.optimizer,
        "total": counted.total,
        "transfers": transfers,
        "tensors": tensors,
        "heap": allocated_bytes() - heap_before if heap_before >= 0 else -1,
    }
    run.update()
    _end(run)
    del run
    answer["left"] = settled_bytes(tensors_before) - tensors_before
    return answer


def _end(run: Run) -> None:
    """As `run.close`, but the world stays for others."""
    for undo in run.program.on_close:
        undo()
