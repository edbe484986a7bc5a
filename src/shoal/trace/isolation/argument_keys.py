"""Keys of a layer's non-tensor arguments: the tensors inside of objects, and all other values.

A graph is made once, from a layer's parameters, buffers and tensor arguments. Values in a cache or
context object of the model would stay in the graph as they were when it was made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from shoal.trace._torch import pytree
from shoal.trace.isolation.equal_layers import PLAIN
from shoal.trace.isolation.layer_calls import LayerCall


def describe_holder(leaf: Any) -> str:
    """Return a message if an argument that is no tensor holds tensors; else ""."""
    if isinstance(leaf, Tensor) or next(_tensors_inside(leaf), None) is None:
        return ""
    return f"it is handed a {type(leaf).__name__}, and a graph does not follow the tensors in it"


def drop_holders(call: LayerCall) -> LayerCall:
    """Drop a call's non-tensor arguments that hold tensors: they would keep their graphs."""
    leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
    told = [describe_holder(leaf) for leaf in leaves]
    left = [None if why else leaf for leaf, why in zip(leaves, told, strict=True)]
    args, kwargs = pytree.tree_unflatten(left, structure)
    return LayerCall(args, kwargs, call.follows, call.unseen or max(told, default=""))


def object_key(value: Any, around: frozenset[int] = frozenset()) -> Hashable:
    """Return a hashable key of an object: its numbers, however deep, or its identity."""
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, Tensor):
        return _tensor_key(value)
    inside = _list_contents(value)
    if not inside or id(value) in around or isinstance(value, nn.Module):
        return _IdentityKey(value)
    around |= {id(value)}
    return type(value), tuple((name, object_key(one, around)) for name, one in inside)


def _tensors_inside(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that an object holds in attributes, lists and dicts, however deep."""
    waiting, seen = [value], set[int]()
    while waiting:
        one = waiting.pop()
        if isinstance(one, Tensor):
            yield one
        elif id(one) not in seen:
            seen.add(id(one))
            waiting += (part for _, part in _list_contents(one))


def _list_contents(one: Any) -> list[tuple[Hashable, Any]]:
    """Return the contents of an object: (key or name, value)."""
    if isinstance(one, (*PLAIN, bytes, type, FunctionType, MethodType, ModuleType)):
        return []
    if isinstance(one, Mapping):
        return list(one.items())
    if isinstance(one, list | tuple | set | frozenset):
        return list(enumerate(one))
    named = [kind.__dict__.get("__slots__", ()) for kind in type(one).__mro__]
    slots = [name for some in named for name in ((some,) if isinstance(some, str) else some)]
    held = [(name, getattr(one, name)) for name in slots if hasattr(one, name)]
    return [*held, *getattr(one, "__dict__", {}).items()]


class _IdentityKey:
    """Key of an object by identity, which keeps the object alive."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _IdentityKey) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


_known: Any = WeakIdKeyDictionary()


def _tensor_key(tensor: Tensor) -> Hashable:
    """Return a tensor's shape, dtype and a hash of its numbers, read once per version."""
    version, told = _known.get(tensor, (None, None))
    if version != tensor._version:
        numbers: Hashable = None
        if not tensor.is_meta:
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            numbers = hashlib.blake2b(flat.view(torch.uint8).numpy().tobytes()).digest()
        told = tuple(tensor.shape), tensor.dtype, tensor.device, numbers
        _known[tensor] = tensor._version, told
    return told
