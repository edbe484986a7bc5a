"""Full state dict of the model in the user's parameter names, for any layout and precision.

Under bf16 and fp16 the module computes with narrow copies of some weights, and the optimizer steps
fp32 masters outside the module. So `module.state_dict()` returns the masters where this rank has
them whole (single, ddp), and loading copies values into them. Where a rank holds parts (zero1 and
zero2 in bf16, fsdp, tp, pp), it raises an error that names `run.state_dict()`, a call of all ranks.
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
"""Modules whose state dict has the narrow copies that forward passes read, if masters are sharded.
Training loops of libraries whose modules hold nothing else save these.
"""

WHOLE_NOW: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules whose parameters are whole for a moment (`state/whole_weights.py`)."""


def check_averaged(average: WeightAverage | None) -> None:
    """Raise ConfigError if the run averages no weights, or has made no step yet."""
    if average is None or not average.updates:
        why = "no step was made yet" if average else "try: parallelize(…, average=0.999)"
        raise ConfigError(f"run.state_dict: there is no average of the weights; {why}")


def gather_full_state_dict(program: Program) -> dict[str, torch.Tensor]:
    """Gather every parameter and persistent buffer to the CPU of every rank; all ranks call it.

    Returns:
        Names and order of the user's module. A tied weight is one tensor under all its names.
        Parameters have the dtype that is stepped: fp32 where forward passes read narrow copies.
    """
    from shoal.parallel.build.full_state import assemble_tensors, local_state

    found = assemble_tensors(local_state(program), program.world)
    names = list(program.module.state_dict(keep_vars=True))
    names += [name for name in found if name not in names]
    kept = {name: program.aliases.get(name, name) for name in names}
    return {name: found[first] for name, first in kept.items() if first in found}


def register_master_hooks(program: Program) -> Program:
    """Register hooks so that `module.state_dict()` and `load_state_dict` use the master weights."""
    undo: list[Callable[[], None]] = []
    layout = program.plan.layout
    for path, module in program.module.named_modules():
        parts: dict[str, torch.Tensor | None] = {}
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            full = f"{path}.{name}" if path else name
            first = program.aliases.get(full, full)
            if first in program.parts or first in program.cuts or parameter.is_meta:
                parts[name] = _unsharded_tensor(program.parts.get(first))
        if not parts:
            continue
        own = _MasterWeights(module, parts, layout.text(), program.plan.compute)
        hooks = _register_hooks(own)
        if layout.zero < 3 and not program.cuts and program.pipe.size == 1:
            undo += [hook.remove for hook in hooks]  # here the module is whole after close
    return replace(program, on_close=(*program.on_close, *undo))


def _register_hooks(own: _MasterWeights) -> list[Any]:
    """Register state-dict hooks; they are plain functions, which a deep copy of the model omits."""

    def give(module: nn.Module, state: dict[str, Any], prefix: str, _meta: Any) -> None:
        own.export_masters(module, state, prefix)

    def load_hook(module: nn.Module, state: Mapping[str, Any], prefix: str, *_more: Any) -> None:
        own.load_masters(module, state, prefix)

    return [
        own.module.register_state_dict_post_hook(give),
        own.module.register_load_state_dict_pre_hook(load_hook),
    ]


def _unsharded_tensor(part: Part | None) -> torch.Tensor | None:
    """Return the tensor of a part that covers the whole parameter, else None."""
    if part is None:
        return None
    tensor, shard = part
    complete = tuple((0, n) for n in shard.global_shape)
    return tensor if shard.slices == (complete,) else None


class _MasterWeights:
    """Weights of one module whose stepped masters differ from the tensors in the module.

    Args:
        module: the module that holds the weights.
        parts: name in the module → the master, or None where this rank has only a part.
        layout: the layout's text, for errors.
        precision: the compute precision, for errors.
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

    def export_masters(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Replace narrow copies by masters after `module.state_dict()`.

        Raises:
            ConfigError: this rank holds only a part of a weight.
        """
        for name, master in self.parts.items():
            kept = state.get(prefix + name)
            # A copy of the module has weights of its own; with keep_vars parameters are wanted.
            if module is not self.module or kept is None or isinstance(kept, nn.Parameter):
                continue
            if module in GIVE_COPIES or module in WHOLE_NOW:
                continue
            if master is None:
                raise ConfigError(
                    f"model.state_dict(): this rank holds a part of {prefix}{name} only "
                    f"({self.where}); try: run.state_dict(), called on every rank"
                )
            state[prefix + name] = master.detach()

    @torch.no_grad()
    def load_masters(self, module: nn.Module, state: Mapping[str, Any], prefix: str) -> None:
        """Copy values into the masters, in the masters' dtype, before `module.load_state_dict(…)`.

        Raises:
            ConfigError: this rank holds only a part of a weight.
        """
        for name, master in self.parts.items():
            given = state.get(prefix + name)
            if module is not self.module or not isinstance(given, torch.Tensor):
                continue
            if module in WHOLE_NOW:
                continue
            if master is None:
                raise ConfigError(
                    f"model.load_state_dict(…): this rank holds a part of {prefix}{name} only "
                    f"({self.where}); try: load before shoal.parallelize, or run.restore()"
                )
            if given.shape == master.shape:
                master.copy_(given)
