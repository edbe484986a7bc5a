"""Ring attention: queries stay on their rank, keys and values travel once around the ranks.

Every rank holds 1/n of the tokens. In n turns it receives the keys and values of every rank, adds
the attention of its queries to them (online softmax, `merge_attention`) and sends them on while it
computes. In the backward pass keys and values travel again, with their gradients, one turn longer:
back to their rank. Nothing is approximated. At most two ranks' keys and values are in transit
through a rank; with a mask they travel in groups, so that the rank's own are among the two.

Causal    neighbouring tokens would give the last rank n times the work of the first. If each rank
          has an even number of tokens, they are redistributed (`zigzag_chunks`), an early and a
          late half each. Then a turn is half the work, on every rank:
              own keys       causal, early and late half in one
              of a rank before    all queries, its early keys
              of a rank after     late queries, all its keys
Masks     a window or padding: the ring ends with the last turn in which a rank sees any key
          (`visible_keys.py`), and gradients go straight to their rank from there. Tokens stay
          neighbours: a window gives every rank as much work, padding and causal masks do not
Bytes     a turn: keys and values of a rank; forward n − 1 turns; backward n − 1, and n of gradients
Source    Liu, Zaharia, Abbeel 2023 (2310.01889); the backward pass by the log-sum-exp of all keys:
          torch.distributed.tensor.experimental (context_parallel)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.parallel.context_parallel.attention_kernels import (
    AttentionResult,
    attend,
    attend_backward,
    merge_attention,
)
from shoal.parallel.context_parallel.visible_keys import (
    MaskedKeys,
    UnmaskedKeys,
    VisibleKeys,
    split_in_groups,
)
from shoal.parallel.context_parallel.zigzag import contiguous_chunks, redistribute, zigzag_chunks

if TYPE_CHECKING:  # only types
    from shoal.parallel.context_parallel.attention_axis import ContextAxis


def ring_attention(
    q: Tensor,
    axis: ContextAxis,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Compute attention of this rank's queries to the keys of all ranks.

    q [batch, heads, own tokens, head_dim] · k, v [batch, kv_heads, own tokens, head_dim], or
    without the dim of heads; tokens of rank r come after those of rank r − 1

    Args:
        mask: [..., own tokens or 1, tokens of all ranks], boolean or added to the scores; it has no
            gradient and excludes `causal`.
        scale: factor of the scores; default 1 / √head_dim.
    """
    q, k, v = cast_to_autocast(q, k, v)
    headless = q.dim() == 3
    if headless:
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if mask is None:
        out: Tensor = _RingAttention.apply(q, k, v, None, axis, causal, scale)
    else:
        mask = mask.unsqueeze(1) if headless and mask.dim() == 3 else mask
        dim, groups = split_in_groups(q, k, v, mask[(None,) * (4 - mask.dim())])
        out = torch.cat([_RingAttention.apply(*group, axis, False, scale) for group in groups], dim)
    return out.squeeze(1) if headless else out


def cast_to_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast to autocast's dtype if it is on, as torch's own attention does."""
    kind = tensors[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    if tensors[0].dtype == torch.float64:
        return tensors
    return tuple(one.to(torch.get_autocast_dtype(kind)) for one in tensors)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        axis: ContextAxis,
        causal: bool,
        scale: float,
    ) -> Tensor:
        ctx.axis, ctx.scale = axis, scale
        ctx.dealt = causal and q.shape[-2] % 2 == 0
        if ctx.dealt:
            q, k, v = redistribute((q, k, v), axis, contiguous_chunks, zigzag_chunks)
        if mask is None:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
            tokens = q.shape[-2]
            ctx.visible = UnmaskedKeys(axis.rank, axis.size, tokens, causal, ctx.dealt)
        else:
            ctx.visible = MaskedKeys.by(mask, axis)
        total = _forward_ring(q, k, v, axis, ctx.visible, scale)
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total.lse)
        return redistribute((out,), axis, zigzag_chunks, contiguous_chunks)[0] if ctx.dealt else out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        axis, dealt = ctx.axis, ctx.dealt
        gradient = gradient.to(q.dtype).contiguous()
        if dealt:
            (gradient,) = redistribute((gradient,), axis, contiguous_chunks, zigzag_chunks)
        total = AttentionResult(out, lse)
        grads = _backward_ring(gradient, q, k, v, total, axis, ctx.visible, ctx.scale)
        back = redistribute(grads, axis, zigzag_chunks, contiguous_chunks) if dealt else grads
        return (*back, None, None, None, None)


def _forward_ring(
    q: Tensor, k: Tensor, v: Tensor, axis: ContextAxis, visible: VisibleKeys, scale: float
) -> AttentionResult:
    """Attend from the rank's queries to all keys; `out` has the dtype of `lse`."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    total = AttentionResult(
        q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=wide),
        q.new_full(q.shape[:-1], -torch.inf, dtype=wide),
    )
    held = [k, v]
    for turn in range(visible.turns):
        coming = axis.pass_on(_make_contiguous(held)) if turn < visible.turns - 1 else None
        for rows, keys, diagonal, mask in visible.of((axis.rank - turn) % axis.size):
            seen = attend(
                q[:, :, rows],
                held[0][:, :, keys],
                held[1][:, :, keys],
                causal=diagonal,
                scale=scale,
                mask=mask,
            )
            merge_attention(AttentionResult(total.out[:, :, rows], total.lse[:, :, rows]), seen)
        held = held if coming is None else coming.result()
    return total


def _backward_ring(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    total: AttentionResult,
    axis: ContextAxis,
    visible: VisibleKeys,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, in a second journey around the ring."""
    wide = total.lse.dtype
    dq = torch.zeros_like(q, dtype=wide)
    held, sums = [k, v], None
    for turn in range(visible.turns):
        coming = axis.pass_on(_make_contiguous(held)) if turn < visible.turns - 1 else None
        own = [torch.zeros(one.shape, dtype=wide, device=one.device) for one in held]
        for rows, keys, diagonal, mask in visible.of((axis.rank - turn) % axis.size):
            for_q, for_k, for_v = attend_backward(
                gradient[:, :, rows],
                q[:, :, rows],
                held[0][:, :, keys],
                held[1][:, :, keys],
                AttentionResult(total.out[:, :, rows], total.lse[:, :, rows]),
                causal=diagonal,
                scale=scale,
                mask=mask,
            )
            dq[:, :, rows] += for_q
            own[0][:, :, keys] += for_k
            own[1][:, :, keys] += for_v
        if sums is not None:  # from the ranks before, for the keys that are on this rank now
            for mine, theirs in zip(own, sums.result(), strict=True):
                mine += theirs
        sums = axis.pass_on(own) if turn < visible.turns - 1 else None
        held = held if coming is None else coming.result()
    dk, dv = _return_gradients(own, axis, visible.turns)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _make_contiguous(tensors: list[Tensor]) -> list[Tensor]:
    """Make tensors contiguous, so that they can be sent."""
    return [one.contiguous() for one in tensors]


def _return_gradients(sums: list[Tensor], axis: ContextAxis, turns: int) -> list[Tensor]:
    """Send the gradients of keys, now `turns` − 1 ranks ahead, to the rank that holds the keys."""
    if turns == axis.size:
        return axis.pass_on(sums).result()
    if turns == 1:
        return sums
    home, guest = (axis.rank - turns + 1) % axis.size, (axis.rank + turns - 1) % axis.size
    came = axis.all_to_all_rows(
        torch.cat([one.reshape(1, -1) for one in sums], 1),
        [int(rank == home) for rank in range(axis.size)],
        [int(rank == guest) for rank in range(axis.size)],
    )
    parts = came[0].split([one.numel() for one in sums])
    return [part.view(one.shape) for part, one in zip(parts, sums, strict=True)]
