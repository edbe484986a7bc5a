"""Attention whose tokens lie on several ranks: the numbers of one, in every way to compute it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from context_threads import in_a_ring

from shoal.parallel.context_parallel import attention_kernels
from shoal.parallel.context_parallel.ring import ring_attention
from shoal.parallel.context_parallel.ulysses import ulysses_attention
from shoal.parallel.context_parallel.zigzag import moved, neighbours, zigzag

WAYS = {"ring": ring_attention, "ulysses": ulysses_attention}


def drawn(tokens: int, heads: int, kv_heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, heads, tokens, 8), (2, kv_heads, tokens, 8), (2, kv_heads, tokens, 8)]
    shapes.append(shapes[0])
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def whole(q, k, v, pull, causal: bool, scale: float | None) -> list[torch.Tensor]:
    q, k, v = (one.clone().requires_grad_() for one in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    (out * pull).sum().backward()
    return [out.detach(), q.grad, k.grad, v.grad]


def in_parts(way, size: int, tensors, causal: bool, scale: float | None) -> list[torch.Tensor]:
    def work(axis):
        q, k, v, pull = (one.chunk(size, 2)[axis.rank] for one in tensors)
        leaves = [one.clone().requires_grad_() for one in (q, k, v)]
        out = way(leaves[0], axis, leaves[1], leaves[2], causal=causal, scale=scale)
        (out * pull).sum().backward()
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    ranks = in_a_ring(size, work)
    return [torch.cat(parts, 2) for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize("kernel", ["flash", "written"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("size", "tokens"), [(2, 12), (3, 12), (4, 16), (3, 9)])
@pytest.mark.parametrize("way", WAYS)
def test_equals_one_process(monkeypatch, way, size, tokens, causal, kernel) -> None:
    if kernel == "written":
        monkeypatch.setattr(attention_kernels, "_kind", lambda q, v: "written")
        monkeypatch.setattr(attention_kernels, "ROWS", 3)
    tensors = drawn(tokens, 4, 2)
    expected = whole(*tensors, causal, 0.3)
    for got, right in zip(in_parts(WAYS[way], size, tensors, causal, 0.3), expected, strict=True):
        assert (got - right).norm() <= 1e-14 * right.norm()


@pytest.mark.parametrize("way", WAYS)
def test_without_a_dim_of_heads(way) -> None:
    tensors = drawn(8, 1, 1)
    expected = whole(*tensors, True, None)

    def flat(q, axis, k, v, **how):
        three = (one.squeeze(1) for one in (q, k, v))
        first, *others = three
        return WAYS[way](first, axis, *others, **how).unsqueeze(1)

    for got, right in zip(in_parts(flat, 2, tensors, True, None), expected, strict=True):
        assert (got - right).norm() <= 1e-14 * right.norm()


def test_heads_are_dealt_where_they_divide_only() -> None:
    def work(axis):
        q = torch.ones(1, 4, 2, 8)
        ulysses_attention(q, axis, q, q)
        by_heads = dict(axis.counts)
        axis.counts.clear()
        ulysses_attention(q[:, :3], axis, q[:, :3], q[:, :3])
        return by_heads, dict(axis.counts)

    assert in_a_ring(2, work)[0] == ({"all_to_all": 4}, {"send": 1})


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_zigzag_is_an_early_and_a_late_chunk(size: int) -> None:
    tokens = torch.arange(4 * size).double()

    def work(axis):
        own = tokens.chunk(size)[axis.rank].view(-1, 1)
        (dealt,) = moved((own,), axis, neighbours, zigzag)
        (back,) = moved((dealt,), axis, zigzag, neighbours)
        return dealt.flatten().tolist(), torch.equal(back, own)

    for rank, (dealt, came_back) in enumerate(in_a_ring(size, work)):
        late = 2 * (2 * size - 1 - rank)
        assert dealt == [2 * rank, 2 * rank + 1, late, late + 1]
        assert came_back


@pytest.mark.parametrize("size", [2, 4])
def test_a_zigzag_gives_every_rank_the_same_work(monkeypatch, size: int) -> None:
    """Scores that are computed: with neighbouring tokens the last rank has n times the first's."""
    import threading

    from shoal.parallel.context_parallel import ring

    work_of: dict[int, int] = {}
    right = ring.attend

    def counted(q, k, v, *, causal, scale):
        who = threading.get_ident()
        rows, keys = q.shape[2], k.shape[2]
        work_of[who] = work_of.get(who, 0) + (rows * (rows + 1) // 2 if causal else rows * keys)
        return right(q, k, v, causal=causal, scale=scale)

    monkeypatch.setattr(ring, "attend", counted)
    q = torch.randn(1, 1, 8, 8)
    in_a_ring(size, lambda axis: ring.ring_attention(q, axis, q, q, causal=True))
    assert len(set(work_of.values())) == 1
    work_of.clear()
    in_a_ring(
        size,
        lambda axis: ring.ring_attention(q[:, :, :7], axis, q[:, :, :7], q[:, :, :7], causal=True),
    )
    assert max(work_of.values()) > 1.9 * size / 2 * min(work_of.values())


def test_bf16_adds_up_in_fp32() -> None:
    tensors = [one.bfloat16() for one in drawn(64, 2, 2)]
    exact = whole(*(one.double() for one in tensors), True, None)[0]
    one = F.scaled_dot_product_attention(*tensors[:3], is_causal=True).double()
    got = in_parts(ring_attention, 4, tensors, True, None)[0].double()
    assert (got - exact).norm() <= 1.5 * (one - exact).norm()
