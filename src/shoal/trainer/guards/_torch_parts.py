"""Private names of torch for parts of tensors in the hands of user code; tested on 2.11 and 2.13.

p.shape, p.numel()          those of the whole tensor
p - start, p.mul_(mask)     plain tensors of the shape of the whole are cut to this rank's part
p.normal_(), randn_like(p)  draws of the whole, of which this rank keeps its part
p.norm(), p[0], cat([p])    the part's result, and one line
start.add_(p)               refused: a part would be written into a whole tensor
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from shoal.parallel.data_parallel.tensor_sizes import read_size
from shoal.trainer._torch import pytree
from shoal.trainer.guards import reports
from shoal.trainer.guards._torch import (
    INIT,
    PARTS,
    REDUCTIONS,
    PartReader,
    copy_parameter,
    note_written,
)

__all__ = [
    "CUTS",
    "PartCut",
    "PartialParameter",
    "PartialTensor",
    "mark_partial_gradient",
]


@dataclass(frozen=True)
class PartCut:
    """Cut of a whole tensor of which this rank holds a part.

    Attributes:
        name: of the weight.
        shape: of the whole tensor.
        extract: returns this rank's part of a whole tensor.
    """

    name: str
    shape: torch.Size
    extract: Callable[[torch.Tensor], torch.Tensor]


def mark_partial_gradient(
    gradient: torch.Tensor, reader: PartReader, cut: PartCut | None = None, *, owned: bool = False
) -> torch.Tensor:
    """Return an alias of a tensor that is a part of a whole; it shares the memory.

    Args:
        gradient: this rank's part.
        reader: called for results of user code that are those of the part.
        cut: how the part lies in the whole; None: unknown.
        owned: it lies in the memory of a weight or of its gradient.
    """
    made: Any = gradient.as_subclass(PartialTensor)
    made.reader, made.cut, made.owned = reader, cut, owned
    return cast(torch.Tensor, made)


CUTS: dict[int, PartCut] = {}
"""By id of a `PartialParameter`: its cut."""


class PartialTensor(torch.Tensor):
    """Alias of a part; tensors of its size that are computed from it are parts, too."""

    part_of_weight = True
    reader: PartReader
    cut: PartCut | None
    owned: bool

    def to_part(self) -> torch.Tensor:
        """Return the plain tensor of this rank; it shares the memory."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().as_subclass(torch.Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _run_on_parts(func, args, kwargs or {})


class PartialParameter(nn.Parameter):
    """A weight of which this rank has a part, in the hands of user code.

    Between the calls of a run it has this class in the place of torch's. Its shape is that of the
    whole, plain tensors of that shape are cut where they meet it, and draws are those of the whole.
    """

    part_of_weight = True

    def __deepcopy__(self, memo: Any) -> Any:
        return copy_parameter(self, memo)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _run_on_parts(func, args, kwargs or {})


def _run_on_parts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function of torch on parts of tensors, and tell their reader what is a part's result.

    Raises:
        ConfigError: the function needs the whole tensor.
    """
    leaves = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    parts = [one for one in leaves if isinstance(one, PartialTensor | PartialParameter)]
    swapped: list[Any] = [one for one in parts if isinstance(one, PartialParameter)]
    first, name = parts[0], getattr(func, "__name__", "")
    if isinstance(first, PartialParameter):
        reader, cut = PARTS[id(first)], CUTS.get(id(first))
    else:
        reader, cut = first.reader, first.cut
    of_init = getattr(func, "__module__", "") == INIT
    if cut is not None and first is (args[0] if args else kwargs.get("tensor")):
        if args and (size := read_size(func, name, cut.shape, args, kwargs)) is not None:
            return size
        if name in WHOLE_DRAWS or of_init:
            kwargs = {key: value for key, value in kwargs.items() if value is not first}
            return _draw_whole(func, first, cut, args, kwargs)
    owned = isinstance(first, PartialParameter) or first.owned
    if owned and args and args[0] is first and name.endswith("_") and not name.endswith("__"):
        note_written(reader, args[1:], kwargs, single=True)
    for one in swapped:
        one.__class__ = nn.Parameter
    try:
        with torch._C.DisableTorchFunctionSubclass():
            numel, shape = first.numel(), first.shape
            if cut is not None and shape != cut.shape:
                args, kwargs = _cut_operands(name, cut, reader, args, kwargs)
            result = _call_on_part(func, name, cut, args, kwargs)
            given = [leaf for leaf in leaves if leaf.numel() not in (1, numel)]
            alike = isinstance(result, torch.Tensor) and result.numel() == numel > 1
            alike = alike and all(cut is not None and one.shape == cut.shape for one in given)
            same = alike and result.shape == shape
            owned = owned and alike and _share_memory(result, first)
            reads = _is_of_part(name, result, numel)
    finally:
        for one in swapped:
            one.__class__ = PartialParameter
    if reads:
        reader.read_part(name)
    if alike and type(result) is torch.Tensor:
        reader.compute_with_part(first, result)
        return mark_partial_gradient(result, reader, cut if same else None, owned=owned)
    return result


def _call_on_part(
    func: Any, name: str, cut: PartCut | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a function of torch on parts.

    Raises:
        ConfigError: it needs the whole tensor.
    """
    try:
        return func(*args, **kwargs)
    except (RuntimeError, IndexError) as error:
        if not SHAPES.search(str(error)):
            raise
        which = "a split weight (or its view, gradient or state)" if cut is None else cut.name
        raise reports.writes_report.part_error(name, which) from error


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    except RuntimeError:  # the stand-in of a gradient that is gone has no memory
        return False


SHAPES = re.compile("size|shape|dimension|out of (range|bounds)")
"""Words of torch's errors about tensors that do not fit each other."""
WHOLE_DRAWS = frozenset(
    {"normal_", "uniform_", "exponential_", "log_normal_", "cauchy_", "geometric_", "random_"}
    | {"rand_like", "randn_like", "randint_like"}
)
"""Draws that read no numbers of their tensor."""


def _cut_operands(
    name: str,
    cut: PartCut,
    reader: PartReader,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Take this rank's part of plain tensors that have the shape of the whole.

    Raises:
        ConfigError: a part would be written into a whole tensor.
    """
    written = args[0] if args and name.endswith("_") and not name.endswith("__") else None
    written = kwargs.get("out", written)

    def is_whole(leaf: Any) -> bool:
        plain = isinstance(leaf, torch.Tensor) and not isinstance(leaf, PartialTensor)
        return plain and leaf.shape == cut.shape

    if is_whole(written):
        raise reports.writes_report.part_error(name, cut.name)

    def cut_leaf(leaf: torch.Tensor) -> torch.Tensor:
        if not is_whole(leaf):
            return leaf
        reader.note_operand(leaf)
        return cut.extract(leaf)

    found: tuple[tuple[Any, ...], dict[str, Any]]
    found = pytree.tree_map_only(torch.Tensor, cut_leaf, (args, kwargs))
    return found


def _draw_whole(
    func: Any, part: Any, cut: PartCut, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Draw for the whole tensor, as one process does, and keep this rank's part."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        whole = torch.zeros(cut.shape, dtype=part.dtype, device=part.device)
        drawn = func(whole, *args[1:], **kwargs)
        mine = cut.extract(whole if drawn is whole else drawn)
        if drawn is whole:
            part.copy_(mine)
            return part
    reader = PARTS[id(part)] if isinstance(part, PartialParameter) else part.reader
    return mark_partial_gradient(mine, reader, cut)


def _is_of_part(name: str, result: Any, numel: int) -> bool:
    """Return whether a result depends on which part of a tensor this rank has."""
    if numel > 1 and (name in REDUCTIONS or name in ("numpy", "tolist", "__array__")):
        return True
    if numel < 2 or name == "__get__" or name.startswith("new_"):  # an attribute, as .grad
        return False
    made = pytree.tree_leaves(result) if isinstance(result, torch.Tensor | tuple | list) else []
    return any(isinstance(one, torch.Tensor) and one.numel() != numel for one in made)
