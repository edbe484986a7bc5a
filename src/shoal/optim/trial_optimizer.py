"""Trial optimizer: the class and settings of an optimizer, over small parameters of its own.

The user's optimizer must not change. Its parameters and state are not copied (they may fill the
memory), and its hooks do not run. Neither does a `step` that a learning-rate scheduler wrapped on
the instance, which would step the real one. Optimizers that wrap others are supported if they share
their groups.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shoal.fabric.device import is_accelerator
from shoal.optim._torch import every_post_hook, every_pre_hook
from shoal.optim.sharded_optimizer import inner_optimizers

LR = 0.1


class UntestableOptimizerError(Exception):
    """An optimizer that cannot be tried on small parameters."""


def make_trial_optimizer(
    optimizer: torch.optim.Optimizer, members: Sequence[Sequence[nn.Parameter]]
) -> torch.optim.Optimizer:
    """Return an unstepped optimizer of the same class over other parameters, with lr 0.1.

    Args:
        members: parameters of the trial optimizer, group by group.

    Raises:
        UntestableOptimizerError: the optimizer holds another optimizer over groups of its own, a
        value that
            cannot be copied, or a `step` set on the instance.
    """
    memo: dict[int, Any] = {}
    for group, stand_ins in zip(optimizer.param_groups, members, strict=True):
        memo.update({id(p): p for p in group["params"]})  # never copied, wherever they are held
        memo[id(group)] = _trial_group(group, list(stand_ins), memo)
    twin = _copy_optimizer(optimizer, memo)
    ours, theirs = ([of, *inner_optimizers(of)] for of in (optimizer, twin))
    for one, its in zip(ours, theirs, strict=True):
        if one.state:
            its.state.update(_initial_state(its))
    return twin


def _initial_state(twin: torch.optim.Optimizer) -> dict[Any, Any]:
    """Return the state that a class creates in its constructor, as Adagrad did until torch 2.11.

    Found by constructing one more, as torch's classes are: groups, then their defaults.
    """
    groups = [dict(group, params=list(group["params"])) for group in twin.param_groups]
    try:
        return dict(type(twin)(groups, **twin.defaults).state)
    except Exception:  # another constructor, or no parameters: it starts without state
        return {}


def _trial_group(
    group: dict[str, Any], stand_ins: list[nn.Parameter], memo: dict[int, Any]
) -> dict[str, Any]:
    twin = {
        k: _copy_value(k, v, memo) for k, v in group.items() if k not in ("params", "param_names")
    }
    twin["params"] = stand_ins
    if "param_names" in group:
        twin["param_names"] = [f"stand_in_{place}" for place in range(len(stand_ins))]
    if "lr" in group:  # 0 at the start of a warm-up would hide all differences
        lr = group["lr"]
        twin["lr"] = torch.full_like(lr.detach(), LR) if isinstance(lr, torch.Tensor) else LR
    if "differentiable" in group:
        twin["differentiable"] = False
    if "capturable" in group and not any(is_accelerator(p.device) for p in stand_ins):
        twin["capturable"] = False
    return twin


def _copy_optimizer(
    optimizer: torch.optim.Optimizer, memo: dict[int, Any]
) -> torch.optim.Optimizer:
    kind = type(optimizer)
    twin: torch.optim.Optimizer = object.__new__(kind)
    memo[id(optimizer)] = twin
    memo[id(optimizer.state)] = defaultdict(dict)
    for inner in inner_optimizers(optimizer):
        if any(id(group) not in memo for group in inner.param_groups):
            raise UntestableOptimizerError(
                f"it holds a {type(inner).__name__} over parameter groups of its own"
            )
        if id(inner) not in memo:
            _copy_optimizer(inner, memo)
    for name, value in vars(optimizer).items():
        if name == "step":
            if not hasattr(value, "_wrapped_by_lr_sched"):
                raise UntestableOptimizerError("its step was replaced on the instance")
        elif name.startswith("_optimizer_") and name.endswith("_hooks"):
            setattr(twin, name, OrderedDict())
        else:
            setattr(twin, name, _copy_value(name, value, memo))
    if "differentiable" in twin.defaults:
        twin.defaults["differentiable"] = False
    return twin


def _copy_value(name: str, value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception as failure:
        raise UntestableOptimizerError(
            f"its {name}, a {type(value).__name__}, cannot be copied"
        ) from failure


@contextmanager
def disable_hooks() -> Iterator[None]:
    """Disable the hooks that are registered for all optimizers inside the block."""
    tables: tuple[Any, ...] = (every_pre_hook, every_post_hook)
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            table.update(hooks)
