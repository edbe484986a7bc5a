"""Finds the trunk of any model: the repeated blocks that tensor parallelism and pipelines work on.

One forward pass on a sample tells what calls what; the walk over the modules is `trunk_walk.py`.

    blocks     non-leaf modules of a class with several instances, or one that is called often
    leaf       a model without such blocks (a plain nn.Sequential of layers): every layer with
               parameters is a block

Source: the rule, and how often it is right, were measured on 21 models of many families.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.trace.echo import as_cheaply, echoing
from shoal.trace.shapes import map_tensors, tensors_of
from shoal.trace.stand_in import StandIn
from shoal.trace.trunk_walk import Walk, is_leaf, kind_of


@dataclass(frozen=True)
class BlockCall:
    """One call of a block in the sample's forward pass: copies of its arguments and outputs.

    Numbers may be those of an equal block's call (`echo`); shapes and structure are its own.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any


@dataclass(frozen=True)
class Trunk:
    """The blocks of a model.

    blocks   names in the order of their first call, each once
    calls    every call, in order; a block may be called several times
    called   names of all modules that the forward pass called
    leaf     the blocks are single layers: the model has no repeated non-leaf module
    """

    blocks: tuple[str, ...]
    calls: tuple[BlockCall, ...]
    called: frozenset[str] = frozenset()
    leaf: bool = False


Run = Callable[[nn.Module], Any]
"""Does one forward pass of a module on a sample."""


def find_trunk(module: nn.Module, run: Run) -> Trunk:
    """The trunk of `module`, found with one forward pass under no_grad that leaves no trace.

    run      calls the module on a sample of real inputs
    Gives    blocks and calls; no blocks at all for a model that calls no layer with parameters
    """
    kinds = Counter(kind_of(part) for part in module.modules())
    likely = [n for n, p in module.named_modules() if not is_leaf(p) and kinds[kind_of(p)] > 1]
    heard = _heard(module, likely, run)
    names, leaf = Walk(module, heard.shapes).trunk()
    if not set(names) <= set(likely):  # single layers, or one block that is called often
        heard = _heard(module, names, run)
    calls = heard.outermost(names)
    blocks = tuple(dict.fromkeys(call.name for call in calls))
    return Trunk(blocks, calls, frozenset(heard.shapes), leaf)


class Snapshots:
    """Copies trees of tensors as they are now; a tensor met twice unchanged is copied once."""

    def __init__(self) -> None:
        self.taken: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, tree: Any) -> Any:
        """The same tree with copies, detached."""
        return map_tensors(self._copy, tree)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        key = (id(tensor), tensor._version)
        if key not in self.taken:  # the tensor is kept too, or its id would be given away again
            # A weight that a model hands on stays as it is: no forward pass writes into it.
            is_weight = isinstance(tensor, nn.Parameter)
            self.taken[key] = (tensor, tensor if is_weight else tensor.detach().clone())
        return self.taken[key][1]


@contextmanager
def without_trace(module: nn.Module, attributes: bool = True) -> Iterator[None]:
    """Buffers, attributes and generators are afterwards what they were, whatever passes ran inside.

    attributes   False: they stay as the passes leave them, for a pass to come that needs them

    Inside, every rank draws the same numbers: what ranks see and compare must not depend on chance.
    """
    kept = [(part, dict(part._buffers)) for part in module.modules() if part._buffers]
    values = {id(b): b.detach().clone() for _, held in kept for b in held.values() if b is not None}
    drawn = torch.get_rng_state()
    on_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)
    if on_cuda:
        torch.cuda.manual_seed_all(0)
    try:
        with attributes_kept(module) if attributes else nullcontext():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(drawn)
        if on_cuda:
            torch.cuda.set_rng_state_all(on_cuda)
        for part, held in kept:
            part._buffers.clear()
            part._buffers.update(held)
            for buffer in held.values():
                if buffer is None or buffer.is_meta or torch.equal(buffer, values[id(buffer)]):
                    continue
                buffer.detach().copy_(values[id(buffer)])


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Plain attributes of all parts are afterwards what they were.

    One that keeps what a pass gave would keep its graph too, and that the shapes which parameters
    had before they were cut.
    """
    before = _Attributes(module)
    try:
        yield
    finally:
        before.restore()


class _Attributes:
    """Plain attributes of all parts as they are now, one level into lists, dicts and sets."""

    not_plain = frozenset({*vars(nn.Module()), "forward"})

    def __init__(self, module: nn.Module) -> None:
        self.kept = [(part, self._of(part)) for part in module.modules()]
        inside = {id(v): v for _, held in self.kept for v in held.values() if type(v) in MUTABLE}
        self.inside = [(value, copy.copy(value)) for value in inside.values()]

    def restore(self) -> None:
        """Give every part what it had; what it got since is taken away."""
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

    def _of(self, part: nn.Module) -> dict[str, Any]:
        own = vars(part).items()
        return {k: v for k, v in own if k not in self.not_plain and not callable(v)}


MUTABLE = (list, dict, set)


@dataclass
class _Heard:
    """What one forward pass called, in the order of the calls' ends.

    around   modules that are being called now
    """

    copied: Snapshots = field(default_factory=Snapshots)
    log: list[_Told] = field(default_factory=list)
    around: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.log)

    def again(self, said: slice, names: Mapping[str, str]) -> None:
        """Calls inside of a block, once more inside of the one that is being called now."""
        for told in self.log[said]:
            inside = [names.get(name, name) for name in told.around]
            inside = inside[inside.index(self.around[-1]) + 1 :]
            own = names.get(told.name, told.name)
            call = replace(told.call, name=own) if told.call else None
            self.log.append(_Told(own, (*self.around, *inside), told.shape, call))

    @property
    def shapes(self) -> dict[str, list[torch.Size]]:
        """Of the first output of every call, by module, in the order of first calls' ends."""
        found: dict[str, list[torch.Size]] = {}
        for told in self.log:
            found.setdefault(told.name, []).append(told.shape)
        return found

    def outermost(self, names: Iterable[str]) -> tuple[BlockCall, ...]:
        """Calls of some modules that are not inside of calls of the same modules."""
        chosen = set(names)
        return tuple(
            told.call
            for told in self.log
            if told.call and told.name in chosen and chosen.isdisjoint(told.around)
        )


@dataclass(frozen=True)
class _Told:
    """A call: of which module, inside of calls of which others, and what came out.

    call   the same with copies, if it is copied
    """

    name: str
    around: tuple[str, ...]
    shape: torch.Size
    call: BlockCall | None


class _Listener(StandIn):
    """A module's `forward` that tells of every call; `copies`: with what came in and went out."""

    def __init__(self, name: str, block: nn.Module, heard: _Heard, copies: bool) -> None:
        self.heard, self.copies = heard, copies
        super().__init__(name, block)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The module's own forward, told."""
        heard = self.heard
        # As they were: the block may write into them.
        before = heard.copied((inputs, named)) if self.copies else None
        heard.around.append(self.name)
        try:
            outputs = self.forward(*inputs, **named)
        finally:
            heard.around.pop()
        found = tensors_of(outputs)
        call = None
        if before is not None:
            call = BlockCall(self.name, before[0], before[1], heard.copied(outputs))
        shape = found[0].shape if found else torch.Size()
        heard.log.append(_Told(self.name, tuple(heard.around), shape, call))
        return outputs


def _heard(module: nn.Module, copies: Iterable[str], run: Run) -> _Heard:
    chosen = set(copies)

    def look(cheaply: bool) -> _Heard:
        heard = _Heard()
        listeners: list[_Listener] = []
        with echoing(module, heard) if cheaply else nullcontext():
            try:
                for name, part in module.named_modules():
                    listeners.append(_Listener(name, part, heard, name in chosen))
                with torch.no_grad(), without_trace(module):
                    run(module)
            finally:
                for listener in listeners:
                    listener.take_away()
        return heard

    return as_cheaply(look)
