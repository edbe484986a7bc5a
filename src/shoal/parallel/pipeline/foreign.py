"""Weights of other stages are let go: they keep name, shape and format, and hold no data.

A module keeps its tree and all names, so that checkpoints, rules by name and error lines mean the
same on every stage. Tied weights stay tied: one meta tensor in every place where there was one.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import torch
from torch import nn

from shoal.base.errors import BugError, nearest


def drop_foreign(module: nn.Module, keep: AbstractSet[str]) -> None:
    """Replace parameters and buffers that are not in `keep` by ones on the meta device, in place.

    keep    first names, as `named_parameters` and `named_buffers` give them; a tied tensor is kept
            under all its names
    Errors  BugError for a name in `keep` that the module does not have
    """
    names = {
        id(tensor): name for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
    for unknown in sorted(keep - set(names.values())):
        close = nearest(unknown, names.values())
        raise BugError(f"{unknown} is kept, and no tensor of the module; nearest: {close}")
    hollow: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is None or names[id(tensor)] in keep:
                    continue
                if id(tensor) not in hollow:
                    hollow[id(tensor)] = _hollow(tensor)
                held[name] = hollow[id(tensor)]  # type: ignore[assignment]


def _hollow(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty
