"""Dropout that does not depend on the layout: generators are reseeded at the entry of every block.

The key is a hash of (seed, step, number of the micro-batch in the step, block name). So a random op
draws the same numbers whichever rank runs the micro-batch and whatever ran before it. Blocks are
the entries of the module's outermost ModuleLists and Sequentials. The code after a block is
reseeded too, so that it does not depend on the block's draws. A block that runs several times in a
micro-batch (a recurrent cell, shared layers) has a key per call. Activation checkpointing, which
runs it again during the backward pass, gets the key of the call that is recomputed. Outside
training steps the user's own generator state is left as it was.

`random` and `numpy.random` are reseeded once per micro-batch, and in the blocks that may draw from
them (host_rng.py): some models draw masks from them, and ranks that share a sample would otherwise
mask it differently.

A block is reseeded in every pass, also one that has never drawn: the first micro-batch that draws
may depend on data, on the layout and on a resume. Exempt are torch modules that cannot draw, inside
a model that is a plain `nn.Sequential`: no code runs between them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import random
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shoal.base.errors import PlanError
from shoal.parallel._torch import get_generators, graph_task_id
from shoal.parallel.program import Program


def derive_seed(seed: int, step: int, micro_batch: int, block: str) -> int:
    """Return a 63-bit generator seed for one block of one micro-batch of one step.

    >>> derive_seed(0, 1, 2, "layers.0") == derive_seed(0, 1, 2, "layers.0") != derive_seed(
    ...     0, 1, 3, "layers.0"
    ... )
    True
    """
    text = f"{seed}/{step}/{micro_batch}/{block}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def apply(program: Program, seed: int) -> Program:
    """Reseed the generators for every micro-batch of the program and every block inside it."""
    keyed, layout = _GeneratorSeeding(seed, program.world.device), program.plan.layout
    hooks: list[RemovableHandle] = []
    unkeyed, own = _blocks_without_draws(program.module), list[str]()
    for name in (name for name in program.blocks if name not in unkeyed):
        block = program.module.get_submodule(name)
        # Objects and no closures: the hooks of a replica use the keys of that replica.
        hooks.append(block.register_forward_pre_hook(partial(keyed.enter, name)))
        hooks.append(block.register_forward_hook(partial(keyed.seed_after_block, name)))
        kinds = {type(part).__module__.partition(".")[0] for part in block.modules()}
        own += [] if kinds <= {"torch", "shoal"} else [name]  # theirs draw from torch alone
    if own:
        from shoal.parallel.host_rng import watch_blocks

        hooks += watch_blocks(program.module, own, keyed.host_seed)

    hooks.append(program.module.register_forward_pre_hook(keyed.again))
    traced = layout.processes == 1 or program.pipe.size > 1  # a traced pass has replaced them
    hooks += () if traced else _refuse_module_replacement(program.module)

    begin = (*program.on_begin, keyed.start_step)
    close = (*program.on_close, *(hook.remove for hook in hooks))
    return replace(program, on_begin=begin, keyed=keyed, on_close=close)


PLAIN = """
Linear Identity Flatten Unflatten Embedding Sequential Conv1d Conv2d Conv3d LayerNorm GroupNorm
RMSNorm BatchNorm1d BatchNorm2d BatchNorm3d MaxPool1d MaxPool2d MaxPool3d AvgPool1d AvgPool2d
AvgPool3d AdaptiveAvgPool1d AdaptiveAvgPool2d ReLU LeakyReLU GELU SiLU Tanh Sigmoid ELU Hardswish
Softmax
"""
DRAWLESS = frozenset(getattr(nn, name) for name in PLAIN.split())
"""torch.nn modules whose forward pass draws no random number."""


def has_no_random_ops(module: nn.Module) -> bool:
    """Return whether a module consists only of torch modules without random draws or hooks.

    >>> has_no_random_ops(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    True
    >>> has_no_random_ops(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))
    False
    """
    return all(
        type(one) in DRAWLESS
        and not (one._forward_hooks or one._forward_pre_hooks or "forward" in vars(one))
        for one in module.modules()
    )


def _blocks_without_draws(model: nn.Module) -> set[str]:
    """Return the names of blocks that need no reseeding, judged by their module types.

    The last block is reseeded in any case: code after the model draws from its generator state.
    """
    if type(model) is not nn.Sequential or "forward" in vars(model):
        return set()
    names = list(model._modules)
    return {name for name in names[:-1] if has_no_random_ops(model.get_submodule(name))}


Mark = tuple[int, bytes, bytes]
WORDS, PLACE = 4 * 624, 4
"""Bytes of the Mersenne Twister's words, and of its position in them, in memory."""


PYTHON: Any = random._inst
"""Generator of the functions of `random`."""


class _NumpySeeding:
    """Seeding of `numpy.random` in micro-batches, with the user's state restored after them.

    Reading and writing the state takes 75 µs, reading its bytes 1 µs. A few bytes show whether
    anything was drawn: a draw moves the position, and after the last position the words change. So
    if a micro-batch drew nothing, only the bytes are restored. If the user drew nothing since, the
    state is known.
    """

    def __init__(self) -> None:
        self._state: Any = None
        self._users = b""
        self._users_mark: Mark | None = None
        self._keyed: Mark | None = None

    def enter(self, number: int) -> None:
        """Save the user's state and seed numpy for a micro-batch."""
        mark = self._mark()
        if self._state is None or mark is None or mark != self._users_mark:
            self._state, self._users_mark = np.random.get_state(), mark
            self._users = ctypes.string_at(mark[0], WORDS + PLACE) if mark else b""
        np.random.seed(number % 2**32)
        self._keyed = self._mark()

    def exit(self) -> None:
        """Restore the user's state after a micro-batch."""
        waits = self._state[3] if isinstance(self._state, tuple) else 1
        if waits or self._keyed is None or self._users_mark is None or self._mark() != self._keyed:
            np.random.set_state(self._state)  # numpy caches a second normal number elsewhere
        else:
            ctypes.memmove(self._keyed[0], self._users, len(self._users))
        if waits:
            self._state = None  # the bytes do not show whether the user consumes that cached number

    def _mark(self) -> Mark | None:
        """Return the Mersenne Twister's address, its first and last words, and its position."""
        bits = np.random.mtrand._rand._bit_generator
        if not isinstance(bits, np.random.MT19937):
            return None
        at = bits.ctypes.state_address
        return at, ctypes.string_at(at, 16), ctypes.string_at(at + WORDS - 16, 16 + PLACE)


def _read_python_state() -> Any:
    """Return the state of `random`, as `_write_python_state` takes it.

    `random.getstate` and `setstate` convert 625 numbers. Copying their bytes takes a tenth of the
    time. They lie behind the head of CPython's object, which a comparison with `getstate` confirms
    once; else the slow way is taken.
    """
    if at := _find_python_state():  # a second normal number is cached beside them
        return ctypes.string_at(at, WORDS + PLACE), PYTHON.gauss_next
    return random.getstate()


def _write_python_state(state: Any) -> None:
    """Restore a state of `random`."""
    if at := _find_python_state():
        words, PYTHON.gauss_next = state
        ctypes.memmove(at, words, WORDS + PLACE)
    else:
        random.setstate(state)


@functools.cache
def _find_python_state() -> int:
    """Return the address of the bytes of `random`'s state; 0 if they are not where expected."""
    if sys.implementation.name != "cpython" or type(PYTHON) is not random.Random:
        return 0
    address = id(PYTHON) + object.__basicsize__
    position, *words = struct.unpack("=i624I", ctypes.string_at(address, WORDS + PLACE))
    return address if random.getstate()[1] == (*words, position) else 0


class _GeneratorSeeding:
    """Seeding of generators by step, micro-batch and block, active only while a micro-batch runs.

    `calls` counts how often a block was entered in this forward pass. `arrived` maps each call's
    generator seed at entry to the call's number, since checkpointing restores that seed before it
    recomputes. A pipeline returns to a micro-batch after it ran others, so each has its own map.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.device = seed, device
        self.at: tuple[int, int] | None = None
        self.set_concurrent(False)
        self.calls: dict[str, int] = {}
        self.arrived: dict[tuple[str, int], int] = {}
        self.arrivals: dict[tuple[int, int], dict[tuple[str, int], int]] = {}
        self.inside: dict[str, list[int]] = {}
        self.numpy = _NumpySeeding()

    def __deepcopy__(self, known: object) -> _GeneratorSeeding:
        return self  # a copied module shares the keys

    def on(self, device: torch.device) -> _GeneratorSeeding:
        """Return the seeding for a replica on another device."""
        return _GeneratorSeeding(self.seed, device)

    def set_concurrent(self, others: bool) -> None:
        """Note whether other devices run at the same time; host generators are then left alone."""
        self.host, self.generators = not others, get_generators(self.device)[int(others) :]

    def start_step(self) -> None:
        """Forget the calls of the previous step, of which nothing is recomputed any more."""
        self.arrivals = {}

    def again(self, *_: object) -> None:
        """Reset the call counts at the start of a forward pass (a pipeline: of each stage's)."""
        if graph_task_id() < 0:
            self.calls, self.inside = {}, {}

    def enter(self, block: str, *_: object) -> None:
        """Seed the generators at a block's entry by its name and the number of this call."""
        if self.at is None:
            return
        arrival = (block, self.generators[0].initial_seed())
        if graph_task_id() >= 0:
            call = self.arrived.get(arrival, 0)
        else:
            call = self.calls.get(block, 0)
            self.calls[block] = call + 1
            self.arrived[arrival] = call
        self.inside.setdefault(block, []).append(call)
        self._seed_generators(block, call)

    def host_seed(self, block: str) -> int | None:
        """Return the seed of `random` and numpy for the call of a block that was entered last."""
        if self.at is None or not self.host:
            return None
        call = self.inside[block][-1]
        return derive_seed(self.seed, *self.at, f"{block}#{call}/host")

    def seed_after_block(self, block: str, *_: object) -> None:
        """Seed the generators after a block, so that what follows does not depend on its draws."""
        if self.at is None:
            return
        calls = self.inside.get(block)
        self._seed_generators(f"{block}/after", calls.pop() if calls else 0)

    def _seed_generators(self, block: str, call: int) -> None:
        if self.at is None:
            return
        name = f"{block}#{call}" if call else block
        for generator in self.generators:
            generator.manual_seed(derive_seed(self.seed, *self.at, name))

    @contextmanager
    def __call__(self, step: int, index: int) -> Iterator[None]:
        kept = [generator.get_state() for generator in self.generators]
        python = _read_python_state()
        self.at = (step, index)
        self.calls, self.inside = {}, {}
        self.arrived = self.arrivals.setdefault((step, index), {})
        self._seed_generators("", 0)
        number = derive_seed(self.seed, step, index, "host")
        if self.host:
            random.seed(number)
            self.numpy.enter(number)
        try:
            yield
        finally:
            self.at = None
            if self.host:
                _write_python_state(python)
                self.numpy.exit()
            for generator, state in zip(self.generators, kept, strict=True):
                generator.set_state(state)


def _refuse_module_replacement(model: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
    """Refuse a model whose first forward pass replaces modules (as BigBird), since that draws."""
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
