"""Dropout that does not depend on the layout: the generator is re-keyed at every block's entry.

The key is a hash of (seed, step, number of the micro-batch in the step, block name), so a random
op draws the same numbers whichever rank runs the micro-batch and whatever ran before it. Blocks are
the entries of the module's outermost ModuleLists and Sequentials; what runs after a block is keyed
too, so that it does not depend on how much the block drew. A block that runs several times in one
micro-batch (a recurrent cell, shared layers) has a key per call; activation checkpointing, which
runs it again during the backward pass, gets the key of the call that is recomputed. Outside
training steps the user's own generator state is left as it was.

`random` and `numpy.random` are keyed once per micro-batch: some models draw masks from them, and
ranks that share a sample would each hide something else.

Blocks of a model that draws nothing in its first micro-batches are not keyed: hooks of 300 small
ones took a third of a step. Should it draw later, they are keyed from the next micro-batch on, and
a line says so. `numpy.random` is left alone in the same way.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import inf

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shoal.base.errors import PlanError
from shoal.parallel._torch import generators, in_backward
from shoal.parallel.program import Program


def key(seed: int, step: int, micro_batch: int, block: str) -> int:
    """A 63-bit generator seed for one block of one micro-batch of one step.

    >>> key(0, 1, 2, "layers.0") == key(0, 1, 2, "layers.0") != key(0, 1, 3, "layers.0")
    True
    """
    text = f"{seed}/{step}/{micro_batch}/{block}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def apply(program: Program, seed: int) -> Program:
    """Key every micro-batch of the program, and every block inside it, by `seed`."""
    # Not the program itself: the weights that it has now may be whole.
    keyed = _Keyed(seed, program.world.device, program.module)
    keyed.blocks, keyed.notices = program.blocks, program.notices
    keyed.hook_blocks()
    layout = program.plan.layout
    if layout.threads > 1 or layout.processes > layout.data_degree:
        # Replicas have hooks of their own; no rank runs a whole micro-batch.
        keyed.to_watch, keyed.numpy.watched = 0, inf
    traced = layout.processes == 1 or program.pipe.size > 1  # a trace has replaced them
    hooks = () if traced else _refuse_replaced(program.module)

    def remove() -> None:
        for hook in (*keyed.hooks, *hooks):
            hook.remove()

    begin, close = (*program.on_begin, keyed.begin), (*program.on_close, remove)
    return replace(program, on_begin=begin, keyed=keyed, on_close=close)


WATCHED = 4
"""Micro-batches without a draw after which a model's blocks are not keyed one by one."""

FIRST_DRAW = (
    "step {}: the model drew random numbers for the first time; this step's may hang on the layout"
)


class _NumpyDraws:
    """Keys `numpy.random` unless nothing drew: 75 µs to read and write it, and 1 to compare."""

    def __init__(self) -> None:
        self.watched: float = WATCHED
        self._kept, self._seen = np.random.get_state(), b""

    def enter(self, number: int) -> None:
        """Begin a micro-batch."""
        if self.watched:
            self._kept = np.random.get_state()
            np.random.seed(number % 2**32)
        self._seen = self._state()

    def leave(self) -> bool:
        """End it; returns whether it drew though nothing was keyed."""
        drew, keyed = self._state() != self._seen, self.watched != 0
        if keyed:
            np.random.set_state(self._kept)
        self.watched = inf if drew else max(0, self.watched - 1)
        return drew and not keyed

    def _state(self) -> bytes:
        """The 624 words and the place of the Mersenne Twister, as they lie in memory."""
        bits = np.random.mtrand._rand._bit_generator
        size = 4 * 625 if isinstance(bits, np.random.MT19937) else 0
        return ctypes.string_at(bits.ctypes.state_address, size)


class _Keyed:
    """Where the step is now; blocks are keyed only while a micro-batch runs.

    `calls` counts how often a block was entered in this forward pass; `arrived` remembers with
    which generator seed each call arrived, since checkpointing puts that seed back before it
    recomputes; a pipeline comes back to a micro-batch after it ran others, so each has its own.
    """

    def __init__(self, seed: int, device: torch.device, module: nn.Module | None = None) -> None:
        self.seed, self.device = seed, device
        self.at: tuple[int, int] | None = None
        self.beside(False)
        self.calls: dict[str, int] = {}
        self.arrived: dict[tuple[str, int], int] = {}
        self.arrivals: dict[tuple[int, int], dict[tuple[str, int], int]] = {}
        self.inside: dict[str, list[int]] = {}
        self.module, self.to_watch = module, WATCHED if module is not None else 0
        self.blocks: Sequence[str] = ()
        self.notices: list[str] = []
        self.hooks: list[RemovableHandle] = []
        self.quiet = self._drew = False
        self.numpy = _NumpyDraws()
        self._left: list[torch.Tensor] = []

    def __deepcopy__(self, known: object) -> _Keyed:
        return self  # whoever copies a module keeps its keys

    def on(self, device: torch.device) -> _Keyed:
        """Give keys for a replica on another device."""
        return _Keyed(self.seed, device)

    def hook_blocks(self) -> None:
        """Key every block of the module from the next pass on."""
        if self.module is None:
            return
        for name in self.blocks:
            block = self.module.get_submodule(name)
            # Objects and no closures: a replica's hooks ask keys of its own.
            self.hooks.append(block.register_forward_pre_hook(partial(self.enter, name)))
            self.hooks.append(block.register_forward_hook(partial(self.leave, name)))
        self.hooks.append(self.module.register_forward_pre_hook(self.again))

    def beside(self, others: bool) -> None:
        """Passes of other devices run at the same time: the host's generators are nobody's then."""
        self.host, self.generators = not others, generators(self.device)[int(others) :]

    def begin(self) -> None:
        """A step begins: nobody recomputes anything of the one before."""
        self.arrivals = {}

    def again(self, *_: object) -> None:
        """The model's forward pass begins, on a pipeline's rank once for each of its stages."""
        if not in_backward():
            self.calls, self.inside = {}, {}

    def enter(self, block: str, *_: object) -> None:
        """A block begins: key the generators by its name and by which of its calls this is."""
        if self.at is None:
            return
        arrival = (block, self.generators[0].initial_seed())
        if in_backward():
            call = self.arrived.get(arrival, 0)
        else:
            call = self.calls.get(block, 0)
            self.calls[block] = call + 1
            self.arrived[arrival] = call
        self.inside.setdefault(block, []).append(call)
        self._set(block, call)

    def leave(self, block: str, *_: object) -> None:
        """It ended: what follows must not depend on how much it drew."""
        if self.at is None:
            return
        calls = self.inside.get(block)
        self._set(f"{block}/after", calls.pop() if calls else 0)

    def _set(self, block: str, call: int) -> None:
        if self.at is None:
            return
        if self.to_watch:
            self._drew |= self._moved()
        name = f"{block}#{call}" if call else block
        for generator in self.generators:
            generator.manual_seed(key(self.seed, *self.at, name))
        if self.to_watch or self.quiet:
            self._left = [generator.get_state() for generator in self.generators]

    def _moved(self) -> bool:
        """Whether something was drawn since the generators were keyed last."""
        now = [generator.get_state() for generator in self.generators]
        return not all(map(torch.equal, self._left, now))

    @contextmanager
    def __call__(self, step: int, index: int) -> Iterator[None]:
        kept = [generator.get_state() for generator in self.generators]
        python = random.getstate()
        self.at = (step, index)
        self.calls, self.inside = {}, {}
        self.arrived = self.arrivals.setdefault((step, index), {})
        self._left = kept
        self._set("", 0)
        number = key(self.seed, step, index, "host")
        if self.host:
            random.seed(number)
            self.numpy.enter(number)
        try:
            yield
            if self.to_watch or self.quiet:
                self._look(step)
        finally:
            self.at = None
            if self.host:
                random.setstate(python)
                if self.numpy.leave():
                    self.notices.append(FIRST_DRAW.format(step + 1))
            for generator, state in zip(self.generators, kept, strict=True):
                generator.set_state(state)

    def _look(self, step: int) -> None:
        """A micro-batch is over: key blocks one by one only if something draws."""
        moved = self._moved()
        if self.quiet and moved:
            self.quiet = False
            self.hook_blocks()
            self.notices.append(FIRST_DRAW.format(step + 1))
        elif self.to_watch:
            self._drew |= moved
            self.to_watch = 0 if self._drew else self.to_watch - 1
            self.quiet = not self.to_watch and not self._drew
            while self.quiet and self.hooks:
                self.hooks.pop().remove()


def _refuse_replaced(model: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
    """Refuse a model whose first forward pass replaces modules, as BigBird does: that draws."""
    before: dict[str, nn.Module] = {}

    def ended(module: nn.Module, inputs: object, output: object) -> None:
        for hook in hooks:
            hook.remove()
        now = dict(module.named_modules())
        for path in (path for path, old in before.items() if now.get(path) is not old):
            raise PlanError(
                f"{path}: the model's first forward pass replaces this "
                f"{type(before[path]).__name__}, so ranks would not compute what one process "
                f"computes; try: run the model once, on such inputs, before it is divided"
            )

    hooks = (
        model.register_forward_pre_hook(lambda module, _: before.update(module.named_modules())),
        model.register_forward_hook(ended),
    )
    return hooks
