"""Read a DeepSpeed folder: fp32 weights of ZeRO 1, 2 and 3, merged from all ranks' partitions.

    latest                                            names the folder of the newest save
    TAG/mp_rank_00_model_states.pt                    stages 0 to 2: names, shapes, buffers
    TAG/zero_pp_rank_R_mp_rank_00_model_states.pt     stage 3: the same, by rank
    TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   rank R's part of the fp32 weights

Stages 1, 2   each group of parameters is one flat vector in the order of `param_shapes`, cut in
              one part per rank; at the end is padding, which may or may not have been saved
Stage 3       each parameter is cut alone: ceil(n / ranks) elements on every rank, the last part
              padded; a rank's vectors, one after another, hold its parts in order
Frozen        whole in stages 1, 2 (rank 0), cut like the others in stage 3
Buffers       those of `buffer_names`, from rank 0's `module`, in their own format
Tied          `shared_params`: name → the name that is there
Stage 0       `module` itself

Refused       tensor-parallel parts (mp_rank_01: how they are cut is known to the model's code
              alone), pipeline layers, experts that only some ranks have
Source        DeepSpeed's main of 2026: `utils/zero_to_fp32.py` (00158f6), `runtime/zero/
              stage_1_and_2.py` (02aa38c) and `stage3.py` (007cca6), `checkpoint/constants.py`
              (051a0f5); the arithmetic is theirs, the code is not
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shoal.base.errors import CheckpointError, shorten
from shoal.base.plans.tensor_shards import DTYPES
from shoal.checkpoint.foreign.foreign_weights import (
    ForeignTensor,
    ForeignWeights,
    convert_torch_tensor,
    format_count,
)
from shoal.checkpoint.foreign.inert_objects import InertTensor, is_shape
from shoal.checkpoint.foreign.torch_file import Bytes, TorchFile, map_file

STATES = re.compile(
    r"(?:bf16_|fp16_)?(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_(model|optim)_states.pt"
)
TAGGED = "*_states.pt"


@dataclass(frozen=True)
class _FlatVector:
    """A flat vector in one rank's file."""

    file: TorchFile
    tensor: InertTensor

    @property
    def elements(self) -> int:
        return math.prod(self.tensor.size)


def find_tag_folder(folder: Path) -> Path | None:
    """Return the folder of a save: this one, or the one that its `latest` names; None if neither.

    Raises:
        CheckpointError: `latest` names no folder beside it.
    """
    latest = folder / "latest"
    if latest.is_file():
        tag = latest.read_text(encoding="utf-8", errors="replace").strip()[:256]
        if tag in ("", "..") or Path(tag).name != tag or not (folder / tag).is_dir():
            raise CheckpointError(f"{latest}: names {tag!r}, which is no folder beside it")
        return folder / tag
    return folder if next(folder.glob(TAGGED), None) is not None else None


def read_deepspeed(folder: Path) -> ForeignWeights:
    """Read the model in the folder of one save.

    Raises:
        CheckpointError: partitions are missing or do not add up, or the folder is of a kind that
            the module's docstring lists under Refused.
    """
    models, optimizers = _list_state_files(folder)
    files = [*models, *optimizers]
    states = [_open(path) for path in models]
    first = states[0]
    module, shapes = first.value.get("module"), first.value.get("param_shapes")
    if not isinstance(module, Mapping):
        raise CheckpointError(f"{first.where}: holds no state dict under module")
    if "ds_autoep_layers" in first.value or "autoep_layers" in first.value:
        raise CheckpointError(f"{first.where}: its experts lie on some of the ranks only; refused")
    if not optimizers:
        if shapes:
            raise CheckpointError(
                f"{folder}: the fp32 weights are in *_optim_states.pt, which are not there; "
                f"try: copy those of all ranks"
            )
        found = ForeignWeights("DeepSpeed without ZeRO", _read_tensors(first, module), files)
        return found
    parts = [_open(path) for path in optimizers]
    flat, stage3 = _read_flat_groups(parts, folder)
    groups = _read_shapes(shapes, first)
    tensors = _read_buffers(first, module)
    frozen = first.value.get("frozen_param_shapes")
    fragments = [state.value.get("frozen_param_fragments") for state in states]
    if stage3:
        if len(states) != len(parts):
            raise CheckpointError(
                f"{folder}: {len(parts)} *_optim_states.pt and {len(states)} *_model_states.pt; "
                f"stage 3 writes one of each on every rank"
            )
        tensors |= _merge_partitions(
            flat, {n: s for group in groups for n, s in group.items()}, folder
        )
        tensors |= _merge_frozen(states, fragments, _read_shapes([frozen or {}], first)[0])
    else:
        tensors |= _merge_flat_groups(flat, groups, folder)
        tensors |= _read_tensors(first, fragments[0] if isinstance(fragments[0], dict) else {})
    kind = f"DeepSpeed, ZeRO {'3' if stage3 else '1 or 2'} of {len(parts)} ranks"
    found = ForeignWeights(kind, tensors, files)
    shared = first.value.get("shared_params")
    for alias, name in shared.items() if isinstance(shared, Mapping) else ():
        if isinstance(name, str) and name in tensors and alias not in tensors:
            found.aliases[alias] = name
    return _add_unoptimized(found, first, module)


def _add_unoptimized(
    found: ForeignWeights, first: TorchFile, module: Mapping[str, Any]
) -> ForeignWeights:
    """Add tensors that no optimizer holds: whole in stages 1 and 2, absent in stage 3."""
    known = {*found.tensors, *found.aliases}
    rest = _read_tensors(first, {name: t for name, t in module.items() if name not in known})
    lost = [
        name for name, tensor in rest.items() if tensor.dtype in DTYPES and not tensor.size_bytes
    ]
    if lost:
        raise CheckpointError(
            f"{first.where}: {lost[0]} is a parameter of the module and in no rank's part"
        )
    if rest:
        found.tensors |= rest
        found.said.append(
            f"as the module holds them: {format_count(len(rest))} that no optimizer has"
        )
    return found


def _list_state_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return (model states, optimizer states) by rank.

    Raises:
        CheckpointError: the folder has files of other kinds.
    """
    found: dict[str, dict[int, Path]] = {"model": {}, "optim": {}}
    for path in sorted(folder.glob(TAGGED)):
        told = STATES.fullmatch(path.name)
        if told is None:
            raise CheckpointError(
                f"{path}: layers of a pipeline, or experts, that lie apart; try: export them "
                f"with the model's own code"
            )
        rank, model_part, kind = told.groups()
        if int(model_part):
            raise CheckpointError(
                f"{path}: the model is cut by tensor parallelism, and how is known to its code "
                f"alone; try: save it with tp 1"
            )
        if int(rank or 0) in found[kind]:
            raise CheckpointError(f"{path}: a second file of rank {int(rank or 0)}")
        found[kind][int(rank or 0)] = path
    for kind, paths in found.items():
        if sorted(paths) != list(range(len(paths))):
            lacking = next(rank for rank in itertools.count() if rank not in paths)
            raise CheckpointError(f"{folder}: the {kind} states of rank {lacking} are missing")
    if not found["model"]:
        raise CheckpointError(f"{folder}: no *_model_states.pt is there, which has the names")
    models, optimizers = (
        [paths[rank] for rank in range(len(paths))] for paths in (found["model"], found["optim"])
    )
    return models, optimizers


def _open(path: Path) -> TorchFile:
    file = TorchFile(map_file(path), str(path))
    if not isinstance(file.value, dict):
        raise CheckpointError(f"{path}: is no file of DeepSpeed: it holds no dict")
    return file


def _read_tensors(file: TorchFile, held: Mapping[str, Any]) -> dict[str, ForeignTensor]:
    found = {n: t for n, one in held.items() if (t := convert_torch_tensor(file, one)) is not None}
    if odd := [name for name in found if not isinstance(name, str)]:
        raise CheckpointError(f"{file.where}: {odd[0]!r} is no tensor's name")
    return found


def _read_buffers(file: TorchFile, module: Mapping[str, Any]) -> dict[str, ForeignTensor]:
    names = file.value.get("buffer_names")
    if not isinstance(names, list):
        raise CheckpointError(f"{file.where}: is no DeepSpeed save: it has no buffer_names")
    return _read_tensors(file, {n: module[n] for n in names if isinstance(n, str) and n in module})


def _read_shapes(groups: Any, file: TorchFile) -> list[dict[str, tuple[int, ...]]]:
    """Return names and shapes, group by group, in the order of the flat vectors."""
    for group in groups if isinstance(groups, list) else [None]:
        for name, shape in group.items() if isinstance(group, dict) else [(None, None)]:
            if not isinstance(name, str) or not is_shape(shape):
                raise CheckpointError(f"{file.where}: its param_shapes are no lists of shapes")
    return list(groups)


def _read_flat_groups(
    parts: Sequence[TorchFile], folder: Path
) -> tuple[list[list[_FlatVector]], bool]:
    """Return (each rank's flat vectors, whether parameters are partitioned one by one)."""
    found: list[list[_FlatVector]] = []
    keys: set[str] = set()
    for file in parts:
        state = file.value.get("optimizer_state_dict")
        state = state if isinstance(state, dict) else {}
        key = "fp32_flat_groups"
        key = key if key in state else "single_partition_of_fp32_groups"
        vectors, count = state.get(key), state.get("partition_count", len(parts))
        counts = count if isinstance(count, list) else [count]
        if any(one != len(parts) for one in counts):
            wrote = ", ".join(sorted({str(one) for one in counts}))
            raise CheckpointError(
                f"{folder}: {len(parts)} *_optim_states.pt, written by {shorten(wrote)} ranks; "
                f"try: copy those of all ranks, and no older ones"
            )
        flat = isinstance(vectors, list) and all(
            isinstance(one, InertTensor) and len(one.size) == 1 for one in vectors
        )
        if not vectors or not flat:
            raise CheckpointError(f"{file.where}: holds no flat fp32 weights under {key}")
        found.append([_FlatVector(file, one) for one in vectors])
        keys.add(key)
    dtypes = {part.tensor.dtype for vectors in found for part in vectors}
    if len(keys) > 1 or len({len(vectors) for vectors in found}) > 1 or len(dtypes) > 1:
        raise CheckpointError(f"{folder}: its ranks' *_optim_states.pt are not of one save")
    return found, keys == {"fp32_flat_groups"}


def _slice_vectors(parts: Sequence[_FlatVector], begin: int, end: int) -> list[Bytes]:
    """Return elements begin … end − 1 of consecutive vectors, as views."""
    found, start = [], 0
    for part in parts:
        low, high = max(begin - start, 0), min(end - start, part.elements)
        if low < high:
            found.append(part.file.view(part.tensor)[low:high])
        start += part.elements
    return found


def _join_pieces(
    shape: tuple[int, ...], width: int, cuts: Callable[[], list[Bytes]]
) -> Callable[[], Bytes]:
    """Return a function that reads a tensor from pieces: a view of a single one, else a copy."""

    def read() -> Bytes:
        pieces = cuts()
        if not pieces:
            return np.empty((*shape, width), np.uint8)
        return (pieces[0] if len(pieces) == 1 else np.concatenate(pieces)).reshape(*shape, width)

    return read


def _merge_flat_groups(
    ranks: list[list[_FlatVector]], groups: list[dict[str, tuple[int, ...]]], folder: Path
) -> dict[str, ForeignTensor]:
    """Split each group's vector over all ranks into its parameters (stages 1 and 2)."""
    if len(ranks[0]) != len(groups):
        raise CheckpointError(
            f"{folder}: {len(groups)} groups of names and {len(ranks[0])} of fp32 weights"
        )
    found: dict[str, ForeignTensor] = {}
    align = 2 * len(ranks)  # vectors are padded to a multiple of it
    for place, group in enumerate(groups):
        parts, begin = [rank[place] for rank in ranks], 0
        for name, shape in group.items():
            end = begin + math.prod(shape)
            dtype = parts[0].tensor.dtype
            cuts = partial(_slice_vectors, parts, begin, end)
            found[name] = ForeignTensor(dtype, shape, _join_pieces(shape, DTYPES[dtype][1], cuts))
            begin = end
        have = sum(part.elements for part in parts)
        if have < begin or -(-have // align) != -(-begin // align):
            raise CheckpointError(
                f"{folder}: group {place} has {begin} elements by its shapes and {have} in the "
                f"ranks' parts"
            )
    return found


def _merge_partitions(
    ranks: list[list[_FlatVector]], shapes: dict[str, tuple[int, ...]], folder: Path
) -> dict[str, ForeignTensor]:
    """Merge every parameter from one equal partition per rank (stage 3)."""
    found: dict[str, ForeignTensor] = {}
    begin = 0
    for name, shape in shapes.items():
        count = math.prod(shape)
        each = -(-count // len(ranks))
        dtype = ranks[0][0].tensor.dtype
        found[name] = ForeignTensor(
            dtype,
            shape,
            _join_pieces(
                shape, DTYPES[dtype][1], partial(_collect_partitions, ranks, begin, each, count)
            ),
        )
        begin += each
    for rank, parts in enumerate(ranks):
        have = sum(part.elements for part in parts)
        if have != begin:
            raise CheckpointError(
                f"{folder}: rank {rank} holds {have} elements, the shapes ask for {begin}"
            )
    return found


def _collect_partitions(
    ranks: list[list[_FlatVector]], begin: int, each: int, count: int
) -> list[Bytes]:
    """Return each rank's partition of one parameter, without the padding of the last ones."""
    found: list[Bytes] = []
    for rank, parts in enumerate(ranks):
        found += _slice_vectors(parts, begin, begin + max(min(each, count - rank * each), 0))
    return found


def _merge_frozen(
    states: Sequence[TorchFile], fragments: Sequence[Any], shapes: dict[str, tuple[int, ...]]
) -> dict[str, ForeignTensor]:
    """Merge frozen parameters from each rank's partition (stage 3)."""
    found: dict[str, ForeignTensor] = {}
    for name, shape in shapes.items():
        held = [one.get(name) if isinstance(one, dict) else None for one in fragments]
        tensors = [one for one in held if isinstance(one, InertTensor) and len(one.size) == 1]
        count, each = math.prod(shape), -(-math.prod(shape) // len(states))
        if len(tensors) != len(states) or any(one.size != (each,) for one in tensors):
            raise CheckpointError(
                f"{states[0].where}: {name}, which is frozen, is not in {each} elements on every "
                f"rank"
            )
        ranks = [[_FlatVector(file, one)] for file, one in zip(states, tensors, strict=True)]
        dtype = tensors[0].dtype
        cuts = partial(_collect_partitions, ranks, 0, each, count)
        found[name] = ForeignTensor(dtype, shape, _join_pieces(shape, DTYPES[dtype][1], cuts))
    return found
