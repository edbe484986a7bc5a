"""Weights of fsdp in user code, between the calls of a run: they look like full tensors.

    w.norm(), w.mul_(2)                    torch's DTensor does this right
    w.grad.add_(noise), w.copy_(list)      a plain tensor is a whole one: each rank takes its rows
    w.data = tensor                        its rows are written; torch would lose the tensor
    w[0] = 0, draws, nn.init, torch.cat    on the gathered tensor, of which each rank keeps its rows
    w[0].mul_(2)                           refused: the row is a copy, and the change would be lost
    w.norm() of a part of tp or ep         on the gathered whole (`inner_cuts.py`)

Outside of the run's own calls a weight has another class, whose operations come here. Inside they
are torch's, at torch's speed. Every rank must make the same calls, as with a DTensor itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from shoal.base.errors import ConfigError
from shoal.parallel._torch import pytree, version_counter
from shoal.parallel.data_parallel._torch import allow_plain_tensors
from shoal.parallel.data_parallel.inner_cuts import (
    extract_operands,
    find_inner_cut,
    gather_whole,
    replicate,
    set_inner_cut,
)
from shoal.parallel.data_parallel.tensor_sizes import read_size

DRAWS = frozenset(
    {"normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_"}
    | {"random_", "rand_like", "randn_like", "randint_like", "bernoulli", "dropout", "dropout_"}
)
"""Functions that draw random numbers: each rank would draw the same ones for other rows."""
INDEXED = frozenset(
    {"index_add_", "index_copy_", "index_fill_", "index_put_", "index_reduce_", "put_"}
    | {"scatter_", "scatter_add_", "scatter_reduce_", "masked_scatter_"}
)
"""Functions that write by numbers of rows: those of the whole weight, not of this rank's part."""
VIEWS = frozenset(
    {"__getitem__", "select", "narrow", "view", "reshape", "flatten", "t", "transpose", "unbind"}
    | {"split", "chunk", "diagonal", "diag", "squeeze", "unsqueeze", "permute", "ravel"}
)
"""Functions that return a view in plain torch; a DTensor may return a copy."""
NUMBERS = frozenset(
    {"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__", "__format__"}
)
"""Functions that read a tensor's numbers: a DTensor would read those of this rank."""
SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # a property, written in C


class WeightReader(Protocol):
    """Watcher of what user code does with weights."""

    def note_operand(self, tensor: torch.Tensor) -> None:
        """Note a plain tensor that an operation takes as replicated, so that ranks compare it."""

    def compute_with_part(self, tensor: torch.Tensor, result: torch.Tensor) -> None:
        """Note a tensor that was computed from a weight."""

    def record_gather(self, function: str) -> AbstractContextManager[None]:
        """Return a context that records a gather in user code, which every rank must make."""


readers: list[WeightReader] = []
"""Watchers of the open runs."""


class UserDTensor(DTensor):
    """A weight or gradient of fsdp, or a tensor computed from one, in the hands of user code."""

    __slots__ = ()
    part_of_weight = True

    def full_tensor(self, **options: Any) -> torch.Tensor:
        """Return the full tensor; every rank calls it."""
        with as_dtensors([self]), _record_gather("full_tensor"):
            if find_inner_cut(self) is not None:
                return gather_whole(self)
            return DTensor.full_tensor(self, **options)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class RowCopy(UserDTensor):
    """A view in plain torch, and here a copy: it refuses writes."""

    __slots__ = ()


def _record_gather(function: str) -> AbstractContextManager[None]:
    """Return a context that records a gather for the watchdog of the ranks."""
    return readers[-1].record_gather(function) if readers else nullcontext()


def wrap_rows(weight: Any, rows: torch.Tensor) -> torch.Tensor:
    """Wrap this rank's rows of a tensor of a weight's shape as a full tensor.

    Args:
        weight: of fsdp.
        rows: in any shape; they share the memory.
    """
    local = rows.view(weight._local_tensor.shape)
    mesh, places = weight.device_mesh, weight.placements
    with as_dtensors([weight]):
        shape, stride = weight.shape, weight.stride()
    made: Any = DTensor.from_local(local, mesh, places, run_check=False, shape=shape, stride=stride)
    made.__class__ = UserDTensor
    set_inner_cut(made, find_inner_cut(weight))
    return made


@contextmanager
def as_dtensors(tensors: Sequence[Any]) -> Iterator[None]:
    """Make tensors plain DTensors for torch, inside the context."""
    kinds = [(one, type(one)) for one in tensors]
    for one in tensors:
        one.__class__ = DTensor
    try:
        yield
    finally:
        for one, kind in kinds:
            one.__class__ = kind


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function of torch on weights of fsdp."""
    leaves = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    ours = list({id(one): one for one in leaves if isinstance(one, UserDTensor)}.values())
    name = str(getattr(func, "__name__", ""))
    writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    if writes and isinstance(args[0] if args else None, RowCopy):
        raise ConfigError(
            f"{name} on rows of a weight: under fsdp they are a copy, and the change would be "
            f"lost; try: the same on the weight by an index (w[0] = …), or "
            f"with run.whole_weights():"
        )
    cuts = list(map(find_inner_cut, ours))
    cut, is_cut = next(iter(cuts), None), any(cuts)
    if cut is not None and args and args[0] is ours[0]:
        size = read_size(func, name, cut.shape, args, kwargs)
        if size is not None:
            return size
    with as_dtensors(ours):
        if func == SET_DATA:
            _write_rows(ours[0], args[1]) if args[0] is ours[0] else func(*args, **kwargs)
            return None
        if name in NUMBERS and isinstance(args[0], DTensor):
            with _record_gather(name):
                whole = gather_whole(args[0])
            return func(whole, *args[1:], **kwargs)
        if func is torch.autograd.grad:
            raise ConfigError(
                "torch.autograd.grad by weights: under fsdp the graph has gathered copies of them; "
                "try: run.forward_backward(batch), then .grad; or layout=zero2"
            )
        if writes and args and isinstance(args[0], DTensor):
            _note_numbers(args[1:], kwargs)
        drawn = (
            name in DRAWS or name in INDEXED or getattr(func, "__module__", "") == "torch.nn.init"
        )
        drawn = drawn or (writes and not isinstance(args[0] if args else None, DTensor))
        on_rows = None if drawn else (args, kwargs)
        if is_cut and not drawn:
            on_rows = extract_operands(func, name, args, kwargs, _note_operand)
        result = _run_on_rows(func, *on_rows) if on_rows else _run_on_whole(func, args, kwargs)
        if is_cut and on_rows is None and name in VIEWS:
            result = pytree.tree_map_only(
                torch.Tensor, lambda one: _as_row_copy(one, ours[0]), result
            )
        if writes and args and isinstance(args[0], DTensor):  # torch counts no write into the rows
            rows = getattr(args[0], "rows", args[0]._local_tensor)
            torch.autograd.graph.increment_version(rows)
    _mark_results(result, name, ours)
    return result


def _mark_results(result: Any, name: str, weights: Sequence[Any]) -> None:
    """Give DTensors that were computed from weights the class that user code sees."""
    cut = find_inner_cut(weights[0]) if weights else None
    for one in pytree.tree_leaves(result):
        if type(one) is DTensor:
            shares = _share_memory(one, weights)
            one.__class__ = UserDTensor if shares or name not in VIEWS else RowCopy
            if shares:
                vars(one)["rows"] = getattr(weights[0], "rows", weights[0]._local_tensor)
            set_inner_cut(one, cut)
        elif not isinstance(one, torch.Tensor) or any(one is weight for weight in weights):
            continue
        for reader in readers:
            reader.compute_with_part(weights[0], one)


def _as_row_copy(tensor: torch.Tensor, like: Any) -> Any:
    """Return a view of a gathered weight as a tensor that refuses writes."""
    if isinstance(tensor, DTensor):
        return tensor
    made: Any = replicate(tensor, like)
    made.__class__ = RowCopy
    return made


def _note_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note the single numbers that a function writes into a weight."""
    leaves = pytree.tree_leaves((args, kwargs))
    for one in leaves:
        if isinstance(one, float | int):
            _note_operand(torch.tensor(float(one), dtype=torch.float64))
        elif isinstance(one, torch.Tensor) and not isinstance(one, DTensor) and not one.ndim:
            _note_operand(one)


def _note_operand(tensor: torch.Tensor) -> None:
    for reader in readers:
        reader.note_operand(tensor)


def _run_on_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function on each rank's rows, or on the gathered tensors if torch cannot."""
    leaves = pytree.tree_leaves((args, kwargs))
    plain = [
        one
        for one in leaves
        if isinstance(one, torch.Tensor) and not isinstance(one, DTensor) and one.ndim
    ]
    for one in plain:
        _note_operand(one)
    try:
        with allow_plain_tensors() if plain else nullcontext():
            return func(*args, **kwargs)
    except (NotImplementedError, RuntimeError):  # no rule for it, or the script's own mistake
        return _run_on_whole(func, args, kwargs)


def _run_on_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function on gathered tensors, and keep this rank's rows of those that it wrote."""
    wholes: dict[int, tuple[Any, torch.Tensor, int]] = {}

    def gather(leaf: Any) -> Any:
        if id(leaf) not in wholes:
            whole = gather_whole(leaf).requires_grad_(leaf.requires_grad)
            wholes[id(leaf)] = (leaf, whole, version_counter(whole))
        return wholes[id(leaf)][1]

    with _record_gather(str(getattr(func, "__name__", "an operation"))):
        args, kwargs = pytree.tree_map_only(DTensor, gather, (args, kwargs))
    result = func(*args, **kwargs)
    for leaf, whole, version in wholes.values():
        if version_counter(whole) != version:
            _write_rows(leaf, whole)
        if result is whole:
            return leaf
    return result


@torch.no_grad()
def _write_rows(weight: Any, value: torch.Tensor) -> None:
    """Copy this rank's rows of a whole tensor into a weight."""
    value, cut = value.detach(), find_inner_cut(weight)
    shape = weight.shape if cut is None or isinstance(value, DTensor) else cut.shape
    if value.shape != shape:
        raise ConfigError(
            f"weights of fsdp keep their shape: {list(shape)}, got {list(value.shape)}; "
            f"try: layers of another size before shoal.parallelize"
        )
    if cut is not None and not isinstance(value, DTensor):
        value = cut.extract(value)
    if not isinstance(value, DTensor):
        mesh, places = weight.device_mesh, weight.placements
        value = distribute_tensor(value.to(weight.device), mesh, places, src_data_rank=None)
    elif value.placements != weight.placements:
        value = value.redistribute(placements=weight.placements)
    weight.to_local().copy_(value.to_local())


def _share_memory(view: Any, weights: Sequence[Any]) -> bool:
    """Return whether a tensor lies in the memory of a weight."""
    memory = view._local_tensor.untyped_storage().data_ptr()
    return any(one._local_tensor.untyped_storage().data_ptr() == memory for one in weights)
