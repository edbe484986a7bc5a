"""Names of the files in a folder of transformers, as `from_pretrained` reads it."""

from __future__ import annotations

from pathlib import Path

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
"""File names of the weights: one file, or the index of several."""
TOKENIZER = "tokenizer.json"


def has_weights(folder: Path) -> bool:
    """Return whether a folder holds weights as safetensors."""
    return any((folder / name).is_file() for name in WEIGHTS)
