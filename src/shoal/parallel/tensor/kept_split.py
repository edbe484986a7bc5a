"""Keeps how models were split: a second start of the same model neither runs nor checks anything.

Format    <cache>/splits/<name>.json, the name being that of the model, its sample and everything
          else that the split depends on (`fingerprint.py`): {"sum": of the rest, "split": …}.
          Written whole; an entry that is damaged, or is about something else, is made again
Protocol  rank 0 alone looks for it and tells all others what it found, since a rank that derives a
          split waits for all others. It is written after the check has passed
Holds     which parameter is cut how, what is exchanged, what is told. Graphs are not kept: they are
          made, for the inputs that come, from the parameters' labels
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import fx, nn

from shoal.base.errors import BugError
from shoal.base.files import cache_folder, write_whole
from shoal.fabric import World
from shoal.parallel.fingerprint import fingerprint
from shoal.parallel.tensor.capture import Call, bare
from shoal.parallel.tensor.labels import PARTIAL, WHOLE, Label, Partial, Split, Tiled, Whole
from shoal.parallel.tensor.split_block import BlockSplit, Exchange
from shoal.parallel.tensor.splits import BlockClass, ModelSplit, ParameterSplit
from shoal.parallel.tensor.tables import Tables

TABLES = ("split", "whole", "embeddings", "heads", "to_loss")
"""What is kept of tables."""


class KeptSplit:
    """The entry of one model under one layout; every rank of `world` makes it, reads and writes."""

    def __init__(
        self, module: nn.Module, run: Callable[[nn.Module], Any], world: World, settings: Any
    ) -> None:
        """`settings`: plain values that the split depends on, beside model and sample."""
        self.module, self.world = module, world
        name = fingerprint(module, run, settings) if world.is_first else None
        self.path: Path | None = cache_folder() / "splits" / f"{name}.json" if name else None

    def read(self) -> ModelSplit | None:
        """The split, on every rank or on none."""
        found = self.world.broadcast_json(self._sound())
        return None if found is None else _split_of(found, self.module)

    def write(self, split: ModelSplit) -> None:
        """Keep a split that was checked. Where the cache cannot be written, nothing is kept."""
        if self.path is None:
            return
        body = _told(split)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps({"sum": _sum(body), "split": body}))
        except OSError:
            return

    def _sound(self) -> Any:
        """What the file holds, on rank 0, if it is whole and can be read."""
        if self.path is None:
            return None
        try:
            entry = json.loads(self.path.read_text())
            body = entry["split"]
            if entry["sum"] != _sum(body):
                return None
            _split_of(body, self.module)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None
        return body


def _sum(body: Any) -> str:
    return hashlib.blake2b(json.dumps(body).encode(), digest_size=16).hexdigest()


def _told(split: ModelSplit) -> dict[str, Any]:
    """As plain values."""
    return {
        "degree": split.degree,
        "sequence": split.sequence,
        "classes": [
            {"names": list(group.names), **_told_block(group.split)} for group in split.classes
        ],
        "tables": {key: getattr(split.tables, key) for key in TABLES},
        "parameters": {
            name: [_plain(one.label), one.partial, one.reason]
            for name, one in split.parameters.items()
        },
        "exchanges": {n: [asdict(one) for one in each] for n, each in split.exchanges.items()},
        "notices": list(split.notices),
        "scattered": sorted(split.scattered),
    }


def _split_of(told: Any, module: nn.Module) -> ModelSplit:
    """What `_told` said, for `module`, which is whole yet."""
    classes = []
    for one in told["classes"]:
        names = tuple(one["names"])
        twin = bare(module.get_submodule(names[0]))
        split = _block_of(one, told["degree"])
        classes.append(BlockClass(names, split, twin, Call((), {}, ()), graph=False))
    return ModelSplit(
        told["degree"],
        told["sequence"],
        tuple(classes),
        _tables(told["tables"]),
        {n: ParameterSplit(_label(one[0]), *one[1:]) for n, one in told["parameters"].items()},
        {n: _exchanges(each) for n, each in told["exchanges"].items()},
        tuple(told["notices"]),
        frozenset(told["scattered"]),
    )


def _tables(told: Any) -> Tables:
    """All but what was for counting exchanges."""
    embeddings, heads = tuple(told["embeddings"]), tuple(told["heads"])
    return Tables(told["split"], told["whole"], embeddings, heads, told["to_loss"])


def _told_block(split: BlockSplit) -> dict[str, Any]:
    return {
        "parameters": {n: _plain(label) for n, label in split.parameters.items()},
        "partial": sorted(split.partial),
        "inputs": [_plain(label) for label in split.inputs],
        "outputs": [_plain(label) for label in split.outputs],
        "exchanges": [asdict(one) for one in split.exchanges],
        "reasons": split.reasons,
        "gathered": list(split.gathered),
        "shapes": {n: list(shape) for n, shape in split.shapes.items()},
        "buffers": list(split.buffers),
        "mutated": sorted(split.mutated),
        "sequence_dim": split.sequence_dim,
    }


def _block_of(told: Any, degree: int) -> BlockSplit:
    """A layer's split without a graph: `again` makes one for the inputs that come."""
    cuts = {n: _label(label) for n, label in told["parameters"].items()}
    return BlockSplit(
        degree=degree,
        parameters={n: label for n, label in cuts.items() if isinstance(label, Split)},
        partial=frozenset(told["partial"]),
        inputs=tuple(_label(label) for label in told["inputs"]),
        outputs=tuple(_label(label) for label in told["outputs"]),
        run=fx.GraphModule(nn.Module(), fx.Graph()),
        exchanges=_exchanges(told["exchanges"]),
        reasons=told["reasons"],
        gathered=tuple(told["gathered"]),
        shapes={n: tuple(shape) for n, shape in told["shapes"].items()},
        buffers=tuple(told["buffers"]),
        mutated=frozenset(told["mutated"]),
        sequence_dim=told["sequence_dim"],
        flatten=_no_graph,
        rebuild=_no_graph,
    )


def _no_graph(*_: Any) -> Any:
    raise BugError("a split that was read from the cache has no graph yet")


def _exchanges(told: Any) -> tuple[Exchange, ...]:
    return tuple(Exchange(**one) for one in told)


def _plain(label: Label) -> Any:
    """A label as plain values.

    >>> _plain(Split(1, 3)), _plain(Tiled(((2, Split(0)), (2, WHOLE))))
    ([1, 3], {'grid': [[2, [0, 1]], [2, 'whole']]})
    """
    if isinstance(label, Split):
        return [label.dim, label.groups]
    if isinstance(label, Tiled):
        return {"grid": [[parts, _plain(one)] for parts, one in label.axes]}
    return "partial" if isinstance(label, Partial) else "whole"


def _label(told: Any) -> Label:
    """The label that `_plain` told. Errors: ValueError for anything else."""
    if told in ("whole", "partial"):
        return WHOLE if told == "whole" else PARTIAL
    if isinstance(told, dict):
        return Tiled(tuple((parts, _of_axis(one)) for parts, one in told["grid"]))
    dim, groups = told
    return Split(dim, groups)


def _of_axis(told: Any) -> Whole | Split:
    label = _label(told)
    if isinstance(label, Whole | Split):
        return label
    raise ValueError(f"{told} is no label of an axis")
