"""Turns a checkpoint of any layout into one safetensors file that other tools open as a model.

Shards are merged tensor by tensor, so memory holds one whole tensor at a time, and every slice is
verified on the way. Tied weights are written once; the file's metadata says alias → stored name,
as `safetensors.torch.save_model` does, beside `format = pt`, which transformers asks for.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from shoal.base.errors import CheckpointError
from shoal.base.phases import phase
from shoal.base.shards import Shard
from shoal.checkpoint import folders
from shoal.checkpoint.faults import shown
from shoal.checkpoint.listing import read_manifest
from shoal.checkpoint.read import load_from
from shoal.checkpoint.tensorfile import Entry, write_file


def export(path: Path, out_file: Path, prefix: str = "model.") -> int:
    """Write a checkpoint's tensors whose names start with `prefix` as one safetensors file.

    Tensors are whole, verified, and named without the prefix; tied weights are written once, the
    file's metadata says alias → name.

    path       a checkpoint folder · out_file  replaced only once the new file is complete
    Gives      the file's size in bytes
    Errors     Damaged where bytes are not those that were saved; CheckpointError when no tensor has
               the prefix, or for a format version of another Shoal; OSError
    """
    manifest = read_manifest(path)
    names = {
        name.removeprefix(prefix): name for name in manifest.tensors if name.startswith(prefix)
    }
    if not names:
        firsts = sorted({name.split(".")[0] + "." for name in manifest.tensors})
        raise CheckpointError(
            f"{shown(path)}: no tensor's name starts with {prefix!r}; names here start with "
            f"{', '.join(firsts) or 'nothing: it is empty'}"
        )
    metadata = {
        alias.removeprefix(prefix): name.removeprefix(prefix)
        for alias, name in manifest.aliases.items()
        if alias.startswith(prefix) and name.startswith(prefix)
    }
    stored = {short: manifest.tensors[name] for short, name in names.items()}

    def data_of(short: str) -> memoryview:
        tensor, name = stored[short], names[short]
        whole = Shard.whole(name, tensor.shape, tensor.dtype)
        data = load_from(path, manifest, [whole])[name]
        told.step()
        return data.view(-1).view(torch.uint8).numpy().data

    entries = [Entry(short, tensor.dtype, tensor.shape) for short, tensor in stored.items()]
    half = out_file.with_name(f"{out_file.name}.tmp-{os.getpid()}")
    try:
        with phase("export", of=len(entries)) as told:
            written = write_file(half, entries, data_of, {**metadata, "format": "pt"})
        os.replace(half, out_file)
    finally:
        half.unlink(missing_ok=True)
    folders.fsync_folder(out_file.parent)
    return written.size_bytes
