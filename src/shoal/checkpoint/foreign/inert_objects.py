"""Inert records for the objects of a pickle that are never made: names, calls, tensors in storages.

Plain values without any behaviour: nothing here looks up, imports or calls what a file names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.base.errors import CheckpointError, shorten

DIMS = 31
"""Most dims of a tensor: numpy before 2 has 32, and the bytes of an element are one."""


class PickleRefused(CheckpointError):
    """CheckpointError for a pickle that is cut, broken, or asks for what no weights need."""


@dataclass(frozen=True, slots=True)
class PickledName:
    """A name that a pickle asks to be looked up, kept as text."""

    module: str
    name: str

    def __str__(self) -> str:
        """Return the dotted name."""
        return f"{self.module}.{self.name}"


class InertObject:
    """An object that was not made: the callable that a pickle named, and its arguments.

    Attributes:
        of: a Global, or the result of another call.
        arguments: of the call.
        state: argument of its `__setstate__`.
        items: appended to it.
        pairs: set in it.
    """

    __slots__ = ("arguments", "items", "of", "pairs", "state")

    def __init__(self, of: Any, arguments: tuple[Any, ...] = ()) -> None:
        self.of, self.arguments = of, arguments
        self.state: Any = None
        self.items: list[Any] = []
        self.pairs: list[tuple[Any, Any]] = []

    def field(self, name: str) -> Any:
        """Return the attribute `name` in its state, or None."""
        state = self.state[0] if isinstance(self.state, tuple) and self.state else self.state
        return state.get(name) if isinstance(state, dict) else None

    def __repr__(self) -> str:
        """Return a text without its contents, which may contain the record itself."""
        return (
            f"<record of {shorten(str(self.of))}>"
            if isinstance(self.of, PickledName)
            else "<record>"
        )


class StorageRef:
    """A storage of a torch file: its key there, dtype and number of elements, without the bytes."""

    __slots__ = ("dtype", "elements", "key")

    def __init__(self, dtype: str, key: str, elements: int) -> None:
        self.dtype, self.key, self.elements = dtype, key, elements


@dataclass(frozen=True, slots=True, eq=False)
class InertTensor:
    """A tensor in a storage: offset and strides in elements of `dtype`; no bytes.

    Sizes are checked to be whole numbers, not to lie within the storage: the reader checks that.
    """

    storage: StorageRef
    dtype: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def is_shape(values: Any) -> bool:
    """Return whether `values` is a short tuple of integers, as shapes and strides are."""
    return (
        isinstance(values, tuple)
        and len(values) <= DIMS
        and all(type(n) is int and 0 <= n < 1 << 62 for n in values)
    )
