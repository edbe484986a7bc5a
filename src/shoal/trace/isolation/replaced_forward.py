"""Replacement of a layer's `forward`, until it is removed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import update_wrapper
from typing import Any, Self

from torch import nn


class ReplacedForward:
    """Callable that replaces a block's `forward` until it is removed.

    An object with the bound method inside, and no closure, so that a deep copy of the model
    computes with its own weights. No name in the state dict changes, and hooks stay outside.

    Attributes:
        calls_experts: True if it distributes the block's experts over ranks.
        computes: False after a call that returned stand-ins, for results of another rank.
        shared_attributes: what a deep copy has in common with the original, such as its ranks.
    """

    calls_experts = False
    computes = True
    shared_attributes: tuple[str, ...] = ()

    def __init__(self, name: str, block: nn.Module) -> None:
        self.name, self.block = name, block
        self.replaced = block.__dict__.get("forward")
        self.forward: Callable[..., Any] = block.forward
        # The signature is the block's; the attributes stay this object's own.
        update_wrapper(self, self.forward, updated=())
        block.__dict__["forward"] = self

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Compute the block's results instead of its own forward."""
        raise NotImplementedError

    def compile_inside(self, compiler: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
        """Compile the code inside with `compiler`; return whether that was done.

        For forwards that cannot be compiled as a whole, because ranks communicate inside.
        """
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy with the model; the copy has `shared_attributes` in common with this one."""
        shared = [getattr(self, name) for name in self.shared_attributes]
        memo |= {id(one): one for one in shared}
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def restore(self) -> None:
        """Restore the block's forward, or that of replacements around this one, in any order."""
        outer = self.block.__dict__.get("forward")
        if outer is self:
            del self.block.__dict__["forward"]
            if self.replaced is not None:
                self.block.__dict__["forward"] = self.replaced
        while isinstance(outer, ReplacedForward):
            if outer.replaced is self:
                outer.replaced, outer.forward = self.replaced, self.forward
            outer = outer.replaced


def restore_all(forwards: Iterable[ReplacedForward]) -> None:
    """Restore the forwards of several blocks."""
    for one in forwards:
        one.restore()
