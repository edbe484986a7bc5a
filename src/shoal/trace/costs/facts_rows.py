"""Collect traced costs into rows of `UnitFacts`: equal units counted, everything per sample.

A tensor that one unit keeps because it made it, and the next because it reads it, is kept once: the
next unit's input is left out. Parameters count in the first unit that has them; a unit without
parameters of its own names the unit whose parameters it shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shoal.base.estimates.estimate import ModelFacts, UnitFacts
from shoal.base.layouts.policies import BlocksPolicy
from shoal.trace.costs.operation_costs import Tally
from shoal.trace.find.blocks import ROOT, BlockIndex
from shoal.trace.find.model_units import CONTAINERS


@dataclass
class UnitCost:
    """Costs of one call of a unit on the example batch."""

    flops: float
    attention_flops: float
    elementwise_bytes: float
    operations: int
    split_bytes: float
    plain_bytes: float
    selective: tuple[float, float]
    input_bytes: float
    saved_inputs: list[tuple[int, int, bool]]  # (which input, bytes, split)
    keeps_outputs: list[bool]
    width: int
    working_bytes: float = 0.0

    @classmethod
    def of(
        cls, tally: Tally, inputs: list[torch.Tensor], saved: list[bool], keeps: list[bool]
    ) -> UnitCost:
        """Build from the counted costs; `saved`: which inputs, `keeps`: which outputs are kept."""
        given = sum(t.numel() * t.element_size() for t in inputs)
        products = tally.products[:-1] if _ends_in_weights(tally) else tally.products
        split = sum(size for size, cut, _ in products if cut)
        plain = sum(size for size, cut, _ in products if not cut)
        kept = [
            (index, *tally.saved[t.untyped_storage()])
            for index, t in enumerate(inputs)
            if saved[index]
        ]
        width = next((t.shape[-1] for t in inputs if t.dim() == 3 and t.is_floating_point()), 0)
        return cls(
            tally.flops,
            tally.attention_flops,
            tally.elementwise_bytes,
            tally.operations,
            tally.saved_bytes(True),
            tally.saved_bytes(False),
            (split, plain + given),
            given,
            kept,
            keeps,
            width,
        )

    def unique_saved_bytes(self, inputs: list[torch.Tensor], kept: Any) -> tuple[float, float]:
        """Return (split, plain) saved bytes of a call, without inputs that are counted already.

        Args:
            kept: storages that are counted; this call's inputs are added.
        """
        split, plain = self.split_bytes, self.plain_bytes
        for index, size, cut in self.saved_inputs:
            storage = inputs[index].untyped_storage()
            if storage in kept:
                split, plain = (split - size, plain) if cut else (split, plain - size)
            kept[storage] = True
        return split, plain


def _ends_in_weights(tally: Tally) -> bool:
    """Return whether the last matrix product is not attention's: nothing later needs its output."""
    return bool(tally.products) and not tally.products[-1][2]


@dataclass
class _Row:
    """Sums over the equal units of one row."""

    path: str
    call: UnitCost | None = None
    count: int = 0
    parameters: int = 0
    plain: int = 0
    frozen: int = 0
    split_bytes: float = 0.0
    plain_bytes: float = 0.0
    glue: Tally = field(default_factory=Tally)
    glue_saved: list[float] = field(default_factory=lambda: [0.0, 0.0])
    loss_bytes: float = 0.0
    given_bytes: float = 0.0
    tied_to: str = ""
    block: str = ""
    rooted: int = 0


class UnitRows:
    """All rows of a model, in the order of the first call."""

    def __init__(
        self, twin: nn.Module, units: list[tuple[str, nn.Module]], policy: BlocksPolicy
    ) -> None:
        self.twin, self.units = twin, units
        self.blocks = BlockIndex(twin, policy)
        self.batch, self.sequence, self.width = 1, 0, 0
        self.rows: dict[Any, _Row] = {}
        self.last: _Row | None = None
        self.owner: dict[int, str] = {}
        self.called: set[str] = set()
        self.often: set[str] = set()

    def add_call(
        self, path: str, module: nn.Module, key: Any, call: UnitCost, saved: tuple[float, float]
    ) -> None:
        """Add a call of a unit, with its (split, plain) saved bytes."""
        trained, plain, frozen, tied_to = self._claim(path, module.parameters())
        if path in self.called:
            self.often.add(path)
        self.called.add(path)
        lies = self.blocks.of(path, module)
        alike = (self._container_key(path), key, trained, frozen, lies.block)
        row = self.rows.setdefault(alike, _Row(path, block=lies.block))
        row.rooted = min(lies.rooted, trained + frozen)
        if row.call is None or call.working_bytes > row.call.working_bytes:
            row.call = call  # the first one's input may need no gradient
        row.count += 1
        row.parameters, row.plain, row.frozen = trained, plain, frozen
        row.tied_to = row.tied_to or tied_to
        row.split_bytes += saved[0]
        row.plain_bytes += saved[1]
        self.last = row

    def _container_key(self, path: str) -> str:
        """Return the container that a unit is an entry of, else a key of its own."""
        parent = path.rpartition(".")[0]
        in_container = isinstance(self.twin.get_submodule(parent), CONTAINERS)
        return parent if in_container and path else f"={path}"

    def add_glue(self, tally: Tally, kept: Any) -> None:
        """Add work outside of units to the unit before it."""
        if not tally.operations and not len(tally.saved):
            return
        row = self.last or self._inputs_row()
        row.glue.flops += tally.flops
        row.glue.attention_flops += tally.attention_flops
        row.glue.elementwise_bytes += tally.elementwise_bytes
        row.glue.operations += tally.operations
        for storage, (size, split) in tally.saved.items():
            if storage not in kept:
                row.glue_saved[0 if split else 1] += size
                kept[storage] = True

    def add_loss(self, tally: Tally, backward_flops: float, peak: float, given: float) -> None:
        """Add the loss: forward pass, FLOP of its backward, peak bytes and bytes of its input.

        A loss that makes its gradients in the forward pass does all three products there.
        """
        row = self.rows["loss"] = _Row(
            "loss", count=1, block=ROOT, given_bytes=given, loss_bytes=peak
        )
        ahead = backward_flops < tally.flops
        row.glue.flops = (tally.flops + backward_flops) / 3 if ahead else tally.flops
        row.glue.elementwise_bytes = tally.elementwise_bytes
        row.glue.operations = tally.operations
        self.last = row

    def _inputs_row(self) -> _Row:
        return self.rows.setdefault("inputs", _Row("inputs", count=1, block=ROOT))

    def _claim(self, path: str, parameters: Any) -> tuple[int, int, int, str]:
        """Count trained, plain (1-d) and frozen elements that no unit owns yet.

        Returns:
            (trained, plain, frozen, path of the unit that owns tied ones or "").
        """
        trained = plain = frozen = 0
        tied_to = ""
        for parameter in parameters:
            owner = self.owner.setdefault(id(parameter), path)
            if owner != path or path in self.called:
                tied_to = tied_to or owner
            elif parameter.requires_grad:
                trained += parameter.numel()
                plain += parameter.numel() if parameter.dim() < 2 else 0
            else:
                frozen += parameter.numel()
        return trained, plain, frozen, tied_to

    def _claim_remaining_parameters(self) -> None:
        """Add parameters that no call counted: outside of units, or of units never called."""
        inside = {id(p) for _, module in self.units for p in module.parameters()}
        loose = [p for p in self.twin.parameters() if id(p) not in inside]
        if loose:
            row = self._first_row()
            self._add_parameters(row, row.path + ".", loose)
        for path, module in self.units:
            if path not in self.called:
                row = self.rows.get("loss") or self.rows.setdefault(path, _Row(path, count=1))
                self._add_parameters(row, path, list(module.parameters()))

    def _add_parameters(self, row: _Row, path: str, parameters: list[nn.Parameter]) -> None:
        trained, plain, frozen, tied_to = self._claim(path, parameters)
        row.parameters += trained
        row.plain += plain
        row.frozen += frozen
        row.rooted += trained + frozen
        row.tied_to = row.tied_to or tied_to

    def _first_row(self) -> _Row:
        first = next(iter(self.rows.values()), None)
        return first if first and first.count == 1 else self._inputs_row()

    def _mark_repeated_units(self) -> None:
        """Mark units that one pass calls repeatedly as blocks, if the model has no other blocks."""
        if self.blocks.gathered:
            return
        for row in self.rows.values():
            if row.path in self.often and any(self.twin.get_submodule(row.path).children()):
                row.block, row.rooted = "", 0

    def model_facts(self, name: str, element_bytes: int, source: str) -> ModelFacts:
        """Convert the rows to facts, per unit and sample."""
        self._claim_remaining_parameters()
        self._mark_repeated_units()
        keys = sorted(self.rows, key=lambda key: key != "inputs")
        rows = [self.rows[key] for key in keys]
        return ModelFacts(
            name=name,
            units=tuple(self._make_unit(row, self._names(rows)) for row in rows),
            sequence=self.sequence,
            element_bytes=element_bytes,
            trainable=sum(p.numel() for p in self.twin.parameters() if p.requires_grad),
            hidden=max((r.call.width for r in rows if r.call and r.count > 1), default=0),
            source=source,
        )

    def _names(self, rows: Sequence[_Row]) -> dict[str, str]:
        """Map the path of a row's first unit to its name; equal entries take their container's."""
        containers = [row.path.rpartition(".")[0] for row in rows if row.count > 1]
        return {
            row.path: parent
            for row in rows
            if row.count > 1
            and (parent := row.path.rpartition(".")[0])
            and containers.count(parent) == 1
        }

    def _make_unit(self, row: _Row, names: dict[str, str]) -> UnitFacts:
        call, share = row.call, 1 / (row.count * self.batch)
        flops, attention, moved, operations = (0.0, 0.0, 0.0, 0)
        selective, given, working = (0.0, row.given_bytes), row.given_bytes, 0.0
        if call:
            flops, attention = call.flops, call.attention_flops
            moved, operations = call.elementwise_bytes, call.operations
            selective, given, working = call.selective, call.input_bytes, call.working_bytes
        glue, b = row.glue, self.batch
        return UnitFacts(
            name=names.get(row.path, row.path) or "model",
            count=row.count,
            parameters=row.parameters,
            plain_parameters=row.plain,
            frozen_parameters=row.frozen,
            forward_flops=flops / b + glue.flops * share,
            attention_flops=attention / b + glue.attention_flops * share,
            elementwise_bytes=moved / b + glue.elementwise_bytes * share,
            operations=operations + round(glue.operations / row.count),
            saved_split_bytes=(row.split_bytes + row.glue_saved[0]) * share,
            saved_plain_bytes=(row.plain_bytes + row.glue_saved[1]) * share,
            selective_bytes=(selective[0] / b, selective[1] / b),
            input_bytes=given / b,
            working_bytes=working / b,
            loss_bytes=row.loss_bytes / b,
            tied_to=names.get(row.tied_to, row.tied_to),
            block=row.block,
            rooted_parameters=row.rooted,
        )
