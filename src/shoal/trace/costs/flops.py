"""Count the floating-point operations of one sample, forward and backward, without running them.

A copy of the module on torch's meta device (shapes without data) runs two samples under torch's own
FLOP counter. It allocates nothing, draws no random numbers, and does not touch the real module.
Matrix products, convolutions and attention count; element-wise work does not, as is usual for MFU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shoal.base.plans.parameter_splits import FlopsRow
from shoal.trace._torch import pytree
from shoal.trace.isolation.collective_ban import forbid_collectives
from shoal.trace.isolation.module_copies import copy_to_meta


def count_training_flops(
    module: nn.Module, batch: Any, loss_sum: Callable[[nn.Module, Any], torch.Tensor]
) -> int | None:
    """Count the FLOP of a forward and backward pass, on a meta copy without data.

    Args:
        loss_sum: (module, batch) → the scalar whose `.backward()` is counted too.
        batch: a few samples, on any device.

    Returns:
        FLOP of the whole batch; None if the model needs values, or other ranks.

    Note:
        Operations that torch's counter does not know count as 0. A real copy of the model would
        also count models that read values, but cost rank 0 their memory (measured: 95 MiB for a 14
        MiB model).
    """
    try:
        twin = copy_to_meta(module)
        shapes = pytree.tree_map(_to_meta, batch)
        with forbid_collectives(), FlopCounterMode(display=False) as counter:
            loss_sum(twin, shapes).backward()
        return counter.get_total_flops()
    except Exception:  # any failure of a user's module: training goes on without MFU
        return None


def count_module_flops(
    module: nn.Module, batch: Any, forward: Callable[[nn.Module, Any], Any]
) -> tuple[FlopsRow, ...]:
    """Count the FLOP of a forward pass by the class of the module that does them, most first.

    A model that needs values is run on the CPU; all others on a copy without data.

    Args:
        batch: a few samples, on the CPU.
        forward: (module, batch) → the loss, which counts too.

    Returns:
        FLOP of the whole batch, each counted once: at the innermost module around it.
    """
    try:
        counted = _count_flops(copy_to_meta(module), pytree.tree_map(_to_meta, batch), forward)
    except Exception:  # any failure; it is raised again where the model has its data
        with torch.random.fork_rng(devices=[]):
            counted = _count_flops(module, batch, forward)
    root = type(module).__name__
    kinds = {root: root, "Global": "loss"}
    kinds |= {f"{root}.{name}": type(one).__name__ for name, one in module.named_modules() if name}
    own = dict(counted)
    for name, flops in counted.items():
        if name != "Global":
            own[_enclosing_path(name, counted)] -= flops
    rows: dict[str, list[int]] = {}
    for name, flops in own.items():
        if flops:
            rows.setdefault(kinds.get(name, name), []).append(flops)
    found = (FlopsRow(kind, len(each), float(sum(each))) for kind, each in rows.items())
    return tuple(sorted(found, key=lambda row: -row.flops))


def _count_flops(
    module: nn.Module, batch: Any, forward: Callable[[nn.Module, Any], Any]
) -> dict[str, int]:
    """Return FLOP by path, including those of submodules; "Global" is all of them."""
    # With gradients, losses over a vocabulary compute theirs in the forward pass.
    with forbid_collectives(), torch.no_grad(), FlopCounterMode(display=False) as counter:
        forward(module, batch)
    return {name: sum(each.values()) for name, each in counter.get_flop_counts().items()}


def _enclosing_path(name: str, names: Mapping[str, int]) -> str:
    """Return the nearest counted path around one without a count, e.g. of a container."""
    while "." in name:
        name = name.rpartition(".")[0]
        if name in names:
            return name
    return "Global"


def _to_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf
