"""Where a model draws random numbers in training, seen while it runs once.

A function draws if one of torch's own generators stands elsewhere after it than before: that is
what every later mask hangs on, whatever the function is called. Tags of operations say too much:
those of fused attention are set without dropout too.

Limits    draws from a generator that is the user's own; draws that the sample's values do not lead
          to
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shoal.fabric.device import device_generators


@dataclass(frozen=True)
class Draw:
    """A call of a function that drew.

    Attributes:
        function: by the name under which the model calls it.
        around: modules that were being called, the innermost last; "" is the model.
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


def keyed_inside(layer: str, blocks: Iterable[str], draws: Sequence[Draw]) -> str:
    """Say why a layer cannot be one graph: it holds blocks with dropout keys; "" where it can.

    A graph of such a layer calls none of them, so no key would be set at their entries, nor for
    what follows: other masks than in one process (parallel/dropout_rng.py), which a check of one
    layer does not see, since it gives both sides one generator.

    Args:
        draws: of the whole model; () : no key matters.

    >>> keyed_inside("body", ["body.0", "body.1"], [Draw("dropout", ("", "body", "body.1"))])
    'dropout is keyed by blocks inside of it, like body.0'
    """
    start = f"{layer}." if layer else ""
    inner = [name for name in blocks if name.startswith(start) and name != layer]
    if not inner or not draws:
        return ""
    return f"{draws[0].function} is keyed by blocks inside of it, like {inner[0]}"


class Drawing(TorchFunctionMode):
    """Looks at torch's generators around every function of torch that a model calls.

    Args:
        draws: gets an entry for each that moved one.
        around: modules that are being called now.
    """

    def __init__(self, draws: list[Draw], around: list[str]) -> None:
        super().__init__()
        self.draws, self.around = draws, around

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        before = generators()
        outputs = func(*args, **(kwargs or {}))
        if generators() != before:
            name = getattr(func, "__name__", str(func))
            self.draws.append(Draw(name, tuple(self.around)))
        return outputs


def generators() -> list[bytes]:
    """Where torch's generators stand; read without an operation, which a transform would see."""
    used = [torch.default_generator, *device_generators()]
    return [one.get_state().numpy().tobytes() for one in used]
