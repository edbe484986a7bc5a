"""Bugs of programs for a GPU, each beside its mended twin; every one ends red in one run, any schedule.

Run by `test_planted.py` in processes of their own: `python planted.py NAME planted|mended SEED [MODE,… [SEEDS]]`.
A function gets `right`: False is the bug. It returns whether its numbers came out right; a bug must be
named by the device, not only by its numbers.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from itertools import product

import torch
import torch.distributed as dist

N = 4096
cuda = torch.cuda
BUGS: dict[str, Callable[[bool], bool]] = {}


def bug(function: Callable[[bool], bool]) -> Callable[[bool], bool]:
    """Adds to the table."""
    BUGS[function.__name__] = function
    return function


def equal(tensor: torch.Tensor, value: float) -> bool:
    """All elements have this value."""
    return bool((tensor.cpu() == value).all())


@bug
def prefetched_without_wait(right: bool) -> bool:
    """Copied in on a side stream, used on the main one."""
    host, side = torch.ones(N).pin_memory(), cuda.Stream()
    with cuda.stream(side):
        batch = host.to("cuda", non_blocking=True)
    if right:
        cuda.current_stream().wait_stream(side)
        batch.record_stream(cuda.current_stream())
    return equal(batch + 1, 2)


@bug
def result_read_early(right: bool) -> bool:
    """The host reads what is still on its way."""
    host = torch.zeros(N).pin_memory()
    host.copy_(torch.ones(N, device="cuda"), non_blocking=True)
    arrived = cuda.Event()
    arrived.record()
    if right:
        arrived.synchronize()
    return equal(host, 1)


@bug
def offloaded_before_computed(right: bool) -> bool:
    """A side stream copies out what the main one has not computed."""
    computed, side, host = (
        torch.ones(N, device="cuda") * 3,
        cuda.Stream(),
        torch.zeros(N).pin_memory(),
    )
    if right:
        side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        host.copy_(computed, non_blocking=True)
    side.synchronize()
    return equal(host, 3)


@bug
def freed_before_its_stream_is_done(right: bool) -> bool:
    """Freed where it was made, while another stream reads it; no record_stream."""
    side, block = cuda.Stream(), torch.full((N,), 5.0, device="cuda")
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        doubled = block * 2
    if right:
        block.record_stream(side)
    del block
    torch.zeros(N, device="cuda")
    cuda.current_stream().wait_stream(side)
    return equal(doubled, 10)


@bug
def device_memory_read_by_the_host(right: bool) -> bool:
    """An address of the device in the host's hands."""
    values = torch.ones(N, device="cuda")
    values = values.cpu() if right else values
    return ctypes.string_at(values.data_ptr(), 4) == b"\x00\x00\x80\x3f"


@bug
def left_on_the_default_device(right: bool) -> bool:
    """One tensor of the second device's work is made on the first."""
    cuda.set_device(0)
    weights = torch.ones(N, 1, device="cuda:1")
    rows = torch.ones(1, N, device="cuda:1" if right else "cuda")
    return equal(rows @ weights, N)


@bug
def wrong_device_waited_for(right: bool) -> bool:
    """The other device is synchronised."""
    host = torch.zeros(N).pin_memory()
    host.copy_(torch.ones(N, device="cuda:1"), non_blocking=True)
    cuda.synchronize(1 if right else 0)
    return equal(host, 1)


@bug
def asynchronous_copy_of_unpinned_memory(right: bool) -> bool:
    """Asked to go on beside computing; it cannot."""
    host = torch.ones(N)
    batch = (host.pin_memory() if right else host).to("cuda", non_blocking=True)
    return equal(batch, 1)


@bug
def gradient_read_before_its_reduction(right: bool) -> bool:
    """The norm is taken while the gradient is summed over ranks."""
    weight = torch.ones(N, device="cuda", requires_grad=True)
    (weight * 2).sum().backward()
    work = dist.all_reduce(weight.grad, async_op=True)
    if right:
        work.wait()
    norm = weight.grad.square().sum()
    work.wait()
    return equal(norm, 4 * N)


@bug
def collective_on_the_wrong_stream(right: bool) -> bool:
    """Launched from a stream that does not wait for what it sends."""
    computed, side = torch.ones(N, device="cuda") * 3, cuda.Stream()
    if right:
        side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        dist.all_reduce(computed)
    cuda.current_stream().wait_stream(side)
    return equal(computed, 3)


@bug
def gathered_without_wait(right: bool) -> bool:
    """Work.wait is missing."""
    shard = torch.ones(N, device="cuda")
    whole = torch.empty(N, device="cuda")
    work = dist.all_gather_into_tensor(whole, shard, async_op=True)
    if right:
        work.wait()
    told = whole + 1
    work.wait()
    return equal(told, 2)


@bug
def bucket_refilled_while_it_is_sent(right: bool) -> bool:
    """The next micro-batch writes into what a collective still reads."""
    bucket, out = torch.ones(N, device="cuda"), torch.empty(N, device="cuda")
    work = dist.reduce_scatter_tensor(out, bucket, async_op=True)
    if right:
        work.wait()
    bucket.fill_(7)
    work.wait()
    return equal(out, 1)


@bug
def pinned_buffer_refilled_too_early(right: bool) -> bool:
    """The loader writes the next batch over one that is still copied."""
    buffer = torch.ones(N).pin_memory()
    batch = buffer.to("cuda", non_blocking=True)
    if right:
        cuda.current_stream().synchronize()
    buffer.fill_(9)
    return equal(batch, 1)


@bug
def event_before_the_work(right: bool) -> bool:
    """Recorded before what it should cover."""
    side, values, done = cuda.Stream(), torch.ones(N, device="cuda"), cuda.Event()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        if not right:
            done.record()
        result = values * 7
        if right:
            done.record()
    values.record_stream(side)
    cuda.current_stream().wait_event(done)
    return equal(result, 7)


@bug
def gradient_made_on_another_stream(right: bool) -> bool:
    """The optimizer's stream does not wait for the backward pass."""
    weight = torch.ones(N, device="cuda", requires_grad=True)
    (weight * 4).sum().backward()
    optimizer = cuda.Stream()
    if right:
        optimizer.wait_stream(cuda.current_stream())
    with cuda.stream(optimizer):
        stepped = weight.detach() - weight.grad
    optimizer.synchronize()
    return equal(stepped, -3)


@bug
def made_on_a_side_stream(right: bool) -> bool:
    """Memory of one stream's pool is filled on another that does not wait for its former user."""
    side = cuda.Stream()
    with cuda.stream(side):
        buffer = torch.empty(N, device="cuda")
    if right:
        cuda.current_stream().wait_stream(side)
    buffer.fill_(2)
    return equal(buffer, 2)


@bug
def registered_memory_let_go(right: bool) -> bool:
    """Unregistered while the device still writes to it."""
    host = torch.zeros(N)
    cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)
    host.copy_(torch.ones(N, device="cuda"), non_blocking=True)
    if right:
        cuda.synchronize()
    cuda.cudart().cudaHostUnregister(host.data_ptr())
    cuda.synchronize()
    return equal(host, 1)


def red(name: str, right: bool) -> str:
    """What the device said, or what was wrong with the numbers; empty: nothing."""
    try:
        good = BUGS[name](right)
        cuda.synchronize(0)
        cuda.synchronize(1)
    except (RuntimeError, OSError) as told:
        return str(told)
    return "" if good else "wrong numbers"


def everything(twin: str) -> list[str]:
    """All of the table but, where it is planted, what ends the process."""
    return [n for n in BUGS if twin == "mended" or n != "device_memory_read_by_the_host"]


def main() -> None:
    """Exit status 1 and the report where red."""
    import simulated_cuda

    name, twin, seed = sys.argv[1:4]
    if name == "names":
        print(*BUGS)
        return
    modes = (sys.argv[4] if len(sys.argv) > 4 else "drawn").split(",")
    seeds = int(sys.argv[5]) if len(sys.argv) > 5 else 1
    names = everything(twin) if name == "all" else [name]
    alone()
    said = []
    for mode, one, each in product(modes, range(int(seed), int(seed) + seeds), names):
        simulated_cuda.set_mode(mode)
        simulated_cuda.seed_schedule(one)
        if text := red(each, twin == "mended"):
            said.append(f"{each} {mode} {one}: {text}")
    print("\n".join(said))
    sys.stdout.flush()
    raise SystemExit(1 if said else 0)


def alone() -> None:
    """A group of this one process, with collectives on their own stream all the same."""
    cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


if __name__ == "__main__":
    main()
