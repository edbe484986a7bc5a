"""What a model's layers are called with: one forward pass on a sample, and a layer without weights.

The pass runs with gradients on, because only so it shows which inputs carry a gradient; what
autograd would keep for a backward pass is thrown away at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.trace._torch import pytree
from shoal.trace.copies import copied_module
from shoal.trace.echo import as_cheaply, echoing
from shoal.trace.stand_in import StandIn
from shoal.trace.trunk import Run, without_trace


@dataclass(frozen=True)
class Call:
    """The first call of a layer in the sample, and how it went on.

    args, kwargs   copies of its arguments; floating tensors that carry a gradient require one
    follows        for each call the layer whose output, untouched, is its first floating argument,
                   or ""
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    follows: tuple[str, ...]

    def without_numbers(self) -> Call:
        """The same with tensors that have shapes only."""
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda t: t.to("meta"), (self.args, self.kwargs)
        )
        return Call(args, kwargs, self.follows)


@dataclass
class CallLog:
    """Calls of some layers, those inside of layers that are echoed included.

    first   of each layer the first call, with all that its calls followed
    order   (layer, call) of every call
    """

    first: dict[str, Call] = field(default_factory=dict)
    order: list[tuple[str, Call]] = field(default_factory=list)

    def __len__(self) -> int:
        """How many calls."""
        return len(self.order)

    def note(self, name: str, call: Call) -> None:
        """A call begins."""
        known = self.first.get(name)
        joined = replace(known, follows=(*known.follows, *call.follows)) if known else call
        self.first[name] = joined
        self.order.append((name, call))

    def again(self, said: slice, names: Mapping[str, str]) -> None:
        """Calls inside of a layer, once more as calls inside of an equal one."""
        for name, call in self.order[said]:
            follows = tuple(names.get(before, "") for before in call.follows)
            self.note(names.get(name, name), replace(call, follows=follows))


def first_calls(module: nn.Module, names: Iterable[str], run: Run) -> dict[str, Call]:
    """The first call of each of some layers, in the order of the calls; absent if never called.

    run      one forward pass; done a second time where the cheap one fails
    Limits   numbers in a call may be those of an equal layer's; shapes are its own
    """

    def look(cheaply: bool) -> dict[str, Call]:
        calls = CallLog()
        with echoing(module, calls) if cheaply else nullcontext():
            noting(names, run, calls)(module)
        return calls.first

    return as_cheaply(look)


def noting(names: Iterable[str], run: Run, calls: CallLog) -> Run:
    """`run`, which also notes the calls of some layers."""

    def noted(module: nn.Module) -> Any:
        last = _Last()
        parts = {name: module.get_submodule(name) for name in names}  # each once
        listeners = [_Listener(name, part, calls, last) for name, part in parts.items()]
        nothing = torch.empty(0)
        drop = torch.autograd.graph.saved_tensors_hooks(lambda _: nothing, lambda kept: kept)
        try:
            with torch.enable_grad(), drop, without_trace(module):
                return run(module)
        finally:
            for listener in listeners:
                listener.take_away()

    return noted


def bare(block: nn.Module) -> nn.Module:
    """A copy that shows the parameters' shapes and formats and has none of their numbers.

    Without the hooks that hang on the block itself: they run around whatever stands in for it.
    """
    shown: dict[int, Any] = {}
    for p in block.parameters():
        number = torch.zeros((), dtype=p.dtype, device=p.device)
        shown[id(p)] = nn.Parameter(number.expand(p.shape), requires_grad=p.requires_grad)
    twin = copied_module(block, shown)
    for hooks in (twin._forward_pre_hooks, twin._forward_hooks, twin._backward_hooks):
        hooks.clear()
    return twin


@dataclass
class _Last:
    """The newest output of a listened layer, and whose it is."""

    output: Tensor | None = None
    name: str = ""


class _Listener(StandIn):
    def __init__(self, name: str, block: nn.Module, calls: CallLog, last: _Last) -> None:
        self.calls, self.last = calls, last
        super().__init__(name, block)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The layer's own forward; its first call is noted."""
        first = next((t for t in _tensors((inputs, named)) if t.is_floating_point()), None)
        follows = self.last.name if first is not None and first is self.last.output else ""
        known = self.calls.first.get(self.name)
        if known is None:
            args, kwargs = pytree.tree_map_only(Tensor, _copied, (inputs, named))
            known = Call(args, kwargs, ())
        self.calls.note(self.name, replace(known, follows=(follows,)))
        outputs = self.forward(*inputs, **named)
        self.last.output, self.last.name = next(iter(_tensors(outputs)), None), self.name
        return outputs


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _copied(tensor: Tensor) -> Tensor:
    """As it is now: the layer may write into it."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
