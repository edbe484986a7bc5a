"""Find the stacked experts of any model, by their parameters and their calls.

A part is an expert layer if all its parameters have the same first dim, the number E of experts,
and its forward is called with three tensors and nothing else:

    tokens   [n, d], floating    · chosen  [n, k], integers up to E (E: no expert)
    weights  [n, k], floating    · gives   [n, d']

Names do not matter. expert_check.py checks by a run that such a part is a sum over experts. Experts
that are a list of modules: `listed_experts.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.trace.find.blocks import iterate_stacked_modules
from shoal.trace.isolation.layer_calls import LayerCall

Key = int | str
"""Argument of a call, by position or by name."""


@dataclass(frozen=True)
class ExpertLayer:
    """Submodule whose parameters are stacked by expert, and how the model calls it.

    Attributes:
        name, part: the submodule.
        experts: number of experts.
        roles: arguments of its call that are tokens, chosen experts and weights.
        sample: the values of such a call, until they are checked.
        counts: names of its attributes that hold the number of experts; `expert_parallel` sets
            them if a rank keeps fewer.
    """

    name: str
    part: nn.Module
    experts: int
    roles: tuple[Key, Key, Key]
    sample: tuple[Tensor, ...] = ()
    counts: tuple[str, ...] = ()

    def read(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return (tokens, chosen, weights) of a call."""
        return tuple(args[key] if isinstance(key, int) else named[key] for key in self.roles)

    def call(self, forward: Callable[..., Any], *values: Tensor) -> Any:
        """Call `forward` with tokens, chosen and weights as the model calls it."""
        given = dict(zip(self.roles, values, strict=True))
        args = [given[place] for place in range(3) if place in given]
        return forward(*args, **{key: v for key, v in given.items() if isinstance(key, str)})

    @property
    def kind(self) -> tuple[Any, ...]:
        """Return a key: layers with the same key compute alike."""
        shapes = tuple((name, p.shape, p.dtype) for name, p in self.part.named_parameters())
        return type(self.part), shapes, self.roles


def detect_stacked_experts(module: nn.Module, calls: Mapping[str, LayerCall]) -> list[ExpertLayer]:
    """Find all expert layers, outermost first, in the order of the module.

    Args:
        calls: first calls of all parts that are `iterate_stacked_modules`.
    """
    found: list[ExpertLayer] = []
    for name, part in iterate_stacked_modules(module):
        inside = any(name.startswith(f"{outer.name}.") for outer in found)
        if name not in calls or inside:
            continue
        args, named = calls[name].args, calls[name].kwargs
        experts = len(next(part.parameters()))
        roles = _match_roles(args, named, experts)
        if roles is not None:
            layer = ExpertLayer(name, part, experts, roles)
            found.append(replace(layer, sample=tuple(t.detach() for t in layer.read(args, named))))
    return found


def _match_roles(
    args: tuple[Any, ...], named: Mapping[str, Any], experts: int
) -> tuple[Key, Key, Key] | None:
    """Return the arguments that are tokens, choices and weights; None if it is no expert call."""
    given: dict[Key, Any] = dict(enumerate(args))
    given.update(named)
    tensors = {key: v for key, v in given.items() if isinstance(v, Tensor) and v.dim() == 2}
    if len(given) != 3 or len(tensors) != 3:
        return None
    integers = [key for key, v in tensors.items() if not v.is_floating_point()]
    if len(integers) != 1:
        return None
    chosen = tensors[integers[0]]
    if chosen.dtype == torch.bool or len({len(v) for v in tensors.values()}) != 1:
        return None
    floating = [key for key in tensors if key != integers[0]]
    # Tokens come first in every convention, should both have the same width.
    weights = [key for key in floating if tensors[key].shape == chosen.shape][-1:]
    if not weights or not len(chosen) or int(chosen.min()) < 0 or int(chosen.max()) > experts:
        return None
    tokens = next(key for key in floating if key != weights[0])
    return tokens, integers[0], weights[0]
