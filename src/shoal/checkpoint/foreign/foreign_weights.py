"""Weights that other tools wrote: the tensors found in a file or folder, and those of the model.

    a folder of transformers   model.safetensors or its index of several, else pytorch_model.bin or
                               its index
    a file                     .safetensors, or of torch.save: a state dict, alone or among others
    torch's DCP, DeepSpeed     `torch_dcp.py`, `deepspeed_zero.py`

A tensor is known by name, dtype and shape; its bytes are read on demand. If a file holds more than
a model (`{"model": …, "optimizer": …}`), the model's part is taken and the other parts are listed.
If the model's part is ambiguous, `--key` names it. No torch here.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.base.errors import CheckpointError, shorten
from shoal.base.plans.tensor_shards import DTYPES
from shoal.checkpoint.foreign.inert_objects import InertObject, InertTensor, PickledName, is_shape
from shoal.checkpoint.foreign.torch_file import Bytes, TorchFile, map_file
from shoal.checkpoint.format.safetensors_file import (
    HEADER_LIMIT_BYTES,
    LENGTH_BYTES,
    METADATA,
    parse_header,
)

MODEL_KEYS = ("model", "module", "state_dict", "model_state_dict", "model_state")
"""Keys of the weights in training scripts' files, which hold other values too."""

WRAPPERS = ("module.", "_orig_mod.", "_forward_module.")
"""Prefixes of all names from DistributedDataParallel, torch.compile, Lightning with DeepSpeed."""

MAKERS = ("torch._utils", "torch._tensor")
"""Modules whose functions make tensors: sparse and quantized ones, DTensors, subclasses."""

DEEP = 16
"""Depth of nested dicts that are searched."""


@dataclass(frozen=True)
class ForeignTensor:
    """One tensor that another tool wrote; `read` returns its bytes, mapped or merged.

    Attributes:
        same: equal for two names of one tensor; None if it has no other name.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Bytes]
    same: Hashable = None

    @property
    def size_bytes(self) -> int:
        """Bytes of a tensor of this dtype and shape."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]


@dataclass
class ForeignWeights:
    """Weights of a model as another tool wrote them.

    Attributes:
        kind: of the source, as messages name it.
        files: that hold the tensors.
        aliases: tied name → the stored name.
        said: lines on tensors that were left out or renamed.
    """

    kind: str
    tensors: dict[str, ForeignTensor]
    files: list[Path]
    aliases: dict[str, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)


def format_count(count: int) -> str:
    """Return a count of tensors in words.

    >>> format_count(1), format_count(2)
    ('1 tensor', '2 tensors')
    """
    return f"{count} tensor{'s' * (count != 1)}"


def convert_torch_tensor(file: TorchFile, value: Any) -> ForeignTensor | None:
    """Return a tensor of a torch file, or None if `value` is none; tied ones have equal `same`.

    A tensor of another layout or class has its constructor's name as dtype, so that `check_formats`
    refuses it.
    """
    if isinstance(value, InertTensor):
        same = (id(file), *file.storage_key(value))
        return ForeignTensor(value.dtype, value.size, lambda: file.view(value), same)
    made = value.of if isinstance(value, InertObject) else None
    if isinstance(made, PickledName) and (made.module in MAKERS or made.name == "_reconstruct"):
        return ForeignTensor(str(made), (0,), lambda: np.empty((0, 1), np.uint8))
    return None


def find_member(folder: Path, name: Any, says: Path) -> Path:
    """Return the path of a file in `folder` whose name another file gives.

    Raises:
        CheckpointError: the name is no plain file name, since a path could point anywhere.
    """
    if not isinstance(name, str) or not name or Path(name).name != name or name == "..":
        raise CheckpointError(f"{says}: names {name!r} where a file beside it should be")
    if not (folder / name).exists():
        raise CheckpointError(f"{folder / name}: is missing, {says.name} names it")
    return folder / name


def read_safetensors(path: Path) -> tuple[dict[str, ForeignTensor], dict[str, str]]:
    """Return (tensors by name, tied name → stored name) of one file.

    Raises:
        CheckpointError: the file cannot be read or is no safetensors file.
    """
    data = map_file(path)
    length = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    if length > min(len(data), HEADER_LIMIT_BYTES):
        raise CheckpointError(f"{path}: is no safetensors file, or was cut short")
    header = bytes(data[:length])
    try:
        entries = parse_header(header, len(data))
    except ValueError as failure:
        raise CheckpointError(f"{path}: {failure}") from None
    for name, entry in entries.items():
        if not is_shape(entry.shape):
            raise CheckpointError(f"{path}: {name} has a shape that no tensor has")
    told = json.loads(header[LENGTH_BYTES:]).get(METADATA)

    def reader(begin: int, end: int, shape: tuple[int, ...], dtype: str) -> Callable[[], Bytes]:
        whole = (*shape, DTYPES[dtype][1])
        if begin == end:
            return lambda: np.empty(whole, np.uint8)
        return lambda: np.frombuffer(data[begin:end], np.uint8).reshape(whole)

    tensors = {
        name: ForeignTensor(e.dtype, e.shape, reader(e.begin, e.end, e.shape, e.dtype))
        for name, e in entries.items()
    }
    pairs = told.items() if isinstance(told, Mapping) else ()
    return tensors, {a: n for a, n in pairs if str(n) in tensors and a not in tensors}


def read_hub_folder(folder: Path, listed: Path) -> ForeignWeights:
    """Read the weights of a transformers folder; `listed` is the one file, or the index of several.

    Raises:
        CheckpointError: files are missing, damaged, or hold a name twice.
    """
    files = [listed]
    if listed.suffix == ".json":
        try:
            told = json.loads(listed.read_text(encoding="utf-8"))
            named = dict.fromkeys(told["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CheckpointError(f"{listed}: is no index with a weight_map") from None
        files = [find_member(folder, name, listed) for name in named]
    found = ForeignWeights(f"{len(files)} files of transformers", {}, files)
    for path in files:
        one = read_file(path, "")
        doubled = one.tensors.keys() & found.tensors.keys()
        if doubled:
            raise CheckpointError(f"{path}: {min(doubled)} is in another file too")
        found.tensors.update(one.tensors)
        found.aliases.update(one.aliases)
        found.said += one.said
    return found


def read_file(path: Path, key: str) -> ForeignWeights:
    """Read the weights in one file of safetensors or torch.save; `key` names a part of it."""
    if path.suffix == ".safetensors":
        tensors, aliases = read_safetensors(path)
        return select_part(ForeignWeights("a safetensors file", tensors, [path], aliases), key)
    file = TorchFile(map_file(path), str(path))
    found = ForeignWeights("a file of torch.save", {}, [path])
    return select_model_part(dict(_walk_tensors(file)), key, found)


def select_part(found: ForeignWeights, key: str) -> ForeignWeights:
    """Return a model's tensors under `key`, with tied weights that another part stores."""
    if not key:
        return found
    leaves: dict[tuple[str, ...], ForeignTensor] = {(n,): t for n, t in found.tensors.items()}
    for alias, name in found.aliases.items():
        shared = replace(found.tensors[name], same=(id(found), name))
        leaves |= {(name,): shared, (alias,): shared}
    found.aliases = {}
    return select_model_part(leaves, key, found)


def _walk_tensors(file: TorchFile) -> Iterator[tuple[tuple[str, ...], ForeignTensor]]:
    """Yield every tensor in nested dicts, with its keys.

    A file can name one dict many times over: more tensors than its pickle has bytes are refused.
    """
    left = len(file.pickle_bytes)
    waiting: list[tuple[tuple[str, ...], Any]] = [((), file.value)]
    while waiting:
        keys, value = waiting.pop()
        left -= 1
        if left < 0:
            raise CheckpointError(f"{file.where}: names more tensors than it has bytes for")
        if keys and (tensor := convert_torch_tensor(file, value)) is not None:
            yield keys, tensor
        elif isinstance(value, dict) and len(keys) < DEEP:
            waiting += [((*keys, str(k)), v) for k, v in reversed(value.items())]


def select_model_part(
    leaves: Mapping[tuple[str, ...], ForeignTensor], key: str, found: ForeignWeights
) -> ForeignWeights:
    """Add the model's tensors among `leaves` to `found`, by name, and note the parts left out.

    Args:
        key: the model's part, as `model` or `app.model`; "" to look for it.

    Raises:
        CheckpointError: several parts could be the model, or none has tensors.
    """
    where = found.files[0]
    if not leaves:
        raise CheckpointError(f"{where}: holds no tensors by name; try: a file of state_dict()")
    if key:
        names = {keys: ".".join(keys) for keys in leaves}
        chosen = {k: n.removeprefix(f"{key}.") for k, n in names.items() if n.startswith(f"{key}.")}
    else:  # deeper tensors beside plain ones are no weights of this model
        level = _model_keys(leaves, where)
        chosen = {keys: keys[-1] for keys in leaves if keys[:-1] == level}
    if not chosen:
        firsts = ", ".join(sorted({keys[0] for keys in leaves})[:8])
        raise CheckpointError(f"{where}: nothing is under {key}; what it holds: {shorten(firsts)}")
    found.tensors = {name: leaves[keys] for keys, name in chosen.items()}
    if len(found.tensors) < len(chosen):
        raise CheckpointError(f"{where}: two of its tensors have one name under {key}")
    rest = Counter(keys[0] for keys in leaves if keys not in chosen)
    found.said += [
        f"left out: {format_count(n)} of {shorten(part)}" for part, n in sorted(rest.items())
    ]
    return found


def _model_keys(leaves: Mapping[tuple[str, ...], ForeignTensor], where: Path) -> tuple[str, ...]:
    """Return the keys under which the model's tensors are.

    Raises:
        CheckpointError: several parts could be the model.
    """
    level: tuple[str, ...] = ()
    while True:
        here = [keys for keys in leaves if keys[: len(level)] == level]
        parts = dict.fromkeys(keys[len(level)] for keys in here if len(keys) > len(level) + 1)
        named = [part for part in parts if part in MODEL_KEYS]
        if not named:
            if any(len(keys) == len(level) + 1 for keys in here):
                return level
            named = [part for part in parts if not part.startswith("optim")] or list(parts)
        if len(named) > 1:
            near = ".".join((*level, named[0]))
            raise CheckpointError(
                f"{where}: {', '.join(named[:8])} could each be the model; try: --key {near}"
            )
        level = (*level, named[0])


def strip_wrappers(found: ForeignWeights) -> ForeignWeights:
    """Strip the prefixes that wrappers of a whole model add to all its names."""
    for wrapper in (*WRAPPERS, *WRAPPERS):
        names = [*found.tensors, *found.aliases]
        if names and all(name.startswith(wrapper) for name in names):
            found.tensors = {n.removeprefix(wrapper): t for n, t in found.tensors.items()}
            found.aliases = {
                a.removeprefix(wrapper): n.removeprefix(wrapper) for a, n in found.aliases.items()
            }
            found.said.append(f"names: without {wrapper}, which all of them began with")
    return found


def check_formats(found: ForeignWeights) -> None:
    """Refuse tensors that are no plain arrays of numbers.

    Raises:
        CheckpointError: a tensor has another layout, class or dtype.
    """
    for name, tensor in found.tensors.items():
        if tensor.dtype not in DTYPES:
            raise CheckpointError(
                f"{found.files[0]}: {name} is no plain tensor but one of {shorten(tensor.dtype)}; "
                f"try: save it whole and dense, as full_tensor() or to_dense() give it"
            )


def drop_tied_names(found: ForeignWeights) -> ForeignWeights:
    """Delete duplicate names of tied tensors from `found`, in place, and return it.

    The first of several names for the same storage stays; `aliases` maps the others to it.
    """
    first: dict[Hashable, str] = {}
    for name, tensor in list(found.tensors.items()):
        if tensor.same is not None and first.setdefault(tensor.same, name) != name:
            found.aliases[name] = first[tensor.same]
            del found.tensors[name]
    return found
