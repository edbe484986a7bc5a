"""Blocks of a model: the modules that fsdp, recompute and compile wrap one at a time.

    lists       entries of ModuleLists and Sequentials. In a list of unequal entries that hold lists
                of equal ones themselves (stages of a Swin or a U-Net), the inner lists count
    attributes  `self.block0`, `self.block1`, …, and entries of a ModuleDict: siblings of one class
                that have a forward, with layers inside and no blocks

The outermost ones count. A model without either is one piece: fsdp gathers all of it at once, and
both the prediction and the start of a run must report that.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from shoal.base.errors import PlanError, nearest_word
from shoal.base.layouts.policies import BlocksPolicy

FOUND = BlocksPolicy()
"""Policy without blocks named by the user."""

ROOT = "-"
"""Block name of modules that lie in no block."""

LISTS = (nn.ModuleList, nn.Sequential)
UNCALLED = (nn.ModuleList, nn.ModuleDict)

POSITIVE = re.compile(r"\b(?!0\.0+\b)\d+\.\d+(?:e-?\d+)?\b|\b\d+e-?\d+\b")
"""Printed numbers that do not change a unit's costs: drop rates above 0, epsilons."""


def iterate_blocks(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost blocks with their names; for a list all entries, single layers too.

    >>> def layer(width):
    ...     return nn.TransformerEncoderLayer(width, 2, 8)
    >>> stages = nn.ModuleList(nn.Sequential(layer(w), layer(w), nn.Linear(w, 8)) for w in (4, 8))
    >>> [name for name, _ in iterate_blocks(stages)]
    ['0.0', '0.1', '0.2', '1.0', '1.1', '1.2']
    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.block0, self.block1, self.head = layer(8), layer(8), nn.Linear(8, 8)
    >>> [name for name, _ in iterate_blocks(Net())]
    ['block0', 'block1']
    """
    is_list = isinstance(module, LISTS)
    unequal, alike = is_list and _count_equal_entries(module) == 1, _attribute_blocks(module)
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        inside = _holds_equal_entries(child) if unequal else isinstance(child, UNCALLED)
        if (is_list and not inside) or name in alike:
            yield path, child
        else:
            yield from iterate_blocks(child, path)


def detect_blocks(module: nn.Module, policy: BlocksPolicy = FOUND) -> dict[str, nn.Module]:
    """Find the blocks of a module: those that the user names, else the layers that repeat.

    Raises:
        PlanError: a pattern matches nothing, or a block lies inside of another.

    >>> layers = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    >>> list(detect_blocks(layers, BlocksPolicy(blocks=("Linear",))))
    ['0', '2']
    """
    wished = policy.blocks
    if not wished:
        return dict(iterate_blocks(module))
    parts = {name: part for name, part in module.named_modules() if name}
    found: set[str] = set()
    for pattern in wished:
        matching = [
            name
            for name, part in parts.items()
            if _matches(name, pattern) or fnmatchcase(type(part).__name__, pattern)
        ]
        if not matching:
            close = nearest_word(
                pattern, [*parts, *{type(part).__name__ for part in parts.values()}]
            )
            raise PlanError(
                f"layout.blocks = {pattern}: matches no module of {type(module).__name__}, by name "
                f"or class; try: {close or next(iter(parts), 'leave layout.blocks out')}"
            )
        found.update(matching)
    for name in sorted(found):
        outer = [other for other in found if name.startswith(f"{other}.")]
        if outer:
            raise PlanError(
                f"layout.blocks = {', '.join(wished)}: {name} lies inside of {outer[0]}, which is "
                f"a block too; try: layout.blocks={outer[0]}"
            )
        if isinstance(parts[name], UNCALLED):
            inside = next((f"{name}.*" for _ in parts[name].children()), "leave it out")
            raise PlanError(
                f"layout.blocks = {', '.join(wished)}: {name} is a {type(parts[name]).__name__}, "
                f"which is never called; try: layout.blocks={inside}"
            )
    return {name: part for name, part in parts.items() if name in found}


def _matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a name part by part: no `*` reaches beyond a dot."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def module_key(module: nn.Module) -> tuple[object, ...]:
    """Return a key that equal modules share.

    >>> module_key(nn.Linear(2, 3)) == module_key(nn.Linear(2, 3)) != module_key(nn.Linear(3, 2))
    True
    """
    tensors = [
        (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    ]
    return (type(module), module.training, POSITIVE.sub("#", repr(module)), tuple(tensors))


def _count_equal_entries(module: nn.Module) -> int:
    """Count the equal entries of a list, of those with layers inside; 1 if they are unequal."""
    entries = (part for part in module.children() if next(part.parameters(), None) is not None)
    kinds = Counter(module_key(part) for part in entries if not is_single_layer(part))
    return max(kinds.values(), default=0)


def _holds_equal_entries(module: nn.Module) -> bool:
    """Return whether a module contains a list of equal entries with layers inside."""
    return any(
        _count_equal_entries(part) > 1 for part in module.modules() if isinstance(part, LISTS)
    )


def _attribute_blocks(module: nn.Module) -> set[str]:
    """Return the names of children that are blocks as attributes."""
    if isinstance(module, LISTS):
        return set()
    children = [
        (name, child)
        for name, child in module.named_children()
        if any(child.children())
        and not isinstance(child, (*LISTS, *UNCALLED))
        and type(child).forward is not nn.Module.forward
        and next(child.parameters(), None) is not None
    ]
    often = Counter(type(child) for _, child in children)
    return {
        name
        for name, child in children
        if often[type(child)] > 1
        and not any(not is_single_layer(part) for _, part in iterate_blocks(child))
    }


def is_single_layer(block: nn.Module) -> bool:
    """Return whether a block is one bare torch.nn layer without submodules: not wrapped."""
    return type(block).__module__.startswith("torch.nn.") and not any(block.children())


def residual_blocks(module: nn.Module, policy: BlocksPolicy = FOUND) -> dict[str, nn.Module]:
    """Find the blocks that a residual stream passes through: those of several layers each.

    >>> list(residual_blocks(nn.Sequential(nn.Linear(1, 1), nn.TransformerEncoderLayer(4, 2, 8))))
    ['1']
    """
    return {n: b for n, b in detect_blocks(module, policy).items() if not is_single_layer(b)}


def fsdp_blocks(module: nn.Module, policy: BlocksPolicy = FOUND) -> dict[str, nn.Module]:
    """Find the blocks that fsdp gathers one at a time: with layers inside, none shared.

    A parameter that lies in two places must be gathered for both, so such blocks do not count.

    Args:
        module: the whole module; shapes are enough.
    """
    found = detect_blocks(module, policy)
    shared = list_shared_parameters(module, found)
    own = {n: b for n, b in found.items() if n not in shared and any(b.children())}
    return {n: b for n, b in own.items() if next(b.parameters(), None) is not None}


def list_shared_parameters(module: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the blocks that share a parameter with another block, or with the rest of the model.

    Tied weights are shared, and so are modules that several blocks hold. One block in two places
    of the model shares nothing.

    Returns:
        {block: the name of the first such parameter}.

    >>> one = nn.Linear(2, 2)
    >>> layers = nn.Sequential(nn.Sequential(one), nn.Sequential(one), nn.Sequential(nn.ReLU()))
    >>> list_shared_parameters(layers, dict(layers.named_children()))
    {'0': '0.0.weight', '1': '1.0.weight'}
    """
    distinct = {id(block): block for block in blocks.values()}
    homes = Counter(_parameters_outside(module, distinct))
    for block in distinct.values():
        homes.update({id(p) for p in block.parameters()})
    found: dict[str, str] = {}
    for name, block in blocks.items():
        for own, parameter in block.named_parameters(name):
            if homes[id(parameter)] > 1:
                found.setdefault(name, own)
    return found


def _parameters_outside(module: nn.Module, blocks: Mapping[int, nn.Module]) -> set[int]:
    """Return the ids of the parameters that the model holds outside of the blocks."""
    outside: set[int] = set()
    seen, waiting = set(blocks), [module]
    while waiting:
        part = waiting.pop()
        if id(part) not in seen:
            seen.add(id(part))
            outside.update(id(p) for p in part.parameters(recurse=False))
            waiting += part.children()
    return outside


@dataclass(frozen=True)
class BlockPosition:
    """Position of one unit of a model relative to its blocks.

    Attributes:
        block: "" if the unit is a block itself, ROOT if it lies in none, else the name of the block
            around it.
        rooted: elements that fsdp gathers with the root, and not block by block.
    """

    block: str
    rooted: int


class BlockIndex:
    """Blocks of a model's meta copy by name, to locate other modules in them."""

    def __init__(self, module: nn.Module, policy: BlocksPolicy = FOUND) -> None:
        found = detect_blocks(module, policy)
        self.named = {n: part for n, part in found.items() if not is_single_layer(part)}
        self.names = {id(part): name for name, part in self.named.items()}
        gathered = fsdp_blocks(module, policy).values()
        self.gathered = {id(p) for part in gathered for p in part.parameters()}

    def of(self, path: str, unit: nn.Module) -> BlockPosition:
        """Return the position of `unit`, whose name is `path`, relative to the blocks."""
        outside = sum(p.numel() for p in unit.parameters() if id(p) not in self.gathered)
        if id(unit) in self.names:
            return BlockPosition("", outside)
        around = [name for name in self.named if path.startswith(f"{name}.")]
        return BlockPosition(around[0] if around else ROOT, outside)


def iterate_stacked_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield parts whose parameters share their first dim, one of them a stack of matrices."""
    for name, part in module.named_modules():
        own = list(part.parameters())
        if own and all(p.dim() for p in own) and max(p.dim() for p in own) >= 3:
            sizes = {len(p) for p in own}
            if len(sizes) == 1 and sizes.pop() > 1:
                yield name, part
