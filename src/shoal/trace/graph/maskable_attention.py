"""Rewrite attention so that its masks can be cut.

Attention with dropout is written out as matrix products. If the sequence is split, `is_causal`
becomes a mask, because a rank's first row is not the sequence's. Or the operation is shared: the
ranks compute it together, by a function of their own, and no rank needs all keys.

Formula   out = dropout(softmax(q kᵀ · scale + mask)) · v
Source    torch's own math kernel (aten/src/ATen/native/transformers/attention.cpp), which the CPU
          takes for attention with dropout: the same order of operations, so the same bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from shoal.trace.graph._torch_graph import make_fx

aten = torch.ops.aten


def decompose_attention(graph: fx.Graph, node: fx.Node) -> None:
    """Replace the attention operation by its matrix products."""
    named = _named_arguments(node)
    inputs = [named["query"], named["key"], named["value"]]
    if named.get("attn_mask") is not None:
        inputs.append(named["attn_mask"])
    formula = functools.partial(
        compute_attention,
        dropout=named["dropout_p"],
        causal=bool(named.get("is_causal")),
        scale=named.get("scale"),
        grouped=bool(named.get("enable_gqa")),
    )
    values = [one.meta["val"] for one in inputs]
    with values[0].fake_mode, torch.enable_grad():
        written = make_fx(formula, pre_dispatch=True)(*values)
    places = [one for one in written.graph.nodes if one.op == "placeholder"]
    copies: dict[fx.Node, fx.Node] = dict(zip(places, inputs, strict=True))
    with graph.inserting_before(node):
        for inner in written.graph.nodes:
            if inner.target is aten._assert_tensor_metadata.default:
                continue
            if inner.op == "call_function":
                copies[inner] = graph.node_copy(inner, lambda one: copies[one])
            elif inner.op == "output":
                node.replace_all_uses_with(copies[inner.args[0]])
    graph.erase_node(node)


def has_dropout(node: fx.Node) -> bool:
    """Return whether this attention has dropout."""
    return bool(_named_arguments(node).get("dropout_p"))


def share_attention(
    graph: fx.Graph, node: fx.Node, shared_attention: Callable[..., Tensor]
) -> bool:
    """Let the ranks compute this attention together, if they can share it; return whether they can.

    They can without dropout, and without a mask that needs a gradient (a learnt bias).

    Args:
        shared_attention: the function that replaces the operation in the graph.
    """
    named = _named_arguments(node)
    q, k, v = (named[name] for name in ("query", "key", "value"))
    shapes = [tuple(one.meta["val"].shape) for one in (q, k, v)]
    causal = bool(named.get("is_causal"))
    mask = named.get("attn_mask")
    if named.get("dropout_p") or len(shapes[0]) not in (3, 4):
        return False
    if mask is not None and (mask.meta["val"].requires_grad or mask.meta["val"].dim() < 2):
        return False
    if len({len(shape) for shape in shapes}) > 1 or (causal and shapes[0][-2] != shapes[1][-2]):
        return False
    with graph.inserting_before(node):
        values = (q, k, v) if mask is None else (q, k, v, mask)
        shared = graph.call_function(
            shared_attention, values, {"causal": causal, "scale": named.get("scale")}
        )
    shared.meta = dict(node.meta)
    node.replace_all_uses_with(shared)
    graph.erase_node(node)
    return True


def write_mask(graph: fx.Graph, node: fx.Node) -> None:
    """Replace `is_causal` by a mask."""
    named = _named_arguments(node)
    if not named.get("is_causal"):
        return
    query, key = named["query"].meta["val"], named["key"].meta["val"]

    def mask() -> Tensor:
        rows, columns = query.shape[-2], key.shape[-2]
        return torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril()

    with query.fake_mode:
        written = make_fx(mask, pre_dispatch=True)()
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(node):
        for inner in written.graph.nodes:
            if inner.op == "call_function":
                copies[inner] = graph.node_copy(inner, lambda one: copies[one])
            elif inner.op == "output":
                named |= {"attn_mask": copies[inner.args[0]], "is_causal": False}
    node.args, node.kwargs = (), named


def compute_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    dropout: float,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> Tensor:
    """Compute `F.scaled_dot_product_attention` on [..., heads, seq, head_dim] each."""
    root = math.sqrt(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if grouped:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
    scores = (q * root) @ (k * root).transpose(-2, -1)
    if causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(mask.logical_not(), -math.inf)
    elif mask is not None:
        scores = scores + mask
    return F.dropout(scores.softmax(-1), dropout) @ v


def _named_arguments(node: fx.Node) -> dict[str, Any]:
    schema: Any = node.target._schema  # type: ignore[union-attr]
    names = [argument.name for argument in schema.arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
