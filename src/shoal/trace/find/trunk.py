"""Finds the trunk of any model: the repeated blocks that tensor parallelism and pipelines work on.

A model is walked from the root inwards, given what one forward pass called (`record`). A module
whose class (or which itself) is used only once is opened; the outermost ones that are used again
and again are the blocks. A block of which there are few, and which is itself a stack of like blocks
(the encoder and the decoder of T5), is opened too. Several classes may be blocks.

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
"""A class with at most so many instances may be a stack of blocks instead of a block."""
STACK_SHARE = 0.8
"""A stack keeps at least this share of its parameters in its blocks."""
GROUP_SHARE = 0.1
"""A class belongs to the trunk if it holds at least this share of what all blocks hold."""

Run = Callable[[nn.Module], Any]
"""Does one forward pass of a module on a sample."""


@dataclass(frozen=True)
class Trunk:
    """The repeated blocks of a model that tp and pp work on, and how one pass called them.

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


def find_trunk(
    module: nn.Module,
    shapes: Mapping[str, Sequence[torch.Size]],
    order: Sequence[tuple[str, tuple[str, ...]]],
    wished: Sequence[str] = (),
) -> Trunk:
    """The trunk of a module, of which one forward pass is known.

    Args:
        shapes: of the first output of every call, by module, in the order of first calls' ends.
        order: every call in the order of their ends: (module, modules that were being called).
        wished: the blocks as the user has them; (): what repeats.

    Returns:
        blocks and calls; no blocks at all for a model that calls no layer with parameters.
    """
    names, leaf = (list(wished), False) if wished else Walk(module, shapes).trunk()
    chosen = set(names)
    calls = tuple(name for name, around in order if name in chosen and chosen.isdisjoint(around))
    return Trunk(tuple(dict.fromkeys(calls)), calls, frozenset(shapes), leaf)


def guess_blocks(module: nn.Module) -> list[str]:
    """The trunk's blocks as they are if every module is called once; no pass is needed."""
    once = [torch.Size()]
    called = {n: once for n, part in module.named_modules() if not isinstance(part, UNCALLED)}
    return Walk(module, called).trunk()[0]


class Walk:
    """The walk from the root inwards, with what one forward pass called."""

    def __init__(self, module: nn.Module, heard: Mapping[str, Sequence[torch.Size]]) -> None:
        self.module, self.heard = module, heard
        self.names = {id(part): name for name, part in module.named_modules()}
        self.used = Counter(
            kind_of(part) for name, part in module.named_modules() if name in heard and _held(part)
        )
        self.opened: set[Any] = set()

    def trunk(self) -> tuple[list[str], bool]:
        """(names of the blocks, whether they are leaves)."""
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
            if _elements(parts) >= GROUP_SHARE * total and self.repeats(parts)
        ]
        if _elements(chosen) and _elements(chosen) >= _elements(self.comparable(leaves)):
            return [self.names[id(part)] for part in chosen], False
        return [self.names[id(part)] for part in self.all_leaves()], True

    def repeats(self, parts: list[nn.Module]) -> bool:
        """Whether they are called more than once, all together."""
        return len(parts) > 1 or len(self.heard[self.names[id(parts[0])]]) > 1

    def comparable(self, leaves: list[nn.Module]) -> list[nn.Module]:
        """Layers beside the blocks, without embeddings and the output layer: large vocabularies."""
        place = {name: number for number, name in enumerate(self.heard)}
        called = [part for part in leaves if self.names[id(part)] in place]
        called.sort(key=lambda part: place[self.names[id(part)]])
        return [part for part in called[:-1] if not isinstance(part, nn.Embedding)]

    def all_leaves(self) -> list[nn.Module]:
        """Every called layer with parameters."""
        named = self.module.named_modules()
        return [part for name, part in named if name in self.heard and is_leaf(part)]

    def frontier(self, top: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
        """(outermost repeated non-leaf modules under `top`, layers met on the way)."""
        blocks: list[nn.Module] = []
        leaves: list[nn.Module] = []
        met: set[int] = set()
        waiting = [top]
        while waiting:
            part = waiting.pop()
            if id(part) in met or not _held(part):
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
        """Whether a non-leaf module is used again and again."""
        calls = self.heard.get(self.names[id(part)], [])
        if is_leaf(part) or not calls or kind_of(part) in self.opened:
            return False
        if isinstance(part, nn.Sequential) and not all(is_leaf(p) for p in part if _held(p)):
            return False
        return self.used[kind_of(part)] > 1 or len(calls) > 1

    def is_stack(self, part: nn.Module) -> bool:
        """Whether `part` only runs blocks of one class one after another.

        The last one then gives what the stack gives, which experts of a mixture do not.
        """
        for parts in _groups(self.frontier(part)[0]).values():
            if len(parts) < 2 or _elements(parts) < STACK_SHARE * _elements([part]):
                continue
            own = self.heard[self.names[id(part)]][-1]
            return self.heard[self.names[id(parts[-1])]][-1] == own
        return False


def kind_of(part: nn.Module) -> Any:
    """What two blocks must have in common: their class; a Sequential is what it consists of."""
    if isinstance(part, nn.Sequential):
        return (type(part), *(type(entry) for entry in part))
    return type(part)


def _groups(parts: Iterable[nn.Module]) -> dict[Any, list[nn.Module]]:
    groups: dict[Any, list[nn.Module]] = {}
    for part in parts:
        groups.setdefault(kind_of(part), []).append(part)
    return groups


def _held(part: nn.Module) -> bool:
    return next(part.parameters(), None) is not None


def is_leaf(part: nn.Module) -> bool:
    """Whether a module has parameters, and no module inside of it has."""
    return _held(part) and not any(_held(child) for child in part.children())


def _elements(parts: Iterable[nn.Module]) -> int:
    """Elements of all parameters of some modules, each counted once."""
    return sum({id(p): p.numel() for part in parts for p in part.parameters()}.values())
