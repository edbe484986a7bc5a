"""Blocks that draw from `random` or `numpy.random`, and the seeds of these draws in each block.

Both generators are seeded once per micro-batch. Under pp each stage begins there anew, so a block
of a later stage would draw what the first block of one process draws. So the generators are seeded
by name at the entry of each block that may draw, and restored after it: the code between blocks
draws on where it was, whichever stages ran the blocks.

Seeding takes some 100 µs. So a block is keyed only if code that it may run refers to `random`,
`numpy.random` or a function of theirs: the methods of its modules, and the functions that they
name, to a depth of `DEPTH`.
"""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import nn
from torch.utils.hooks import RemovableHandle

DEPTH = 3
"""Calls between a method of a block and a function that is still read."""
FOREIGN = frozenset({"torch", "numpy", "shoal", "builtins"})
"""Packages whose functions are not read: torch draws from its own generators."""


def draws_from_host(block: nn.Module) -> bool:
    """Return whether a block may draw from `random` or `numpy.random`.

    Args:
        block: the module.
    """
    kinds = {base for part in block.modules() for base in type(part).__mro__}
    found = [one for kind in kinds if _is_own(kind) for one in vars(kind).values()]
    found += [vars(part)["forward"] for part in block.modules() if "forward" in vars(part)]
    seen: set[int] = set()
    for _ in range(DEPTH + 1):
        functions = [one for value in found if (one := _function(value)) is not None]
        found = []
        for function in functions:
            if id(function.__code__) in seen:
                continue
            seen.add(id(function.__code__))
            for value, names in _referred(function):
                if _is_generator(value, names):
                    return True
                found.append(value)
                if isinstance(value, types.ModuleType) and _is_own(value):
                    found += [vars(value)[name] for name in names if name in vars(value)]
    return False


def _is_own(value: Any) -> bool:
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return str(name).partition(".")[0] not in FOREIGN


def _function(value: Any) -> types.FunctionType | None:
    """Return the Python function behind a method, a property or a decorated function."""
    for name in ("fget", "__func__", "__wrapped__"):
        value = getattr(value, name, None) or value
    return value if isinstance(value, types.FunctionType) and _is_own(value) else None


def _referred(function: types.FunctionType) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Yield the objects that a function's code names, each with all names of that code."""
    codes = [function.__code__]
    for code in codes:
        codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
        for name in code.co_names:
            if name in function.__globals__:
                yield function.__globals__[name], code.co_names
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents, function.__code__.co_names
        except ValueError:  # a name that is not bound yet
            continue


def _is_generator(value: Any, names: tuple[str, ...]) -> bool:
    if value is random or value is np.random:
        return True
    if value is np:
        return "random" in names
    owner = getattr(value, "__self__", None)
    return owner is not None and (owner is random._inst or owner is np.random.mtrand._rand)


class HostDraws:
    """Seeder of `random` and `numpy.random` for a block, which restores their states after it.

    Args:
        seed_of: returns the seed of the current call of a block; None outside of training steps,
            or where other devices run at the same time.
    """

    def __init__(self, seed_of: Callable[[str], int | None]) -> None:
        self._seed_of = seed_of
        self._states: list[tuple[Any, Any] | None] = []

    def __deepcopy__(self, known: object) -> HostDraws:
        return self  # a copied module shares the keys

    def enter(self, block: str, *_: object) -> None:
        """Seed both generators by a block's name; after torch's own are seeded."""
        seed = self._seed_of(block)
        if seed is None:
            self._states.append(None)
            return
        self._states.append((random.getstate(), np.random.get_state()))
        random.seed(seed)
        np.random.seed(seed % 2**32)

    def leave(self, *_: object) -> None:
        """Restore the states that both generators had before the block."""
        if self._states and (state := self._states.pop()) is not None:
            random.setstate(state[0])
            np.random.set_state(state[1])


def watch_blocks(
    module: nn.Module, names: Sequence[str], seed_of: Callable[[str], int | None]
) -> list[RemovableHandle]:
    """Add the hooks of the blocks that draw, after those that seed torch's generators.

    Args:
        module: the model.
        names: of blocks that may draw.
        seed_of: as of `HostDraws`.
    """
    draws, hooks = HostDraws(seed_of), list[RemovableHandle]()
    for name in names:
        if draws_from_host(block := module.get_submodule(name)):
            hooks.append(block.register_forward_pre_hook(partial(draws.enter, name)))
            hooks.append(block.register_forward_hook(draws.leave))
    return hooks
