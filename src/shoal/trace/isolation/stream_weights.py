"""Run a module on a device that cannot hold it: each operation copies the weights that it reads.

Traces of a model before it is divided (`trace.flow`, and the checks of a split) run on the device
that will train it, with its kernels; the weights stay on the host. Inside of `stream_weights` an
operation of torch that takes a parameter or buffer of the module receives a copy of it on the
device, which is freed after its last use. The device holds what one operation reads, and what a
pass keeps.

    device of a tensor      a lent tensor reports the device; so do tensors made like it
    shape, dtype, views     are the host's own: nothing is copied for them
    written in place        the copy is, and then the host's tensor is made equal to it

Source    torch.overrides.TorchFunctionMode: it sees calls before autograd and autocast do, so both
          treat the copy as they would treat a parameter on the device
Limits    what C++ does inside of one operation with weights that it kept is not seen (a flattened
          recurrent net); running statistics that a function updates are updated in the copy
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.trace._torch import pytree
from shoal.trace.isolation.equal_layers import structure_key

HANDLES = frozenset(
    {
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset"),
        *("element_size", "data_ptr", "untyped_storage", "is_contiguous", "is_floating_point"),
        *("is_complex", "is_set_to", "is_pinned", "detach", "requires_grad_", "cpu", "copy_"),
        *("register_hook", "register_post_accumulate_grad_hook", "_is_view", "__len__", "__hash__"),
    }
)
"""Functions that need no values of a lent tensor, or read them on the host."""

READ_NOTHING_WHOLE = HANDLES | {"__get__", "__set__", "embedding"}
"""Functions that read no tensor, or rows of one."""

WITHOUT_TENSORS = frozenset(
    {type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size, type(...), slice}
)
"""Types of arguments in which no tensor is."""

PLACES = {"device", "is_cuda", "is_cpu"}
"""Properties that depend on a tensor's device."""


@contextmanager
def stream_weights(
    module: nn.Module, device: torch.device, before: Callable[[Tensor], None] | None = None
) -> Iterator[None]:
    """Run operations on a module's tensors on `device`, wherever the tensors are.

    If all tensors are on `device` or on the meta device, only `before` is called.

    Args:
        before: called with each tensor that an operation is about to read whole: it may lie in a
            file.
    """
    held = [*module.parameters(), *module.buffers()]
    away = [t for t in held if t.device.type not in (device.type, "meta")]
    told = before or _ignore_tensor
    if away:
        with _WeightStreamMode(away, device, told):
            yield
    elif before:
        with _ReadReportMode(told):
            yield
    else:
        yield


@contextmanager
def share_first_weights(module: nn.Module, wanted: Callable[[Tensor], bool]) -> Iterator[None]:
    """Give equal layers of a list the first layer's parameter storage, until the context exits.

    For traces of dependencies, which would otherwise read all weights of a checkpoint. Each layer's
    tensors stay objects and storages of their own. Attributes do not count: layers with weights of
    one shape may use them differently.

    Args:
        wanted: whether a layer should use the first layer's weight instead of this weight of its
            own.
    """
    own: dict[int, tuple[Tensor, Tensor]] = {}
    for part in module.modules():
        if not isinstance(part, nn.ModuleList | nn.Sequential):
            continue
        firsts: dict[object, nn.Module] = {}
        for layer in part:
            first = firsts.setdefault(structure_key(layer), layer)
            given = dict(first.named_parameters(remove_duplicate=False))
            for name, other in layer.named_parameters(remove_duplicate=False):
                one = given[name]
                if one is other or not wanted(other):
                    continue
                own.setdefault(id(other), (other, other.data))
                storage = one.untyped_storage()[:]
                place = (one.storage_offset(), one.size(), one.stride())
                other.data = torch.empty(0, dtype=one.dtype).set_(storage, *place)
    try:
        yield
    finally:
        for tensor, data in own.values():
            tensor.data = data


def _ignore_tensor(_: Tensor) -> None:
    """Ignore a tensor that is about to be read."""


class _ReadReportMode(TorchFunctionMode):
    """Torch function mode that reports tensors before a function reads them whole."""

    def __init__(self, before: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.before = before

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Report the tensors, then call the function."""
        if getattr(func, "__name__", "") not in READ_NOTHING_WHOLE:
            for value in (*args, *kwargs.values()) if kwargs else args:
                kind = type(value)
                if kind is Tensor or kind is nn.Parameter:
                    self.before(value)
                elif kind not in WITHOUT_TENSORS:
                    for leaf in pytree.tree_leaves(value):
                        if type(leaf) in (Tensor, nn.Parameter):
                            self.before(leaf)
        return func(*args, **kwargs) if kwargs else func(*args)


class _WeightStreamMode(TorchFunctionMode):
    """Torch function mode that passes device copies of lent tensors to every function."""

    def __init__(
        self, tensors: list[Tensor], device: torch.device, before: Callable[[Tensor], None]
    ) -> None:
        super().__init__()
        self.before = before
        self.storages = {t.untyped_storage().data_ptr() for t in tensors if t.numel()}
        self.host, self.device = tensors[0].device, device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call the function, with copies if it reads values."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            what = getattr(getattr(func, "__self__", None), "__name__", "")
            if name == "__get__" and what in PLACES and self._is_streamed(args[0]):
                return self._device_property(what)
            return func(*args, **kwargs)
        if name in HANDLES or (name == "to" and self._to_host(args, kwargs)):
            return func(*args, **kwargs)
        copies: dict[int, tuple[Tensor, Tensor]] = {}
        if name == "__deepcopy__":  # what it knows already is no argument
            first = args[0].to(self.device) if self._is_streamed(args[0]) else args[0]
            return func(first, *args[1:], **kwargs)

        def copied(leaf: Any) -> Any:
            if not self._is_streamed(leaf):
                return leaf
            if id(leaf) not in copies:
                self.before(leaf)
                copies[id(leaf)] = leaf, leaf.to(self.device)
            return copies[id(leaf)][1]

        given, named = pytree.tree_map(copied, (args, kwargs))
        result = func(*given, **named)
        if copies and args and id(args[0]) in copies and _is_write_method(name):
            host, copy = copies[id(args[0])]
            host.detach().copy_(copy.detach())
            return host if result is copy else result
        return result

    def _is_streamed(self, value: Any) -> bool:
        """Return whether a value is a lent tensor, or a view of one."""
        if type(value) not in (Tensor, nn.Parameter) or value.device != self.host:
            return False
        try:
            return value.untyped_storage().data_ptr() in self.storages
        except (RuntimeError, NotImplementedError):  # sparse, or a function transform's wrapper
            return False

    def _to_host(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a call of `to` asks for the values on the host."""
        asked = [*args[1:2], kwargs.get("device")]
        places = [torch.device(one) for one in asked if isinstance(one, str | torch.device)]
        return any(place.type == self.host.type for place in places)

    def _device_property(self, what: str) -> Any:
        return self.device if what == "device" else what == f"is_{self.device.type}"


def _is_write_method(name: str) -> bool:
    """Return whether a method of this name writes into the tensor that it is called on."""
    inside = name.endswith("_") and not name.endswith("__")
    return inside or name == "__setitem__" or name.startswith("__i")
