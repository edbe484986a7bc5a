"""Split of each parameter of a model: one plain row per parameter, without any tensor type.

`shoal plan --explain` shows these rows. The code that splits the model (torch) makes them; `view`,
which does not import torch, draws them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shoal.base.plans.placement import Groups, make_even_cut


@dataclass(frozen=True)
class SplitRow:
    """Split of one parameter of a model under a layout.

    Attributes:
        name: the parameter's own name.
        shape: shape of the whole tensor.
        axis: axes that split it: `tp`, `dp_shard`, both as `tp, dp_shard`; "" if none does.
        shard: part of the first rank, in words (`shard_text`), or "whole".
        collective: collective that the split causes, such as "all_reduce after the product"; "" if
            none.
        reason: reason for the split, or for none.
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
    """Describe the first of `degree` ranks' part of a tensor that is cut along `dim`.

    Args:
        groups: segments of `dim`, each of which is cut over the ranks: 3 for fused q, k and v, (4,
            1, 1) if q has four times as many heads.
        copies: ranks that hold the same part, if there are fewer parts than ranks.

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
        spans = make_even_cut("tp", dim, size, degree // copies, groups=groups).spans(0)
        return f"{what} {', '.join(f'{start}:{stop}' for start, stop in spans)} of {size}"
    part = -(-size // (groups * degree // copies))
    if groups > 1:
        return f"{what} 0:{part} of each {size // groups} of {size} ({groups} groups)"
    same = f" ({copies} ranks hold the same)" if copies > 1 else ""
    return f"{what} 0:{part} of {size}{same}"


@dataclass(frozen=True)
class ExchangeRow:
    """Equal collectives over the tensor-parallel ranks that one module calls in one pass.

    Attributes:
        name: the module's, "" for the model itself.
        kind: all_reduce, all_gather, reduce_scatter.
        when: forward or backward.
        count: number of equal collectives.
        payload_bytes: bytes of each: the summed tensor, or the gathered one.
    """

    name: str
    kind: str
    when: str
    payload_bytes: int
    count: int = 1


@dataclass(frozen=True)
class FlopsRow:
    """Floating-point operations of modules of one class in a forward pass.

    Attributes:
        kind: the class, or "loss" for operations outside of modules.
        modules: number of modules with such operations.
        flops: FLOP of one sample over all these modules: products, convolutions and attention.
    """

    kind: str
    modules: int
    flops: float


@dataclass(frozen=True)
class SplitReport:
    """Split of a whole model, parameter by parameter, as `shoal plan --explain` shows it.

    Attributes:
        model: its name.
        layout: result of `Layout.text()`.
        rows: one per parameter, in the model's order.
        exchanges: collectives of the tensor-parallel ranks in a forward and backward pass of
            `samples` samples.
        samples: samples of the traced pass, also without exchanges.
        notices: lines for the user: parts that stay whole although they could be split.
        flops: largest first; their sum is the FLOP of the plan.
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
        """Number of parameters that some axis splits."""
        return sum(bool(row.axis) for row in self.rows)

    def record(self) -> dict[str, Any]:
        """Return the JSON document that `shoal plan --explain --json` prints."""
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
