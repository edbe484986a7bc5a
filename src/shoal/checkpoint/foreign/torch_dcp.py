"""Read a folder of torch.distributed.checkpoint (DCP): whole tensors from the slices of all ranks.

    .metadata      a pickle: per tensor its format, shape and slices; per slice its file, where in
                   it, how many bytes; and by which keys of the saved dict each tensor was reached
    __R_K.distcp   slices of rank R, one torch.save archive after another

Tensors are found by their keys, so `{"model": …, "optimizer": …}` yields the model. Slices must
tile their tensor; each is checked against the dtype and shape in .metadata. Other values
(BytesStorageMetadata) are pickles of their own and are not read.

Source: torch 2.13, `torch/distributed/checkpoint/metadata.py`, `filesystem.py` (format version
1.0.0); fields are read by name, so that those of later versions are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.base.errors import CheckpointError
from shoal.base.plans.tensor_shards import DTYPES, Box
from shoal.checkpoint.foreign.foreign_weights import (
    DEEP,
    ForeignTensor,
    ForeignWeights,
    find_member,
    select_model_part,
)
from shoal.checkpoint.foreign.inert_objects import InertObject, InertTensor, PickledName, is_shape
from shoal.checkpoint.foreign.pickle_reader import read_pickle
from shoal.checkpoint.foreign.torch_file import Bytes, TorchFile, map_file
from shoal.checkpoint.format import boxes

METADATA = ".metadata"
OF_TENSORS = "torch.distributed.checkpoint.metadata.TensorStorageMetadata"


@dataclass(frozen=True)
class _Slice:
    """Byte range of a file that holds one box of a tensor."""

    box: Box
    file: Path
    begin: int
    end: int


def read_dcp(folder: Path, key: str) -> ForeignWeights:
    """Read the model in a folder of DCP; `key` names its part of the saved dict, if ambiguous.

    Raises:
        CheckpointError: files are missing, cut or damaged, slices do not tile their tensor, or they
            were compressed or encrypted.
        Refused: as `read_pickle`.
    """
    says = folder / METADATA
    root = read_pickle(map_file(says), str(says))
    tables = [_read_field(root, name) for name in ("state_dict_metadata", "storage_data")]
    if not all(isinstance(table, dict) for table in tables):
        raise CheckpointError(f"{says}: is no metadata of torch.distributed.checkpoint")
    described, stored = tables
    places = _locate_slices(stored, folder, says)
    mapped: dict[Path, memoryview] = {}
    paths = _read_field(root, "planner_data")
    leaves: dict[tuple[str, ...], ForeignTensor] = {}
    for name, told in described.items():
        if isinstance(name, str) and isinstance(told, InertObject) and str(told.of) == OF_TENSORS:
            keys = paths.get(name) if isinstance(paths, dict) else None
            known = isinstance(keys, tuple) and 0 < len(keys) <= DEEP
            reached = tuple(str(one) for one in keys or ()) if known else (name,)
            leaves[reached] = _build_tensor(name, told, places, mapped, says)
    files = sorted({place.file for place in places.values()})
    return select_model_part(
        leaves, key, ForeignWeights(f"torch's DCP, {len(files)} files", {}, [says, *files])
    )


def _read_field(record: Any, name: str) -> Any:
    return record.field(name) if isinstance(record, InertObject) else None


def _locate_slices(
    stored: dict[Any, Any], folder: Path, says: Path
) -> dict[tuple[str, tuple[int, ...]], _Slice]:
    """Return the byte range of each slice, by (tensor's name, the slice's offset in the tensor)."""
    found: dict[tuple[str, tuple[int, ...]], _Slice] = {}
    known: dict[str, Path] = {}
    for index, told in stored.items():
        name, offsets = _read_field(index, "fqn"), _read_field(index, "offset")
        begin, length = _read_field(told, "offset"), _read_field(told, "length")
        if offsets is None:
            continue  # a value that is no tensor
        file = _read_field(told, "relative_path")
        plain = isinstance(name, str) and isinstance(file, str)
        if not (plain and is_shape(offsets) and is_shape((begin, length))):
            raise CheckpointError(f"{says}: says of a slice no tensor, no file or no place in it")
        if _read_field(told, "transform_descriptors"):
            raise CheckpointError(
                f"{says}: {name} was packed on the way to the disk; try: save it without"
            )
        if file not in known:
            known[file] = find_member(folder, file, says)
        found[name, offsets] = _Slice((), known[file], begin, begin + length)
    return found


def _build_tensor(
    name: str,
    told: InertObject,
    places: dict[tuple[str, tuple[int, ...]], _Slice],
    mapped: dict[Path, memoryview],
    says: Path,
) -> ForeignTensor:
    """Return one tensor of the metadata, after a check that its slices exist and tile it."""
    properties, shape, chunks = (told.field(one) for one in ("properties", "size", "chunks"))
    state = properties.state if isinstance(properties, InertObject) else None
    dtype = state[0] if isinstance(state, tuple) and state else _read_field(properties, "dtype")
    if not isinstance(dtype, PickledName) or dtype.module != "torch" or dtype.name not in DTYPES:
        raise CheckpointError(f"{says}: {name} has a format that is not known: {dtype}")
    parts: list[_Slice] = []
    for chunk in chunks if isinstance(chunks, list) and is_shape(shape) else []:
        offsets, sizes = _read_field(chunk, "offsets"), _read_field(chunk, "sizes")
        if not (is_shape(offsets) and is_shape(sizes)):
            raise CheckpointError(f"{says}: {name} has a slice without a place")
        if (name, offsets) not in places:
            raise CheckpointError(f"{says}: {name} at {list(offsets)} is in no file")
        place = places[name, offsets]
        box = tuple((a, a + n) for a, n in zip(offsets, sizes, strict=False))
        parts.append(_Slice(box, place.file, place.begin, place.end))
    if not parts or (problem := boxes.explain_untiled(shape, [part.box for part in parts])):
        raise CheckpointError(f"{says}: {name}: {problem if parts else 'has no slices'}")

    def read() -> Bytes:
        width = DTYPES[dtype.name][1]
        if len(parts) == 1:
            return _read_slice(name, dtype.name, parts[0], mapped)
        whole = np.empty((*shape, width), np.uint8)
        for part in parts:
            whole[boxes.index_within(part.box, boxes.whole(shape))] = _read_slice(
                name, dtype.name, part, mapped
            )
        return whole

    return ForeignTensor(dtype.name, shape, read)


def _read_slice(name: str, dtype: str, part: _Slice, mapped: dict[Path, memoryview]) -> Bytes:
    """Return a slice's bytes, from the archive that holds nothing else."""
    if part.file not in mapped:
        mapped[part.file] = map_file(part.file)
    data = mapped[part.file]
    where = f"{part.file}: {name}"
    if not 0 <= part.begin <= part.end <= len(data):
        raise CheckpointError(f"{where} ends at byte {part.end}; the file has {len(data)}")
    file = TorchFile(data[part.begin : part.end], where)
    tensor = file.value
    if not isinstance(tensor, InertTensor):
        raise CheckpointError(f"{where} is no tensor; subclasses of tensors are not read")
    if (tensor.dtype, tensor.size) != (dtype, boxes.extents(part.box)):
        raise CheckpointError(f"{where} is not what {METADATA} says: {tensor.dtype}")
    return file.view(tensor)
