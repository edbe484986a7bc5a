"""Blocks whose residual stream is bf16: formats of what they receive, read, save and return.

    inputs      fp32 tensors become bf16; scalars (a loss that blocks add up) stay
    weights     are read in bf16; those of batch norms stay fp32, as their statistics
    operations  take the format of their operands: autocast is off, so no norm widens the stream.
                Kernels of norms, softmax and attention sum in fp32 inside
    outputs     fp32 tensors with as many dims as the stream become bf16
    last norm   a norm of torch outside of blocks that receives bf16 computes in bf16

This is what `fully_shard` computes with `MixedPrecisionPolicy(param_dtype=torch.bfloat16,
cast_forward_inputs=True)` for a block. Code outside of blocks keeps its formats: embeddings sum
their gradients in fp32, and so does the loss.

Source: torch.distributed.fsdp.MixedPrecisionPolicy; Micikevicius et al. 2018 (masters)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.base.errors import PlanError
from shoal.trace._torch import pytree
from shoal.trace.isolation.replaced_forward import ReplacedForward

FORMAT = torch.bfloat16

RUNNING_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""Norms with running statistics: kernels want their weights in the same format, fp32."""

STREAM_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
"""Norms that autocast widens on a GPU, with a copy of what they receive."""

MIXED = re.compile(r"same dtype|should be the same|expected scalar type|mixed dtype", re.IGNORECASE)
"""Words of torch's errors for operands of two formats."""


def list_narrow_weights(module: nn.Module, blocks: Iterable[nn.Module]) -> set[int]:
    """Return the ids of the fp32 parameters that blocks alone read, and read in bf16."""
    parts = {id(part): part for block in blocks for part in block.modules()}
    inside = {id(p) for part in parts.values() for p in _own_weights(part)}
    outside = {
        id(p)
        for part in module.modules()
        if id(part) not in parts or isinstance(part, RUNNING_NORMS)
        for p in _own_weights(part)
    }
    return inside - outside


def narrow_stream(tree: Any) -> Any:
    """Return arguments of a block with their fp32 tensors in bf16; scalars stay.

    >>> h, loss = narrow_stream((torch.zeros(1, 2), torch.zeros(())))
    >>> h.dtype, loss.dtype
    (torch.bfloat16, torch.float32)
    """
    return _narrow(tree, _is_wide)


def _narrow(tree: Any, is_wide: Callable[[Any], bool]) -> Any:
    if not any(map(is_wide, pytree.tree_leaves(tree))):
        return tree  # as it is: a tensor that stands for ranks' parts would be wrapped once more
    return pytree.tree_map(lambda leaf: leaf.to(FORMAT) if is_wide(leaf) else leaf, tree)


def narrow_inputs(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Narrow a block's inputs: a forward pre-hook, outside of whatever saves them."""
    return narrow_stream((args, kwargs))


class NarrowForward(ReplacedForward):
    """A block's `forward` in bf16, autocast off.

    Args:
        device_type: of the autocast that runs around the model.
    """

    def __init__(self, name: str, block: nn.Module, device_type: str) -> None:
        self.device_type = device_type
        self.homes = [
            (part, key, torch.float32 if isinstance(part, RUNNING_NORMS) else FORMAT)
            for part in block.modules()
            for key in part._parameters
        ]
        super().__init__(name, block)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run the block's forward pass in bf16.

        Raises:
            PlanError: an operation of the block mixes bf16 with an fp32 tensor.
        """
        inputs, named = narrow_stream((inputs, named))
        dims = next((t.dim() for t in pytree.tree_leaves((inputs, named)) if _is_floating(t)), 0)
        try:
            with torch.autocast(self.device_type, enabled=False), self._narrow_weights():
                outputs = self.forward(*inputs, **named)
        except RuntimeError as failure:
            if not MIXED.search(str(failure)):
                raise
            raise PlanError(
                f"precision.residual = bf16: {self.name} mixes bf16 with an fp32 tensor that it "
                f"makes or keeps ({str(failure).strip().splitlines()[0][:160]}); try: "
                f"tensor.to(input.dtype) there, or precision.residual=fp32"
            ) from failure
        return _narrow(outputs, lambda leaf: _is_wide(leaf) and leaf.dim() == dims)

    @contextmanager
    def _narrow_weights(self) -> Iterator[None]:
        """Read weights without a narrow copy through casts: frozen and tied ones, of root units."""
        wide = [
            (part, key, p, dtype)
            for part, key, dtype in self.homes
            if (p := part._parameters[key]) is not None
            and p.dtype != dtype
            and p.dtype in (FORMAT, torch.float32)
        ]
        parameters: Any
        for part, key, p, dtype in wide:
            parameters = part._parameters  # which are Parameters; these are results of casts
            parameters[key] = p.to(dtype)
        try:
            yield
        finally:
            for part, key, p, _ in wide:
                part._parameters[key] = p


class NarrowNorm(NarrowForward):
    """The `forward` of a norm outside of blocks: in bf16 if it receives bf16."""

    def __call__(self, stream: Tensor) -> Any:
        """Run the norm's forward pass in the format of what it receives."""
        return super().__call__(stream) if stream.dtype == FORMAT else self.forward(stream)


def list_stream_norms(module: nn.Module, blocks: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """Return the norms of torch outside of blocks, by name."""
    inside = {id(part) for block in blocks for part in block.modules()}
    return {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, STREAM_NORMS) and id(part) not in inside
    }


def _own_weights(part: nn.Module) -> Iterator[nn.Parameter]:
    return (p for p in part.parameters(recurse=False) if p.dtype == torch.float32)


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _is_wide(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == torch.float32 and leaf.dim() > 0
