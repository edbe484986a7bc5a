"""Ulysses attention: during attention the ranks split the heads instead of the sequence.

Everywhere else a rank holds all heads of 1/n of the tokens. One all-to-all turns q, k and v into
1/n of the heads of all tokens, attention runs as on one device, and one more all-to-all turns the
result back. The number of query heads must be a multiple of n; key/value heads that do not divide
are repeated until they do.

Bytes     4/n of what gathered q, k, v and out would be, n times less than gathering keys and values
          where those have as many heads
Source    Jacobs et al. 2023 (2309.14509), DeepSpeed-Ulysses
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.parallel.context_parallel.ring import cast_to_autocast, ring_attention

if TYPE_CHECKING:  # only types
    from shoal.parallel.context_parallel.attention_axis import ContextAxis


def ulysses_attention(
    q: Tensor,
    axis: ContextAxis,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attend by heads; with a mask or heads that do not divide, run `ring_attention`."""
    if mask is not None or q.dim() != 4 or q.shape[1] % axis.size:
        return ring_attention(q, axis, k, v, mask, causal=causal, scale=scale)
    q, k, v = cast_to_autocast(q, k, v)
    kv_heads = k.shape[1]
    repeats = math.lcm(kv_heads, axis.size) // kv_heads
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    mine = [_Exchange.apply(one, axis, 1, 2) for one in (q, k, v)]
    grouped = mine[0].shape[1] != mine[1].shape[1]
    out = F.scaled_dot_product_attention(
        mine[0], mine[1], mine[2], is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return _Exchange.apply(out, axis, 2, 1)


def _exchange(value: Tensor, axis: ContextAxis, split: int, join: int) -> Tensor:
    """All-to-all that splits dim `split` over the ranks and joins their parts along dim `join`."""
    rows = torch.stack(value.chunk(axis.size, split))
    came = axis.all_to_all_rows(rows, [1] * axis.size, [1] * axis.size)
    return torch.cat(came.unbind(0), join)


class _Exchange(torch.autograd.Function):
    """From [batch, heads, own tokens, dim] to [batch, own heads, tokens, dim] or back."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: ContextAxis, split: int, join: int) -> Tensor:
        ctx.axis, ctx.split, ctx.join = axis, split, join
        return _exchange(value, axis, split, join)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(upstream, ctx.axis, ctx.join, ctx.split), None, None, None
