"""Something that is called in the place of a layer's `forward`, until it is taken away."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from torch import nn


class StandIn:
    """Something that is called in the place of a block's `forward`, until it is taken away.

    An object with the bound method inside, and no closure, so that a deep copy of the model
    computes with its own weights. No name in the state dict changes, and hooks stay outside.
    """

    def __init__(self, name: str, block: nn.Module) -> None:
        self.name, self.block = name, block
        self.replaced = block.__dict__.get("forward")
        self.forward: Callable[..., Any] = block.forward
        # Whoever reads its signature sees the block's own; what it holds itself stays its own.
        update_wrapper(self, self.forward, updated=())
        block.__dict__["forward"] = self

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """What is computed in the place of the block's own forward."""
        raise NotImplementedError

    def compile_inside(self, compiler: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
        """Hand over to `compiler` what runs in here; tells whether it did.

        For what cannot become code as a whole, since ranks talk to each other in it.
        """
        return False

    def take_away(self) -> None:
        """Leave the block as it was, or those that stand around this one, in whichever order."""
        outer = self.block.__dict__.get("forward")
        if outer is self:
            del self.block.__dict__["forward"]
            if self.replaced is not None:
                self.block.__dict__["forward"] = self.replaced
        while isinstance(outer, StandIn):
            if outer.replaced is self:
                outer.replaced, outer.forward = self.replaced, self.forward
            outer = outer.replaced
