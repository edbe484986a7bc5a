"""A program: the user's module plus everything a layout added to it, ready to run one step.

Techniques take a program and give one back with their part filled in; `compose.py` says in which
order. The trainer asks a program to place a batch, to enter a micro-batch, and to reduce gradients,
and never needs to know which layout it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from shoal.base.plan import Plan
from shoal.fabric import World


class Reducer(Protocol):
    """Turns every rank's gradients into the sum over all ranks, held in `parameter.grad`.

    Call order of one step, on every rank: `begin` · for each micro-batch its backward pass, with
    `arm` before the last one (or without any, on a rank that has none) · `finish`.
    """

    def begin(self) -> None:
        """All gradients are zero from here on."""

    def arm(self) -> None:
        """The next backward pass is the step's last: gradients may travel as they become ready."""

    def finish(self) -> None:
        """Returns when `parameter.grad` is the sum over ranks for every parameter."""

    def used(self) -> list[bool]:
        """Per parameter, in the program's order: did this rank compute a gradient for it?"""

    def local_norms(self) -> list[torch.Tensor]:
        """Norms of this rank's gradients before the sum: they tell whose numbers broke."""

    def buffers(self) -> list[torch.Tensor]:
        """The tensors that hold all gradients, each element once, for scaling and norms."""


@dataclass(frozen=True)
class Program:
    """A module, made ready.

    parameters    trainable ones by name, tied ones once, in the module's order
    frozen        the others by name; they must stay frozen, since nothing sums their gradients
    aliases       other names of tied tensors → the name under which they are kept
    prepare       functions on the inputs of a micro-batch (device, dtype)
    around        context managers around a micro-batch's forward and backward pass, by
                  (step, micro-batch number)
    autocast      around the forward pass only
    moved, align  did a loose buffer change on this rank · make such buffers equal on all ranks
                  (True: and as they were before a step that is skipped)
    on_begin      called before the first micro-batch of every step
    on_update     called once per committed step, after the reduction: (micro-batches of each rank)
    on_close      called at the end: takes away whatever was hung on the user's module
    """

    module: nn.Module
    world: World
    plan: Plan
    parameters: dict[str, nn.Parameter]
    aliases: dict[str, str]
    frozen: dict[str, nn.Parameter] = field(default_factory=dict)
    reducer: Reducer | None = None
    prepare: tuple[Callable[[Any], Any], ...] = ()
    around: tuple[Callable[[int, int], AbstractContextManager[None]], ...] = ()
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    moved: Callable[[], bool] = lambda: False
    align: Callable[[bool], None] = lambda skipped: None
    on_begin: tuple[Callable[[], None], ...] = ()
    on_update: tuple[Callable[[list[int]], None], ...] = ()
    on_close: tuple[Callable[[], None], ...] = ()
    notices: list[str] = field(default_factory=list)


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by their first name; a tied parameter appears once."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def frozen(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that do not train, by their first name."""
    return {name: p for name, p in module.named_parameters() if not p.requires_grad}


def aliases(module: nn.Module) -> dict[str, str]:
    """Second names of tied parameters and buffers → first name.

    A tied tensor is one object under two names; views that merely share storage are not ties.
    """
    first: dict[int, str] = {}
    second: dict[str, str] = {}
    for name, tensor in _named_tensors(module):
        canonical = first.setdefault(id(tensor), name)
        if canonical != name:
            second[name] = canonical
    return second


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
