"""Matrix products in emulated fp16: operands and results are rounded to fp16, products are fp32.

A CPU has no fast fp16. Here every function that autocast would compute in fp16 gets rounded
operands and rounds its result, gradients likewise; so numbers are fp16's, and speed is fp32's. A
value beyond 65,504 becomes inf, as on a GPU: the loss scale learns from that.

Source: torch.amp's list of functions in fp16
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shoal.trace._torch import pytree


class _RoundToHalf(torch.autograd.Function):
    """Rounding to the nearest fp16 value, gradient likewise; too large values become inf."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.half().to(value.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].half().to(gradients[0].dtype)


def _round_to_half(value: Any) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return _RoundToHalf.apply(value) if floating else value


PRODUCTS = {
    F.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum,
    torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.mm, torch.Tensor.bmm,
    F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d,
    F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, torch.conv_transpose1d,
    torch.conv_transpose2d, torch.conv_transpose3d, torch.Tensor.__rmatmul__, torch.Tensor.addmm,
    torch.Tensor.baddbmm, torch.addbmm, F.bilinear,
    F.scaled_dot_product_attention,
}  # fmt: skip
"""Functions whose operands autocast casts to the narrow format."""


class _HalfProducts(TorchFunctionMode):
    """Function mode that rounds the inputs and outputs of matrix products to fp16."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in PRODUCTS or "out" in kwargs:
            return func(*args, **kwargs)
        args = pytree.tree_map(_round_to_half, args)
        return _round_to_half(func(*args, **pytree.tree_map(_round_to_half, kwargs)))


@contextmanager
def emulate_half() -> Iterator[None]:
    """Compute matrix products as a device with fp16 does, while the context is open."""
    with _HalfProducts():
        yield
