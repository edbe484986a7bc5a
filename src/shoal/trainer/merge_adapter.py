"""Merge a checkpoint's adapters into the layers of their base model, with peft's own arithmetic.

The whole model is in memory, once. The run's hub/ must hold config.json and adapter_config.json,
which every save of a transformers model with adapters writes there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shoal.base.errors import CheckpointError
from shoal.checkpoint.export.export_file import ExportTensors, select_tensors
from shoal.checkpoint.format.hub_folder import ADAPTER, ADAPTER_CONFIG, CONFIG, HUB
from shoal.checkpoint.format.safetensors_file import TensorEntry
from shoal.wire.phases import phase


@dataclass(frozen=True)
class MergedAdapterExport(ExportTensors):
    """Tensors to export from a checkpoint with its adapters merged, in the base model's names."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def entries(self) -> list[TensorEntry]:
        """Return key, dtype and shape of every tensor."""
        found = ((n, self.tensors[full]) for n, full in self.names.items())
        return [
            TensorEntry(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in found
        ]

    def read_tensor(self, short: str) -> torch.Tensor:
        """Return a merged tensor by its exported name."""
        return self.tensors[self.names[short]]


@torch.no_grad()
def merge_adapters(path: Path, *, average: bool = False) -> MergedAdapterExport | None:
    """Merge the adapters of a checkpoint; return None for a model without adapters.

    Args:
        path: the checkpoint's folder.
        average: use the averaged weights, as in `select_tensors`.

    Raises:
        CheckpointError: the base model below the adapters is no transformers model.
    """
    found = select_tensors(path, average=average)
    if ADAPTER not in found.manifest.record:
        return None
    hub = path.parent.parent / HUB
    if not (hub / CONFIG).is_file() or not (hub / ADAPTER_CONFIG).is_file():
        raise CheckpointError(
            f"{path}: keeps no {CONFIG} of the model beneath its adapters, so they cannot be "
            f"merged; try: the same with --adapter"
        )
    with phase("import"):
        import transformers
        from peft import PeftConfig, PeftModel
    config = transformers.AutoConfig.from_pretrained(hub, local_files_only=True)
    kind: Any = getattr(transformers, config.architectures[0])
    adapted: Any = PeftModel(kind(config), PeftConfig.from_pretrained(str(hub)))
    here = adapted.state_dict(keep_vars=True)
    unlike = sorted((found.names.keys() | found.aliases.keys()) ^ here.keys())
    if unlike:
        raise CheckpointError(
            f"{path}: {unlike[0]} is not as in the model of {hub / CONFIG} with the adapters of "
            f"{ADAPTER_CONFIG}; try: the same with --adapter, or one file of weights"
        )
    adapted.to(_most_common_dtype(found))
    with phase("read", of=len(found.names)) as told:
        for short in found.names:
            here[short].copy_(found.read_tensor(short))
            told.step()
    whole_model = adapted.merge_and_unload()
    tensors: dict[str, torch.Tensor] = whole_model.state_dict()
    firsts: dict[int, str] = {}
    aliases = {}
    for name, tensor in tensors.items():
        first = firsts.setdefault(tensor.data_ptr() if tensor.numel() else id(tensor), name)
        if first != name:
            aliases[name] = first
    names = {name: name for name in tensors if name not in aliases}
    return MergedAdapterExport(found.path, found.manifest, names, aliases, tensors)


def _most_common_dtype(found: ExportTensors) -> torch.dtype:
    """Return the dtype that most weights of the checkpoint have."""
    kinds = [entry.dtype for entry in found.entries]
    return getattr(torch, max(set(kinds), key=kinds.count))
