"""Ring attention: queries stay where they are, keys and values travel once around the ranks.

Every rank holds 1/n of the tokens. In n turns it meets the keys and values of every rank, adds what
its queries see of them (online softmax, `kernels.merge`) and hands them on, which happens while it
computes. In the backward pass they travel again, and their gradients with them, one turn longer:
home. Nothing is approximated, and no rank ever holds more than two ranks' keys and values.

Causal    neighbouring tokens would give the last rank n times the work of the first. Where the
          tokens of a rank are an even number they are dealt anew (`zigzag`), an early and a late
          half each. Then a turn is half the work, on every rank:
              own keys       causal, early and late half in one
              of a rank before    all queries, its early keys
              of a rank after     late queries, all its keys
Bytes     a turn: keys and values of a rank; forward n − 1 turns; backward n − 1, and n of gradients
Source    Liu, Zaharia, Abbeel 2023 (2310.01889); the backward pass by the log-sum-exp of all keys:
          torch.distributed.tensor.experimental (context_parallel)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shoal.parallel.context_parallel.attention_kernels import (
    Attended,
    attend,
    attend_backward,
    merge,
)
from shoal.parallel.context_parallel.axis import ContextAxis
from shoal.parallel.context_parallel.zigzag import moved, neighbours, zigzag


def ring_attention(
    q: Tensor,
    axis: ContextAxis,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks.

    q [batch, heads, own tokens, head_dim] · k, v [batch, kv_heads, own tokens, head_dim], or
    without the dim of heads; tokens of rank r come after those of rank r − 1
    scale   of the scores; default 1 / √head_dim
    """
    q, k, v = as_products(q, k, v)
    headless = q.dim() == 3
    if headless:
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    out: Tensor = _Ring.apply(q, k, v, axis, causal, scale)
    return out.squeeze(1) if headless else out


def as_products(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In the format of matrix products: autocast's if it is on, as torch's own attention does."""
    kind = tensors[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    if tensors[0].dtype == torch.float64:
        return tensors
    return tuple(one.to(torch.get_autocast_dtype(kind)) for one in tensors)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: ContextAxis, causal: bool, scale: float
    ) -> Tensor:
        ctx.axis, ctx.scale = axis, scale
        ctx.causal, ctx.dealt = causal, causal and q.shape[-2] % 2 == 0
        if ctx.dealt:
            q, k, v = moved((q, k, v), axis, neighbours, zigzag)
        else:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        total = _around(q, k, v, axis, causal, ctx.dealt, scale)
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total.lse)
        return moved((out,), axis, zigzag, neighbours)[0] if ctx.dealt else out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        axis, dealt = ctx.axis, ctx.dealt
        gradient = gradient.to(q.dtype).contiguous()
        if dealt:
            (gradient,) = moved((gradient,), axis, neighbours, zigzag)
        total = Attended(out, lse)
        grads = _around_again(gradient, q, k, v, total, axis, ctx.causal, dealt, ctx.scale)
        back = moved(grads, axis, zigzag, neighbours) if dealt else grads
        return (*back, None, None, None)


def _around(
    q: Tensor, k: Tensor, v: Tensor, axis: ContextAxis, causal: bool, dealt: bool, scale: float
) -> Attended:
    """Own queries' attention to all keys; `out` in the format of `lse`."""
    total: Attended | None = None
    held = [k, v]
    for turn in range(axis.size):
        coming = axis.pass_on(held) if turn < axis.size - 1 else None
        source = (axis.rank - turn) % axis.size
        for rows, keys, diagonal in _seen(axis.rank, source, q.shape[-2], causal, dealt):
            seen = attend(
                q[:, :, rows],
                held[0][:, :, keys],
                held[1][:, :, keys],
                causal=diagonal,
                scale=scale,
            )
            if total is None:  # the own keys come first, and all queries see of them
                total = Attended(seen.out.to(seen.lse.dtype, copy=True), seen.lse)
            else:
                merge(Attended(total.out[:, :, rows], total.lse[:, :, rows]), seen)
        held = held if coming is None else coming.result()
    if total is None:
        raise ValueError("a ring has at least one rank")
    return total


def _around_again(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    total: Attended,
    axis: ContextAxis,
    causal: bool,
    dealt: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    wide = total.lse.dtype
    dq = torch.zeros_like(q, dtype=wide)
    held, sums = [k, v], None
    for turn in range(axis.size):
        coming = axis.pass_on(held) if turn < axis.size - 1 else None
        source = (axis.rank - turn) % axis.size
        own = [torch.zeros_like(one, dtype=wide) for one in held]
        for rows, keys, diagonal in _seen(axis.rank, source, q.shape[-2], causal, dealt):
            for_q, for_k, for_v = attend_backward(
                gradient[:, :, rows],
                q[:, :, rows],
                held[0][:, :, keys],
                held[1][:, :, keys],
                Attended(total.out[:, :, rows], total.lse[:, :, rows]),
                causal=diagonal,
                scale=scale,
            )
            dq[:, :, rows] += for_q
            own[0][:, :, keys] += for_k
            own[1][:, :, keys] += for_v
        if sums is not None:  # what the ranks before found for the keys that are here now
            for mine, theirs in zip(own, sums.result(), strict=True):
                mine += theirs
        sums = axis.pass_on(own)
        held = held if coming is None else coming.result()
    dk, dv = own if sums is None else sums.result()
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _seen(
    rank: int, source: int, tokens: int, causal: bool, dealt: bool
) -> Iterator[tuple[slice, slice, bool]]:
    """(queries, keys, whether only earlier keys) of what `rank` sees of the keys of `source`."""
    every, half = slice(None), tokens // 2
    if not causal or source == rank:
        yield every, every, causal
    elif dealt:
        yield (every, slice(half), False) if source < rank else (slice(half, None), every, False)
    elif source < rank:
        yield every, every, False
