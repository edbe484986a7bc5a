"""Find the embeddings and output heads whose rows may be split over the ranks.

A table is split only if every use of it is understood. Such uses are a lookup in an nn.Embedding's
forward, the forward of a plain nn.Linear, and an output that passes hidden states and weight to the
loss (see `vocabulary_use.py`, which records the uses). With any other use the table stays whole;
the result names the reason.

A table qualifies if it has more rows than columns (a vocabulary, not a list of positions), and a
head if it comes after the last block. Splitting costs one reduction of a lookup's result, or a
gather of the logits if the loss is not the default one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

from torch import nn

from shoal.trace.find.vocabulary_use import (
    Table,
    TableUses,
    VocabularyTables,
    has_own_forward,
    is_table,
)


def select_tables(
    module: nn.Module,
    uses: TableUses,
    order: Sequence[str],
    blocks: Collection[str],
    degree: int,
    wish: Callable[[str], str | None],
) -> VocabularyTables:
    """Find the tables of `module` that `degree` ranks can split, from the uses in one forward pass.

    Args:
        uses: operations that read each table.
        order: modules in the order of their calls' ends.
        blocks: names of the modules that are split by other means: layers in them are no tables.
        wish: the user's override for a parameter: `whole`, `column`, or None.
    """
    candidates = {
        name: part
        for name, part in module.named_modules()
        if is_table(part)
        and not any(name == block or name.startswith(f"{block}.") for block in blocks)
    }
    seen = _TableCandidates(module, candidates, uses, order, blocks)
    first = {id(p): name for name, p in module.named_parameters()}
    groups: dict[int, list[str]] = {}
    for name, part in candidates.items():
        groups.setdefault(id(part.weight), []).append(name)
    found = VocabularyTables(outputs={n: out for n, out in uses.outputs.items() if n in candidates})
    embeddings: list[str] = []
    heads: list[str] = []
    to_loss = ""
    for key, names in groups.items():
        parameter = first[key]
        parts = [candidates[name] for name in names]
        refused = seen.reason(parts, names, degree, wish(parameter))
        if refused:
            found.whole[parameter] = refused
            continue
        found.split[parameter] = f"rows of the vocabulary, {parts[0].weight.shape[0]} in all"
        for name, part in zip(names, parts, strict=True):
            (embeddings if isinstance(part, nn.Embedding) else heads).append(name)
            if isinstance(part, nn.Linear) and part.bias is not None:
                found.split[first[id(part.bias)]] = "with the rows of its weight"
        if key in uses.handed:
            to_loss = names[-1]
    return dataclasses.replace(
        found,
        embeddings=tuple(embeddings),
        own_forwards=tuple(name for name in embeddings if has_own_forward(candidates[name])),
        heads=tuple(heads),
        to_loss=to_loss,
        hidden=uses.hidden if to_loss else None,
    )


class _TableCandidates:
    """Layers that may be tables, and their uses in a forward pass.

    Attributes:
        late: layers called after the last block.
        homes: other modules that hold a weight.
    """

    def __init__(
        self,
        module: nn.Module,
        candidates: dict[str, Table],
        uses: TableUses,
        order: Sequence[str],
        blocks: Collection[str],
    ) -> None:
        self.uses = uses
        last = max((place for place, name in enumerate(order) if name in blocks), default=-1)
        self.late = {name for name in order[last + 1 :] if name in candidates}
        known = {f"{name}.{key}" for name, p in candidates.items() for key in p._parameters}
        self.homes = {
            id(p): name
            for name, p in module.named_parameters(remove_duplicate=False)
            if name not in known
        }

    def reason(self, parts: list[Table], names: list[str], degree: int, wish: str | None) -> str:
        """Return why the weight of these layers is replicated; "" if it can be split."""
        weight = parts[0].weight
        biases = [p.bias for p in parts if isinstance(p, nn.Linear) and p.bias is not None]
        rows, columns = weight.shape
        if wish == "whole":
            return "the user's wish"
        for tensor in (weight, *biases):
            if id(tensor) in self.uses.used:
                return self.uses.used[id(tensor)]
        if id(weight) in self.homes:
            return f"also held by {self.homes[id(weight)]}"
        if id(weight) not in self.uses.handed and not any(
            name in self.uses.outputs for name in names
        ):
            return "not used in the sample's forward pass"
        if rows < degree:
            return f"{rows} rows are fewer than {degree} ranks"
        embeds = any(isinstance(part, nn.Embedding) for part in parts)
        if not embeds and id(weight) not in self.uses.handed and not self.late.intersection(names):
            return "a layer before or between the blocks"
        if rows <= columns and wish != "column":
            return f"{rows} rows of {columns} are no vocabulary: splitting costs more than it saves"
        return ""
