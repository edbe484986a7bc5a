"""Check of the folder that an export may replace: none yet, empty, or an earlier export."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from shoal.base.errors import ConfigError
from shoal.checkpoint.format.hub_folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONFIGS,
    TOKENIZER_FILES,
)
from shoal.checkpoint.format.safetensors_file import LENGTH_BYTES, METADATA

INDEX = "model.safetensors.index.json"
WEIGHTS = re.compile(
    rf"model(-[0-9]{{5}}-of-[0-9]{{5}})?\.safetensors|{re.escape(ADAPTER_WEIGHTS)}"
)
MARK = {"written_by": "shoal checkpoint export"}
"""Metadata of every file of weights in an exported folder."""


def check_target(out: Path) -> None:
    """Refuse a file, or a folder that an export must not replace.

    Raises:
        ConfigError: `out` is a file, or a folder that holds anything but an earlier export.
    """
    if out.is_file():
        raise ConfigError(f"{out}: is a file; try: {out}.safetensors for one file of weights")
    if not out.is_dir():
        return
    names = sorted(os.listdir(out))
    known = {INDEX, *CONFIGS, ADAPTER_CONFIG, *TOKENIZER_FILES}
    strange = [name for name in names if name not in known and not WEIGHTS.fullmatch(name)]
    weights = [name for name in names if WEIGHTS.fullmatch(name)]
    strange += [name for name in weights if not _has_export_mark(out / name)]
    if names and (strange or not weights):
        raise ConfigError(
            f"{out}: holds {(strange or names)[0]}, which no export wrote, and would be replaced "
            f"whole; try: a folder that is new, empty or an earlier export"
        )


def _has_export_mark(file: Path) -> bool:
    """Return whether the header of a weights file carries the mark of an export."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
            if length > file.stat().st_size:
                return False
            metadata = json.loads(opened.read(length))[METADATA]
        return all(metadata.get(key) == value for key, value in MARK.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
