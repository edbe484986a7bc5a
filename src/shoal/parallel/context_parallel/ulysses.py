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
    if mask is not None or q.dim() != 4 or not heads_divide(q.shape[1], axis.size):
        return ring_attention(q, axis, k, v, mask, causal=causal, scale=scale)
    q, k, v = cast_to_autocast(q, k, v)
    kv_heads = k.shape[1]
    repeats = math.lcm(kv_heads, axis.size) // kv_heads
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    mine = [_ToHeads.apply(one, axis) for one in (q, k, v)]
    grouped = mine[0].shape[1] != mine[1].shape[1]
    out = F.scaled_dot_product_attention(
        mine[0], mine[1], mine[2], is_causal=causal, scale=scale, enable_gqa=grouped
    )
    back: Tensor = _ToTokens.apply(out, axis)
    return back


def heads_divide(heads: int, degree: int) -> bool:
    """Return whether the query heads divide evenly over the ranks.

    >>> heads_divide(6, 4)
    False
    """
    return heads % degree == 0


def _to_heads(tokens: Tensor, axis: ContextAxis) -> Tensor:
    """All-to-all from [batch, heads, own tokens, dim] to [batch, own heads, tokens, dim]."""
    rows = torch.stack(tokens.chunk(axis.size, 1))
    came = axis.all_to_all_rows(rows, [1] * axis.size, [1] * axis.size)
    return torch.cat(came.unbind(0), 2)


def _to_tokens(heads: Tensor, axis: ContextAxis) -> Tensor:
    """All-to-all from [batch, own heads, tokens, dim] to [batch, heads, own tokens, dim]."""
    rows = torch.stack(heads.chunk(axis.size, 2))
    came = axis.all_to_all_rows(rows, [1] * axis.size, [1] * axis.size)
    return torch.cat(came.unbind(0), 1)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, axis: ContextAxis) -> Tensor:
        ctx.axis = axis
        return _to_heads(tokens, axis)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return _to_tokens(upstream, ctx.axis), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, axis: ContextAxis) -> Tensor:
        ctx.axis = axis
        return _to_tokens(heads, axis)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return _to_heads(upstream, ctx.axis), None
