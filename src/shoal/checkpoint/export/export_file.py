"""Export a checkpoint of any layout as one safetensors file that other tools open as a model.

Shards are merged tensor by tensor, so memory holds one whole tensor at a time, and every slice is
verified on the way. Tied weights are written once. The file's metadata maps alias → stored name,
as `safetensors.torch.save_model` does, and has `format = pt`, which transformers requires.
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
from shoal.checkpoint.format.checkpoint_faults import short_path
from shoal.checkpoint.format.listing import read_manifest
from shoal.checkpoint.format.manifest import Manifest
from shoal.checkpoint.format.safetensors_file import TensorEntry, write_file
from shoal.checkpoint.load.read import load_from
from shoal.wire.phases import Phase, phase

AVERAGE = "average."


@dataclass(frozen=True)
class ExportTensors:
    """Tensors of a checkpoint that an export writes.

    `reader(told)` returns a function that reads a tensor's verified bytes, one step of `told` each.

    Attributes:
        names: exported name → name in the checkpoint.
        aliases: tied name → exported name, both without the prefix.
        entries: of `names`, as a safetensors file wants them, in the checkpoint's order.
    """

    path: Path
    manifest: Manifest
    names: dict[str, str]
    aliases: dict[str, str]

    @property
    def entries(self) -> list[TensorEntry]:
        """Key, dtype and shape of every tensor."""
        stored = {short: self.manifest.tensors[name] for short, name in self.names.items()}
        return [TensorEntry(short, one.dtype, one.shape) for short, one in stored.items()]

    def read_tensor(self, short: str) -> torch.Tensor:
        """Return a whole tensor by its exported name; may raise Damaged."""
        name = self.names[short]
        tensor = self.manifest.tensors[name]
        whole = Shard.whole(name, tensor.shape, tensor.dtype)
        return load_from(self.path, self.manifest, [whole])[name]

    def make_reader(self, told: Phase) -> Callable[[str], memoryview]:
        """Return a function from an exported name to a tensor's bytes; it may raise Damaged."""

        def data_of(short: str) -> memoryview:
            tensor = self.read_tensor(short).contiguous()
            told.step()
            return tensor.view(-1).view(torch.uint8).numpy().data

        return data_of


def select_tensors(path: Path, prefix: str = "model.", *, average: bool = False) -> ExportTensors:
    """Select the tensors of a checkpoint whose names start with `prefix`, to be written without it.

    Args:
        average: take the averaged weights instead of the stepped ones; tensors without an average
            (buffers, frozen weights) as they are.

    Raises:
        CheckpointError: no tensor has the prefix, there are no averages, or the format's version is
            another Shoal's.
        Damaged: the manifest differs from the one that was written.
    """
    manifest = read_manifest(path)
    names = {
        name.removeprefix(prefix): name for name in manifest.tensors if name.startswith(prefix)
    }
    if not names:
        firsts = sorted({name.split(".")[0] + "." for name in manifest.tensors})
        raise CheckpointError(
            f"{short_path(path)}: no tensor's name starts with {prefix!r}; names here start with "
            f"{', '.join(firsts) or 'nothing: it is empty'}"
        )
    if average:
        if not any(name.startswith(AVERAGE) for name in manifest.tensors):
            raise CheckpointError(
                f"{short_path(path)}: holds no averaged weights, which a run keeps where "
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
    return ExportTensors(path, manifest, names, aliases)


def export_file(
    path: Path, out_file: Path, prefix: str = "model.", *, average: bool = False
) -> int:
    """Write a checkpoint's tensors whose names start with `prefix` as one safetensors file.

    Tensors are whole, verified, and named without the prefix. Tied weights are written once: the
    file's metadata maps alias → name.

    Args:
        path: a checkpoint folder.
        out_file: replaced only once the new file is complete.
        average: export averaged weights, as in `select_tensors`.

    Returns:
        The file's size in bytes.

    Raises:
        Damaged: bytes differ from those that were saved.
        CheckpointError: as `select_tensors`.
        OSError: the file cannot be written.
    """
    found = select_tensors(path, prefix, average=average)
    half = out_file.with_name(f"{out_file.name}.tmp-{os.getpid()}")
    try:
        with phase("export", of=len(found.names)) as told:
            metadata = {**found.aliases, "format": "pt"}
            written = write_file(half, found.entries, found.make_reader(told), metadata)
        os.replace(half, out_file)
    finally:
        half.unlink(missing_ok=True)
    folders.fsync_folder(out_file.parent)
    return written.size_bytes
