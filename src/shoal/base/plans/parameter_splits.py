"""How each parameter of a model is split: one plain row per parameter, without any tensor type.

`shoal plan --explain` shows these rows. They are made by whoever splits the model (torch) and drawn
by `view`, which knows no torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shoal.base.plans.placement import Groups, even_cut


@dataclass(frozen=True)
class SplitRow:
    """How one parameter of a model is split under a layout.

    Attributes:
        name: the parameter's own name.
        shape: of the whole.
        axis: what splits it: `tp`, `dp_shard`, both as `tp, dp_shard`; "" where nothing does.
        shard: what the first rank holds, in words (`shard_text`), or "whole".
        collective: what travels because of it, such as "all_reduce after the product"; "" for
            nothing.
        reason: why it is split so, or why it is not.
        stage: pipeline stages that hold it, ascending; () without a pipeline.
    """

    name: str
    shape: tuple[int, ...]
    axis: str
    shard: str
    collective: str = ""
    reason: str = ""
    stage: tuple[int, ...] = ()


def shard_text(
    shape: tuple[int, ...], dim: int, degree: int, *, groups: Groups = 1, copies: int = 1
) -> str:
    """Describe in words what the first of `degree` ranks holds of a tensor that is cut along `dim`.

    Args:
        groups: segments of `dim`, each of which is cut over the ranks: 3 for fused q, k and v, (4,
            1, 1) where q has four times as many heads.
        copies: ranks that hold the same part, where there are fewer parts than ranks.

    >>> shard_text((256, 64), 0, 2), shard_text((64, 256), 1, 2)
    ('rows 0:128 of 256', 'columns 0:128 of 256')
    >>> shard_text((96, 64), 0, 2, groups=3), shard_text((64, 8), 0, 4, copies=2)
    ('rows 0:16 of each 32 of 96 (3 groups)', 'rows 0:32 of 64 (2 ranks hold the same)')
    >>> shard_text((192, 64), 0, 2, groups=(4, 1, 1))
    'rows 0:64, 128:144, 160:176 of 192'
    """
    size = shape[dim]
    what = ("rows", "columns")[dim] if dim < 2 else f"dim {dim},"
    if not isinstance(groups, int):
        spans = even_cut("tp", dim, size, degree // copies, groups=groups).spans(0)
        return f"{what} {', '.join(f'{start}:{stop}' for start, stop in spans)} of {size}"
    part = -(-size // (groups * degree // copies))
    if groups > 1:
        return f"{what} 0:{part} of each {size // groups} of {size} ({groups} groups)"
    same = f" ({copies} ranks hold the same)" if copies > 1 else ""
    return f"{what} 0:{part} of {size}{same}"


@dataclass(frozen=True)
class ExchangeRow:
    """Equal collectives over the tensor-parallel ranks that one module makes in one pass.

    Attributes:
        name: the module's, "" for the model itself.
        kind: all_reduce, all_gather, reduce_scatter.
        when: forward or backward.
        count: how many.
        payload_bytes: of each: the tensor that is summed, or that is there after gathering.
    """

    name: str
    kind: str
    when: str
    payload_bytes: int
    count: int = 1


@dataclass(frozen=True)
class FlopsRow:
    """Floating-point operations that modules of one class do themselves in a forward pass.

    Attributes:
        kind: the class, or "loss" for what no module does.
        modules: how many do some.
        flops: of one sample, over all of them; products, convolutions and attention count.
    """

    kind: str
    modules: int
    flops: float


@dataclass(frozen=True)
class Explained:
    """How a layout splits a whole model, parameter by parameter: what `shoal plan --explain` shows.

    Attributes:
        model: its name.
        layout: as `Layout.text()` says it.
        rows: one per parameter, in the model's order.
        exchanges: what a forward and backward pass of `samples` samples makes the tensor-parallel
            ranks exchange.
        samples: that the model was looked at with, also without exchanges.
        notices: what the user should hear: what stays whole although it could have been split.
        flops: most first; their sum is what the plan counts.
    """

    model: str
    layout: str
    rows: tuple[SplitRow, ...]
    exchanges: tuple[ExchangeRow, ...] = ()
    notices: tuple[str, ...] = ()
    samples: int = 0
    flops: tuple[FlopsRow, ...] = ()

    @property
    def split(self) -> int:
        """How many parameters are split by some axis."""
        return sum(bool(row.axis) for row in self.rows)

    def record(self) -> dict[str, Any]:
        """The JSON document that `shoal plan --explain --json` prints."""
        return {
            "version": 1,
            "model": self.model,
            "layout": self.layout,
            "parameters": [asdict(row) for row in self.rows],
            "samples": self.samples,
            "exchanges": [asdict(row) for row in self.exchanges],
            "notices": list(self.notices),
            "flops": [asdict(row) for row in self.flops],
        }
