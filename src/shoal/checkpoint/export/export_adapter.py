"""Export the adapter of a checkpoint as a folder that peft opens.

    adapter_config.json · adapter_model.safetensors · the tokenizer, from the run folder's hub/

It is written to a temporary folder beside `out`, then renamed, as all exported folders.
Source    peft, utils/save_and_load.py: which tensors are an adapter's, and what their file calls
          them; both stand in the checkpoint's record since the save
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from shoal.base.errors import CheckpointError
from shoal.checkpoint.export.export_file import select_tensors
from shoal.checkpoint.export.export_folder import ExportResult, copy_hub_files, replaced_folder
from shoal.checkpoint.export.export_target import MARK, check_target
from shoal.checkpoint.format.hub_folder import (
    ADAPTER,
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    HUB,
    TOKENIZER_FILES,
    tokenizer_hub,
)
from shoal.checkpoint.format.safetensors_file import write_file
from shoal.wire.phases import phase


def export_adapter(path: Path, out: Path, *, average: bool = False) -> ExportResult:
    """Write the adapter of a checkpoint as a folder for `PeftModel.from_pretrained`.

    Args:
        path: a checkpoint folder, `RUN/checkpoints/step-N`.
        out: replaced once the new folder is complete.
        average: export averaged weights, as in `select_tensors`.

    Raises:
        CheckpointError: the model has no adapters.
        ConfigError: `out` holds anything but an earlier export.
        Damaged, OSError: as `export`.
    """
    out = Path(os.path.realpath(out))
    check_target(out)
    found = select_tensors(path, average=average)
    names = found.manifest.record.get(ADAPTER)
    config = path.parent.parent / HUB / ADAPTER_CONFIG
    if not names or not config.is_file():
        raise CheckpointError(
            f"{path}: its model has no adapter of peft; try: the same without --adapter"
        )
    found = replace(found, names={short: found.names[full] for short, full in names.items()})
    with replaced_folder(out) as half:
        with phase("export", of=len(found.names)) as told:
            metadata = {**MARK, "format": "pt"}
            written = write_file(
                half / ADAPTER_WEIGHTS, found.entries, found.make_reader(told), metadata
            )
        copy_hub_files(config.parent, half, (ADAPTER_CONFIG,))
        copy_hub_files(tokenizer_hub(path), half, TOKENIZER_FILES)
    return ExportResult(written.size_bytes, tuple(sorted(os.listdir(out))))
