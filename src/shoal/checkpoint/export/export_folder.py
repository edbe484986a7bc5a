"""Export a checkpoint of any layout as a folder that `from_pretrained` of transformers opens.

    model.safetensors, or model-0000i-of-0000n.safetensors and model.safetensors.index.json
    config.json, generation_config.json, tokenizer.json, …     from the run folder's hub/, if there

Memory holds one whole tensor at a time. The folder is written to `NAME.tmp-<id>` and renamed, so
a crash leaves the old folder as it was and, at most, a temporary one. It may replace nothing, an
empty folder, or an earlier export, recognised by its files' names and by a mark in the headers of
its weights.

Source    transformers 5, modeling_utils.py: names of the files, the index, and ties, which
          `from_pretrained` restores whichever of the tied names is stored
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.checkpoint.export.export_file import ExportTensors, select_tensors
from shoal.checkpoint.export.export_target import INDEX, MARK, check_target
from shoal.checkpoint.format import folders
from shoal.checkpoint.format.hub_folder import (
    CONFIG,
    CONFIGS,
    HUB,
    TOKENIZER_FILES,
    TRANSFORMERS,
    UNTOLD_TIES,
    tokenizer_hub,
)
from shoal.checkpoint.format.safetensors_file import TensorEntry, write_file
from shoal.wire.phases import phase

SHARD_BYTES = 5 * 10**9
"""Largest file of weights, unless one tensor is larger: the limit of the Hugging Face hub."""


@dataclass(frozen=True)
class HubTranslation:
    """Names and config.json that turn one of Shoal's own models into one of transformers.

    Attributes:
        name_of: Shoal's name of a tensor → the name in transformers.
        config: of transformers, as JSON.
    """

    name_of: Callable[[str], str]
    config: Mapping[str, Any]


@dataclass(frozen=True)
class ExportResult:
    """Result of an export: bytes of the weights, names of all files."""

    size_bytes: int
    files: tuple[str, ...]

    @property
    def has_config(self) -> bool:
        """Return whether the folder has the config.json that `from_pretrained` needs."""
        return CONFIG in self.files


def export_folder(
    path: Path,
    out: Path,
    *,
    average: bool = False,
    translated: HubTranslation | None = None,
    merged: ExportTensors | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> ExportResult:
    """Write the model of a checkpoint as a folder of safetensors, configuration and tokenizer.

    Args:
        path: a checkpoint folder, `RUN/checkpoints/step-N`.
        out: the folder, replaced only once the new one is complete.
        average: export averaged weights, as in `select_tensors`.
        merged: tensors to write instead, where adapters were merged into the checkpoint's.
        translated: for a model of Shoal's own that transformers has too.
        shard_bytes: the largest file of weights, unless a single tensor is larger.

    Raises:
        ConfigError: `out` holds anything but an earlier export.
        Damaged, CheckpointError: as `export`.
        OSError: the folder cannot be written.
    """
    out = Path(os.path.realpath(out))  # a symlink stays; its target is replaced
    check_target(out)
    found = merged or select_tensors(path, average=average)
    if translated is not None:
        found = _rename_tensors(found, translated.name_of)
    with replaced_folder(out) as half:
        size_bytes = _write_weights(half, found, shard_bytes)
        _write_companion_files(half, path, found, translated)
    return ExportResult(size_bytes, tuple(sorted(os.listdir(out))))


def _rename_tensors(found: ExportTensors, name_of: Callable[[str], str]) -> ExportTensors:
    names = {name_of(short): full for short, full in found.names.items()}
    ties = {name_of(alias): name_of(short) for alias, short in found.aliases.items()}
    return replace(found, names=names, aliases=ties)


def _write_weights(folder: Path, found: ExportTensors, shard_bytes: int) -> int:
    """Write the files of weights, and their index where there are several; return their bytes."""
    untold = found.manifest.record.get(TRANSFORMERS, {}).get(UNTOLD_TIES, [])
    twice = {alias: found.names[found.aliases[alias]] for alias in untold if alias in found.aliases}
    found = replace(found, names={**found.names, **twice})
    ties = {alias: name for alias, name in found.aliases.items() if alias not in twice}
    shards = _split_into_shards(found.entries, shard_bytes)
    size_bytes, places = 0, dict[str, str]()
    with phase("export", of=len(found.names)) as told:
        for number, entries in enumerate(shards, start=1):
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            if len(shards) == 1:
                name = "model.safetensors"
            metadata = {**ties, **MARK, "format": "pt"}
            written = write_file(folder / name, entries, found.make_reader(told), metadata)
            size_bytes += written.size_bytes
            places |= {entry.key: name for entry in entries}
    if len(shards) > 1:
        total_bytes = sum(entry.size_bytes for entries in shards for entry in entries)
        index = {
            "metadata": {"total_size": total_bytes},
            "weight_map": dict(sorted(places.items())),
        }
        _write_json(folder / INDEX, index)
    return size_bytes


def _split_into_shards(entries: Sequence[TensorEntry], shard_bytes: int) -> list[list[TensorEntry]]:
    """Split the tensors, in order, into files of at most `shard_bytes`, or of one larger tensor.

    >>> sizes = {"a": 6, "b": 2, "c": 2, "d": 9}
    >>> entries = [TensorEntry(name, "uint8", (size,)) for name, size in sizes.items()]
    >>> [[entry.key for entry in shard] for shard in _split_into_shards(entries, 8)]
    [['a', 'b'], ['c'], ['d']]
    """
    shards: list[list[TensorEntry]] = [[]]
    size_bytes = 0
    for entry in entries:
        if shards[-1] and size_bytes + entry.size_bytes > shard_bytes:
            shards.append([])
            size_bytes = 0
        shards[-1].append(entry)
        size_bytes += entry.size_bytes
    return shards


def _write_companion_files(
    folder: Path, path: Path, found: ExportTensors, translated: HubTranslation | None
) -> None:
    """Write the configuration with the weights' dtype, and the tokenizer."""
    dtype = _widest_dtype(found.entries)
    configs = CONFIGS if TRANSFORMERS in found.manifest.record else ()  # else of another model
    copy_hub_files(tokenizer_hub(path), folder, TOKENIZER_FILES)
    copy_hub_files(path.parent.parent / HUB, folder, configs)
    config = translated.config if translated is not None else None
    if config is None and (folder / CONFIG).exists():
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if config is not None:
        _write_json(folder / CONFIG, _set_dtype(config, dtype))


def copy_hub_files(hub: Path, folder: Path, names: Sequence[str]) -> None:
    """Copy those of the named files that a run's hub/ has, and fsync them."""
    for name in names:
        source = hub / name
        if source.is_file() and not source.is_symlink():  # no link out of the run folder
            shutil.copyfile(source, folder / name)
            _make_durable(folder / name)


def _widest_dtype(entries: Sequence[TensorEntry]) -> str:
    """Return the widest floating dtype of some tensors: every tensor converts to it without loss.

    >>> _widest_dtype(
    ...     [
    ...         TensorEntry("a", "bfloat16", ()),
    ...         TensorEntry("b", "float16", ()),
    ...         TensorEntry("c", "int64", ()),
    ...     ]
    ... )
    'float32'
    """
    found = {entry.dtype for entry in entries} & {"bfloat16", "float16", "float32", "float64"}
    if len(found) == 1:
        return found.pop()
    return "float64" if "float64" in found else "float32"


def _set_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the configuration with the dtype in which `from_pretrained` reads the weights.

    >>> _set_dtype({"model_type": "x", "torch_dtype": "bfloat16"}, "float32")
    {'dtype': 'float32', 'model_type': 'x'}
    """
    changed: dict[str, Any] = {"dtype": dtype}
    for key, value in config.items():
        part = isinstance(value, dict) and "model_type" in value
        if key not in ("dtype", "torch_dtype"):
            changed[key] = _set_dtype(value, dtype) if part else value
    return changed


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _make_durable(path)


def _make_durable(path: Path) -> None:
    with path.open("rb") as written:
        os.fsync(written.fileno())


@contextmanager
def replaced_folder(out: Path) -> Iterator[Path]:
    """Give a new folder to fill, which takes the place of `out` when the context ends.

    An exception leaves `out` as it was.
    """
    half = folders.make_temporary_path(out)
    half.mkdir()
    try:
        yield half
        folders.fsync_folder(half)
        _replace_folder(half, out)
    finally:
        shutil.rmtree(half, ignore_errors=True)


def _replace_folder(half: Path, out: Path) -> None:
    """Rename a complete folder to `out`, in place of an earlier export or an empty folder."""
    if not out.is_dir():
        os.rename(half, out)
    else:
        earlier = folders.make_temporary_path(out)
        os.rename(out, earlier)
        try:
            os.rename(half, out)
        except OSError:
            os.rename(earlier, out)
            raise
        shutil.rmtree(earlier, ignore_errors=True)
    folders.fsync_folder(out.parent)
