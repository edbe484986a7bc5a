"""What stands for the objects of a pickle that are never made: names, calls, places of tensors.

Plain values without any behaviour: nothing here looks up, imports or calls what a file names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.base.errors import CheckpointError, short

DIMS = 31
"""A tensor has at most: numpy before 2 has 32, and its bytes are one more."""


class Refused(CheckpointError):
    """CheckpointError for a pickle that is cut, broken, or asks for what no weights need."""


@dataclass(frozen=True, slots=True)
class Global:
    """A name that a pickle wants to have looked up, and never is."""

    module: str
    name: str

    def __str__(self) -> str:
        """As one word."""
        return f"{self.module}.{self.name}"


class Record:
    """An object that was not made: what a pickle would have called, and what it gave it.

    Attributes:
        of: a Global, or what another call would have returned.
        arguments: of the call.
        state: what it would have been set to.
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
        """The attribute that its state gives it, or None."""
        state = self.state[0] if isinstance(self.state, tuple) and self.state else self.state
        return state.get(name) if isinstance(state, dict) else None

    def __repr__(self) -> str:
        """Without what it holds, which may hold it."""
        return f"<record of {short(str(self.of))}>" if isinstance(self.of, Global) else "<record>"


class Storage:
    """Bytes elsewhere in a torch file: their key there, and how many elements of which kind."""

    __slots__ = ("dtype", "elements", "key")

    def __init__(self, dtype: str, key: str, elements: int) -> None:
        self.dtype, self.key, self.elements = dtype, key, elements


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """Where a tensor lies in a storage: offset and strides in elements of `dtype`; no bytes.

    Sizes are checked to be whole numbers, not to lie within the storage: whoever reads does that.
    """

    storage: Storage
    dtype: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def is_shape(values: Any) -> bool:
    """Whether this is a short tuple of whole numbers, as shapes, strides and offsets are."""
    return (
        isinstance(values, tuple)
        and len(values) <= DIMS
        and all(type(n) is int and 0 <= n < 1 << 62 for n in values)
    )
