"""Reduce-scatter and all-gather of unequal parts, on real gloo; every rank is a thread here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.fabric.collectives.sharded_collectives import BufferCache, GatherParameters
from shoal.fabric.collectives.traffic_counts import TrafficCounter
from shoal.fabric.collectives.uneven_collectives import (
    LARGEST_KEPT_BYTES,
    PendingFlatReduceScatter,
    TransferBuffer,
    all_gather_parts,
    reduce_scatter,
)

WAIT = timedelta(seconds=30)
CUTS = [
    (0, 4, 8, 12),  # equal
    (0, 1, 8, 12),  # unequal
    (0, 0, 12, 12),  # two ranks own nothing
    (0, 5, 5, 9),
]
Action = Callable[[int, dist.ProcessGroup], Any]


@pytest.fixture(scope="module")
def together():
    """`together(action)`: action(rank, group) on three ranks at once, answers by rank."""
    ranks = 3
    store = dist.HashStore()
    with ThreadPoolExecutor(ranks) as pool:

        def join(rank: int) -> dist.ProcessGroup:
            group = dist.ProcessGroup(store, rank, ranks)
            gloo = dist.ProcessGroupGloo(store, rank, ranks, WAIT)
            # As `init_process_group` does; that one allows one rank per process.
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            return group

        groups = [one.result() for one in [pool.submit(join, rank) for rank in range(ranks)]]

        def run(action: Action) -> list[Any]:
            works = [pool.submit(action, rank, group) for rank, group in enumerate(groups)]
            return [work.result(WAIT.total_seconds()) for work in works]

        yield run
        groups.clear()


def values(rank: int, elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(elements, generator=generator).to(dtype)


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_each_rank_gets_the_sum_of_its_part(together, cuts: Sequence[int]) -> None:
    def action(rank: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        tensor = values(rank, cuts[-1])
        pending = reduce_scatter(tensor, cuts, rank, group)
        return pending.result(), tensor

    answers = together(action)
    expected = torch.stack([values(rank, cuts[-1]) for rank in range(3)]).sum(0)
    for rank, (part, source) in enumerate(answers):
        assert torch.equal(part, expected[cuts[rank] : cuts[rank + 1]])
        assert torch.equal(source, values(rank, cuts[-1])), "the source was changed"


def test_the_sum_may_overwrite_its_source(together) -> None:
    """As zero1 does: the part of the sum lands where this rank's gradients were."""
    cuts = CUTS[1]

    def action(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        tensor = values(rank, 12)
        reduce_scatter(tensor, cuts, rank, group).result(out=tensor[cuts[rank] : cuts[rank + 1]])
        return tensor

    expected = torch.stack([values(rank, 12) for rank in range(3)]).sum(0)
    for rank, tensor in enumerate(together(action)):
        own = slice(cuts[rank], cuts[rank + 1])
        assert torch.equal(tensor[own], expected[own])
        tensor[own] = values(rank, 12)[own]
        assert torch.equal(tensor, values(rank, 12)), "something else was written"


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_parts_come_together_on_every_rank(together, cuts: Sequence[int]) -> None:
    whole = values(7, cuts[-1])

    def action(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        tensor = torch.full((cuts[-1],), torch.nan)
        tensor[cuts[rank] : cuts[rank + 1]] = whole[cuts[rank] : cuts[rank + 1]]
        work = all_gather_parts(tensor, cuts, rank, group)
        if work is not None:
            work.wait()
        return tensor

    assert all(torch.equal(tensor, whole) for tensor in together(action))


def test_sums_under_way_may_be_several(together) -> None:
    """Their results are asked for in any order on a rank."""

    def action(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        cuts = CUTS[0]
        pending = [reduce_scatter(values(rank + k, 12), cuts, rank, group) for k in (0, 10, 20)]
        return [one.result() for one in reversed(pending)]

    for rank, parts in enumerate(together(action)):
        for k, part in zip((20, 10, 0), parts, strict=True):
            expected = torch.stack([values(r + k, 12) for r in range(3)]).sum(0)
            assert torch.equal(part, expected[4 * rank : 4 * rank + 4])


def test_bits_do_not_depend_on_who_is_first(together) -> None:
    """Added in the order of the ranks: the same part, whichever rank owns it."""
    tensors = [values(rank, 4) * 10.0**rank for rank in range(3)]

    def owned_by(owner: int) -> torch.Tensor:
        cuts = [0 if rank <= owner else 4 for rank in range(4)]

        def action(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
            return reduce_scatter(tensors[rank], cuts, rank, group).result()

        return together(action)[owner]

    parts = [owned_by(owner) for owner in range(3)]
    assert torch.equal(parts[0], parts[1])
    assert torch.equal(parts[0], parts[2])


def test_a_result_holds_no_work_and_no_source() -> None:
    """A work that is kept keeps its process group alive beyond `destroy`."""
    tensor = torch.arange(4.0)
    pending = PendingFlatReduceScatter(None, tensor.clone().unsqueeze(0), tensor)
    out = torch.zeros(4)
    assert pending.result(out=out) is out
    assert torch.equal(out, tensor)
    assert pending.work is None
    assert pending.source is None


def test_what_was_received_is_given_back_with_the_sum() -> None:
    """Not when gloo's thread lets go of it: on busy cores that is after the next buffers came."""
    received = torch.arange(6.0).view(2, 3)
    kept = received.untyped_storage()
    assert PendingFlatReduceScatter(None, received, None).result().tolist() == [3.0, 5.0, 7.0]
    assert kept.nbytes() == 0


CPU = torch.device("cpu")


def test_transfers_take_the_memory_of_earlier_ones(together) -> None:
    """Of smaller and larger ones, of another dtype, equal parts and unequal ones: the same bits."""

    def action(rank: int, group: dist.ProcessGroup) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found, buffer = [], TransferBuffer()
        for memory in (buffer, buffer, None):
            for cuts in CUTS:
                for dtype in (torch.float32, torch.bfloat16):
                    tensor = values(rank, cuts[-1], dtype)
                    own = tensor[cuts[rank] : cuts[rank + 1]]
                    reduce_scatter(tensor, cuts, rank, group, memory).result(out=own)
                    part = own.clone()
                    direct = memory is not None and dtype is torch.float32
                    all_gather_parts(tensor, cuts, rank, group, memory, direct=direct).wait()
                    found.append((part, tensor))
            most = max(cuts[rank + 1] - cuts[rank] for cuts in CUTS)  # three times, in fp32
            assert memory is None or memory.held_bytes == 3 * 4 * most
        return found

    for found in together(action):
        third = len(found) // 3
        for one, again, alone in zip(*(found[third * k :][:third] for k in range(3)), strict=True):
            assert torch.equal(one[0], alone[0])
            assert torch.equal(one[1], alone[1])
            assert torch.equal(again[1], alone[1])


def test_a_transfer_buffer_lends_its_memory_once() -> None:
    """A transfer that an error gave up may still write: it keeps its memory for itself."""
    buffer = TransferBuffer()
    first = buffer.acquire(8, torch.float32, CPU)
    place = first.data_ptr()
    buffer.release(first.view(2, 4))
    assert buffer.acquire(4, torch.float64, CPU).data_ptr() == place
    given_up = buffer.acquire(8, torch.bfloat16, CPU)
    assert given_up.data_ptr() != place
    buffer.release(first)  # of an earlier loan: frees its own memory alone
    assert first.untyped_storage().nbytes() == 0
    assert buffer.acquire(8, torch.bfloat16, CPU).data_ptr() != given_up.data_ptr()


def test_memory_that_glibc_maps_is_not_kept() -> None:
    buffer = TransferBuffer()
    large = buffer.acquire(LARGEST_KEPT_BYTES + 1, torch.uint8, CPU)
    assert buffer.held_bytes == 0
    buffer.release(large)
    assert large.untyped_storage().nbytes() == 0
    buffer.release(buffer.acquire(LARGEST_KEPT_BYTES, torch.uint8, CPU))
    assert buffer.held_bytes == LARGEST_KEPT_BYTES
    assert buffer.acquire(4, torch.uint8, torch.device("meta")).is_meta
    assert buffer.held_bytes == LARGEST_KEPT_BYTES


def test_buffers_of_one_size_take_turns_and_others_are_given_back() -> None:
    spare = BufferCache()
    first = spare.acquire(4, torch.float32)
    spare.release(first)
    assert first.untyped_storage().nbytes() == 0, "nobody knows yet that more of its size will come"
    second = spare.acquire(4, torch.float32)
    spare.release(second)
    assert spare.acquire(4, torch.float32).data_ptr() == second.data_ptr()
    assert spare.acquire(4, torch.float32).data_ptr() != second.data_ptr()
    spare.release(second)
    assert spare.acquire(8, torch.float32).numel() == 8
    assert spare.acquire(4, torch.float64).dtype == torch.float64
    spare.drop()
    assert second.untyped_storage().nbytes() == 0


def test_a_gathered_buffer_is_taken_again_once_nobody_holds_it() -> None:
    gather, cpu = GatherParameters(TrafficCounter()), torch.device("cpu")

    def take(size: int) -> torch.Tensor:
        return gather.allocate([size], dtype=torch.float32, device=cpu)

    root = take(100)
    first, held = take(8), take(8)
    view = held.view(2, 4)
    place = held.data_ptr()
    del held
    assert take(8).data_ptr() != place, "a view holds it"
    del view
    again = take(8)
    assert again.data_ptr() == place
    assert len({root.data_ptr(), first.data_ptr(), again.data_ptr()}) == 3
    gather.drop()
    assert again.numel() == 8
