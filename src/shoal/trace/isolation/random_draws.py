"""Random draws of a model in training, observed while it runs once.

A function draws if the state of one of torch's own generators changes. Every later mask depends on
that state, whatever the function is called. Tags of operations are too broad: fused attention has
them without dropout too.

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
class RandomDraw:
    """Call of a function that drew random numbers.

    Attributes:
        function: the name under which the model calls it.
        around: modules whose call was in progress, the innermost last; "" is the model.
    """

    function: str
    around: tuple[str, ...]

    def text(self, part: str) -> str:
        """Format the function that drew, and its module unless `part` itself drew.

        >>> RandomDraw("dropout", ("", "blocks.0", "blocks.0.drop")).text("blocks.0")
        'dropout in blocks.0.drop'
        """
        inside = self.around[-1]
        return self.function if inside == part else f"{self.function} in {inside}"


def explain_keyed_blocks(layer: str, blocks: Iterable[str], draws: Sequence[RandomDraw]) -> str:
    """Return why a layer cannot be one graph: it holds blocks with dropout keys; "" if it can.

    A graph of such a layer calls none of these blocks, so no key would be set at their entries, nor
    for later draws. The masks would then differ from those of one process
    (parallel/dropout_rng.py). A check of one layer does not see that, since it gives both sides one
    generator.

    Args:
        draws: draws of the whole model; (): no key matters.

    >>> explain_keyed_blocks(
    ...     "body", ["body.0", "body.1"], [RandomDraw("dropout", ("", "body", "body.1"))]
    ... )
    'dropout is keyed by blocks inside of it, like body.0'
    """
    start = f"{layer}." if layer else ""
    inner = [name for name in blocks if name.startswith(start) and name != layer]
    if not inner or not draws:
        return ""
    return f"{draws[0].function} is keyed by blocks inside of it, like {inner[0]}"


class DrawRecorder(TorchFunctionMode):
    """Torch function mode that compares torch's generators before and after every function.

    Args:
        draws: receives an entry for each function that changed a generator.
        around: modules whose call is in progress.
    """

    def __init__(self, draws: list[RandomDraw], around: list[str]) -> None:
        super().__init__()
        self.draws, self.around = draws, around

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        before = generator_states()
        outputs = func(*args, **(kwargs or {}))
        if generator_states() != before:
            name = getattr(func, "__name__", str(func))
            self.draws.append(RandomDraw(name, tuple(self.around)))
        return outputs


def generator_states() -> list[bytes]:
    """Return the states of torch's generators, read without a traceable operation."""
    used = [torch.default_generator, *device_generators()]
    return [one.get_state().numpy().tobytes() for one in used]
