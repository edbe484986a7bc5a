"""Sizes of tensors of which a rank holds a part, while user code sees the full size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

READ_SHAPE = torch.Tensor.shape.__get__  # type: ignore[attr-defined]  # a property, written in C


def read_size(
    func: Any, name: str, shape: torch.Size, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return what a function reads of a tensor's size; None: it reads no size.

    Args:
        func: of torch.
        name: its name.
        shape: of the tensor that user code sees as the first argument.
        args, kwargs: the function's arguments.
    """
    if func == READ_SHAPE:
        return shape
    if name in ("numel", "nelement"):
        return shape.numel()
    if name == "__len__":
        return shape[0] if shape else None
    if name == "size":
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        return shape if dim is None else shape[dim]
    return None
