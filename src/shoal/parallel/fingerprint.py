"""Gives a model, and how it is called, a name under which what was derived from it can be kept.

Two models have one name if everything is equal that a derivation may look at: classes and their
source, tensors' names, shapes and formats, all other attributes, ties, hooks, the kind of the
sample (shapes, formats and numbers that are no tensors), versions, processor, and the source of the
derivation itself. Numbers of weights and of the sample do not count.

    installed package    its version stands for its source
    a user's own file    its text, and that of the user's files whose names it uses
    something opaque     (a C object, code that was typed in) has no name: nothing is kept

Limits   what a forward imports while it runs, and the environment, are not seen
"""

from __future__ import annotations

import functools
import hashlib
import sys
import sysconfig
import types
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.parallel._torch import pytree
from shoal.parallel.alike import OF_TORCH

MOST = 200_000
"""So many values are looked at: an attribute that is a data set is no attribute of a layer."""


class Nameless(Exception):
    """Something that cannot be told from another of its kind."""


def fingerprint(module: nn.Module, run: Callable[[nn.Module], Any], settings: Any) -> str | None:
    """A name of 32 hexadecimal digits; None where there is none.

    run        calls a module on the sample; not this one here, but one that only looks
    settings   plain values that the derivation depends on as well
    """
    try:
        teller = _Teller()
        told = (
            _versions(),
            _text_of(sorted(Path(__file__).parent.rglob("*.py"))),
            settings,
            teller.value(module),
            teller.value(_asked(run)),
            _sources(teller.homes),
        )
    except Exception:  # a user's objects can do anything when they are looked at
        return None
    return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()


def _versions() -> tuple[str, ...]:
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return sys.version, torch.__version__, torch.backends.cpu.get_cpu_capability(), cuda


class _Teller:
    """Puts everything about a module into plain values.

    known   objects met so far (kept: their ids stay theirs), and their numbers
    homes   names of the Python modules that define what was met
    """

    def __init__(self) -> None:
        self.known: dict[int, tuple[int, Any]] = {}
        self.homes: set[str] = set()
        self.count = 0

    def value(self, value: Any) -> Any:
        """One value; an object met again is told by its number."""
        self.count += 1
        if self.count > MOST:
            raise Nameless
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return value
        if isinstance(value, torch.dtype | torch.device | torch.layout):
            return str(value)
        if id(value) in self.known:
            return ("again", self.known[id(value)][0])
        self.known[id(value)] = len(self.known), value
        if isinstance(value, nn.Module):
            return self.part(value)
        if isinstance(value, Tensor):
            return self.tensor(value)
        if isinstance(value, Mapping):
            items = [(self.value(k), self.value(v)) for k, v in value.items()]
            return (self.name(type(value)), items)
        if isinstance(value, list | tuple | set | frozenset):
            items = [self.value(one) for one in value]
            unordered = isinstance(value, set | frozenset)
            return (self.name(type(value)), sorted(items, key=repr) if unordered else items)
        return self.object(value)

    def part(self, part: nn.Module) -> Any:
        """A module, its hooks and its children."""
        tensors = {**part._parameters, **part._buffers}
        hooks = [list(part._forward_pre_hooks.values()), list(part._forward_hooks.values())]
        own = {k: v for k, v in vars(part).items() if k not in OF_TORCH}
        told = [self.value(each) for each in (tensors, own, hooks, dict(part._modules))]
        return (self.name(type(part)), part.training, told)

    def tensor(self, tensor: Tensor) -> Any:
        """All but numbers; of whole numbers and booleans those too, for they may be a mask."""
        told = (tuple(tensor.shape), tensor.stride(), str(tensor.dtype), tensor.device.type)
        moves = isinstance(tensor, nn.Parameter), tensor.requires_grad
        if tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta:
            return (*told, *moves)
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return (*told, *moves, hashlib.blake2b(raw).hexdigest())

    def object(self, value: Any) -> Any:
        """Functions by name, others by class and attributes."""
        if isinstance(value, functools.partial):
            return ("partial", self.value([value.func, value.args, value.keywords]))
        if isinstance(value, types.MethodType):
            return ("method", value.__name__, self.value(value.__self__))
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            return ("function", self.name(value), self.value([cells, value.__defaults__]))
        if isinstance(value, type):
            return ("class", self.name(value))
        if isinstance(value, types.BuiltinFunctionType | types.ModuleType):
            return ("named", value.__name__)
        if not hasattr(value, "__dict__"):
            raise Nameless
        # A hash says nothing new, and in every process something else.
        own = {k: v for k, v in vars(value).items() if not k.endswith("_hash")}
        return (self.name(type(value)), self.value(own))

    def name(self, value: type | types.FunctionType) -> str:
        """Of a class or function; where it and its bases come from is noted."""
        self.homes |= {base.__module__ for base in getattr(value, "__mro__", (value,))}
        return f"{value.__module__}.{value.__qualname__}"


class _Asked(Exception):
    """What a model is called with."""

    def __init__(self, inputs: Any) -> None:
        super().__init__()
        self.inputs = inputs


class _Stub(nn.Module):
    """Stands in for a model that is called, and computes nothing."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Tells what it was called with."""
        raise _Asked((inputs, named))


def _asked(run: Callable[[nn.Module], Any]) -> Any:
    """What a run calls the model with, tensors without their numbers."""
    try:
        run(_Stub())
    except _Asked as asked:
        return pytree.tree_map_only(Tensor, _kind, asked.inputs)
    raise Nameless


def _kind(tensor: Tensor) -> Any:
    return (tuple(tensor.shape), tensor.dtype, tensor.device.type, tensor.requires_grad)


def _sources(homes: Collection[str]) -> list[tuple[str, str]]:
    """(Python module, version or text) of some modules, and of the user's own that they use."""
    waiting = set(homes)
    told: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        if name in told:
            continue
        path = _file_of(name)
        if path is None:
            package = name.partition(".")[0]
            told[package] = str(getattr(sys.modules.get(package), "__version__", ""))
            continue
        told[name] = _text_of([path])
        for value in vars(sys.modules[name]).values():
            is_module = isinstance(value, types.ModuleType)
            home = value.__name__ if is_module else getattr(value, "__module__", None)
            if isinstance(home, str) and _is_own(home):
                waiting.add(home)
    return sorted(told.items())


def _is_own(name: str) -> bool:
    try:
        return _file_of(name) is not None
    except Nameless:
        return False


@functools.cache
def _file_of(name: str) -> Path | None:
    """The file of a user's own module; None for an installed one. Errors: Nameless without one."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if file is None:
        if name in sys.builtin_module_names or name == "builtins":
            return None
        raise Nameless
    path = Path(file)
    library = Path(sysconfig.get_path("stdlib"))
    installed = {"site-packages", "dist-packages"} & set(path.parts) or library in path.parents
    return None if installed else path


def _text_of(paths: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
