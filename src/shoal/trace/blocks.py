"""What is a block of a model to the techniques that wrap one at a time: fsdp, recompute, compile.

Blocks are the entries of the outermost ModuleLists and Sequentials. A model that keeps its layers
as plain attributes (`self.block0`, `self.block1`, …) has none: then there is nothing to wrap, fsdp
gathers all of it at once, and the prediction of a run has to say so, as has its start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

ROOT = "-"
"""In the place of a block's name: no block at all."""


def blocks(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Entries of the outermost ModuleLists and Sequentials, with their names."""
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(module, nn.ModuleList | nn.Sequential):
            yield path, child
        else:
            yield from blocks(child, path)


def is_single_layer(block: nn.Module) -> bool:
    """One layer of torch's own: it keeps little but its input and has nothing to fuse."""
    return type(block).__module__.startswith("torch.nn.") and not any(block.children())


def gathered_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """The blocks that fsdp gathers one at a time: with layers inside, and no shared parameter.

    A parameter that lies in two places must be gathered for both, so such blocks are none of them.

    module   whole; shapes are enough
    """
    homes: dict[int, int] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            homes[id(parameter)] = homes.get(id(parameter), 0) + 1
    found = {}
    for name, block in blocks(module):
        here: dict[int, int] = {}
        for part in block.modules():
            for parameter in part.parameters(recurse=False):
                here[id(parameter)] = here.get(id(parameter), 0) + 1
        shared = any(homes[key] != count for key, count in here.items())
        if here and not shared and any(block.children()):
            found[name] = block
    return found


@dataclass(frozen=True)
class Wrapped:
    """How one unit of a model lies in its blocks.

    block    "" where it is one itself, ROOT where it lies in none, else the name of the larger one
    rooted   elements that fsdp gathers with the root, and not block by block
    """

    block: str
    rooted: int


class Blocks:
    """The blocks of a model's twin by name, for those who ask about other modules in it."""

    def __init__(self, module: nn.Module) -> None:
        self.named = {n: part for n, part in blocks(module) if not is_single_layer(part)}
        self.names = {id(part): name for name, part in self.named.items()}
        gathered = gathered_blocks(module).values()
        self.gathered = {id(p) for part in gathered for p in part.parameters()}

    def of(self, path: str, unit: nn.Module) -> Wrapped:
        """How `unit`, whose name is `path`, lies in them."""
        outside = sum(p.numel() for p in unit.parameters() if id(p) not in self.gathered)
        if id(unit) in self.names:
            return Wrapped("", outside)
        around = [name for name in self.named if path.startswith(f"{name}.")]
        return Wrapped(around[0] if around else ROOT, outside)


def loose_blocks(module: nn.Module, prefix: str = "") -> list[str]:
    """Names of what look like blocks and are none: siblings of one class, kept as attributes.

    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.block0, self.block1 = (nn.TransformerEncoderLayer(8, 2, 8) for _ in range(2))
    >>> loose_blocks(Net())
    ['block0', 'block1']
    """
    if isinstance(module, nn.ModuleList | nn.Sequential):
        return []
    children = [
        (n, c) for n, c in module.named_children() if next(c.parameters(), None) is not None
    ]
    kinds = [type(child) for _, child in children if any(child.children())]
    found = []
    for name, child in children:
        path = f"{prefix}.{name}" if prefix else name
        inside = any(not is_single_layer(part) for _, part in blocks(child))
        lists = isinstance(child, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        if kinds.count(type(child)) > 1 and not inside and not lists:
            found.append(path)
        else:
            found += loose_blocks(child, path)
    return found
