"""Accesses to the same memory from two streams without an order between them.

CUDA's stream sanitizer (torch.cuda._sanitizer, switched on by TORCH_CUDA_SANITIZER=1 in this part's
environment) looks at every kernel that torch launches. The first row plants a race, so that silence
in the others means something. A CPU has no streams: there the same code runs unwatched.
"""

from __future__ import annotations

import tempfile

import torch

import host_memory
from child import Sheet
from device import DEVICE, ON_GPU
from one import Tokens, apart, train


def races(sheet: Sheet) -> None:
    """What uses a stream of its own: offload, saving beside training, loading ahead."""
    host_memory.BATCH = 2
    with sheet.row("a planted race is seen") as told:
        told["watched"] = ON_GPU
        if ON_GPU:
            try:
                planted()
            except Exception as failure:  # the sanitizer's own class is private to torch
                told["said"] = type(failure).__name__
            assert "said" in told, "the sanitizer is silent about a race"
    with sheet.row("offload of activations"):
        program = host_memory.parking(host_memory.program_of(0.1), 1)
        host_memory.forward_backward(program)
    with sheet.row("optimizer state on the host"):
        host_memory.stepped(True)
    with sheet.row("saving beside training"), tempfile.TemporaryDirectory() as folder:
        run = train("fp32", DEVICE, steps=2)
        # Without workers: in a process that the sanitizer watches, a fork's tensors ask for CUDA.
        for batch in run.loader(Tokens(97, 32)):
            run.step(batch)
            run.save(folder, wait=False)
        run.save(folder)
        other = train("fp32", DEVICE, steps=1)
        assert other.restore(folder)
        assert apart(other, run) == 0.0
    with sheet.row("loader with a worker") as told:
        told["batches"] = fed_by_worker()


def fed_by_worker() -> int:
    """Train an epoch from a worker process, and count its batches.

    A fork inherits the sanitizer, whose look at a tensor asks for CUDA, which a fork cannot have: it
    is off while workers start, and on from the second batch.
    """
    from torch.cuda._sanitizer import cuda_sanitizer

    run = train("fp32", DEVICE, steps=2)
    watched = cuda_sanitizer.enabled
    if watched:
        cuda_sanitizer.disable()
    batches = iter(run.loader(Tokens(97, 32), workers=1))
    ran = 0
    for batch in batches:
        if watched and not ran:
            cuda_sanitizer.enable()
        run.step(batch)
        ran += 1
    assert ran, "the loader ended at once"
    return ran


def planted() -> None:
    """Written on one stream, read on another that waits for nothing."""
    values = torch.zeros(1 << 20, device=DEVICE)
    side = torch.cuda.Stream()
    values.add_(1)
    with torch.cuda.stream(side):
        values.mul_(2)
    torch.cuda.synchronize()
