"""Check of `model.name = hf:PATH` before any process starts: transformers and the files exist.

PATH is a folder with a config.json (and safetensors weights, if any), or the config.json itself, in
which case the weights are initialised randomly. This module imports nothing of transformers: it
looks for the package and reads the file as JSON. `shoal.models.huggingface` builds the model.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.base.errors import ConfigError, nearest_word
from shoal.base.pretrained_folders import HF, has_weights

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Names of the number of layers in transformers configurations."""

SEVERAL = ("depths", "encoder_layers", "decoder_layers", "num_decoder_layers", "num_encoder_layers")
"""Keys of models with more than one stack of layers."""

PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Weight files that execute code on load."""


def is_hf_name(name: str) -> bool:
    """Return whether a `model.name` begins with `hf:`, the path of a transformers model.

    Accesses no file.

    >>> is_hf_name("hf:models/mine"), is_hf_name("llama")
    (True, False)
    """
    return name.startswith(HF)


def resolve_hf_config(name: str, arguments: Mapping[str, Any] | None = None) -> tuple[Path, bool]:
    """Find and check the config.json of `hf:PATH`; return its path and whether to load weights.

    Weights are loaded if PATH is a folder with safetensors, never if PATH is the .json itself. The
    function looks for transformers without importing it.

    Args:
        arguments: keys of [model]; must be empty, since the file has the model's own.

    Raises:
        ConfigError: one line: transformers missing, no such file, no JSON, no model_type in it,
            arguments, or a folder whose only weights are pickles.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            f"model.name = {name}: needs transformers, which is not installed; "
            f"try: pip install 'shoal[hf]'"
        )
    given = Path(name.removeprefix(HF)).expanduser()
    path = given if given.suffix == ".json" else given / "config.json"
    _check_file(name, path)
    if arguments:
        key = next(iter(arguments))
        raise ConfigError(
            f"model.{key}: {name} takes its arguments from {path}; try: change them there"
        )
    if path == given:
        return path, False
    stored = has_weights(given)
    pickled = [weights for weights in PICKLES if (given / weights).exists()]
    if pickled and not stored:
        raise ConfigError(
            f"model.name = {name}: {pickled[0]} is a pickle, which runs code when it is read; "
            f"try: shoal checkpoint import {given} {given}, which runs none, or "
            f"{HF}{path} for new weights"
        )
    return path, stored


def count_hf_layers(name: str) -> int | None:
    """Return the number of layers of the model's single stack; None if it has several.

    A model with encoder and decoder, with stages, or with a vision part has several stacks.
    """
    path, _ = resolve_hf_config(name)
    found = json.loads(path.read_text(encoding="utf-8"))
    several = found.get("is_encoder_decoder") or any(
        key in SEVERAL or (isinstance(value, dict) and "model_type" in value)
        for key, value in found.items()
    )
    counts = [found[key] for key in LAYERS if isinstance(found.get(key), int)]
    return None if several or len(counts) != 1 else counts[0]


def _check_file(name: str, path: Path) -> None:
    """Raise ConfigError if `path` is no config.json with a model_type."""
    if not path.is_file():
        folders = [*path.parent.glob("*/config.json"), *path.parent.parent.glob("*/config.json")]
        close = nearest_word(str(path.parent), [str(found.parent) for found in folders])
        hint = f"try: {HF}{close}" if close else "give a folder with a config.json"
        raise ConfigError(f"model.name = {name}: there is no file {path}; {hint}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as failure:
        raise ConfigError(
            f"model.name = {name}: {path} is no JSON ({failure}); give a model's config.json"
        ) from failure
    if not isinstance(found, Mapping) or not isinstance(found.get("model_type"), str):
        raise ConfigError(
            f"model.name = {name}: {path} has no model_type; give a transformers config.json"
        )
