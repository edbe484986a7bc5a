"""Table of the file positions of a built model's tensors, and its use in another rank's model.

    make_weight_table       on the rank that ran the builder: file and offset of every tensor
    put_in         on the others: the same pages, mapped into a model made without numbers

Small tensors go into files of their own, some dozens of a model: a file leaves the page cache when
all ranks have freed its tensors, while other layers are still being cut. A tensor that is still
a view of a checkpoint's file is mapped from there (checkpoint_files.py).
"""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from shoal.base.errors import ShoalError
from shoal.machine.process_memory import disable_read_ahead, trim_heap
from shoal.parallel.build.checkpoint_files import unmodified_mappings
from shoal.parallel.build.mmap_init import OpenFiles, make_mapped, mark_as_mapped, view_storage
from shoal.parallel.program import dtype_of

ALIGNED = 64
"""Alignment in bytes of each tensor in a file of small ones, as in torch's allocator."""

SMALL_FILES = 64
"""Number of files of small tensors; after each the heap is trimmed, which takes 5 ms."""

IN_MEMORY = -1
"""Stands for a descriptor of a tensor that is in no file."""

Build = Callable[[], nn.Module]
Table = dict[str, Any]


class SharedBuildError(ShoalError):
    """Error if a model cannot be assembled from another rank's files; the text has the reason."""


def _all_named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by all of their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


# ---- the rank that builds


def make_weight_table(module: nn.Module, files: OpenFiles) -> Table:
    """Return the table of the file position of each tensor of a built module.

    Args:
        files: path → descriptor, of those that it was built in.

    Raises:
        SharedBuildError: a tensor is not strided, is a subclass, or is not on the CPU.
    """
    named = _all_named_tensors(module)
    storages: dict[int, Any] = {}
    widths: dict[int, int] = {}
    tensors: dict[str, list[Any]] = {}
    for name, tensor in named.items():
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
            plain = tensor.layout == torch.strided
            kind = type(tensor).__name__ if plain else str(tensor.layout).removeprefix("torch.")
            raise SharedBuildError(f"{name} is a {kind} tensor")
        if tensor.device.type != "cpu":
            raise SharedBuildError(f"{name} is on {tensor.device}")
        key = _storage_address(tensor)
        storages.setdefault(key, tensor.untyped_storage())
        widths[key] = max(widths.get(key, 1), tensor.element_size())
    places: list[dict[str, Any]] = []
    read, used = unmodified_mappings(), set[tuple[int, int]]()
    for key, storage in storages.items():
        found = next((one for one in read if one.start <= key < one.stop), None)
        if storage.filename in files:
            descriptor = files[storage.filename]
            places.append({"file": descriptor, "at": 0, "bytes": storage.nbytes()})
        elif found is not None and found.file_offset(key) % widths[key] == 0:
            told = {"path": found.path, "at": found.file_offset(key), "node": found.node}
            used.add((found.start, found.stop))
            places.append({**told, "bytes": storage.nbytes()})
        else:
            places.append({"file": IN_MEMORY, "at": 0, "bytes": storage.nbytes()})
    for start, stop in used:
        disable_read_ahead(start, stop)
    numbers = {key: number for number, key in enumerate(storages)}
    of_storage: list[list[Tensor]] = [[] for _ in storages]
    for name, tensor in named.items():
        number = numbers[_storage_address(tensor)]
        tensors[name] = [number, tensor.storage_offset(), *_tensor_form(tensor)]
        of_storage[number].append(tensor)
    storages.clear()  # so that a storage is freed once it is in a file
    _pack_small_tensors(of_storage, places, files)
    nodes = {d: os.fstat(d).st_ino for d in {p["file"] for p in places if "file" in p}}
    packages = {type(part).__module__.partition(".")[0] for part in module.modules()}
    return {
        "process": os.getpid(),
        "nodes": nodes,
        "storages": places,
        "tensors": tensors,
        "packages": sorted(packages - {"__main__"}),
    }


def _pack_small_tensors(
    of_storage: list[list[Tensor]], places: list[dict[str, Any]], files: OpenFiles
) -> None:
    """Move the storages that are in no file into files, and write their positions into `places`.

    The memory is freed on the way: a model of small tensors would otherwise be in memory twice.

    Args:
        of_storage: per storage, the module's tensors in it.
        places: positions of the storages, in the same order.
    """
    pairs = zip(of_storage, places, strict=True)
    left = [(tensors, place) for tensors, place in pairs if place.get("file") == IN_MEMORY]
    each_bytes = sum(_round_up(place["bytes"]) for _, place in left) / SMALL_FILES
    together: list[tuple[list[Tensor], dict[str, Any]]] = []
    size_bytes = 0
    for number, (tensors, place) in enumerate(left, start=1):
        place["at"] = size_bytes
        size_bytes += _round_up(place["bytes"])
        together.append((tensors, place))
        if size_bytes >= each_bytes or number == len(left):
            _move_to_file(together, size_bytes, files)
            trim_heap()
            together, size_bytes = [], 0


def _move_to_file(
    together: list[tuple[list[Tensor], dict[str, Any]]], size_bytes: int, files: OpenFiles
) -> None:
    """Move the tensors of some storages to their positions in a new file."""
    held = make_mapped(torch.empty(max(size_bytes, 1), dtype=torch.uint8, device="meta"), files)
    whole = held.untyped_storage()
    descriptor = files[str(whole.filename)]
    for tensors, place in together:
        place["file"] = descriptor
        if not place["bytes"]:
            continue
        start, stop = place["at"], place["at"] + place["bytes"]
        raw = _view_bytes(tensors[0].untyped_storage(), 0, place["bytes"]).numpy().data
        # Not through the mapping: the first write to a part of it fills 16 MiB with empty pages.
        while start < stop:
            start += os.pwrite(descriptor, raw[start - stop :], start)
        del raw
        for tensor in tensors:
            tensor.data = view_storage(whole[place["at"] : stop], tensor, tensor.storage_offset())
            mark_as_mapped(tensor)


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNED) * ALIGNED


def _storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has no bytes."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() if storage.nbytes() else 0


def _tensor_form(tensor: Tensor) -> list[Any]:
    return [dtype_of(tensor), list(tensor.shape), list(tensor.stride())]


# ---- the ranks that map


def build_from_table(build: Build, table: Table) -> nn.Module:
    """Run the builder on the meta device, and put the tensors of a table into its module.

    The packages of the model's classes are imported first, which the builder might do itself: a
    library may need another import path on the meta device, and `build` checks what is imported.

    Raises:
        SharedBuildError: the builder keeps tensors that are neither parameters nor buffers.
        Exception: any error of the builder.
    """
    for package in table["packages"]:
        with suppress(Exception):  # the builder raises the better error
            importlib.import_module(package)
    before = _live_meta_tensors()
    with torch.device("meta"):
        module = build()
    map_table(module, table)
    if len(_live_meta_tensors()) > len(before):
        gc.collect()  # tensors that the builder dropped may be in reference cycles
    known = {id(tensor) for tensor in before}
    if any(id(tensor) not in known for tensor in _live_meta_tensors()):
        raise SharedBuildError("it keeps tensors that are no parameters and no buffers")
    return module


def _live_meta_tensors() -> list[Tensor]:
    """Return all live tensors on the meta device."""
    found = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    return [tensor for tensor in found if tensor.is_meta]


def map_table(module: nn.Module, table: Table) -> None:
    """Put the tensors of a table into a module, in place: parameters stay the same objects.

    Args:
        module: on the meta device, or the module that the table was made of, whose files are then
            mapped again.

    Raises:
        SharedBuildError: the module has other tensors.
    """
    named = _all_named_tensors(module)
    forms = {name: row[2:] for name, row in table["tensors"].items()}
    if forms != {name: _tensor_form(tensor) for name, tensor in named.items()}:
        raise SharedBuildError("without numbers the builder makes other tensors")
    known: dict[str, Any] = {}
    storages = [_map_storage(place, table, known) for place in table["storages"]]
    done: set[int] = set()
    for name, (number, offset, *_) in table["tensors"].items():
        tensor = named[name]
        if id(tensor) in done:
            continue
        done.add(id(tensor))
        if tensor.is_meta:
            _swap_tensor(tensor, view_storage(storages[number], tensor, offset))
        elif "path" not in table["storages"][number]:
            tensor.data = view_storage(storages[number], tensor, offset)
        mark_as_mapped(tensor)


def _map_storage(place: dict[str, Any], table: Table, known: dict[str, Any]) -> Any:
    """Map a part of a file privately.

    Args:
        known: files that are mapped already: one file holds many storages.

    Raises:
        SharedBuildError: this process does not see the other one's file.
    """
    read = "path" in place
    path = place["path"] if read else f"/proc/{table['process']}/fd/{place['file']}"
    node = place["node"] if read else table["nodes"][str(place["file"])]
    try:
        told = os.stat(path)
    except OSError as failure:
        raise SharedBuildError(f"{path}: {failure.strerror}") from failure
    if told.st_ino != node:
        raise SharedBuildError(f"{path} is another file in this process")
    if path not in known:
        whole = torch.UntypedStorage.from_file(path, shared=False, nbytes=told.st_size)
        if read:
            disable_read_ahead(whole.data_ptr(), whole.data_ptr() + told.st_size)
        known[path] = whole
    # A separate storage over the same pages.
    return known[path][place["at"] : place["at"] + place["bytes"]]


def _view_bytes(storage: Any, start: int, size_bytes: int) -> Tensor:
    """Return some bytes of a storage, as a tensor over them."""
    return torch.empty(0, dtype=torch.uint8).set_(storage, start, (size_bytes,), (1,))


def _swap_tensor(tensor: Tensor, value: Tensor) -> None:
    """Replace a meta tensor by a value in place, for all references to it."""
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    else:
        value.requires_grad_(tensor.requires_grad)
    value.__dict__.update(tensor.__dict__)
    try:
        torch.utils.swap_tensors(tensor, value)
    except RuntimeError as failure:
        raise SharedBuildError(
            "it keeps parameters in ways that torch cannot follow (weak references, as in an LSTM; "
            "graphs)"
        ) from failure
