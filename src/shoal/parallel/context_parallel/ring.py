"""Ring attention: queries stay on their rank, keys and values travel once around the ranks.

Every rank holds 1/n of the tokens. In n turns it receives the keys and values of every rank, adds
the attention of its queries to them (online softmax, `merge`) and sends them on while it computes.
In the backward pass keys and values travel again, with their gradients, one turn longer: back to
their rank. Nothing is approximated. At most two ranks' keys and values are in transit through a
rank; with a mask they travel in groups, so that the rank's own are among the two.

Causal    neighbouring tokens would give the last rank n times the work of the first. If each rank
          has an even number of tokens, they are redistributed (`zigzag`), an early and a late
          half each. Then a turn is half the work, on every rank:
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
    Attended,
    attend,
    attend_backward,
    merge,
)
from shoal.parallel.context_parallel.visible_keys import (
    Masked,
    Unmasked,
    Visible,
    in_small_groups,
)
from shoal.parallel.context_parallel.zigzag import moved, neighbours, zigzag

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
    q, k, v = as_products(q, k, v)
    headless = q.dim() == 3
    if headless:
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if mask is None:
        out: Tensor = _Ring.apply(q, k, v, None, axis, causal, scale)
    else:
        mask = mask.unsqueeze(1) if headless and mask.dim() == 3 else mask
        dim, groups = in_small_groups(q, k, v, mask[(None,) * (4 - mask.dim())])
        out = torch.cat([_Ring.apply(*group, axis, False, scale) for group in groups], dim)
    return out.squeeze(1) if headless else out


def as_products(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast to autocast's dtype if it is on, as torch's own attention does."""
    kind = tensors[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    if tensors[0].dtype == torch.float64:
        return tensors
    return tuple(one.to(torch.get_autocast_dtype(kind)) for one in tensors)


class _Ring(torch.autograd.Function):
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
            q, k, v = moved((q, k, v), axis, neighbours, zigzag)
        if mask is None:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
            tokens = q.shape[-2]
            ctx.visible = Unmasked(axis.rank, axis.size, tokens, causal, ctx.dealt)
        else:
            ctx.visible = Masked.by(mask, axis)
        total = _around(q, k, v, axis, ctx.visible, scale)
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
        grads = _around_again(gradient, q, k, v, total, axis, ctx.visible, ctx.scale)
        back = moved(grads, axis, zigzag, neighbours) if dealt else grads
        return (*back, None, None, None, None)


def _around(
    q: Tensor, k: Tensor, v: Tensor, axis: ContextAxis, visible: Visible, scale: float
) -> Attended:
    """Attend from the rank's queries to all keys; `out` has the dtype of `lse`."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    total = Attended(
        q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=wide),
        q.new_full(q.shape[:-1], -torch.inf, dtype=wide),
    )
    held = [k, v]
    for turn in range(visible.turns):
        coming = axis.pass_on(_rows(held)) if turn < visible.turns - 1 else None
        for rows, keys, diagonal, mask in visible.of((axis.rank - turn) % axis.size):
            seen = attend(
                q[:, :, rows],
                held[0][:, :, keys],
                held[1][:, :, keys],
                causal=diagonal,
                scale=scale,
                mask=mask,
            )
            merge(Attended(total.out[:, :, rows], total.lse[:, :, rows]), seen)
        held = held if coming is None else coming.result()
    return total


def _around_again(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    total: Attended,
    axis: ContextAxis,
    visible: Visible,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, in a second journey around the ring."""
    wide = total.lse.dtype
    dq = torch.zeros_like(q, dtype=wide)
    held, sums = [k, v], None
    for turn in range(visible.turns):
        coming = axis.pass_on(_rows(held)) if turn < visible.turns - 1 else None
        own = [torch.zeros(one.shape, dtype=wide, device=one.device) for one in held]
        for rows, keys, diagonal, mask in visible.of((axis.rank - turn) % axis.size):
            for_q, for_k, for_v = attend_backward(
                gradient[:, :, rows],
                q[:, :, rows],
                held[0][:, :, keys],
                held[1][:, :, keys],
                Attended(total.out[:, :, rows], total.lse[:, :, rows]),
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
    dk, dv = _home(own, axis, visible.turns)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _rows(tensors: list[Tensor]) -> list[Tensor]:
    """Make tensors contiguous, so that they can be sent."""
    return [one.contiguous() for one in tensors]


def _home(sums: list[Tensor], axis: ContextAxis, turns: int) -> list[Tensor]:
    """Send the gradients of keys, now `turns` − 1 ranks ahead, to the rank that holds the keys."""
    if turns == axis.size:
        return axis.pass_on(sums).result()
    if turns == 1:
        return sums
    home, guest = (axis.rank - turns + 1) % axis.size, (axis.rank + turns - 1) % axis.size
    came = axis.to_each(
        torch.cat([one.reshape(1, -1) for one in sums], 1),
        [int(rank == home) for rank in range(axis.size)],
        [int(rank == guest) for rank in range(axis.size)],
    )
    parts = came[0].split([one.numel() for one in sums])
    return [part.view(one.shape) for part, one in zip(parts, sums, strict=True)]
