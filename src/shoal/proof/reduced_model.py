"""Reduce a model to one block of each kind and its ends, for models too large to prove whole.

Of every list of blocks the first ones stay, until one of each kind is among them. Each of those
gets the same input in its forward pass as in the whole model, and so does every earlier layer.
Later layers (norm, head, loss) run the whole model's own code and weights, on another block's
output, and gradients reach the blocks through fewer blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from shoal.trace.find.blocks import is_single_layer, module_key

LISTS = (nn.ModuleList, nn.Sequential)


@dataclass(frozen=True)
class BlockCut:
    """Shortened list of blocks: its name in the model, blocks that stay, blocks before."""

    name: str
    kept: int
    of: int
    kinds: int


def cut_blocks(module: nn.Module, least: int = 1) -> list[BlockCut]:
    """Remove blocks from a model, in place, until one of each kind is left; return the cuts.

    Args:
        least: blocks that stay in a list, such as one for each stage of a pipeline.
    """
    found: list[BlockCut] = []
    for name, part in list(module.named_modules()):
        if not isinstance(part, LISTS) or len(part) < 2 or any(is_in_cut(name, c) for c in found):
            continue
        if not all(any(True for _ in b.parameters()) and not is_single_layer(b) for b in part):
            continue
        kinds = [block_kind(block) for block in part]
        kept = max(least, *(kinds.index(kind) + 1 for kind in set(kinds)))
        if kept < len(part):
            found.append(BlockCut(name, kept, len(part), len(set(kinds))))
            del part[kept:]
    return found


def is_in_cut(name: str, cut: BlockCut) -> bool:
    """Return whether a module is in a list that was cut."""
    return name.startswith(f"{cut.name}.")


def block_kind(block: nn.Module) -> Any:
    """Return a key that is equal for blocks of one kind: layers, shapes, words and switches.

    Blocks of one class may differ in a word (`attention_type`) or in whether an attribute is None.
    """
    settings = tuple(
        (name, key, value if isinstance(value, bool | str) else value is None)
        for name, part in block.named_modules()
        for key, value in sorted(vars(part).items())
        if not key.startswith("_") and (value is None or isinstance(value, bool | str | int))
    )
    return module_key(block), settings


def cuts_text(cuts: list[BlockCut]) -> str:
    """Return one line on the proven and the removed parts of a model.

    >>> cuts_text([BlockCut("blocks", 1, 24, 1)])[:60]
    'by blocks: the first 1 of 24 in blocks (1 kind) and both end'
    """
    if not cuts:
        return "by blocks: the model has no repeated blocks, so it is the whole"
    lists = ", ".join(
        f"the first {c.kept} of {c.of} in {c.name} ({c.kinds} kind{'s' * (c.kinds > 1)})"
        for c in cuts
    )
    return (
        f"by blocks: {lists} and both ends; not seen: the other "
        f"{sum(c.of - c.kept for c in cuts)} blocks, the last block's output at the head, and what "
        f"comes of depth"
    )


def least_blocks(layout: Any) -> int:
    """Return the blocks that a list must keep: two, to be recognised as one, or pp's pieces.

    >>> least_blocks("ddp"), least_blocks({"pp": 2, "chunks": 2})
    (2, 4)
    """
    if isinstance(layout, str):
        return 2
    return max(2, int(layout.get("pp", 1) or 1) * int(layout.get("chunks", 1) or 1))
