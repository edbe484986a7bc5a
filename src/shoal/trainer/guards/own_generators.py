"""Name a random generator of the model's own from which a forward pass draws.

Every rank draws the same numbers for other samples, and each micro-batch goes on in it. A run keys
torch's own generator by sample and micro-batch instead.

    self.drawn = torch.Generator()       and those of numpy (old and new) and of Python's random
    torch.randn(…, generator=self.drawn)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.trainer.guards import reports


@contextmanager
def watch_generators(module: nn.Module, notice: Callable[[str], None]) -> Iterator[None]:
    """Print a line if a generator in an attribute of a layer has another state after the passes.

    Args:
        module: the model.
        notice: prints a line, by rank 0.
    """
    states = read_generators(module)
    yield
    drawn = read_generators(module)
    for name in [name for name, state in drawn.items() if states.get(name) != state][:1]:
        notice(reports.model_notices.own_generator_line(name))


def read_generators(module: nn.Module) -> dict[str, bytes]:
    """Return the states of random generators in plain attributes of a module's layers, by name.

    Args:
        module: its generators are of torch, numpy or Python's `random`.
    """
    return {
        f"{path}.{key}".lstrip("."): state
        for path, layer in module.named_modules()
        for key, value in vars(layer).items()
        if (state := _read_generator(value))
    }


def _read_generator(value: Any) -> bytes:
    """Return the state of a random generator; b"" for any other value."""
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().tolist())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state).encode()
    if isinstance(value, np.random.RandomState | random.Random):
        return repr(value.get_state() if hasattr(value, "get_state") else value.getstate()).encode()
    return b""
