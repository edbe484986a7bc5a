"""Attention whose tokens lie on several ranks: the numbers of one, in every way to compute it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from context_threads import in_a_ring

from shoal.parallel.context_parallel import attention_kernels
from shoal.parallel.context_parallel.ring import ring_attention
from shoal.parallel.context_parallel.ulysses import ulysses_attention
from shoal.parallel.context_parallel.zigzag import contiguous_chunks, redistribute, zigzag_chunks

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
        monkeypatch.setattr(attention_kernels, "_select_kernel", lambda q, v: "written")
        monkeypatch.setattr(attention_kernels, "ROWS", 3)
    tensors = drawn(tokens, 4, 2)
    expected = whole(*tensors, causal, 0.3)
    for got, right in zip(in_parts(WAYS[way], size, tensors, causal, 0.3), expected, strict=True):
        assert (got - right).norm() <= 1e-14 * right.norm()


def masks(tokens: int, samples: int) -> dict[str, torch.Tensor]:
    """[samples or 1, heads or 1, tokens or 1, tokens], or with fewer dims."""
    near = torch.arange(tokens)[:, None] - torch.arange(tokens)
    window = (near >= 0) & (near < 4)
    lengths = torch.arange(samples) * 3 + tokens - 3 * samples
    padding = torch.arange(tokens) < lengths[:, None]
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
    return {
        "window": window,
        "padding": padding[:, None, None],
        "window and padding before": (window & padding.flip(1)[:, None])[:, None],
        "bias by head": (-near.abs() * slopes[:, None, None]).masked_fill(near < 0, -torch.inf),
        "own block hidden": (near >= 5)[None],
    }


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("mask", masks(12, 1))
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("way", WAYS)
def test_masks_mean_what_they_mean_on_one_device(way, size, mask, samples) -> None:
    """Rows that see nothing at all give 0, as torch's own attention does."""
    shown = masks(12, samples)[mask]
    shapes = [(samples, 4, 12, 8), (samples, 2, 12, 8), (samples, 2, 12, 8), (samples, 4, 12, 8)]
    generator = torch.Generator().manual_seed(3)
    q, k, v, pull = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    leaves = [one.clone().requires_grad_() for one in (q, k, v)]
    right = F.scaled_dot_product_attention(*leaves, shown, enable_gqa=True)
    (right * pull).sum().backward()

    def masked(q, axis, k, v, **how):
        rows = shown.chunk(size, -2)[axis.rank] if shown.shape[-2] > 1 else shown
        return WAYS[way](q, axis, k, v, rows, scale=how["scale"])

    got = in_parts(masked, size, (q, k, v, pull), False, None)
    for one, expected in zip(got, [right.detach(), *(one.grad for one in leaves)], strict=True):
        assert (one - expected).norm() <= 1e-14 * expected.norm()


@pytest.mark.parametrize(("width", "turns"), [(1, 1), (3, 2), (4, 2), (5, 3), (12, 4)])
def test_a_window_ends_the_ring_where_it_ends(width: int, turns: int) -> None:
    """3 tokens on each of 4 ranks; gradients go straight home, from the last turn."""
    near = torch.arange(12)[:, None] - torch.arange(12)
    window = (near >= 0) & (near < width)

    def work(axis):
        q = torch.ones(1, 1, 3, 8, requires_grad=True)
        out = ring_attention(q, axis, q, q, window.chunk(4)[axis.rank])
        forward = dict(axis.counts)
        out.sum().backward()
        return forward, {key: n - forward.get(key, 0) for key, n in axis.counts.items()}

    for forward, backward in in_a_ring(4, work):
        assert forward.get("send", 0) == turns - 1
        home = (turns == 4, 1 < turns < 4)
        assert backward.get("send", 0) == 2 * (turns - 1) + home[0]
        assert backward.get("all_to_all", 0) == home[1]


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
        (dealt,) = redistribute((own,), axis, contiguous_chunks, zigzag_chunks)
        (back,) = redistribute((dealt,), axis, zigzag_chunks, contiguous_chunks)
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

    def counted(q, k, v, *, causal, scale, mask):
        who = threading.get_ident()
        rows, keys = q.shape[2], k.shape[2]
        work_of[who] = work_of.get(who, 0) + (rows * (rows + 1) // 2 if causal else rows * keys)
        return right(q, k, v, causal=causal, scale=scale, mask=mask)

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
