"""Values of small tensors on the meta device that follow from no input: positions, masks, lengths.

A model may read one (`if (positions.diff() == 1).all()`), as transformers' decoders do before they
build a mask. A tensor on the meta device has no values, so a trace would end there. A small tensor
that is made without any input (`arange`, `ones`, constants) or from such tensors alone is computed
on the CPU as well. Values that depend on a batch, a weight or a draw stay unknown.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from shoal.trace._torch import pytree

MOST_ELEMENTS = 2**16
"""Largest tensor whose values are computed: positions and lengths, not masks of batches."""

ASKS = "aten::_local_scalar_dense"
"""Operation to which `.item()`, `if tensor:` and `int(tensor)` lead."""

UNSET = ("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty")
"""Operations that make a tensor without setting its values."""


class KnownValues:
    """Store of the values of meta tensors that follow from constants alone."""

    def __init__(self) -> None:
        self._values: Any = WeakIdKeyDictionary()

    def answer(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Return the number that an operation reads; None if it reads no known one."""
        if func._schema.name != ASKS or args[0].device.type != "meta":
            return None
        known = self._values.get(args[0])
        return None if known is None else known.item()

    def compute_result(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        """Compute an operation's result if the values of all its inputs are known."""
        if not isinstance(out, torch.Tensor) or out.device.type != "meta":
            return
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        known = (
            out.numel() <= MOST_ELEMENTS
            and func._schema.name not in UNSET
            and torch.Tag.nondeterministic_seeded not in func.tags
            and all(tensor in self._values for tensor in given)
        )
        if not known:
            if func._schema.is_mutable:
                self._forget(out)
            return
        here, named = pytree.tree_map(self._to_cpu, (args, kwargs))
        try:
            self._values[out] = func(*here, **named)
        except (RuntimeError, NotImplementedError):
            self._values.pop(out, None)

    def _forget(self, written: torch.Tensor) -> None:
        """Drop the values of a tensor that was written to, and of all its views."""
        storage = written.untyped_storage()
        stale = [t for t in self._values if t.untyped_storage() is storage]
        for tensor in stale:
            del self._values[tensor]

    def _to_cpu(self, leaf: Any) -> Any:
        """Convert an argument to run its operation on the CPU: meta tensors to known values.

        Args:
            leaf: a meta tensor, a device or another value, which stays as it is.
        """
        if isinstance(leaf, torch.Tensor):
            return self._values[leaf]
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf
