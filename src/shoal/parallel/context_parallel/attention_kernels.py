"""Attention of some queries to some keys, with the log-sum-exp that merges it with other keys.

Formula   s = scale · q kᵀ        lse = log Σ_j exp s_j        out = Σ_j exp(s_j − lse) · v_j
          two sets of keys:      lse = log(exp lse₁ + exp lse₂)
                                 out = exp(lse₁ − lse) · out₁ + exp(lse₂ − lse) · out₂
          backward, with lse and out of all keys:  p = exp(s − lse)     dv = pᵀ g
                                 ds = p · (g vᵀ − Σ g · out) · scale   dq = ds k    dk = dsᵀ q
Protocol  a backward kernel that receives `lse` and `out` of all keys returns, for any set of keys,
          exactly that set's share of the gradients: no [queries, keys] tensor is ever kept
Kernels   CPU: torch's flash kernel. CUDA in fp16 and bf16, head_dim a multiple of 8: torch's flash
          kernel (not tested: no device was at hand). Elsewhere: matrix products, rows by rows
Source    online softmax: Milakov and Gimelshein 2018 (1805.02867); flash: Dao et al. 2022
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.fabric.device import is_accelerator, supports_flash
from shoal.parallel._torch import (
    flash_cpu,
    flash_cpu_backward,
    flash_device,
    flash_device_backward,
)

ROWS = 256
"""Query rows whose scores exist at once, where no flash kernel is available."""


class AttentionResult(NamedTuple):
    """Result: out [batch, heads, rows, head_dim] and lse [batch, heads, rows], at least fp32."""

    out: Tensor
    lse: Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, mask: Tensor | None = None
) -> AttentionResult:
    """Compute attention to these keys alone; a row that sees none of them has out 0 and lse −∞.

    q [batch, heads, rows, head_dim] · k, v [batch, kv_heads, keys, head_dim]; heads is a multiple
    of kv_heads.

    Args:
        causal: query i sees keys up to i; there are as many queries as keys.
        mask: [batch or 1, heads or 1, rows or 1, keys], boolean or added to the scores.
    """
    kind = _select_kernel(q, v) if mask is None else "written"
    if kind == "cpu":
        return AttentionResult(*flash_cpu(q, k, v, 0.0, causal, scale=scale))
    if kind == "device":
        out, lse, *_ = flash_device(q, k, v, 0.0, causal, False, scale=scale)
        return AttentionResult(out, lse)
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse = q.new_empty(q.shape[:-1], dtype=_accumulation_dtype(q))
    for rows, scores in _iterate_scores(q, k, causal, scale, mask):
        lse[..., rows] = scores.logsumexp(-1)
        weights = _exp_difference(scores, lse[..., rows].unsqueeze(-1))
        out[..., rows, :] = _grouped_matmul(weights, v.to(weights.dtype)).to(q.dtype)
    return AttentionResult(out, lse)


def attend_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    all_keys: AttentionResult,
    *,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return these keys' share of the gradients of q, k and v.

    Args:
        gradient: gradient of the output.
        all_keys: result of attention to all keys for these queries.
    """
    out, lse = (one.contiguous() for one in all_keys)
    kind = _select_kernel(q, v) if mask is None else "written"
    if kind == "cpu":
        known = (gradient, q, k, v, out, lse)
        dq, dk, dv = flash_cpu_backward(*known, 0.0, causal, scale=scale)
        return dq, dk, dv
    if kind == "device":
        draws = torch.zeros(2, dtype=torch.uint64, device=q.device)  # dropout, which is off
        sizes = (None, None, q.shape[2], k.shape[2])
        known = (gradient, q, k, v, out, lse)
        dq, dk, dv = flash_device_backward(*known, *sizes, 0.0, causal, draws, draws, scale=scale)
        return dq, dk, dv
    wide = _accumulation_dtype(q)
    dq = torch.empty_like(q, dtype=wide)
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for rows, scores in _iterate_scores(q, k, causal, scale, mask):
        weights = _exp_difference(scores, lse[..., rows].unsqueeze(-1))
        above = gradient[..., rows, :].to(wide)
        along = (above * out[..., rows, :].to(wide)).sum(-1, keepdim=True)
        dv += _sum_query_groups(weights.transpose(-1, -2) @ above, v)
        pulled = weights * (_grouped_matmul(above, v.to(wide).transpose(-1, -2)) - along) * scale
        dq[..., rows, :] = _grouped_matmul(pulled, k.to(wide))
        dk += _sum_query_groups(pulled.transpose(-1, -2) @ q[..., rows, :].to(wide), k)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def merge_attention(total: AttentionResult, more: AttentionResult) -> None:
    """Add attention to further keys, in place; `total.out` has the dtype of `total.lse`."""
    lse = torch.logaddexp(total.lse, more.lse)
    total.out.mul_(_exp_difference(total.lse, lse).unsqueeze(-1))
    total.out.addcmul_(more.out.to(lse.dtype), _exp_difference(more.lse, lse).unsqueeze(-1))
    total.lse.copy_(lse)


def _exp_difference(scores: Tensor, lse: Tensor) -> Tensor:
    """Return exp(scores − lse), and 0 in rows that see no keys, where both are −∞."""
    return (scores - lse.masked_fill(lse == -torch.inf, 0)).exp_()


def _select_kernel(q: Tensor, v: Tensor) -> str:
    if q.shape[-1] != v.shape[-1]:
        return "written"
    if is_accelerator(q.device):
        return "device" if supports_flash(q) else "written"
    return q.device.type if q.device.type == "cpu" else "written"


def _iterate_scores(
    q: Tensor, k: Tensor, causal: bool, scale: float, mask: Tensor | None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows, their scores [batch, heads, rows, keys])."""
    keys = k.to(_accumulation_dtype(q)).transpose(-1, -2)
    for start in range(0, q.shape[2], ROWS):
        rows = slice(start, min(start + ROWS, q.shape[2]))
        scores = _grouped_matmul(q[..., rows, :].to(keys.dtype), keys) * scale
        if causal:
            future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu_(start + 1)
            scores.masked_fill_(future, -torch.inf)
        if mask is not None:
            part = mask[..., rows, :] if mask.shape[-2] > 1 else mask
            if part.dtype == torch.bool:
                scores.masked_fill_(~part, -torch.inf)
            else:
                scores += part
        yield rows, scores


def _grouped_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right, where each head of `right` serves a group of neighbouring heads."""
    batch, heads, rows, width = left.shape
    groups = heads // right.shape[1]  # in one product with its rows: `right` is not repeated
    product = left.reshape(batch, right.shape[1], groups * rows, width) @ right
    return product.view(batch, heads, rows, -1)


def _sum_query_groups(of_queries: Tensor, like: Tensor) -> Tensor:
    """Sum over the query heads that share a head of `like`."""
    groups = of_queries.shape[1] // like.shape[1]
    return of_queries.unflatten(1, (like.shape[1], groups)).sum(2)


def _accumulation_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
