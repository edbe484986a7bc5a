"""Costs of the halves of a transformer block, per token: parameters, FLOP, saved bytes.

    attention   norm, q, k, v, rotary positions, attention, output, residual sum
    latent      DeepSeek's: queries and keys from small latents, part of each head rotary
    ffn         norm, products, activation, residual sum
    experts     norm, router, dispatch, the experts a token uses, their weighted sum, shared ones

Counts are in elements, memory in bytes. `transformer_costs` adds them up and scales them to a
sample. Sources: there, and of latent attention and shared experts 2405.04434.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from shoal.base.estimates.transformer_shape import TransformerShape


@dataclass(frozen=True)
class Kernels:
    """Tensors that a framework's kernels save for the backward pass, where kernels differ.

    Attributes:
        fused_norm: a norm saves its input, not fp32 copies of it.
        fused_gate: SwiGLU saves gate, up and product, not silu(gate) too.
        flash: attention saves log-sum-exp, not the scores.
        score_rows: without flash: causal scores are computed in blocks of this many rows, without
            the keys after the block; 0: all scores.
        wide_residual: the residual stream stays fp32 if products are narrow (autocast).
        repeated_kv: keys and values are copied to every query head before attention.
        probs_inside: an expert's output is weighted before its last product, so that it is not
            saved.
        selective: saved under selective recompute: "products", or "half" (every second product).
        keeps_unused: recompute also saves a block's last product, which the backward does not use.
    """

    fused_norm: bool = True
    fused_gate: bool = False
    flash: bool = True
    score_rows: int = 0
    wide_residual: bool = False
    repeated_kv: bool = False
    probs_inside: bool = False
    selective: str = "products"
    keeps_unused: bool = False


FUSED = Kernels()
"""GPU kernels of torch: RMSNorm and attention are one operation each, SwiGLU is two."""


@dataclass(frozen=True)
class BlockPart:
    """Costs of one half of a block, per token: counts in elements, memory in bytes (UnitFacts)."""

    parameters: int = 0
    plain: int = 0
    experts: int = 0
    flops: float = 0.0
    attention_flops: float = 0.0
    moved: float = 0.0
    operations: int = 0
    split_bytes: float = 0.0
    plain_bytes: float = 0.0
    kept_split: float = 0.0
    kept_plain: float = 0.0
    working: float = 0.0
    routed: float = 0.0
    routed_saved: float = 0.0

    def __add__(self, other: BlockPart) -> BlockPart:
        return BlockPart(
            *(getattr(self, f.name) + getattr(other, f.name) for f in fields(BlockPart))
        )


@dataclass(frozen=True)
class BlockContext:
    """A transformer's shape with the sequence, number format and kernels of a prediction."""

    shape: TransformerShape
    sequence: int
    e: int
    kernels: Kernels

    @property
    def norm_parameters(self) -> int:
        """Return the parameters of one norm."""
        return self.shape.hidden * (2 if self.shape.norm == "layer" else 1)

    def norm_bytes(self, readers: int = 1) -> float:
        """Return the bytes that one norm saves per token: input, output, unfused kernels' copies.

        Args:
            readers: products that read the output: autocast makes a narrow copy of a wide
                output for each.
        """
        h, e = self.shape.hidden, self.e
        copies = readers if self.stream > e else 1
        # two fp32 copies instead of one narrow one; in fp32 one normalised copy more
        extra = 0 if self.kernels.fused_norm else (6 * h if e == 2 else e * h)
        return self.stream * h + copies * e * h + extra

    @property
    def stream(self) -> int:
        """Return the bytes of an element of the residual stream."""
        return max(4, self.e) if self.kernels.wide_residual else self.e

    @property
    def mask_bytes(self) -> float:
        """Return the bytes of one dropout mask per token."""
        return self.shape.hidden if self.shape.dropout else 0.0

    @property
    def residual_elements(self) -> float:
        """Return the elements that norm, residual sum and dropout of half a block access."""
        h = self.shape.hidden
        unfused = 0 if self.kernels.fused_norm else 6 * h
        return 2 * h + 3 * h + (2 * h if self.shape.dropout else 0) + unfused

    @property
    def attended_keys(self) -> float:
        """Return the keys that a query attends to: all, or a window; the mean over the blocks."""
        shape, all_keys = self.shape, self.sequence
        if not shape.window or shape.window >= all_keys:
            return all_keys
        return shape.window + (all_keys - shape.window) * shape.full_layers / shape.layers


def attention_part(cut: BlockContext) -> BlockPart:
    """Return the attention half of a block."""
    return _latent_attention(cut) if cut.shape.latent else _attention(cut)


def _attention(cut: BlockContext) -> BlockPart:
    """Return standard attention: norm, q, k, v, rotary positions, scores, output, residual sum."""
    shape, e, kernels = cut.shape, cut.e, cut.kernels
    h = shape.hidden
    q, kv = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    weights = h * (q + 2 * kv) + q * h
    kept_kv = q if kernels.repeated_kv else kv
    half = kernels.selective == "half"
    products = q + kv if half else q + 2 * kv
    rotary = 0 if shape.positions or shape.patch else 2 * (q + kv)
    small = cut.norm_parameters + (q + 2 * kv + h if shape.biases else 0)
    if shape.vectors:
        small = shape.vectors.attention
    return BlockPart(
        parameters=weights + small,
        plain=small if shape.vectors else cut.norm_parameters + (h if shape.biases else 0),
        flops=2 * weights + 4 * q * cut.attended_keys,
        attention_flops=4 * q * cut.attended_keys,
        moved=cut.residual_elements
        + rotary
        + (0 if kernels.flash else 4 * shape.heads * cut.attended_keys),
        operations=7 + (2 if rotary else 0) + (1 if shape.dropout else 0),
        split_bytes=e * (2 * q + 2 * kept_kv) + _scores_bytes(cut),
        plain_bytes=cut.norm_bytes(readers=3) + cut.mask_bytes,
        kept_split=e * (products + q) + 4 * shape.heads,
        kept_plain=0.0 if half else e * h,
        working=h + 2 * q + 2 * kept_kv,
    )


def _latent_attention(cut: BlockContext) -> BlockPart:
    """Return DeepSeek's latent attention: queries and keys from small latents, partly rotary."""
    shape, e = cut.shape, cut.e
    q_rank, kv_rank, rope, *apart = shape.latent
    h, heads, width = shape.hidden, shape.heads, shape.head_width
    keys = apart[0] if apart else width
    q, k, v = heads * (keys + rope), heads * (keys + rope), heads * width
    down = h * (kv_rank + rope) + h * q_rank
    up = (q_rank or h) * q + kv_rank * heads * (keys + width) + v * h
    norms = shape.vectors.attention if shape.vectors else cut.norm_parameters + q_rank + kv_rank
    attention = 2 * (q + v) * cut.attended_keys
    latents = 2 * (q_rank + kv_rank) + rope
    return BlockPart(
        parameters=down + up + norms,
        plain=down + norms,
        flops=2 * (down + up) + attention,
        attention_flops=attention,
        moved=cut.residual_elements + 2 * latents + 2 * heads * rope + 2 * (q + k),
        operations=13,
        split_bytes=e * (q + k + 2 * v) + _scores_bytes(cut),
        plain_bytes=cut.norm_bytes(readers=2) + cut.mask_bytes + e * latents,
        kept_split=e * (q + heads * (keys + width) + v) + 4 * heads,
        kept_plain=e * (h + q_rank + kv_rank + rope),
        working=h + v + q + k + v,
    )


def _scores_bytes(cut: BlockContext) -> float:
    """Return the bytes saved of the attention weights per token: log-sum-exp, or all scores."""
    heads = cut.shape.heads
    if cut.kernels.flash:
        return 4 * heads
    dropped = cut.e + 1 if cut.shape.dropout else 0
    rows = cut.kernels.score_rows
    keys = (cut.sequence + min(rows, cut.sequence)) / 2 if rows else cut.attended_keys
    return heads * keys * (cut.e + dropped)


def ffn_part(cut: BlockContext, width: int, *, own_norm: bool) -> BlockPart:
    """Return the ffn half; in an expert block (not `own_norm`) without norm and residual sum."""
    shape, e, gated = cut.shape, cut.e, cut.shape.gated
    h = shape.hidden
    weights = (3 if gated else 2) * h * width
    # saved: gate, up, silu, product · gate, up, product · inputs and outputs of the activation
    columns = (3 if cut.kernels.fused_gate else 4) if gated else 2
    biases = (2 if gated else 1) * width if shape.biases else 0
    half = cut.kernels.selective == "half"
    kept = width if half else (2 if gated else 1) * width
    last = h if cut.kernels.keeps_unused else 0
    small = plain = (cut.norm_parameters if own_norm else 0) + (h if biases else 0)
    small += biases
    if shape.vectors:
        small = plain = shape.vectors.ffn if own_norm else 0
    return BlockPart(
        parameters=weights + small,
        plain=plain,
        flops=2 * weights,
        moved=(cut.residual_elements if own_norm else 0) + (5 if gated else 2) * width,
        operations=(6 if gated else 4) + (1 if own_norm else 0),
        split_bytes=e * columns * width,
        plain_bytes=cut.norm_bytes(readers=2 if gated else 1) + cut.mask_bytes if own_norm else 0.0,
        kept_split=e * kept,
        kept_plain=e * last,
        working=(h if own_norm else 0) + (2 if gated else 1) * width,
    )


def experts_part(cut: BlockContext) -> BlockPart:
    """Return the experts half: norm, router, dispatch, experts, weighted sum, shared experts."""
    shape, e = cut.shape, cut.e
    h, used, width = shape.hidden, shape.experts_per_token, shape.expert_ffn
    one = ffn_part(cut, width, own_norm=False)
    shared = ffn_part(cut, shape.shared_ffn, own_norm=False) if shape.shared_ffn else BlockPart()
    router = h * shape.experts
    weights, small = shape.experts * one.parameters, cut.norm_parameters
    if shape.vectors:
        weights += shape.experts * shape.vectors.expert
        small = shape.vectors.router
    kept_output = 0 if cut.kernels.probs_inside else used * h
    routed_saved = used * one.split_bytes + e * (used * h + kept_output)
    own = BlockPart(
        parameters=weights + router + small,
        plain=router + small,
        experts=weights,
        flops=used * one.flops + 2 * router,
        moved=cut.residual_elements + used * (one.moved + 6 * h) + 4 * shape.experts,
        operations=12 + one.operations,
        split_bytes=routed_saved + 8 * shape.experts,
        plain_bytes=cut.norm_bytes(readers=2) + cut.mask_bytes,
        kept_split=used * (one.kept_split + 2 * e * h),
        kept_plain=0.0,
        working=h + used * (h + one.working),
        routed=e * used * h,
        routed_saved=routed_saved,
    )
    return own + shared
