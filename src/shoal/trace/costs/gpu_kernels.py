"""Emulation of GPU kernels' saved tensors in a trace without a GPU.

On a CPU torch differentiates RMSNorm operation by operation and keeps three copies of its input;
its attention on the meta device is plain matrix products with all the scores. GPUs have one kernel
for each. The replacements here have the kernels' inputs, outputs and saved tensors, and compute
nothing:

    RMSNorm     keeps its input, and one fp32 number per row
    attention   keeps q, k, v, its output, and one fp32 number per head and position: flash in bf16
                and fp16; memory-efficient in fp32 or with a mask, which needs k, v for every head
    others      (LayerNorm, BatchNorm, softmax, cross-entropy) are one operation on every device

Source    Dao et al. 2022; torch's dispatch of scaled_dot_product_attention on CUDA, 2.13
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from shoal.base.attribute_patch import patch_attribute
from shoal.trace._torch import pytree

HALF = (torch.float16, torch.bfloat16)


NARROWED = {
    F.linear, F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d,
    F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, torch.einsum,
    torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, Tensor.matmul,
    Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.bmm, F.scaled_dot_product_attention,
}  # fmt: skip
"""Functions that autocast computes in the low-precision dtype."""

WIDENED = {
    F.layer_norm, F.softmax, F.log_softmax, torch.softmax, torch.log_softmax, Tensor.softmax,
    F.cross_entropy, F.nll_loss, F.mse_loss, F.softplus, F.group_norm,
    torch.exp, torch.pow, torch.cumsum,
}  # fmt: skip
"""Functions that autocast computes in fp32: the most frequent ones."""


class GpuKernelMode(TorchFunctionMode):
    """Torch function mode that replaces norms and attention as above; for tensors without data.

    Args:
        narrow: dtype of products where the CPU's autocast is on, which torch does not apply to
            tensors without data; None: every operation keeps its inputs' dtype.
    """

    def __init__(self, narrow: torch.dtype | None = None) -> None:
        super().__init__()
        self._narrow = narrow

    @property
    def narrow(self) -> torch.dtype | None:
        """Return the dtype of matrix products here; None where autocast is off."""
        return self._narrow if torch.is_autocast_enabled("cpu") else None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace norms and attention, and cast what autocast casts."""
        kwargs = kwargs or {}
        narrow = self.narrow if func in NARROWED or func in WIDENED else None
        if narrow:
            wanted = narrow if func in NARROWED else torch.float32
            args, kwargs = pytree.tree_map(_caster(wanted), (args, kwargs))
        if func is F.scaled_dot_product_attention:
            return emulate_attention(*args, **kwargs)
        if func in (F.rms_norm, torch.rms_norm):
            return emulate_rms_norm(*args, **kwargs)
        if func is F.multi_head_attention_forward:  # it calls others while this mode is off
            with self._patch_functional():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    @contextmanager
    def _patch_functional(self) -> Iterator[None]:
        linear = F.linear
        cast = _caster(self.narrow) if self.narrow else lambda value: value

        def narrow_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return linear(cast(input), cast(weight), cast(bias))

        with (
            patch_attribute(F, "linear", narrow_linear),
            patch_attribute(F, "scaled_dot_product_attention", emulate_attention),
        ):
            yield


def _caster(dtype: torch.dtype) -> Callable[[Any], Any]:
    def cast(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if floating and value.dtype != torch.float64 else value

    return cast


def emulate_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return [..., heads, seq, head_dim] as the fused kernel does, with its saved tensors."""
    lead = query.shape[:-3]
    if query.dim() != 4:  # kernels read [batch, heads, seq, head_dim]
        query, key, value = (t.reshape(-1, *t.shape[-3:]) for t in (query, key, value))
    alike = query.shape[-1] == value.shape[-1]  # the flash kernel has one width for all three
    if attn_mask is None and query.dtype in HALF and alike:
        op = torch.ops.aten._scaled_dot_product_flash_attention
        mixed = op(query, key, value, dropout_p, is_causal, scale=scale)[0]
    else:
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        mask = attn_mask
        if mask is not None:
            mask = mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        mixed = efficient(query, key, value, mask, True, dropout_p, is_causal, scale=scale)[0]
    out: Tensor = mixed
    return out.reshape(*lead, *out.shape[-3:])


def emulate_rms_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Return a tensor of the same shape, by one operation that reads and writes it once."""
    dims = len(tuple(normalized_shape))
    return _RmsNorm.apply(input, weight, dims)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        scale = x.new_empty((*x.shape[:-dims], *[1] * dims), dtype=torch.float32)
        ctx.save_for_backward(x, weight, scale)
        return x * 1 if weight is None else x * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, _ = ctx.saved_tensors
        return torch.add(upstream, x), None if weight is None else torch.empty_like(weight), None
