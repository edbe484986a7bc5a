"""Embedding, output head and loss with the vocabulary's rows split over the ranks.

Formula   rows of a table with V rows on n ranks: split evenly, the first V mod n ranks have one
          more. Lookup: own rows or 0, summed over the ranks (one of them has the row)
          head: own columns of the logits from the whole hidden states, whose gradient is summed
Protocol  `trace/find/vocabulary_use.py` finds the tables; replaced forwards of modules compute with
          this rank's rows. Logits come as a `LogitsShard`: the default loss takes its parts, any
          other code gathers them by reading them.
Source    Shoeybi et al. 2019 (1909.08053), sections 3 and 5
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.parallel._torch import pytree
from shoal.parallel.spmd.autograd_collectives import Axis, enter, reduce, scatter
from shoal.parallel.spmd.labelling.labels import Split
from shoal.parallel.spmd.sequence_shards import (
    SequenceShard,
    ShardSpec,
    compute_even_cuts,
    gather_if_shard,
    wrap_shard,
)
from shoal.trace.find.vocabulary_use import VocabularyTables, has_own_forward, is_unprojected
from shoal.trace.isolation.replaced_forward import ReplacedForward


@dataclass(frozen=True)
class SplitVocabulary:
    """Rows of one table over the ranks of an axis, as shoal.models.split_head expects them."""

    axis: Axis
    cuts: tuple[int, ...]

    @property
    def start(self) -> int:
        """Return this rank's first row."""
        return self.cuts[self.axis.rank]

    @property
    def stop(self) -> int:
        """Return the row after this rank's last."""
        return self.cuts[self.axis.rank + 1]

    @property
    def size(self) -> int:
        """Return the number of rows of all ranks."""
        return self.cuts[-1]

    @property
    def most(self) -> int:
        """Return the number of rows of the rank that holds most: the first."""
        return self.cuts[1]

    def all_gather(self, tensor: Tensor) -> Tensor:
        """All-gather every rank's [...] as [ranks, ...]."""
        return self.axis.all_gather(tensor.contiguous())

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over the ranks, in place."""
        self.axis.all_reduce(tensor)

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return [..., size] from hidden [..., dim] and own rows, gathered when it is read."""
        local = F.linear(enter(gather_if_shard(hidden), self.axis), weight, bias)
        return wrap_shard(local, ShardSpec(self.axis, local.dim() - 1, self.cuts), LogitsShard)


class LogitsShard(SequenceShard):
    """Logits of which this rank holds the columns of its own classes."""

    @property
    def vocabulary(self) -> SplitVocabulary:
        """Return the distribution of the classes over the ranks."""
        return SplitVocabulary(self.deal.axis, self.deal.cuts)


class SplitEmbedding(ReplacedForward):
    """Embedding that looks up this rank's rows and sums them over the ranks.

    An embedding whose class has a forward of its own (a scale, an offset) runs that forward; only
    the lookup inside of it is replaced.

    Args:
        along: the dim of its output that blocks pass on in parts, or None.
    """

    def __init__(self, name: str, table: nn.Embedding, rows: SplitVocabulary, along: int | None):
        self.table, self.rows, self.along = table, rows, along
        self.own_forward = has_own_forward(table)
        super().__init__(name, table)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Look up ids [...] as the embedding does, to [..., dim].

        Raises:
            IndexError: an id lies outside of the vocabulary (on the CPU).
        """
        if not self.own_forward:
            return self.look_up(*inputs, **named, padding=self.table.padding_idx)
        with _SplitLookupMode(self):
            return self.forward(*inputs, **named)

    def look_up(self, input: Tensor, *, padding: int | None) -> Tensor:
        """Return rows [..., dim] of ids [...] from all ranks; no gradient at `padding`."""
        rows, table, ids = self.rows, self.table, input
        if ids.device.type == "cpu" and ids.numel() and not _all_within(ids, rows.size):
            raise IndexError(f"{self.name}: an id lies outside of 0 … {rows.size - 1}")
        elsewhere = (ids < rows.start) | (ids >= rows.stop)
        here = (ids - rows.start).masked_fill_(elsewhere, 0)
        if padding is not None:
            padding = padding - rows.start if rows.start <= padding < rows.stop else None
        found = F.embedding(here, table.weight, padding)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0)
        axis, along = rows.axis, self.along
        if along is None or not 0 <= along < ids.dim() or ids.shape[along] % axis.size:
            return reduce(found, axis)
        own = scatter(found, axis, Split(along))
        return wrap_shard(own, ShardSpec.split_evenly(axis, along, ids.shape[along]))


class _SplitLookupMode(TorchFunctionMode):
    """Torch function mode in which lookups in a split table return rows of all ranks."""

    def __init__(self, embedding: SplitEmbedding) -> None:
        super().__init__()
        self.embedding = embedding

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Replace lookups in the split table; run any other operation as it is."""
        if func is not F.embedding and func is not torch.embedding:
            return func(*args, **(kwargs or {}))
        names = ("input", "weight") if func is F.embedding else ("weight", "indices")
        given = {**dict(zip((*names, "padding_idx"), args, strict=False)), **(kwargs or {})}
        if given["weight"] is not self.embedding.table.weight:
            return func(*args, **(kwargs or {}))
        padding = given.get("padding_idx")
        if padding is not None and padding < 0:  # from the end; to torch.embedding it means none
            padding = padding + self.embedding.rows.size if func is F.embedding else None
        ids = given["input" if func is F.embedding else "indices"]
        return self.embedding.look_up(ids, padding=padding)


class SplitHead(ReplacedForward):
    """Output head that returns this rank's columns of the logits."""

    def __init__(self, name: str, head: nn.Linear, rows: SplitVocabulary) -> None:
        self.head, self.rows = head, rows
        super().__init__(name, head)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Map [..., dim] to [..., classes], as nn.Linear does."""
        return self.rows.logits(hidden, self.head.weight, self.head.bias)


class VocabularyOutputs(ReplacedForward):
    """Replacement of the model's forward that adds a split head's rows to outputs for the loss."""

    def __init__(self, name: str, model: nn.Module, head: nn.Module, rows: SplitVocabulary) -> None:
        self.head, self.rows = head, rows
        super().__init__(name, model)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return the model's outputs, with the split vocabulary of the head."""
        outputs = self.forward(*inputs, **named)
        if not any(map(is_unprojected, pytree.tree_leaves(outputs, is_leaf=is_unprojected))):
            return outputs
        return pytree.tree_map(self._add_vocabulary, outputs, is_leaf=is_unprojected)

    def _add_vocabulary(self, output: Any) -> Any:
        if is_unprojected(output) and output.weight is self.head.weight:
            return dataclasses.replace(output, vocabulary=self.rows)
        return output


def replace_table_forwards(
    module: nn.Module, tables: VocabularyTables, axis: Axis, scattered: Collection[str]
) -> list[ReplacedForward]:
    """Replace the forwards of tables, heads and the model; `apply_split` cuts the weights later.

    Every weight must still be whole: its number of rows decides where it is cut.

    Args:
        scattered: embeddings that return this rank's part of dim 1, the sequence.
    """

    def rows(table: nn.Module) -> SplitVocabulary:
        weight = table.get_parameter("weight")
        return SplitVocabulary(axis, compute_even_cuts(weight.shape[0], axis.size))

    made: list[ReplacedForward] = []
    for name in (*tables.embeddings, *tables.heads):
        table = module.get_submodule(name)
        if isinstance(table, nn.Embedding):
            made.append(SplitEmbedding(name, table, rows(table), 1 if name in scattered else None))
        elif isinstance(table, nn.Linear):
            made.append(SplitHead(name, table, rows(table)))
    if tables.to_loss:
        head = module.get_submodule(tables.to_loss)
        made.append(VocabularyOutputs("", module, head, rows(head)))
    return made


def _all_within(ids: Tensor, size: int) -> bool:
    least, most = torch.aminmax(ids)
    return int(least) >= 0 and int(most) < size
