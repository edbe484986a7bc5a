"""Find the trunk of any model: the repeated blocks that tensor parallelism and pipelines work on.

The search walks a model from the root inwards and uses the calls of one forward pass (`record`). A
module whose class (or which itself) is used only once is opened; the outermost ones that are used
repeatedly are the blocks. A block with few instances that is itself a stack of equal blocks (the
encoder and the decoder of T5) is opened too. Several classes may be blocks.

    blocks     non-leaf modules of a class with several instances, or one that is called often
    leaf       a model without such blocks (a plain nn.Sequential of layers): every layer with
               parameters is a block

Source: the rule, and how often it is right, were measured on 21 models of many families.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.trace.find.blocks import UNCALLED

FEW = 4
"""Largest number of instances of a class that may be a stack of blocks instead of a block."""
STACK_SHARE = 0.8
"""Least share of its parameters that a stack keeps in its blocks."""
GROUP_SHARE = 0.1
"""Least share of the parameters of all blocks that a class of the trunk holds."""

ForwardFunction = Callable[[nn.Module], Any]
"""Function that does one forward pass of a module on a sample."""


@dataclass(frozen=True)
class Trunk:
    """Repeated blocks of a model that tp and pp work on, and their calls in one pass.

    Attributes:
        blocks: names in the order of their first call, each once.
        calls: the block of every call, in order; a block may be called several times.
        called: names of all modules that the forward pass called.
        leaf: the blocks are single layers: the model has no repeated non-leaf module.
    """

    blocks: tuple[str, ...]
    calls: tuple[str, ...]
    called: frozenset[str] = frozenset()
    leaf: bool = False


def detect_trunk(
    module: nn.Module,
    shapes: Mapping[str, Sequence[torch.Size]],
    order: Sequence[tuple[str, tuple[str, ...]]],
    wished: Sequence[str] = (),
) -> Trunk:
    """Find the trunk of a module from the calls of one forward pass.

    Args:
        shapes: shape of the first output of every call, by module, in the order of first calls'
            ends.
        order: every call in the order of their ends: (module, modules around the call).
        wished: the blocks that the user names; (): what repeats.

    Returns:
        blocks and calls; no blocks at all for a model that calls no layer with parameters.
    """
    names, leaf = (list(wished), False) if wished else TrunkSearch(module, shapes).search()
    chosen = set(names)
    calls = tuple(name for name, around in order if name in chosen and chosen.isdisjoint(around))
    return Trunk(tuple(dict.fromkeys(calls)), calls, frozenset(shapes), leaf)


def guess_blocks(module: nn.Module) -> list[str]:
    """Return the trunk's blocks if every module is called once; no pass is needed."""
    once = [torch.Size()]
    called = {n: once for n, part in module.named_modules() if not isinstance(part, UNCALLED)}
    return TrunkSearch(module, called).search()[0]


class TrunkSearch:
    """Search for a model's repeated blocks from its root inwards, by the calls of one pass."""

    def __init__(self, module: nn.Module, heard: Mapping[str, Sequence[torch.Size]]) -> None:
        self.module, self.heard = module, heard
        self.names = {id(part): name for name, part in module.named_modules()}
        self.used = Counter(
            class_key(part)
            for name, part in module.named_modules()
            if name in heard and _has_parameters(part)
        )
        self.opened: set[Any] = set()

    def search(self) -> tuple[list[str], bool]:
        """Find the repeated blocks of the module, else its single layers with parameters.

        Returns:
            (names of the blocks, True if they are single layers).
        """
        while True:
            blocks, leaves = self.frontier(self.module)
            stacks = {
                kind
                for kind, parts in _groups(blocks).items()
                if len(parts) <= FEW and all(self.is_stack(part) for part in parts)
            }
            if not stacks:
                break
            self.opened |= stacks
        groups = list(_groups(blocks).values())
        total = _elements(part for parts in groups for part in parts)
        chosen = [
            part
            for parts in groups
            for part in parts
            if _elements(parts) >= GROUP_SHARE * total and self.is_repeated(parts)
        ]
        if _elements(chosen) and _elements(chosen) >= _elements(self.comparable_layers(leaves)):
            return [self.names[id(part)] for part in chosen], False
        return [self.names[id(part)] for part in self.all_leaves()], True

    def is_repeated(self, parts: list[nn.Module]) -> bool:
        """Return whether `parts` are called more than once, all together."""
        return len(parts) > 1 or len(self.heard[self.names[id(parts[0])]]) > 1

    def comparable_layers(self, leaves: list[nn.Module]) -> list[nn.Module]:
        """Return layers beside the blocks without embeddings and head: large vocabularies."""
        place = {name: number for number, name in enumerate(self.heard)}
        called = [part for part in leaves if self.names[id(part)] in place]
        called.sort(key=lambda part: place[self.names[id(part)]])
        return [part for part in called[:-1] if not isinstance(part, nn.Embedding)]

    def all_leaves(self) -> list[nn.Module]:
        """Return every called layer with parameters."""
        named = self.module.named_modules()
        return [part for name, part in named if name in self.heard and is_leaf(part)]

    def frontier(self, top: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return (outermost repeated non-leaf modules under `top`, leaf layers outside of them)."""
        blocks: list[nn.Module] = []
        leaves: list[nn.Module] = []
        met: set[int] = set()
        waiting = [top]
        while waiting:
            part = waiting.pop()
            if id(part) in met or not _has_parameters(part):
                continue
            met.add(id(part))
            if part is not top and self.is_block(part):
                blocks.append(part)
            elif is_leaf(part):
                leaves.append(part)
            else:
                waiting += reversed(list(part.children()))
        return blocks, leaves

    def is_block(self, part: nn.Module) -> bool:
        """Return whether a non-leaf module is used repeatedly."""
        calls = self.heard.get(self.names[id(part)], [])
        if is_leaf(part) or not calls or class_key(part) in self.opened:
            return False
        if isinstance(part, nn.Sequential) and not all(
            is_leaf(p) for p in part if _has_parameters(p)
        ):
            return False
        return self.used[class_key(part)] > 1 or len(calls) > 1

    def is_stack(self, part: nn.Module) -> bool:
        """Return whether `part` only runs blocks of one class one after another.

        The last block then returns what the stack returns, which experts of a mixture do not.
        """
        for parts in _groups(self.frontier(part)[0]).values():
            if len(parts) < 2 or _elements(parts) < STACK_SHARE * _elements([part]):
                continue
            own = self.heard[self.names[id(part)]][-1]
            return self.heard[self.names[id(parts[-1])]][-1] == own
        return False


def class_key(part: nn.Module) -> Any:
    """Return a key that equal blocks share: their class; for a Sequential, its entries' classes."""
    if isinstance(part, nn.Sequential):
        return (type(part), *(type(entry) for entry in part))
    return type(part)


def _groups(parts: Iterable[nn.Module]) -> dict[Any, list[nn.Module]]:
    groups: dict[Any, list[nn.Module]] = {}
    for part in parts:
        groups.setdefault(class_key(part), []).append(part)
    return groups


def _has_parameters(part: nn.Module) -> bool:
    return next(part.parameters(), None) is not None


def is_leaf(part: nn.Module) -> bool:
    """Return whether a module has parameters, and no module inside of it has."""
    return _has_parameters(part) and not any(_has_parameters(child) for child in part.children())


def _elements(parts: Iterable[nn.Module]) -> int:
    """Count the elements of all parameters of some modules, each once."""
    return sum({id(p): p.numel() for part in parts for p in part.parameters()}.values())
