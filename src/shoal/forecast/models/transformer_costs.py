"""Sizes, FLOP and memory of a transformer from its shape: arithmetic only, no tensors.

Sizes     attention h·(q + 2·kv) + q·h, q = heads · head width, kv = kv_heads · head width
          ffn 2·h·f plain, 3·h·f gated; norms h (rms) or 2·h (layer)
Work      forward FLOP of one sample: 2 × the weights of its products × positions, plus attention's
          scores and values 4·q·s² (full: a causal mask reduces nothing)
Saved     per token of e bytes, T = s·b tokens, fused kernels, Llama: e·h·(6 + 2·kv_heads/heads +
          4·f/h), that is 12 + 4k + 8f/h in bf16: both norms' inputs and outputs, q, k, v, the
          attention output, gate, up, silu, product; plus 4 bytes per head (log-sum-exp)
          GPT with dropout adds the masks, one byte each: 34·h at f = 4h, kv_heads = heads
Loss      12 bytes per token and word in bf16 (saved softmax, its gradient, theirs of the logits)
Source    counts: the papers of the models; saved bytes: Korthikanti et al. 2022 (2205.05198) eq. 2,
          and for Llama every saved tensor as listed by torch's saved_tensors_hooks (torch 2.13)
"""

from __future__ import annotations

from shoal.base.errors import PlanError
from shoal.base.estimates.estimate import ModelFacts, UnitFacts
from shoal.base.estimates.transformer_shape import TransformerShape
from shoal.forecast.models.block_parts import (
    FUSED,
    BlockContext,
    Kernels,
    attention_part,
    experts_part,
    ffn_part,
)


def transformer_facts(
    shape: TransformerShape, sequence: int, element_bytes: int, kernels: Kernels = FUSED
) -> ModelFacts:
    """Return a transformer's facts by arithmetic: parameters, FLOP and bytes, unit by unit.

    Args:
        sequence: tokens per sample (ViT: patches and the class token).
        element_bytes: of activations: 1, 2, 4 or 8.
        kernels: tensors that the framework's kernels save for the backward.

    Raises:
        PlanError: a sequence below 1 or another element_bytes.

    References:
        Per term at the head of this module.

    >>> llama = TransformerShape("llama-3-8b", 32, 4096, 32, 8, 14336, 128256)
    >>> facts = transformer_facts(llama, 8192, 2)
    >>> facts.trainable, facts.blocks, [u.name for u in facts.units]
    (8030261248, 32, ['embedding', 'block', 'head'])
    >>> block = facts.units[1]
    >>> units = (block.saved_split_bytes + block.saved_plain_bytes) / (8192 * 4096)
    >>> round(units - 4 * 32 / 4096, 3)  # without log-sum-exp
    41.0
    """
    if sequence < 1:
        raise PlanError(f"data.sequence = {sequence}: at least 1 token; try: 1")
    if element_bytes not in (1, 2, 4, 8):
        raise PlanError(f"element_bytes = {element_bytes}: not one of 1, 2, 4, 8; try: 2")
    cut = BlockContext(shape, sequence, element_bytes, kernels)
    units = [_embedding(cut)]
    dense = shape.layers if not shape.experts else min(shape.dense_layers, shape.layers)
    if dense:
        units.append(_unit("block" if not shape.experts else "dense block", dense, cut, False))
    if shape.layers - dense:
        units.append(_unit("block", shape.layers - dense, cut, True))
    units.append(_head(cut))
    return ModelFacts(
        name=shape.name,
        units=tuple(units),
        sequence=sequence,
        element_bytes=element_bytes,
        trainable=sum(unit.count * unit.parameters for unit in units),
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
    )


def _unit(name: str, count: int, cut: BlockContext, routed: bool) -> UnitFacts:
    """Return `count` equal blocks as one unit, scaled from a token to a sample."""
    shape, tokens = cut.shape, cut.sequence
    attention = attention_part(cut)
    ffn = experts_part(cut) if routed else ffn_part(cut, shape.ffn, own_norm=True)
    part = attention + ffn
    block_input = cut.stream * shape.hidden
    return UnitFacts(
        name=name,
        count=count,
        parameters=part.parameters,
        plain_parameters=part.plain,
        expert_parameters=part.experts,
        experts=shape.experts if routed else 0,
        forward_flops=part.flops * tokens,
        attention_flops=part.attention_flops * tokens,
        elementwise_bytes=part.moved * cut.e * tokens,
        operations=part.operations,
        saved_split_bytes=part.split_bytes * tokens,
        saved_plain_bytes=part.plain_bytes * tokens,
        selective_bytes=(part.kept_split * tokens, (part.kept_plain + block_input) * tokens),
        input_bytes=block_input * tokens,
        working_bytes=max(attention.working, ffn.working) * cut.e * tokens,
        routed_bytes=part.routed * tokens,
        routed_saved_bytes=part.routed_saved * tokens,
    )


def _embedding(cut: BlockContext) -> UnitFacts:
    """Return the embedding: a token table, or a matrix on patches, and learned positions."""
    shape, e, tokens = cut.shape, cut.e, cut.sequence
    h = shape.hidden
    if shape.patch:  # the matrix has a bias, and the class token is a parameter
        table, flops, ids = (shape.patch + 1) * h + h, 2.0 * shape.patch * h, e * shape.patch
    else:
        table, flops, ids = shape.vocabulary * h, 0.0, 8
    split = 0 if shape.patch else table
    table += shape.positions * h + (shape.vectors.embedding if shape.vectors else 0)
    return UnitFacts(
        name="embedding",
        parameters=table,
        plain_parameters=table - split,
        forward_flops=flops * tokens,
        elementwise_bytes=(2 + (2 if shape.positions else 0)) * e * h * tokens,
        operations=1 + (1 if shape.positions else 0),
        saved_plain_bytes=(ids + cut.mask_bytes) * tokens,
        selective_bytes=(0.0, (ids + cut.mask_bytes) * tokens),
        input_bytes=ids * tokens,
        working_bytes=e * h * tokens,
    )


def _head(cut: BlockContext) -> UnitFacts:
    """Return the head: last norm, output projection, loss; for a ViT over one token."""
    shape, e, tokens = cut.shape, cut.e, cut.sequence
    h, words = shape.hidden, shape.vocabulary
    rows = 1 if shape.patch else tokens
    own = words * h + (words if shape.patch else 0)
    # saved softmax, its gradient, the gradient before it: each in fp32, or as wide as e if wider
    loss = 12.0 if e <= 4 else 3.0 * e
    saved = cut.norm_bytes() * tokens
    small = shape.vectors.head if shape.vectors else cut.norm_parameters
    return UnitFacts(
        name="head",
        parameters=small + (0 if shape.tied else own),
        plain_parameters=small,
        forward_flops=2.0 * h * words * rows,
        elementwise_bytes=2 * e * h * tokens + 3 * max(e, 4) * words * rows,
        operations=5,
        saved_plain_bytes=saved,
        selective_bytes=(0.0, saved),
        input_bytes=cut.stream * h * tokens,
        working_bytes=2 * e * h * tokens,
        loss_bytes=loss * words * rows,
        tied_to="embedding" if shape.tied else "",
    )


__all__ = ["FUSED", "Kernels", "transformer_facts"]
