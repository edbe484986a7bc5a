"""Tensors that pass between two stages of a pipeline, of known form, with or without gradients.

A form lists shape, dtype and requires_grad of every value, and a tag for values that stand for
something else. Encoded as integers, to be sent: per value dtype, requires_grad, length of the tag,
tag, number of dims, shape.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from shoal.base.errors import BugError


class TensorForm(NamedTuple):
    """Form of one crossing tensor; tag: the integers that `pack` returned for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    tag: tuple[int, ...] = ()


Form = tuple[TensorForm, ...]
DTYPES = tuple(
    sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
)  # the same on every rank: all run the same torch version


def encode_form(form: Form) -> list[int]:
    """Encode a form as integers; `decode_form` reads them.

    >>> encode_form((TensorForm((2, 3), torch.bool, False, (7,)),))[1:]
    [0, 1, 7, 2, 2, 3]
    """
    told = []
    for value in form:
        told += [DTYPES.index(value.dtype), int(value.requires_grad), len(value.tag), *value.tag]
        told += [len(value.shape), *value.shape]
    return told


def decode_form(told: Sequence[int]) -> Form:
    """Decode a form that `encode_form` encoded.

    >>> form = (TensorForm((), torch.float64, True), TensorForm((0, 4), torch.int32, False, (1, 2)))
    >>> decode_form(encode_form(form)) == form
    True
    """
    form, rest = [], deque(told)
    while rest:
        dtype, requires_grad = DTYPES[rest.popleft()], bool(rest.popleft())
        tag = tuple(rest.popleft() for _ in range(rest.popleft()))
        shape = tuple(rest.popleft() for _ in range(rest.popleft()))
        form.append(TensorForm(shape, dtype, requires_grad, tag))
    return tuple(form)


def form_of_gradients(form: Form) -> Form:
    """Return the form of the gradients that come back for values of a form."""
    return tuple(TensorForm(v.shape, v.dtype, False) for v in form if v.requires_grad)


def describe_form(form: Form) -> str:
    """Return a form as text for error lines.

    >>> describe_form((TensorForm((2, 3), torch.float32, True), TensorForm((), torch.int64, False)))
    '[2, 3] float32 with gradient, [] int64'
    """
    return ", ".join(
        f"{list(v.shape)} {str(v.dtype).removeprefix('torch.')}"
        f"{' with gradient' if v.requires_grad else ''}"
        for v in form
    )


class ValuePacking(Protocol):
    """Protocol that packs values that are no plain tensors into one tensor each."""

    def pack(self, value: Any) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Return the tensor to send, and integers from which `unpack` rebuilds the value."""

    def unpack(self, tensor: torch.Tensor, tag: tuple[int, ...]) -> Any:
        """Return the value again, on the rank that received the tensor."""


class PlainTensorPacking:
    """Crossing of plain tensors, which are sent unchanged."""

    def pack(self, value: Any) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Return the tensor itself; raise BugError for anything else."""
        if not isinstance(value, torch.Tensor):
            raise BugError(f"pipeline: a {type(value).__name__} cannot cross between stages")
        return value, ()

    def unpack(self, tensor: torch.Tensor, tag: tuple[int, ...]) -> Any:
        """Return the tensor itself."""
        return tensor


class _Arrival(torch.autograd.Function):
    """Identity that returns a view of the same memory and passes gradients on."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def to_non_leaf(leaf: torch.Tensor) -> torch.Tensor:
    """Return a leaf's values as a non-leaf, so that a stage may modify them in place."""
    return _Arrival.apply(leaf)
