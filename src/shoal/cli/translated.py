"""Which model of transformers a run's own model is: a `llama` of `shoal train` is its Llama."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.checkpoint.hub_folder import HUB, TOKENIZER
from shoal.config.load import load
from shoal.planner.model_facts import family_of, resolve

if TYPE_CHECKING:  # it brings torch
    from shoal.checkpoint.export_folder import Translated


def translated_of(checkpoint: Path) -> Translated | None:
    """Say a checkpoint's model in transformers' words; None for all but a llama by name.

    Errors: ConfigError for a run.toml that cannot be read.
    """
    folder = checkpoint.parent.parent
    if not (folder / "run.toml").is_file():
        return None
    config = load(folder / "run.toml").config
    if config.model.build or family_of(config.model.name) != "llama":
        return None
    from shoal.checkpoint.export_folder import Translated
    from shoal.checkpoint.listing import read_manifest
    from shoal.models.as_transformers import llama_config, llama_name

    vocabulary = read_manifest(checkpoint).tensors["model.embedding.weight"].shape[0]
    resolved = resolve(
        config.model.name,
        config.model.arguments,
        vocabulary=vocabulary,
        sequence=config.data.sequence,
    )
    return Translated(llama_name, llama_config(resolved.arguments, end_of_text(folder / HUB)))


def end_of_text(hub: Path) -> int | None:
    """Find the id of the token that ends a text, in a run's hub/; None without one."""
    try:
        name = json.loads((hub / "tokenizer_config.json").read_text())["eos_token"]
        added = json.loads((hub / TOKENIZER).read_text())["added_tokens"]
        name = name["content"] if isinstance(name, dict) else name
        return next((one["id"] for one in added if one["content"] == name), None)
    except (OSError, ValueError, KeyError, TypeError):
        return None
