"""Run a user's module and restore its state: buffers, attributes and random generators."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.fabric.device import device_generators


@contextmanager
def preserve_state(module: nn.Module, attributes: bool = True) -> Iterator[None]:
    """Restore buffers, attributes and generators of a module when the context closes.

    Inside, generators are seeded with 0, so that every rank draws the same numbers.

    Args:
        attributes: False: attributes stay as the passes leave them, for a later pass that needs
            them.
    """
    kept = [(part, dict(part._buffers)) for part in module.modules() if part._buffers]
    values = {id(b): b.detach().clone() for _, held in kept for b in held.values() if b is not None}
    drawn = torch.get_rng_state()
    on_devices = [(one, one.get_state()) for one in device_generators()]
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)
    for one, _ in on_devices:
        one.manual_seed(0)
    try:
        with preserve_attributes(module) if attributes else nullcontext():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(drawn)
        for one, state in on_devices:
            one.set_state(state)
        for part, held in kept:
            part._buffers.clear()
            part._buffers.update(held)
            for buffer in held.values():
                if buffer is None or buffer.is_meta or torch.equal(buffer, values[id(buffer)]):
                    continue
                buffer.detach().copy_(values[id(buffer)])


@contextmanager
def preserve_attributes(module: nn.Module) -> Iterator[None]:
    """Restore plain attributes of all submodules when the context closes.

    New ones are removed; lists, dicts and sets are restored one level deep; callables stay.
    Otherwise an output that a module keeps would keep its graph, and with it the shapes of
    parameters before they were cut. Hooks that a pass adds are removed too, or they would be added
    twice (transformers).
    """
    before = _AttributeSnapshot(module)
    try:
        yield
    finally:
        before.restore()


class _AttributeSnapshot:
    """Snapshot of plain attributes of all parts, one level into lists, dicts and sets."""

    not_plain = frozenset({*vars(nn.Module()), "forward"})

    def __init__(self, module: nn.Module) -> None:
        self.kept = [(part, self._of(part)) for part in module.modules()]
        inside = {id(v): v for _, held in self.kept for v in held.values() if type(v) in MUTABLE}
        self.inside = [(value, copy.copy(value)) for value in inside.values()]
        tables = [(p._forward_hooks, p._forward_pre_hooks) for p in module.modules()]
        self.hooks = [(table, set(table)) for pair in tables for table in pair]

    def restore(self) -> None:
        """Restore every part's attributes and remove new ones."""
        for value, contents in self.inside:
            if isinstance(value, list):
                value[:] = contents
            else:
                value.clear()
                value.update(contents)
        for part, held in self.kept:
            now = vars(part)
            for name in self._of(part).keys() - held.keys():
                del now[name]
            now.update(held)
        for registered, before in self.hooks:
            for number in registered.keys() - before:
                del registered[number]

    def _of(self, part: nn.Module) -> dict[str, Any]:
        own = vars(part).items()
        return {k: v for k, v in own if k not in self.not_plain and not callable(v)}


MUTABLE = (list, dict, set)
