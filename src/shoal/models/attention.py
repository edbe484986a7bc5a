"""Causal self-attention, with a choice of kernel by device and sequence length.

Formula   out_i = Σ_{j ≤ i} softmax_j(q_i·k_j / √head_dim) · v_j
          Of several documents in one row, j runs over those of i's own document.
          Grouped queries (GQA): query head h reads key/value head h // (heads / kv_heads), and
          key/value heads are never copied for it on CPU: a group's queries are more rows.
Kernels   CPU, seq ≤ 2048: matrix products on blocks of query rows, which skip the keys after the
          block; longer: torch's flash kernel, whose memory does not grow with seq².
          Elsewhere: torch's flash kernel; in fp32, which it lacks, memory-efficient attention.
Measured  torch 2.13, one EPYC thread with AVX-512 and bf16, forward + backward in ms, 4 heads on 2
          kv_heads of 64, batch × seq = 2048 tokens (128: 1024 tokens):
              seq                128    256    512   1024   2048
              fp32  blocks       5.9   18.2   30.3   52.3   96.3
                    no blocks    6.0   22.5   43.6  109.4  295.1
                    flash        6.2   22.3   43.2   65.6  106.5
              bf16  blocks       2.0    6.3   12.7   20.8   41.1
                    no blocks    1.9    7.2   14.7   43.7  108.4
                    flash       10.7   23.8   39.2   50.5   83.6
Source    Vaswani et al. 2017; grouped queries: Ainslie et al. 2023; flash: Dao et al. 2022
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.base.opaque_ops import opaque_ops_enabled

FLASH_FROM = 2049
"""Shortest sequence for which the CPU's flash kernel is used."""


def number_documents(position_ids: Tensor) -> Tensor:
    """Number the documents of packed rows, [batch, seq]: one begins at each position id of 0.

    >>> number_documents(torch.tensor([[0, 1, 2, 0, 1, 0]])).tolist()
    [[1, 1, 1, 2, 2, 3]]
    """
    return (position_ids == 0).cumsum(-1)


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, dropout: float = 0.0, documents: Tensor | None = None
) -> Tensor:
    """Attend from every position to itself and the past, within its own document if packed.

    Under bf16 the blocks round scores to bf16 before the softmax (which itself adds up in fp32);
    flash kernels keep them in fp32.

    Args:
        q: [batch, heads, seq, head_dim].
        k, v: [batch, kv_heads, seq, head_dim]; heads is a multiple of kv_heads.
        dropout: share of attention weights set to 0; the caller passes 0 in eval mode.
        documents: [batch, seq], numbers of documents; None: a row is one document.

    Returns:
        [batch, heads, seq, head_dim].
    """
    # torch.compile cannot read a context variable: it would cut every block in three there.
    as_one = not torch.compiler.is_compiling() and opaque_ops_enabled() and not dropout
    if q.device.type == "cpu" and q.shape[2] < FLASH_FROM and not as_one:
        return _attend_by_blocks(q, k, v, dropout, documents)
    if q.device.type not in ("cpu", "meta") and (
        documents is not None or q.dtype not in (torch.float16, torch.bfloat16)
    ):
        # only flash kernels, which take no mask, read grouped heads; without copies the rest would
        # fall to seq² memory of scores
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    grouped = q.shape[1] != k.shape[1]
    if documents is None:
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=grouped
        )
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=same.tril(), dropout_p=dropout, enable_gqa=grouped
    )


def _attend_by_blocks(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, documents: Tensor | None
) -> Tensor:
    batch, heads, seq, head_dim = q.shape
    kv_heads = k.shape[1]
    groups = heads // kv_heads
    q = q.reshape(batch * kv_heads, groups, seq, head_dim)
    k, v = k.reshape(-1, seq, head_dim), v.reshape(-1, seq, head_dim)
    rows = 256 if q.dtype == torch.bfloat16 and seq > 512 else 128
    outputs = []
    for start in range(0, seq, rows):
        stop = min(start + rows, seq)
        block = q[:, :, start:stop].reshape(batch * kv_heads, -1, head_dim)
        future = q.new_full((stop - start, stop), -math.inf).triu_(start + 1)
        if documents is None:
            future = future.repeat(groups, 1)
        else:
            foreign = documents[:, start:stop, None] != documents[:, None, :stop]
            future = future.masked_fill(foreign, -math.inf).repeat(1, groups, 1)
            future = future.repeat_interleave(kv_heads, 0)  # [batch × kv_heads, …], as the scores
        scores = torch.baddbmm(
            future, block, k[:, :stop].transpose(1, 2), alpha=1 / math.sqrt(head_dim)
        )  # [batch × kv_heads, groups × block, keys so far]
        weights = scores.softmax(-1)
        if dropout:
            weights = F.dropout(weights, dropout)
        out = torch.bmm(weights, v[:, :stop])
        outputs.append(out.view(-1, groups, stop - start, head_dim))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
    return joined.reshape(batch, heads, seq, head_dim)
