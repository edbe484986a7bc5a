"""Plan how a model is split over n ranks: its blocks, its vocabulary, and what is replicated.

    repeated blocks     one of each class is solved (`split_block`), equal ones share the result
    the vocabulary      embeddings and output heads outside of blocks (`tables`)
    everything else     whole on every rank, computed by every rank alike

A block that cannot be split as a unit is split child by child; it stays whole if that fails too. A
notice names everything that stays whole, with the reason. The planner refuses a layer that draws
random numbers and cannot be traced: the number of draws may depend on values, which layouts round
differently. Nothing here changes the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import Tensor, nn

from shoal.base.errors import PlanError, check_choice, nearest_word
from shoal.parallel._torch import pytree
from shoal.parallel.spmd.collective_counts import list_collectives, list_scattered_embeddings
from shoal.parallel.spmd.labelling.labels import WHOLE, Split, Whole
from shoal.parallel.spmd.labelling.operation_terms import IndivisibleSequence
from shoal.parallel.spmd.split_block import (
    BlockClass,
    BlockSplit,
    ModelSplit,
    ParameterSplit,
    split_block,
)
from shoal.trace.find.trunk import Trunk
from shoal.trace.find.vocabulary_use import VocabularyTables
from shoal.trace.flow.forward_record import ForwardRecord
from shoal.trace.graph.layer_groups import LayerGrouping
from shoal.trace.isolation.layer_calls import LayerCall, copy_without_numbers
from shoal.trace.isolation.random_draws import explain_keyed_blocks
from shoal.wire.phases import phase

WISHES = ("whole", "column", "row")


@phase("split layers")
def plan_split(
    record: ForwardRecord,
    degree: int,
    *,
    staged: bool = False,
    strict: bool = False,
    overrides: Mapping[str, str] = {},
    sequence: bool = False,
    opaque: bool = True,
) -> ModelSplit:
    """Plan how `degree` ranks compute a model.

    Args:
        record: record of a forward pass of the model.
        staged: a pipeline cuts between the blocks, so each block is split by itself.
        strict: refuse instead of leaving something whole.
        overrides: pattern of parameter names (as in a shell) → whole │ column │ row.
        sequence: pass parts of the sequence from block to block.
        opaque: untraceable parts may be one operation of a block's graph (experts).

    Raises:
        PlanError: nothing can be split; `strict` refuses; an untraceable layer draws random
            numbers; or a pattern matches no parameter.
        ConfigError: an override is neither whole, column nor row.
    """
    planner = _SplitPlanner(
        record, degree, _match_overrides(record.module, overrides), sequence, opaque
    )
    return planner.plan(staged, strict)


def _match_overrides(module: nn.Module, overrides: Mapping[str, str]) -> dict[str, str]:
    """Return the user's override of each parameter; later patterns win."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    wishes: dict[str, str] = {}
    for pattern, wish in overrides.items():
        check_choice(f'layout.split."{pattern}"', wish, WISHES)
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            close = nearest_word(pattern, names) or names[0]
            raise PlanError(
                f'layout.split."{pattern}": matches no parameter of {type(module).__name__}; '
                f"try: {close}"
            )
        wishes |= dict.fromkeys(matching, wish)
    return wishes


class _SplitPlanner:
    """Planner of one model's split, with the results so far."""

    def __init__(
        self,
        record: ForwardRecord,
        degree: int,
        wishes: dict[str, str],
        sequence: bool,
        opaque: bool,
    ) -> None:
        self.module, self.record, self.degree = record.module, record, degree
        self.wishes, self.sequence, self.opaque = wishes, sequence, opaque
        self.first = {id(p): name for name, p in self.module.named_parameters()}
        self.homes: dict[int, list[str]] = {}
        for name, p in self.module.named_parameters(remove_duplicate=False):
            self.homes.setdefault(id(p), []).append(name)
        self.classes: list[BlockClass] = []
        self.likeness = LayerGrouping(self.module, opaque=opaque)
        self.refused: list[str] = []  # one line each: what stays whole, and why
        self.graphs: set[str] = set()  # layers that could be traced, whether split or not
        self.untraced: dict[str, str] = {}  # layers that could not, and why

    def plan(self, staged: bool, strict: bool) -> ModelSplit:
        trunk = self.record.trunk
        blocks = self.enclosing_layer(trunk) if trunk.leaf and not staged else trunk.blocks
        lookups = [n for n, p in self.module.named_modules() if isinstance(p, nn.Embedding)]
        calls = self.record.calls([*blocks, *lookups])
        tables = self.record.tables(blocks, self.degree, self.wishes.get)
        reached = self.record.externally_called_blocks(blocks)
        for name, part in reached.items():
            # Another layer computes with parameters that a split one would hold in parts.
            why = f"{part} is called from outside of it"
            self.refused.append(f"{name} stays whole: {why}")
            self.untraced[name] = why
        apart = [name for name in blocks if name in calls and name not in reached]
        for names in self.group_layers(apart, calls):
            self.split_group(names, calls, whole_if_not=True)
        parameters = self.parameter_splits(tables)
        if not any(not isinstance(one.label, Whole) for one in parameters.values()):
            why = self.refused[0] if self.refused else "it has no layer that repeats"
            raise PlanError(
                f"nothing of {type(self.module).__name__} can be split over layout.tp = "
                f"{self.degree}: {why}; try: layout.tp=1"
            )
        if self.untraced:
            self.refuse_random_draws()
        if strict and self.refused:
            raise PlanError(
                f"layout.tp = {self.degree} with layout.strict: {self.refused[0]}; try: "
                f"layout.strict=false, or layout.tp=1"
            )
        return ModelSplit(
            self.degree,
            self.sequence,
            tuple(self.classes),
            tables,
            parameters,
            list_collectives(self.module, self.classes, tables, calls, self.degree),
            tuple(f"layout.tp = {self.degree}: {line}" for line in self.refused),
            list_scattered_embeddings(self.classes, tables, calls),
            {name: call.to_meta() for name, call in calls.items()},
        )

    def enclosing_layer(self, trunk: Trunk) -> tuple[str, ...]:
        """Return the layer that holds all leaves of a trunk, which is split as a unit."""
        parents = [name.split(".")[:-1] for name in trunk.blocks]
        shared = []
        for parts in zip(*parents, strict=False):
            if len(set(parts)) > 1:
                break
            shared.append(parts[0])
        while shared and isinstance(
            self.module.get_submodule(".".join(shared)), nn.ModuleList | nn.ModuleDict
        ):
            shared.pop()  # has no forward of its own
        name = ".".join(shared)
        if any(isinstance(p, nn.Embedding) for p in self.module.get_submodule(name).modules()):
            # Tables of a vocabulary are split by themselves, not as layers of a block.
            return self.lone_blocks(trunk, name)
        return (name,) if trunk.blocks else ()

    def lone_blocks(self, trunk: Trunk, name: str) -> tuple[str, ...]:
        """Return the outermost parts of a layer that hold several layers and look nothing up."""
        found: list[str] = []
        for own, part in self.module.get_submodule(name).named_modules(prefix=name):
            if own not in trunk.called or own.startswith(tuple(f"{one}." for one in found)):
                continue
            if not any(isinstance(inner, nn.Embedding) for inner in part.modules()):
                has_layers = any(list(one.parameters()) for one in part.children())
                found += [own] if has_layers else []
        return tuple(found)

    def group_layers(self, names: list[str], calls: dict[str, LayerCall]) -> list[list[str]]:
        """Group equal layers for which the user wants the same split."""
        return self.likeness.group_layers_by(names, calls, self.relative_overrides)

    def relative_overrides(self, name: str) -> tuple[tuple[str, str], ...]:
        """Return the user's splits of a layer's parameters: (name within the layer, split)."""
        start = f"{name}." if name else ""
        wishes = {
            full.removeprefix(start): wish
            for full, wish in self.wishes.items()
            if full.startswith(start)
        }
        for own, p in self.module.get_submodule(name).named_parameters():
            if self.tied_parameter_name(name, p):
                wishes[own] = "whole"
        return tuple(sorted(wishes.items()))

    def tied_parameter_name(self, name: str, parameter: nn.Parameter) -> str:
        """Return another name of a tied parameter outside of layer `name`, or "".

        A layer under two names (`self.body = self.layers`) is one layer.
        """
        start = f"{name}." if name else ""
        layer = self.module.get_submodule(name)
        others = [home for home in self.homes[id(parameter)] if not home.startswith(start)]
        return next((home for home in others if not self.is_inside(home, layer)), "")

    def is_inside(self, home: str, layer: nn.Module) -> bool:
        """Return whether the path of a parameter leads through a layer."""
        part = self.module
        for step in home.split(".")[:-1]:
            part = part.get_submodule(step)
            if part is layer:
                return True
        return False

    def split_group(
        self, names: list[str], calls: dict[str, LayerCall], whole_if_not: bool
    ) -> bool:
        """Split a group of equal layers, as a unit or by their children; return the success."""
        name = names[0]
        like = f" (and {len(names) - 1} like it)" if len(names) > 1 else ""
        why = self.try_to_split(names, calls)
        if not why:
            return True
        below = [
            [f"{n}.{child}" if n else child for n in names]
            for child in _children(self.module.get_submodule(name))
        ]
        calls |= self.record.calls(n for alike in below for n in alike)
        worked = [
            self.split_group(group, calls, False)
            for alike in below
            for group in self.group_layers([n for n in alike if n in calls], calls)
        ]
        if whole_if_not:
            if any(worked):
                self.refused.append(f"{name}{like} is split by its parts only: {why}")
            else:
                self.refused.append(f"{name}{like} stays whole: {why}")
        return any(worked)

    def try_to_split(self, names: list[str], calls: dict[str, LayerCall]) -> str:
        """Split equal layers as a unit; return the reason if that fails, else ""."""
        if why := explain_keyed_blocks(names[0], self.record.blocks, self.record.draws):
            return why
        part, call = self.module.get_submodule(names[0]), calls[names[0]]
        if why := next((calls[n].unseen for n in names if n in calls and calls[n].unseen), ""):
            self.untraced |= dict.fromkeys(names, why)
            return why
        twin = copy_without_numbers(part)
        wishes = dict(self.relative_overrides(names[0]))
        along = self.sequence_dim(names, calls)
        try:
            try:
                split = self.split_layer(twin, call, along, wishes)
            except IndivisibleSequence as refusal:
                self.refused.append(f"{names[0]} takes whole sequences: {refusal}")
                split = self.split_layer(twin, call, None, wishes)
        except Exception as failure:  # on any failure a layer can stay whole; a notice names it
            why = (str(failure).splitlines() or [type(failure).__name__])[0]
            self.untraced |= dict.fromkeys(names, why)
            return why
        self.graphs.update(names)
        self.check_overrides(names[0], split, wishes)
        if not split.parameters:
            for own, reason in split.reasons.items():
                other = self.tied_parameter_name(names[0], part.get_parameter(own))
                return f"{own} is also {other}" if other else reason
            return "no parameter of it can be cut"
        for own, p in part.named_parameters():
            other = self.tied_parameter_name(names[0], p)
            if other and own in split.partial:
                return f"{own} is also {other}"
        left = [n for n, p in part.named_parameters() if n not in split.parameters and p.dim() > 1]
        for own in left:
            full = f"{names[0]}.{own}" if names[0] else own
            if self.wishes.get(full) != "whole":
                more = f" (and in {len(names) - 1} like it)" if len(names) > 1 else ""
                other = self.tied_parameter_name(names[0], part.get_parameter(own))
                why = f"it is also {other}" if other else split.reasons[own]
                why = why.removeprefix("whole: ")
                self.refused.append(f"{full}{more} stays whole: {why}")
        self.classes.append(BlockClass(tuple(names), split, twin, call))
        return ""

    def refuse_random_draws(self) -> None:
        """Raise PlanError if an untraceable layer draws random numbers outside of all traced parts.

        Raises:
            PlanError: the draws of such a layer may depend on the layout.
        """
        for draw in self.record.draws:
            if not self.graphs.isdisjoint(draw.around):
                continue
            name = next((n for n in reversed(draw.around) if n in self.untraced), None)
            if name is not None:
                raise PlanError(
                    f"layout.tp = {self.degree}: {name or type(self.module).__name__} draws random "
                    f"numbers ({draw.text(name)}) and cannot be traced ({self.untraced[name]}), so "
                    f"they may depend on the layout; try: no dropout there, or layout.tp=1"
                )

    def check_overrides(self, name: str, split: BlockSplit, wishes: Mapping[str, str]) -> None:
        """Raise PlanError if a parameter could not be cut as the user wants.

        Raises:
            PlanError: the split does not follow an override; the text says why.
        """
        for own, wish in wishes.items():
            if wish != "whole" and own in split.reasons and own not in split.parameters:
                full = f"{name}.{own}" if name else own
                raise PlanError(
                    f'layout.split."{full}" = {wish}: cannot be cut so over layout.tp = '
                    f"{self.degree}: {split.reasons[own].removeprefix('whole: ')}; try: whole"
                )

    def split_layer(
        self, twin: nn.Module, call: LayerCall, along: int | None, wishes: dict[str, str]
    ) -> BlockSplit:
        return split_block(
            twin,
            call.args,
            call.kwargs,
            self.degree,
            sequence_dim=along,
            overrides=wishes,
            opaque=self.opaque,
        )

    def sequence_dim(self, names: list[str], calls: dict[str, LayerCall]) -> int | None:
        """Return dim 1 of [batch, seq, dim], or None for other inputs, which have no sequence.

        The sequence is split only for layers one of which passes its output straight to another.
        Code between the layers would read the parts and so gather them, for more bytes than whole
        tensors take.
        """
        if not self.sequence or not any(
            before in calls for n in names if n in calls for before in calls[n].follows
        ):
            return None
        call = calls[names[0]]
        leaves = pytree.tree_leaves((call.args, call.kwargs))
        hidden = next((t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()), None)
        return 1 if hidden is not None and hidden.dim() == 3 else None

    def parameter_splits(self, tables: VocabularyTables) -> dict[str, ParameterSplit]:
        """Return the part of every parameter that a rank holds."""
        held = dict.fromkeys(self.first.values(), ParameterSplit(WHOLE, False, "outside of blocks"))
        for name, why in tables.whole.items():
            held[name] = ParameterSplit(WHOLE, False, why)
        for name, why in tables.split.items():
            held[name] = ParameterSplit(Split(0), False, why)
        for group in self.classes:
            for name in group.names:
                for own, p in self.module.get_submodule(name).named_parameters():
                    label = group.split.parameters.get(own, WHOLE)
                    partial = own in group.split.partial
                    why = group.split.reasons.get(own, "")
                    held[self.first[id(p)]] = ParameterSplit(label, partial, why)
        return held


def _children(part: nn.Module) -> list[str]:
    """Return children with parameters; a list or dict of modules is replaced by its entries."""
    found = []
    for name, child in part.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            found += [f"{name}.{inner}" for inner in _children(child)]
        elif next(child.parameters(), None) is not None:
            found.append(name)
    return found


def keep_blocks_whole(
    module: nn.Module, split: ModelSplit, failed: Mapping[str, str]
) -> ModelSplit:
    """Return the split with some classes of layers left unsplit.

    Args:
        failed: name of a class's first layer → why it stays whole.

    Raises:
        PlanError: no split parameter is left.
    """
    gone = [group for group in split.classes if group.names[0] in failed]
    kept = tuple(group for group in split.classes if group.names[0] not in failed)
    first = {id(p): name for name, p in module.named_parameters()}
    held = dict(split.parameters)
    notices = list(split.notices)
    for group in gone:
        why = failed[group.names[0]]
        like = f" (and {len(group.names) - 1} like it)" if len(group.names) > 1 else ""
        line = f"layout.tp = {split.degree}: {group.names[0]}{like} stays whole: {why}"
        notices.append(line)
        for name in group.names:
            for p in module.get_submodule(name).parameters():
                held[first[id(p)]] = ParameterSplit(WHOLE, False, why)
    if all(isinstance(one.label, Whole) for one in held.values()):
        raise PlanError(f"{notices[-1]}; nothing else can be split; try: layout.tp=1")
    told = list_collectives(module, kept, split.tables, split.calls, split.degree)
    return replace(
        split,
        classes=kept,
        parameters=held,
        exchanges=told,
        notices=tuple(notices),
        scattered=list_scattered_embeddings(kept, split.tables, split.calls),
    )
