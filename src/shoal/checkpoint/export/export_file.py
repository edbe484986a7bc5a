"""Turns a checkpoint of any layout into one safetensors file that other tools open as a model.

Shards are merged tensor by tensor, so memory holds one whole tensor at a time, and every slice is
verified on the way. Tied weights are written once; the file's metadata says alias → stored name,
as `safetensors.torch.save_model` does, beside `format = pt`, which transformers asks for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.base.errors import CheckpointError
from shoal.base.plans.tensor_shards import Shard
from shoal.checkpoint.format import folders
from shoal.checkpoint.format.checkpoint_faults import shown
from shoal.checkpoint.format.listing import read_manifest
from shoal.checkpoint.format.manifest import Manifest
from shoal.checkpoint.format.safetensors_file import Entry, write_file
from shoal.checkpoint.load.read import load_from
from shoal.wire.phases import Phase, phase

AVERAGE = "average."


@dataclass(frozen=True)
class Outgoing:
    """The tensors of a checkpoint that leave it.

    Attributes:
        names: name outside → name in the checkpoint.
        aliases: tied name → name outside, both short.
        entries: of `names`, as a safetensors file wants them, in the checkpoint's order.

    `reader(told)` gives a function that reads a tensor's verified bytes, one step of `told` each
    """

    path: Path
    manifest: Manifest
    names: dict[str, str]
    aliases: dict[str, str]

    @property
    def entries(self) -> list[Entry]:
        """Key, dtype and shape of every tensor."""
        stored = {short: self.manifest.tensors[name] for short, name in self.names.items()}
        return [Entry(short, one.dtype, one.shape) for short, one in stored.items()]

    def reader(self, told: Phase) -> Callable[[str], memoryview]:
        """A function from a short name to the whole tensor's bytes. Errors of it: Damaged."""

        def data_of(short: str) -> memoryview:
            name = self.names[short]
            tensor = self.manifest.tensors[name]
            whole = Shard.whole(name, tensor.shape, tensor.dtype)
            data = load_from(self.path, self.manifest, [whole])[name]
            told.step()
            return data.view(-1).view(torch.uint8).numpy().data

        return data_of


def outgoing(path: Path, prefix: str = "model.", *, average: bool = False) -> Outgoing:
    """Find the tensors of a checkpoint whose names start with `prefix`, to be written without it.

    Args:
        average: averaged weights in the place of those that were stepped; what is not averaged
            (buffers, frozen weights) as it is.

    Raises:
        CheckpointError: when no tensor has the prefix, there are no averages, or for a format
            version of another Shoal; Damaged for a manifest that is not as it was written.
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
    if average:
        if not any(name.startswith(AVERAGE) for name in manifest.tensors):
            raise CheckpointError(
                f"{shown(path)}: holds no averaged weights, which a run keeps where "
                f"optimizer.average (average= of parallelize) is above 0; try: the same "
                f"without --average"
            )
        averaged = {short: AVERAGE + short for short in names}
        names |= {short: name for short, name in averaged.items() if name in manifest.tensors}
    aliases = {
        alias.removeprefix(prefix): name.removeprefix(prefix)
        for alias, name in manifest.aliases.items()
        if alias.startswith(prefix) and name.startswith(prefix)
    }
    return Outgoing(path, manifest, names, aliases)


def export(path: Path, out_file: Path, prefix: str = "model.", *, average: bool = False) -> int:
    """Write a checkpoint's tensors whose names start with `prefix` as one safetensors file.

    Tensors are whole, verified, and named without the prefix; tied weights are written once, the
    file's metadata says alias → name.

    Args:
        path: a checkpoint folder.
        out_file: replaced only once the new file is complete.
        average: as `outgoing` takes it.

    Returns:
        the file's size in bytes.

    Raises:
        Damaged where bytes are not those that were saved; as `outgoing`; OSError.
    """
    found = outgoing(path, prefix, average=average)
    half = out_file.with_name(f"{out_file.name}.tmp-{os.getpid()}")
    try:
        with phase("export", of=len(found.names)) as told:
            metadata = {**found.aliases, "format": "pt"}
            written = write_file(half, found.entries, found.reader(told), metadata)
        os.replace(half, out_file)
    finally:
        half.unlink(missing_ok=True)
    folders.fsync_folder(out_file.parent)
    return written.size_bytes
