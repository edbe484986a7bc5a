"""Number of trainable parameters of each of Shoal's own models, by arithmetic.

Formulas, with V vocabulary, d dim, L layers, h = d / heads, f hidden, S sequence, E experts
    llama     V·d·(1 or 2) + L·(2d + d·h·(2·heads + 2·kv_heads) + 3·d·f) + d
    moe       as llama, with E·3·d·f + E·d for the experts and their router in place of 3·d·f
    gpt       V·d·(1 or 2) + S·d + L·(4d² + 2·d·f + f + 9d) + 2d
    vit       patches (c·p² + 1)·d, class token and positions (n² + 2)·d, the same blocks and norm,
              head d·C + C; n patches of p pixels along each side, c channels, C classes
              mlp and resnet are added up layer by layer
Tied weights count once; BatchNorm's running statistics do not count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _count_llama(
    *,
    vocabulary: int,
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    tied: bool,
    experts: int = 0,
    **_: Any,
) -> int:
    """Count the parameters of llama, or with `experts` of moe."""
    attention = dim * (dim // heads) * (2 * heads + 2 * kv_heads)
    mlp = experts * (3 * dim * hidden + dim) if experts else 3 * dim * hidden
    block = 2 * dim + attention + mlp
    return vocabulary * dim * (1 if tied else 2) + layers * block + dim


def _plain_blocks(layers: int, dim: int, hidden: int) -> int:
    """Count blocks of LayerNorms, fused attention and a plain ffn, and the last norm."""
    return layers * (4 * dim * dim + 2 * dim * hidden + hidden + 9 * dim) + 2 * dim


def _count_gpt(
    *, vocabulary: int, dim: int, layers: int, hidden: int, sequence: int, tied: bool, **_: Any
) -> int:
    tables = vocabulary * dim * (1 if tied else 2) + sequence * dim
    return tables + _plain_blocks(layers, dim, hidden)


def _count_vit(
    *,
    classes: int,
    image_channels: int,
    image_size: int,
    patch: int,
    dim: int,
    layers: int,
    hidden: int,
    **_: Any,
) -> int:
    patches = (image_channels * patch * patch + 1) * dim
    places = ((image_size // patch) ** 2 + 2) * dim
    return patches + places + _plain_blocks(layers, dim, hidden) + (dim + 1) * classes


def _count_mlp(*, inputs: int, hidden: int, layers: int, classes: int, **_: Any) -> int:
    inner = (layers - 1) * (hidden * hidden + hidden)
    return inputs * hidden + hidden + inner + hidden * classes + classes


def _count_resnet(
    *, classes: int, image_channels: int, channels: int, width: int, stages: int, blocks: int
) -> int:
    total = image_channels * channels * 9 + 2 * channels
    inputs = channels
    for stage in range(stages):
        outputs = channels * width * 2**stage
        for _ in range(blocks):
            total += 9 * inputs * outputs + 9 * outputs * outputs + 4 * outputs
            if inputs != outputs:
                total += inputs * outputs + 2 * outputs
            inputs = outputs
    return total + inputs * classes + classes


COUNTS: dict[str, Callable[..., int]] = {
    "llama": _count_llama,
    "gpt": _count_gpt,
    "moe": _count_llama,
    "mlp": _count_mlp,
    "resnet": _count_resnet,
    "vit": _count_vit,
}
"""Family name → function of its resolved arguments."""
