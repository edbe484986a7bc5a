"""Import weights of other tools into one safetensors file, bit for bit, under their own names.

The kind of folder is recognised by its files. The new folder is like that of `checkpoint export`:
model.safetensors, with the configuration and the tokenizer if the source has them, so that
`model.name=hf:FOLDER` trains from it. Tensors are written one after another: at most one is whole
in memory, beside the mapped files. Tied weights are written once; the file's metadata maps
alias → stored name.

Nothing of the source is ever executed (`pickle_reader.py`). No more bytes are written than the
source has, although a file can name one tensor many times over.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal.base.errors import CheckpointError, ConfigError
from shoal.checkpoint.foreign.deepspeed_zero import TAGGED, find_tag_folder, read_deepspeed
from shoal.checkpoint.foreign.foreign_weights import (
    ForeignWeights,
    check_formats,
    drop_tied_names,
    read_file,
    read_hub_folder,
    select_part,
    strip_wrappers,
)
from shoal.checkpoint.foreign.torch_dcp import METADATA, read_dcp
from shoal.checkpoint.format import folders
from shoal.checkpoint.format.manifest import FILE_NAME
from shoal.checkpoint.format.safetensors_file import TensorEntry, write_file
from shoal.wire.phases import phase

WEIGHTS = "model.safetensors"

SAFE = (WEIGHTS, "model.safetensors.index.json")
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Names of transformers' weights, the one file first."""

BESIDE = (
    "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model",
    "spiece.model",
)  # fmt: skip
"""Files copied with the weights: data of transformers' own formats, no code."""


@dataclass(frozen=True)
class ImportResult:
    """Result of an import.

    Attributes:
        kind: of the source.
        said: lines on tensors that were left out or renamed.
        beside: names of the files that were copied.
    """

    file: Path
    size_bytes: int
    tensors: int
    kind: str
    said: list[str]
    beside: list[str]


def import_weights(source: Path, folder: Path, key: str = "") -> ImportResult:
    """Write the weights in `source` as `folder`/model.safetensors, with their configuration.

    Args:
        source: a folder of transformers, DCP or DeepSpeed, or a file of safetensors or torch.save.
        folder: made if it is not there; nothing in it is replaced.
        key: the part of `source` that is the model, where it holds several.

    Raises:
        CheckpointError: the source has no weights, is damaged, or claims more bytes than it has.
        ConfigError: the folder has weights already.
        OSError: the file cannot be written.
    """
    _check_folder(source, folder)
    found = drop_tied_names(strip_wrappers(inspect_weights(source, key)))
    check_formats(found)
    claimed = sum(tensor.size_bytes for tensor in found.tensors.values())
    there = sum(path.stat().st_size for path in found.files)
    if claimed > there:
        raise CheckpointError(
            f"{source}: its tensors have {claimed} bytes by their shapes, its files {there}; "
            f"try: save each tensor once, by clone()"
        )
    folder.mkdir(exist_ok=True)
    try:
        folders.check_space(folder, claimed)
    except CheckpointError as failure:
        raise CheckpointError(f"{folder}: {failure}") from None
    entries = [TensorEntry(n, t.dtype, t.shape) for n, t in found.tensors.items()]
    file, half = folder / WEIGHTS, folder / f"{WEIGHTS}.tmp-{os.getpid()}"

    def data_of(name: str) -> memoryview:
        told.step()
        return np.ascontiguousarray(found.tensors[name].read()).reshape(-1).data

    try:
        with phase("import", of=len(entries)) as told:
            written = write_file(half, entries, data_of, {**found.aliases, "format": "pt"})
        os.replace(half, file)
    finally:
        half.unlink(missing_ok=True)
    beside = _copy_companion_files(source, folder)
    folders.fsync_folder(folder)
    return ImportResult(file, written.size_bytes, len(entries), found.kind, found.said, beside)


def inspect_weights(source: Path, key: str = "") -> ForeignWeights:
    """List the weights in a file or folder, without reading their bytes.

    Raises:
        CheckpointError: there are none; the message names the nearest folder that has some.
    """
    if source.is_file():
        return read_file(source, key)
    kinds = detect_kinds(source)
    if len(kinds) > 1:
        tagged = find_tag_folder(source)
        near = tagged if tagged not in (None, source) else source / kinds[0]
        raise CheckpointError(f"{source}: holds {' and '.join(kinds)}; try: {near}")
    if not kinds:
        raise CheckpointError(f"{source}: {_describe_missing_weights(source)}")
    if kinds[0] == METADATA:
        return read_dcp(source, key)
    tagged = find_tag_folder(source)
    if tagged is not None:
        return select_part(read_deepspeed(tagged), key)
    return select_part(read_hub_folder(source, source / kinds[0]), key)


def detect_kinds(folder: Path) -> list[str]:
    """Return the files that identify a folder of weights; several if it holds several saves."""
    hub = [name for name in (*SAFE, *PICKLED) if (folder / name).is_file()][:1]
    dcp = [METADATA] if (folder / METADATA).is_file() else []
    tagged = find_tag_folder(folder) if folder.is_dir() else None
    saves = {None: [], folder: [TAGGED]}.get(tagged, [f"{tagged and tagged.name}/{TAGGED}"])
    return hub + dcp + saves


def _describe_missing_weights(source: Path) -> str:
    """Return the message for a folder without weights, and the nearest folder with some."""
    if not source.is_dir():
        return "there is no such file or folder"
    if (source / "checkpoints").is_dir() or (source / FILE_NAME).is_file():
        export = f"shoal checkpoint export {source} {source.name}-exported"
        return f"is of a run of Shoal; try: {export}"
    inner = [path for path in sorted(source.iterdir()) if path.is_dir() and detect_kinds(path)]
    files = [path for path in sorted(source.iterdir()) if path.suffix in (".pt", ".pth", ".bin")]
    near = [*inner, *files]
    hint = (
        f"try: {near[0]}"
        if near
        else "what is looked for: " + ", ".join((*SAFE, PICKLED[0], METADATA, TAGGED))
    )
    return f"holds no weights; {hint}"


def _check_folder(source: Path, folder: Path) -> None:
    """Refuse a target folder that cannot take the weights.

    Raises:
        ConfigError: the folder is a file, has no parent, or has weights already.
    """
    if folder.exists() and not folder.is_dir():
        near = folder.with_suffix("") if folder.suffix else folder.parent
        raise ConfigError(f"{folder}: is a file; a folder is written; try: {near}")
    if not folder.parent.is_dir():
        raise ConfigError(f"{folder}: there is no folder {folder.parent}; try: mkdir -p it")
    held = [name for name in SAFE if (folder / name).exists()]
    if held:
        raise ConfigError(f"{folder}: has {held[0]} already; try: a new folder")
    inside = source if source.is_dir() else source.parent
    if folder.is_dir() and folder.resolve() != inside.resolve():
        held = [name for name in BESIDE if (folder / name).exists()]
        if held and any((inside / name).is_file() for name in BESIDE):
            raise ConfigError(f"{folder}: has {held[0]} of another model; try: a new folder")


def _copy_companion_files(source: Path, folder: Path) -> list[str]:
    """Copy the configuration and the tokenizer from the source or, for one save, its parent.

    Returns:
        The names of those files that the target folder has in the end.
    """
    inside = source if source.is_dir() else source.parent
    for root in (inside, inside.parent) if find_tag_folder(inside) == inside else (inside,):
        for name in BESIDE:
            if (root / name).is_file() and not (folder / name).exists():
                shutil.copyfile(root / name, folder / name)
    return [name for name in BESIDE if (folder / name).is_file()]
