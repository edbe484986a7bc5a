"""Finds out where a model draws random numbers in training, by running it once.

A function draws if one of torch's own generators stands elsewhere after it than before: that is
what every later mask hangs on, whatever the function is called. Tags of operations say too much:
those of fused attention are set without dropout too.

Limits    draws from a generator that is the user's own; draws that the sample's values do not lead
          to
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shoal.trace.blocks import blocks
from shoal.trace.calls import CallLog, noting
from shoal.trace.echo import NoLog, as_cheaply, echoing
from shoal.trace.stand_in import StandIn
from shoal.trace.trunk import Run


@dataclass(frozen=True)
class Draw:
    """A call of a function that drew.

    function   by the name under which the model calls it
    around     modules that were being called, the innermost last; "" is the model
    """

    function: str
    around: tuple[str, ...]

    def text(self, part: str) -> str:
        """What was drawn, and where unless `part` itself did.

        >>> Draw("dropout", ("", "blocks.0", "blocks.0.drop")).text("blocks.0")
        'dropout in blocks.0.drop'
        """
        inside = self.around[-1]
        return self.function if inside == part else f"{self.function} in {inside}"


class InnerKeys:
    """Layers that hold blocks with dropout keys of their own, of a model that draws.

    A graph of such a layer calls none of them, so no key would be set at their entries, nor for
    what follows: other masks than in one process (parallel/dropout_rng.py), which a check of one
    layer does not see, since it gives both sides one generator.
    """

    def __init__(self, module: nn.Module, run: Run) -> None:
        self.module, self.run = module, run
        self.keyed = [name for name, _ in blocks(module)]
        self.draws: list[Draw] | None = None

    def inside(self, layer: str) -> str:
        """Why a layer cannot be one graph; "" if it can."""
        start = f"{layer}." if layer else ""
        inner = [name for name in self.keyed if name.startswith(start) and name != layer]
        if not inner:
            return ""
        if self.draws is None:
            self.draws = find_draws(self.module, self.run)
        if not self.draws:
            return ""
        return f"{self.draws[0].function} is keyed by blocks inside of it, like {inner[0]}"


def find_draws(module: nn.Module, run: Run) -> list[Draw]:
    """What a forward pass in training draws, in order; of equal layers that of the first one.

    run     calls the module on a sample of real inputs
    Gives   nothing for what is in evaluation mode while the rest of the model trains
    """

    def look(cheaply: bool) -> list[Draw]:
        heard = _Heard()
        listeners: list[_Listener] = []
        with echoing(module, NoLog()) if cheaply else nullcontext(), _in_training(module):
            try:
                for name, part in module.named_modules():
                    listeners.append(_Listener(name, part, heard))
                with _Watch(heard):
                    noting((), run, CallLog())(module)
            finally:
                for listener in listeners:
                    listener.take_away()
        return heard.draws

    return as_cheaply(look)


@dataclass
class _Heard:
    """The modules that are being called now, and what was drawn so far."""

    around: list[str] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)


class _Watch(TorchFunctionMode):
    """Looks at torch's generators around every function of torch that a model calls."""

    def __init__(self, heard: _Heard) -> None:
        super().__init__()
        self.heard = heard

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        before = generators()
        outputs = func(*args, **(kwargs or {}))
        if generators() != before:
            name = getattr(func, "__name__", str(func))
            self.heard.draws.append(Draw(name, tuple(self.heard.around)))
        return outputs


def generators() -> list[bytes]:
    """Where torch's generators stand; read without an operation, which a transform would see."""
    used = [torch.default_generator]
    if torch.cuda.is_initialized():
        used += torch.cuda.default_generators
    return [one.get_state().numpy().tobytes() for one in used]


class _Listener(StandIn):
    def __init__(self, name: str, block: nn.Module, heard: _Heard) -> None:
        self.heard = heard
        super().__init__(name, block)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The module's own forward, with its name on the list of what is being called."""
        self.heard.around.append(self.name)
        try:
            return self.forward(*inputs, **named)
        finally:
            self.heard.around.pop()


@contextmanager
def _in_training(module: nn.Module) -> Iterator[None]:
    """A model that comes in evaluation mode is put into training mode, as its run will do."""
    modes = [(part, part.training) for part in module.modules()]
    if not module.training:
        module.train()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
