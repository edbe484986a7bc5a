"""Replacement of a layer's `forward`, until it is removed."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from torch import nn


class ReplacedForward:
    """Callable that replaces a block's `forward` until it is removed.

    An object with the bound method inside, and no closure, so that a deep copy of the model
    computes with its own weights. No name in the state dict changes, and hooks stay outside.

    Attributes:
        calls_experts: True if it distributes the block's experts over ranks.
        computes: False after a call that returned stand-ins, for results of another rank.
    """

    calls_experts = False
    computes = True

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
