"""Build a model in the page cache instead of the process's own memory, bit for bit the same.

A rank that keeps only a part of every weight still has the whole weight in memory for a moment:
initialisation draws it whole, so that every layout starts from the same numbers. Inside `mmap_init`
large tensors are mapped from unlinked temporary files, shared. Their pages belong to the page
cache: the system writes them out when memory is short and drops them with the tensor. They are no
private memory of the process, and RLIMIT_DATA does not count them. (It does if ranks map each
other's files, privately: shared_build.py.)

Protocol  a dispatch mode sees every operation. One that makes a large new CPU tensor from nothing
          (empty, zeros, randn, …) or from another (clone, to) writes into a mapped one; the result
          of any other is moved there. Draws are the same calls of the same generator in the same
          order, on the same shapes: the bits are a plain build's
Then      ranks copy the shards they keep (`shard.clone()`, outside) and free the rest;
          `copy_to_memory` copies the tensors that stay whole, so that none trains in a file
Limits    modes belong to a thread: tensors that a library loads in threads of its own stay private.
          An operation that is neither a factory nor a copy needs its result in private memory for a
          moment. A mapped tensor cannot grow (`resize_`). On a tmpfs the pages are memory after
          all; TMPDIR sets the folder of the files (except those of `opened`)
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.base.plans.placement import DimCut
from shoal.machine.process_memory import read_ahead
from shoal.parallel._torch import UncompiledMode, pytree
from shoal.parallel.program import copy_part

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PREFIX = "shoal-weights-"

OPEN = "/proc/self/fd/"
"""Folder with the paths of files that have a descriptor and no name."""

IN_FILE = "_shoal_in_file"
"""Tensor attribute: its address when it was mapped. At another address it is in memory."""

IS_PART = "_shoal_is_part"
"""Tensor attribute: its address when it became a view of a mapped tensor."""

LEAST_BYTES = 2**20
"""Smaller tensors are not mapped: a file and a mapping each would cost more than they save."""


class OpenFiles(dict[str, int]):
    """Descriptors of files by their (former) names, and the bytes of the files on no disk."""

    in_memory_bytes = 0

    def close(self) -> None:
        """Close all descriptors; the files stay mapped."""
        while self:
            os.close(self.popitem()[1])


@contextmanager
def mmap_init(least_bytes: int = LEAST_BYTES, opened: OpenFiles | None = None) -> Iterator[None]:
    """Allocate new CPU tensors of at least `least_bytes` in mapped files, with the same values.

    Args:
        opened: gets a descriptor of every file by the name that it had; to be closed by the caller.

    Raises:
        ConfigError: the folder of temporary files is full.

    References:
        mmap(2), MAP_SHARED; setrlimit(2), RLIMIT_DATA.

    >>> with mmap_init(least_bytes=4096):
    ...     weight = torch.ones(32, 32)
    >>> float(weight.sum()), is_mapped(weight)
    (1024.0, True)
    """
    with _MappedAllocationMode(least_bytes, opened):
        yield


def copy_to_memory(tensors: Iterable[Tensor]) -> None:
    """Copy the mapped tensors of a module into the process's own memory, in place.

    Parameters stay the same objects, and tensors that shared memory share it again.
    """
    copies: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        if not is_mapped(tensor):
            continue
        if tensor.__dict__.pop(IS_PART, None) == tensor.data_ptr():
            tensor.data = copy_rows(tensor.detach(), slice(None))
        else:
            storage = tensor.untyped_storage()
            place = storage.data_ptr()
            if place not in copies:
                read_ahead(tensor)
                copies[place] = storage.clone()
            tensor.data = view_storage(copies[place], tensor, tensor.storage_offset())
        tensor.__dict__.pop(IN_FILE, None)


def copy_rows(tensor: Tensor, rows: slice, device: torch.device | None = None) -> Tensor:
    """Copy some rows of a tensor into a new tensor of its shape, in row order.

    The other rows are allocated unread. On a CPU they take no memory until they are written.

    Args:
        device: of the copy; None: the tensor's own.
    """
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device or tensor.device)
    if tensor.dim():
        read_ahead(tensor[rows])
        copy[rows].copy_(tensor[rows])
        return copy
    return copy.copy_(tensor)


def cut_to_part(tensor: Tensor, cut: DimCut, rank: int) -> None:
    """Cut a tensor in place to the part that rank `rank` of the cut's axis holds.

    A mapped tensor stays in its file, unread: other techniques may cut the part further. A part in
    several pieces is copied, since it cannot be a view.
    """
    spans = cut.spans(rank)
    if len(spans) == 1 and is_mapped(tensor):
        ((start, stop),) = spans
        tensor.data = tensor.detach().narrow(cut.dim, start, stop - start)
        setattr(tensor, IS_PART, tensor.data_ptr())
        mark_as_mapped(tensor)
        return
    for start, stop in spans:
        read_ahead(tensor.detach().narrow(cut.dim, start, stop - start))
    tensor.data = copy_part(tensor.detach(), cut, rank)


def is_mapped(tensor: Tensor) -> bool:
    """Return whether a tensor's memory is a file of `mmap_init`.

    >>> with mmap_init(least_bytes=0):
    ...     is_mapped(torch.ones(2)), is_mapped(torch.ones(2, device="meta"))
    (True, False)
    """
    if not _is_plain(tensor):
        return False
    if is_shared(tensor):
        return True
    path = tensor.untyped_storage().filename
    return path is not None and (path.startswith(OPEN) or os.path.basename(path).startswith(PREFIX))


def mark_as_mapped(tensor: Tensor) -> None:
    """Mark a tensor as privately mapped from a file, since torch does not report its name."""
    setattr(tensor, IN_FILE, tensor.data_ptr())


def is_shared(tensor: Tensor) -> bool:
    """Return whether a tensor's memory is still a file that another rank may map too."""
    return _is_plain(tensor) and tensor.__dict__.get(IN_FILE) == tensor.data_ptr()


def view_storage(storage: Any, like: Tensor, offset: Any = 0) -> Tensor:
    """Return a tensor of `like`'s shape, strides and dtype over a storage."""
    return torch.empty(0, dtype=like.dtype).set_(storage, offset, like.size(), like.stride())


def make_mapped(like: Tensor, opened: OpenFiles | None = None) -> Tensor:
    """Return a zero tensor with `like`'s shape, strides and dtype, in an unlinked file of its own.

    Args:
        opened: gets a descriptor of the file by its name.

    Raises:
        ConfigError: the folder of temporary files is full.
    """
    from shoal.machine.free_memory import create_memory_file, reserve  # only large models need it

    size_bytes = _span_bytes(like)
    if opened is not None:
        descriptor = create_memory_file(PREFIX, size_bytes, opened.in_memory_bytes)
        if descriptor is not None:
            opened.in_memory_bytes += size_bytes
            opened[name := f"{OPEN}{descriptor}"] = descriptor
            return view_storage(
                torch.UntypedStorage.from_file(name, shared=True, nbytes=size_bytes), like
            )
    with tempfile.NamedTemporaryFile(prefix=PREFIX) as file:
        reserve(file.fileno(), size_bytes)
        storage = torch.UntypedStorage.from_file(file.name, shared=True, nbytes=size_bytes)
        if opened is not None:
            opened[file.name] = os.dup(file.fileno())
    return view_storage(storage, like)


def _span_bytes(like: Tensor) -> int:
    """Return the bytes from the first to the last element."""
    if not like.numel():
        return 0
    last = sum((n - 1) * step for n, step in zip(like.size(), like.stride(), strict=True))
    return (last + 1) * like.element_size()


class _MappedAllocationMode(UncompiledMode):
    """Dispatch mode that allocates the results of large operations in mapped files."""

    def __init__(self, least_bytes: int, opened: OpenFiles | None) -> None:
        super().__init__()
        self.least_bytes = max(1, least_bytes)  # an empty tensor needs no file
        self.opened = opened

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given: dict[str, Any] = kwargs or {}
        fill = FILLS.get(func.overloadpacket)
        if fill is None or "out" in given or not _on_cpu(args, given):
            return self._move_results(func(*args, **given), (args, given))
        template = _template(func, args, given)
        if _span_bytes(template) < self.least_bytes or template.layout != torch.strided:
            return func(*args, **given)
        target = make_mapped(template, self.opened)
        fill(target, args, given)
        return target

    def _move_results(self, results: Any, inputs: Any) -> Any:
        """Copy the new and large results of an operation to mapped files."""
        known = {_storage_address(t) for t in pytree.tree_leaves(inputs) if _is_plain(t)}

        def move(leaf: Any) -> Any:
            if not _is_plain(leaf) or _span_bytes(leaf) < self.least_bytes:
                return leaf
            return (
                leaf
                if _storage_address(leaf) in known
                else make_mapped(leaf, self.opened).copy_(leaf)
            )

        return pytree.tree_map(move, results)


def _is_plain(value: Any) -> bool:
    """Return whether a value is a strided CPU tensor with memory of its own, and no subclass."""
    plain = type(value) in (Tensor, nn.Parameter)
    return plain and value.device.type == "cpu" and value.layout == torch.strided


def _storage_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _on_cpu(args: tuple[Any, ...], given: Mapping[str, Any]) -> bool:
    """Return whether a factory makes a tensor on the CPU, by its `device` or its example tensor."""
    example = args[0] if args and isinstance(args[0], Tensor) else None
    if example is not None and not _is_plain(example):
        return False
    device = given.get("device")
    return device is None or torch.device(device).type == "cpu"


def _template(func: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> Tensor:
    """Return a meta tensor with the shape, strides and dtype of a factory's result."""
    if func.overloadpacket is torch.ops.aten.clone:
        form = given.get("memory_format") or torch.preserve_format
        return torch.empty_like(args[0], device="meta", memory_format=form)
    changed: dict[str, Any] = {**given, "device": "meta", "pin_memory": False}
    if "generator" in given:
        changed["generator"] = None  # of the CPU: shapes alone draw nothing
    return func(*args, **changed)


def _fill_functions() -> dict[Any, Callable[[Tensor, tuple[Any, ...], Mapping[str, Any]], object]]:
    """Return operation → function of result, arguments and keywords that fills the result."""
    aten = torch.ops.aten
    kinds: tuple[tuple[Callable[..., object], tuple[str, ...]], ...] = (
        (
            lambda target, args, given: None,  # a new file reads as zeros
            (
                *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"),
                *("zeros", "zeros_like", "new_zeros"),
            ),
        ),
        (lambda target, args, given: target.fill_(1), ("ones", "ones_like", "new_ones")),
        (
            lambda target, args, given: target.fill_(
                given["fill_value"] if "fill_value" in given else args[-1]
            ),
            ("full", "full_like", "new_full"),
        ),
        (
            lambda target, args, given: target.normal_(generator=given.get("generator")),
            ("randn", "randn_like"),
        ),
        (
            lambda target, args, given: target.uniform_(generator=given.get("generator")),
            ("rand", "rand_like"),
        ),
        (lambda target, args, given: target.copy_(args[0]), ("clone", "_to_copy")),
    )
    return {getattr(aten, name): fill for fill, names in kinds for name in names}


FILLS = _fill_functions()


def load_own_rows(parameters: list[nn.Parameter], over: DeviceMesh, device: torch.device) -> None:
    """Copy this rank's rows of a unit to the device; the other rows stay uninitialised there.

    torch moves whole units and shards them on the device. With a checkpoint in mapped files every
    rank would then read all of it. The values of the other rows do not matter. On the CPU torch
    copies only this rank's rows of a contiguous mapped tensor, so such a tensor is left as it is.
    """
    ranks, rank = over.size(over.ndim - 1), over.get_local_rank(over.ndim - 1)
    for parameter in parameters:
        here = parameter.device == device and not is_mapped(parameter)
        if hasattr(parameter, "to_local") or here:
            continue
        rows = -(-len(parameter) // ranks)
        own = slice(rank * rows, (rank + 1) * rows)
        if parameter.device == device and parameter.is_contiguous():
            read_ahead(parameter.detach()[own])
        else:
            parameter.data = copy_rows(parameter.detach(), own, device)
