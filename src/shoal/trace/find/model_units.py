"""Find the units of a model: the parts that repeat, of which a trace runs one for all.

Units are the outermost entries of ModuleLists, Sequentials and ModuleDicts that have an equal
sibling, and the modules beside them: embedding, first convolution, last norm, head. Two modules
are equal if class, printed form (sizes, strides, dropout) and every tensor's shape, type and
trainability are. Modules without parameters are no units: their work counts to the unit before.
"""

from __future__ import annotations

from collections import Counter

from torch import nn

from shoal.trace.find.blocks import UNCALLED, module_key

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def detect_units(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the names and modules of the units, in the order in which the model lists them.

    >>> body = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    >>> [name for name, _ in detect_units(body)]
    ['0', '1', '3']
    """
    found: list[tuple[str, nn.Module]] = []
    if not _children(root) and _has_parameters(root):
        return [("", root)]
    _walk("", root, found, {})
    return found


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(module.named_children())


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _walk(
    prefix: str, module: nn.Module, found: list[tuple[str, nn.Module]], known: dict[int, bool]
) -> None:
    """Add the units below `module`; descend if repeats hide in a single part."""
    children = [(n, c) for n, c in _children(module) if _has_parameters(c)]
    equal = _equal_siblings(module)
    for name, child in children:
        path = f"{prefix}.{name}" if prefix else name
        repeated = id(child) in equal and not isinstance(child, UNCALLED)
        if not repeated and (isinstance(child, CONTAINERS) or _holds_repeats(child, known)):
            _walk(path, child, found, known)
        else:
            found.append((path, child))


def _equal_siblings(module: nn.Module) -> set[int]:
    """Return the entries of a container that have an equal sibling in it, by id."""
    if not isinstance(module, CONTAINERS):
        return set()
    kinds = {id(c): module_key(c) for _, c in _children(module) if _has_parameters(c)}
    often = Counter(kinds.values())
    return {child for child, kind in kinds.items() if often[kind] > 1}


def _holds_repeats(module: nn.Module, known: dict[int, bool]) -> bool:
    """Return whether a container anywhere in this module holds equal siblings."""
    if id(module) not in known:
        known[id(module)] = bool(_equal_siblings(module)) or any(
            _holds_repeats(child, known) for _, child in _children(module)
        )
    return known[id(module)]
