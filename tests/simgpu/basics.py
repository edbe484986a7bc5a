"""What the simulated device promises, checked in one process; prints {check: what went wrong}.

Expected numbers of the allocator are CUDA's (c10/cuda/CUDACachingAllocator.cpp, torch 2.13).
"""

from __future__ import annotations

import copy
import json
import sys
import traceback
from collections.abc import Callable

import pytest
import simulated_cuda as sim
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

cuda = torch.cuda
MIB = 1 << 20
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Adds to the table."""
    CHECKS[function.__name__] = function
    return function


class Net(nn.Module):
    """A block of a transformer between an embedding and a head."""

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, dim), nn.Linear(dim, 50)
        self.qkv, self.out, self.norm = (
            nn.Linear(dim, 3 * dim),
            nn.Linear(dim, dim),
            nn.LayerNorm(dim),
        )
        self.drop = nn.Dropout(dropout)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))

    def forward(self, tokens: torch.Tensor, again: bool) -> torch.Tensor:
        x = self.embedding(tokens)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=False) if again else self.block(x)
        return self.head(x)


@sdpa_kernel(SDPBackend.MATH)  # what the device has
def losses(
    device: str, dropout: float = 0.0, again: bool = False, amp: bool = False, **how
) -> list[float]:
    """Four steps of AdamW."""
    torch.manual_seed(0)
    net = Net(32, dropout).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2, **how)
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(3)
    told = []
    for _ in range(4):
        tokens = torch.randint(0, 50, (4, 17), generator=generator).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=amp):
            out = net(tokens[:, :-1], again).flatten(0, 1)
            loss = F.cross_entropy(out.float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        told.append(loss.item())
    return told


@check
def training_has_the_bits_of_the_cpu() -> None:
    for mode in ("eager", "lazy", "drawn"):
        sim.set_mode(mode)
        for how in ({"foreach": False}, {"foreach": True}, {"again": True}):
            assert losses("cuda", **how) == losses("cpu", **how), (mode, how)


@check
def fused_and_autocast_come_close() -> None:
    for how, bound in (({"fused": True}, 1e-5), ({"amp": True}, 2e-2)):
        pairs = zip(losses("cuda", **how), losses("cpu", **how), strict=True)
        assert max(abs(a - b) for a, b in pairs) < bound, how


@check
def recurrent_layers_have_the_numbers_of_the_cpu() -> None:
    """A device's cells of LSTM and GRU are kernels that torch's CPU build lacks."""
    for mode in ("eager", "lazy", "drawn"):
        sim.set_mode(mode)
        # torch's meta kernel of an LSTM's cell needs a bias.
        for kind, bias in ((nn.LSTM, True), (nn.GRU, True), (nn.GRU, False)):
            torch.manual_seed(3)
            host = kind(5, 4, 2, batch_first=True, bias=bias).double()
            device = copy.deepcopy(host).cuda()
            x = torch.randn(3, 6, 5, dtype=torch.double)
            for layer, rows in ((host, x), (device, x.cuda())):
                rows = rows.requires_grad_()
                (layer(rows)[0].square().sum()).backward()
            pairs = zip(host.parameters(), device.parameters(), strict=True)
            gaps = [(a.grad - b.grad.cpu()).abs().max().item() for a, b in pairs]
            assert max(gaps) < 1e-12, (mode, kind, bias, gaps)
    sim.set_mode("eager")


@check
def dropout_repeats_and_leaves_the_hosts_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    mask = F.dropout(torch.ones(1000, device="cuda"), 0.3)
    assert torch.equal(before, torch.get_rng_state())
    assert 600 < int((mask != 0).sum()) < 800
    first = losses("cuda", dropout=0.2)
    assert first == losses("cuda", dropout=0.2)
    assert first == losses("cuda", dropout=0.2, again=True)
    state = cuda.get_rng_state()
    drawn = torch.rand(4, device="cuda")
    assert not torch.equal(drawn, torch.rand(4, device="cuda"))
    cuda.set_rng_state(state)
    assert torch.equal(drawn, torch.rand(4, device="cuda"))


def allocated() -> tuple[int, int]:
    return cuda.memory_allocated(), cuda.memory_reserved()


@check
def blocks_and_segments_are_cudas() -> None:
    cuda.empty_cache()
    base, reserved = allocated()
    small = torch.empty(1, device="cuda")
    assert allocated() == (base + 512, max(reserved, 2 * MIB))
    middle = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")  # of a 20 MiB segment
    grown = cuda.memory_reserved()
    assert grown == max(reserved, 2 * MIB) + 20 * MIB
    other = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")  # from what is left of it
    assert cuda.memory_reserved() == grown
    large = torch.empty(13 * MIB + 1, dtype=torch.uint8, device="cuda")  # a multiple of 2 MiB
    assert cuda.memory_reserved() == grown + 14 * MIB
    stats = cuda.memory_stats()
    assert stats["inactive_split_bytes.large_pool.current"] == 12 * MIB
    assert (
        stats["requested_bytes.all.current"] - stats["requested_bytes.small_pool.current"]
        == 21 * MIB + 1
    )
    del middle, other
    whole = torch.empty(19 * MIB, dtype=torch.uint8, device="cuda")  # both merged again
    assert cuda.memory_reserved() == grown + 14 * MIB
    cuda.reset_peak_memory_stats()
    del whole, large
    assert cuda.max_memory_allocated() > cuda.memory_allocated()
    cuda.empty_cache()
    assert cuda.memory_reserved() == max(reserved, 2 * MIB)
    snapshot = cuda.memory_snapshot()
    assert sum(s["total_size"] for s in snapshot) == cuda.memory_reserved()
    assert sum(s["allocated_size"] for s in snapshot) == cuda.memory_allocated()
    del small


@check
def a_limit_is_a_limit() -> None:
    sim.set_limit(1, 64 * MIB)
    held = [torch.empty(20 * MIB, dtype=torch.uint8, device="cuda:1") for _ in range(3)]
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 20\.00 MiB"):
        torch.empty(20 * MIB, dtype=torch.uint8, device="cuda:1")
    assert cuda.memory_stats(1)["num_ooms"] == 1
    held.pop()
    torch.empty(2 * MIB, dtype=torch.uint8, device="cuda:1")  # the unused segment goes back
    assert cuda.memory_stats(1)["num_alloc_retries"] >= 1
    assert cuda.mem_get_info(1)[1] == 64 * MIB
    sim.set_limit(1, 4 << 30)


@check
def memory_handed_out_again_is_poisoned() -> None:
    first = torch.ones(1000, device="cuda")
    del first
    assert bool(torch.empty(1000, device="cuda").isnan().all())


@check
def a_block_may_be_freed_before_its_stream_has_waited() -> None:
    """As in HSDP: the next user of the pool waits first, so nothing is wrong."""
    side = cuda.Stream()
    with cuda.stream(side):
        gradient = torch.ones(4096, device="cuda")
    cuda.current_stream().wait_stream(side)
    total = gradient * 2
    del gradient
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        torch.zeros(4096, device="cuda")
    assert bool((total == 2).all())


@check
def a_recorded_block_waits_for_its_stream() -> None:
    sim.set_mode("lazy")
    side, block = cuda.Stream(), torch.ones(4096, device="cuda")
    address = block.data_ptr()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        doubled = block * 2
    block.record_stream(side)
    del block
    other = torch.zeros(4096, device="cuda")
    assert other.data_ptr() != address
    side.synchronize()
    assert torch.zeros(4096, device="cuda").data_ptr() == address
    assert bool((doubled.cpu() == 2).all())
    sim.set_mode("drawn")


@check
def memory_is_pinned_by_torch_and_by_registering() -> None:
    pinned = torch.arange(6.0).pin_memory()
    plain = torch.arange(6.0)
    assert pinned.is_pinned()
    assert not plain.is_pinned()
    cuda.cudart().cudaHostRegister(plain.data_ptr(), plain.nbytes, 0)
    assert plain.is_pinned()
    assert torch.equal(plain.to("cuda", non_blocking=True).cpu(), pinned)
    cuda.synchronize()
    cuda.cudart().cudaHostUnregister(plain.data_ptr())
    assert not plain.is_pinned()


@check
def rows_and_columns_of_one_block_are_told_apart() -> None:
    block, side = torch.zeros(64, 64, device="cuda"), cuda.Stream()
    side.wait_stream(cuda.current_stream())
    block[:, :32].add_(1)
    with cuda.stream(side):
        block[:, 32:].add_(2)
    cuda.current_stream().wait_stream(side)
    assert float(block.sum()) == 64 * 32 * 3


@check
def copies_are_of_every_kind() -> None:
    whole = torch.arange(24.0, dtype=torch.float64).view(4, 6)
    there = whole.to("cuda")
    assert torch.equal(there.t().contiguous().cpu(), whole.t())
    assert torch.equal(there.to("cuda:1").cpu(), whole)
    assert torch.equal(there.float().cpu(), whole.float())
    assert torch.equal(there[:, 1:3].cpu(), whole[:, 1:3])
    assert torch.equal(copy.deepcopy(there).cpu(), whole)
    assert there.masked_select(there > 20).tolist() == [21.0, 22.0, 23.0]


@check
def events_measure_and_wait() -> None:
    begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    begin.record()
    torch.ones(100, device="cuda").mul_(2)
    end.record()
    end.synchronize()
    assert end.query()
    assert begin.elapsed_time(end) >= 0


@check
def a_shape_that_is_known_is_of_the_same_arguments() -> None:
    """Meta kernels are asked once per arguments: what changes their answer is told apart."""
    for end in (10.0, 100.0):
        assert torch.arange(end, device="cuda").shape == (end,)
    whole = torch.arange(12, device="cuda").view(3, 4)
    assert [(whole * by).dtype for by in (2, 2.5)] == [torch.int64, torch.float32]
    assert [(whole * torch.tensor(by)).dtype for by in (2, 2.5)] == [torch.int64, torch.float32]
    assert (whole * torch.tensor(2.5, dtype=torch.float64)).dtype == torch.float64
    assert [whole.sum(dim).shape for dim in (0, 1)] == [(4,), (3,)]
    assert [whole.sum(0, keepdim=keep).shape for keep in (True, False)] == [(1, 4), (4,)]
    assert [(x * 2).stride() for x in (whole, whole.t())] == [(4, 1), (1, 4)]
    assert [torch.cat([whole] * n).shape for n in (1, 2)] == [(3, 4), (6, 4)]
    assert [(whole / 5).dtype, (whole.double() / 5).dtype] == [torch.float32, torch.float64]
    torch.set_default_dtype(torch.float64)
    try:
        assert (whole / 5).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    with pytest.raises(RuntimeError, match="must match the size"):  # at its launch, each time
        whole + whole.t()
    with pytest.raises(RuntimeError, match="must match the size"):
        whole + whole.t()


@check
def nothing_was_reported() -> None:
    assert sim.races_told() == 0


def main() -> None:
    """All checks, or the digest of the order in which a seed's work ran."""
    if sys.argv[1:] == ["digest"]:
        for stream in [cuda.Stream() for _ in range(3)] * 9:  # one stream has one order only
            with cuda.stream(stream):
                torch.ones(9, device="cuda").mul_(2)
        cuda.synchronize()
        print(sim.order_of_work())
        return
    wrong = {}
    for name, function in CHECKS.items():
        sim.set_mode("drawn")
        try:
            function()
        except Exception:
            wrong[name] = traceback.format_exc()
    print(json.dumps({"checks": list(CHECKS), "wrong": wrong}))


if __name__ == "__main__":
    main()
