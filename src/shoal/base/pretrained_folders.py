"""Names of the files in a folder of transformers, as `from_pretrained` reads it."""

from __future__ import annotations

from pathlib import Path

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
"""File names of the weights: one file, or the index of several."""
TOKENIZER = "tokenizer.json"


HF = "hf:"
"""Prefix of a `model.name` that is the path of a transformers model."""


def has_weights(folder: Path) -> bool:
    """Return whether a folder holds weights as safetensors."""
    return any((folder / name).is_file() for name in WEIGHTS)


def pretrained_folder(name: str) -> Path | None:
    """Return the folder of `hf:FOLDER` if it holds weights, which a run then begins with.

    Args:
        name: a `model.name`.
    """
    folder = Path(name.removeprefix(HF)).expanduser()
    return folder if name.startswith(HF) and has_weights(folder) else None
