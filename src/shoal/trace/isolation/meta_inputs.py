"""Models and values as shapes without data: the inputs of a trace.

A model is built on torch's meta device. A constructor that reads values (a schedule of drop rates)
gets small tensors real and large ones without data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from shoal.base.errors import PlanError, ShoalError
from shoal.trace._torch import pytree
from shoal.trace.isolation.module_copies import copy_to_meta

PRODUCT_LAYERS = (
    nn.Linear,
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
DRAWS = ("normal_", "uniform_", "trunc_normal_", "kaiming_uniform_", "xavier_uniform_")
SMALL_ELEMENTS = 65536
"""Largest tensor that is real for a constructor that reads values."""


def build_meta_model(build_or_module: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """Return a meta copy; a constructor that needs values gets small tensors real."""
    if isinstance(build_or_module, nn.Module):
        return copy_to_meta(build_or_module)
    try:
        with torch.device("meta"), _SkipInitMode():
            built = build_or_module()
    except ShoalError:
        raise
    except Exception:  # a constructor that reads a value: the second way raises the real error
        try:
            with _LargeOnMetaMode():
                built = build_or_module()
        except Exception as failure:
            raise PlanError(
                f"model.build: cannot be built from shapes alone: {first_line(failure)}; build "
                f"it for real and give the module, or make its constructor independent of values"
            ) from failure
    if not isinstance(built, nn.Module):
        raise PlanError(
            f"model.build: gives {type(built).__name__}; a function that returns a torch.nn.Module "
            f"is needed"
        )
    return copy_to_meta(built)


def cast_product_weights(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast weights of linear and convolution layers in place, as Shoal's bf16 reads them.

    Weights that other layers read too stay, such as an embedding table that the head shares.
    """
    wide: set[int] = set()
    for part in module.modules():
        if not isinstance(part, PRODUCT_LAYERS):
            wide.update(id(p) for p in part.parameters(recurse=False))
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            if id(parameter) not in wide and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    return module


class _SkipInitMode(TorchFunctionMode):
    """Torch function mode that skips random initialization of weights without data."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")  # torch.nn.init gives it by name
        if getattr(func, "__name__", "") in DRAWS and getattr(target, "is_meta", False):
            return target
        return func(*args, **kwargs)


class _LargeOnMetaMode(TorchFunctionMode):
    """Torch function mode in which large new tensors have no data; small ones are real."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("empty", "zeros", "ones", "rand", "randn", "full"):
            shape = pytree.tree_leaves(args if func is not torch.full else args[:1])
            sizes = [size for size in shape if isinstance(size, int)]
            if torch.Size(sizes).numel() > SMALL_ELEMENTS:
                kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def first_line(failure: BaseException) -> str:
    """Shorten an exception to its class and the first 160 characters of its first line."""
    lines = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {lines[0][:160]}" if lines else type(failure).__name__


def meta_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape and dtype without numbers, in row order."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Rebuild a structure with `function` of every tensor in lists, tuples, dicts, dataclasses.

    A tensor counts as one leaf, whatever structure its class shows to pytree.
    """

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return function(value)
        if isinstance(value, PackedSequence):  # its sizes stay on the host
            index = (one if one is None else function(one) for one in value[2:])
            return PackedSequence(function(value.data), value.batch_sizes, *index)
        if not is_record(value):
            return value
        fields = [f.name for f in dataclasses.fields(value) if f.init]
        changed = {name: map_tensors(function, getattr(value, name)) for name in fields}
        return dataclasses.replace(value, **changed)

    return pytree.tree_map(leaf, tree, is_leaf=_is_leaf)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, torch.Tensor | PackedSequence) or is_record(value)


def is_record(value: Any) -> bool:
    """Return whether a value is a dataclass instance, whose fields may hold tensors."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """List every tensor in lists, tuples, dicts and dataclasses, in order, with repetitions."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor  # named tuples may check what they are rebuilt from

    map_tensors(note, tree)
    return found
