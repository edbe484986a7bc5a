"""The whole model as a plain state dict, whatever a layout or a format made of it.

Under bf16 and fp16 the module computes with narrow copies of some weights, and the optimizer steps
fp32 masters beside it. `module.state_dict()` therefore gives the masters where this rank has them
whole (single, ddp), and loading puts values into them. Where a rank holds parts (zero1 and zero2 in
bf16, fsdp, tp, pp) it is refused in one line that names `run.state_dict()`, which asks all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shoal.base.errors import ConfigError
from shoal.parallel.program import Part, Program

if TYPE_CHECKING:
    from shoal.optim.average import WeightAverage


GIVE_COPIES: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules that give the narrow copies which forward passes read, where masters are in parts: loops
of libraries whose modules hold nothing else save these."""


def check_averaged(average: WeightAverage | None) -> None:
    """Errors: ConfigError where weights are not averaged, or no step was made yet."""
    if average is None or not average.updates:
        why = "no step was made yet" if average else "try: parallelize(…, average=0.999)"
        raise ConfigError(f"run.state_dict: there is no average of the weights; {why}")


def full_state(program: Program) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer, whole, on the CPU of every rank; all ranks call it.

    Returns:
        names and order of the user's module; a tied weight is one tensor under its names;
        parameters in the format that is stepped, fp32 where forward passes read narrow copies.
    """
    from shoal.parallel.build.full_state import assembled, held

    found = assembled(held(program), program.world)
    names = list(program.module.state_dict(keep_vars=True))
    names += [name for name in found if name not in names]
    kept = {name: program.aliases.get(name, name) for name in names}
    return {name: found[first] for name, first in kept.items() if first in found}


def give_masters(program: Program) -> Program:
    """Make `module.state_dict()` and `load_state_dict` true to the weights that are stepped."""
    undo: list[Callable[[], None]] = []
    layout = program.plan.layout
    for path, module in program.module.named_modules():
        parts: dict[str, torch.Tensor | None] = {}
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            full = f"{path}.{name}" if path else name
            first = program.aliases.get(full, full)
            if first in program.parts or first in program.cuts or parameter.is_meta:
                parts[name] = _whole(program.parts.get(first))
        if not parts:
            continue
        own = _Weights(module, parts, layout.text(), program.plan.compute)
        hooks = _hang(own)
        if layout.zero < 3 and not program.cuts and program.pipe.size == 1:
            undo += [hook.remove for hook in hooks]  # closing leaves the module whole
    return replace(program, on_close=(*program.on_close, *undo))


def _hang(own: _Weights) -> list[Any]:
    """Hooks on the module; plain functions, which a deep copy of the model does not copy."""

    def give(module: nn.Module, state: dict[str, Any], prefix: str, _meta: Any) -> None:
        own.give(module, state, prefix)

    def take(module: nn.Module, state: Mapping[str, Any], prefix: str, *_more: Any) -> None:
        own.take(module, state, prefix)

    return [
        own.module.register_state_dict_post_hook(give),
        own.module.register_load_state_dict_pre_hook(take),
    ]


def _whole(part: Part | None) -> torch.Tensor | None:
    """The tensor of a part that is everything."""
    if part is None:
        return None
    tensor, shard = part
    complete = tuple((0, n) for n in shard.global_shape)
    return tensor if shard.slices == (complete,) else None


class _Weights:
    """The weights that one module holds itself, other than as they are stepped.

    Args:
        parts: by their names in the module: the master, or None where this rank has only a part.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: dict[str, torch.Tensor | None],
        layout: str,
        precision: str,
    ) -> None:
        self.module, self.parts = module, parts
        self.where = f"layout {layout}" + (f" in {precision}" if precision != "fp32" else "")

    def give(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """After `module.state_dict()`: masters in the place of narrow copies."""
        for name, master in self.parts.items():
            kept = state.get(prefix + name)
            # A copy of the module has weights of its own; with keep_vars parameters are wanted.
            if module is not self.module or kept is None or isinstance(kept, nn.Parameter):
                continue
            if module in GIVE_COPIES:
                continue
            if master is None:
                raise ConfigError(
                    f"model.state_dict(): this rank holds a part of {prefix}{name} only "
                    f"({self.where}); try: run.state_dict(), called on every rank"
                )
            state[prefix + name] = master.detach()

    @torch.no_grad()
    def take(self, module: nn.Module, state: Mapping[str, Any], prefix: str) -> None:
        """Before `module.load_state_dict(…)`: masters take the values in their own format."""
        for name, master in self.parts.items():
            given = state.get(prefix + name)
            if module is not self.module or not isinstance(given, torch.Tensor):
                continue
            if master is None:
                raise ConfigError(
                    f"model.load_state_dict(…): this rank holds a part of {prefix}{name} only "
                    f"({self.where}); try: load before shoal.parallelize, or run.restore()"
                )
            if given.shape == master.shape:
                master.copy_(given)
