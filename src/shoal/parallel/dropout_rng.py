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

import hashlib
import random
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shoal.base.errors import PlanError
from shoal.fabric.device import NumpyGenerator, PythonGenerator
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
    drawless, own = _blocks_without_draws(program.module), list[str]()
    for name in program.blocks:
        block = program.module.get_submodule(name)
        # Objects and no closures: the hooks of a replica use the keys of that replica.
        if name not in drawless:
            hooks.append(block.register_forward_pre_hook(partial(keyed.enter, name)))
        elif name != [*program.module._modules][-1]:
            continue
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

    After the last block generators are reseeded in any case: code after the model draws from them.
    A last block that is an earlier one too is keyed by the number of its call.
    """
    if type(model) is not nn.Sequential or "forward" in vars(model) or not len(model):
        return set()
    names, blocks = list(model._modules), list(model._modules.values())
    repeats = names[-1:] if blocks.count(blocks[-1]) > 1 else []
    return {n for n in names if n not in repeats and has_no_random_ops(model.get_submodule(n))}


PYTHON, NUMPY = PythonGenerator(), NumpyGenerator()
"""Generators of the functions of `random` and `numpy.random`."""


class _GeneratorSeeding(AbstractContextManager[None]):
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
        self._key = (0, 0)
        self._users: list[tuple[list[torch.Tensor], Any, Any]] = []

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
        self._seed_generators(self.at, block, call)

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
        self._seed_generators(self.at, f"{block}/after", calls.pop() if calls else 0)

    def _seed_generators(self, at: tuple[int, int], block: str, call: int) -> None:
        name = f"{block}#{call}" if call else block
        for generator in self.generators:
            generator.manual_seed(derive_seed(self.seed, *at, name))

    def __call__(self, step: int, index: int) -> _GeneratorSeeding:
        """Return this object as the context of a micro-batch; a generator takes more calls."""
        self._key = (step, index)
        return self

    def __enter__(self) -> None:
        kept = [generator.get_state() for generator in self.generators]
        self._users.append((kept, PYTHON.state(), NUMPY.state()))
        self.at = step, index = self._key
        self.calls, self.inside = {}, {}
        self.arrived = self.arrivals.setdefault(self.at, {})
        self._seed_generators(self.at, "", 0)
        number = derive_seed(self.seed, step, index, "host")
        if self.host:
            random.seed(number)
            NUMPY.seed_number(number % 2**32)

    def __exit__(self, *_what: object) -> None:
        self.at, (kept, python, numpy) = None, self._users.pop()
        if self.host:
            PYTHON.restore(python)
            NUMPY.restore(numpy)
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
