"""The folder `hub/` of a run: files beside the weights that `from_pretrained` needs.

config.json, generation_config.json     of a model of transformers, written at every save
adapter_config.json                     of a model with adapters of peft, at every save
tokenizer.json, tokenizer_config.json   of text that `shoal train` reads, written at its start;
                                        `parallelize(tokenizer=…)`, at every save

A tag has a hub/ of its own for the files that a save writes, and shares the run's tokenizer.
"""

from __future__ import annotations

from pathlib import Path

HUB = "hub"
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
GENERATION = "generation_config.json"
CONFIGS = (CONFIG, GENERATION)
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BESIDE_TOKENIZER = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""Files that transformers stores beside a tokenizer.json; none is executed."""

TOKENIZER_FILES = (TOKENIZER, *BESIDE_TOKENIZER)

TRANSFORMERS, UNTOLD_TIES = "transformers", "untold_ties"
"""Keys of a checkpoint's record. The first is there where its model is one of transformers, whose
configuration hub/ keeps; beneath it the second lists tied names that this configuration does not
tie: whoever opens the weights would draw them anew, so they are exported twice."""

ADAPTER = "adapter"
"""Key of a checkpoint's record, of a model with adapters of peft: a tensor's name in peft's files →
its name in the module."""


def run_folder(checkpoint: Path) -> Path:
    """Return the run's folder of a checkpoint, also of one under a tag.

    >>> str(run_folder(Path("runs/x/checkpoints/step-3")))
    'runs/x'
    >>> str(run_folder(Path("runs/x/tags/best/checkpoints/step-3")))
    'runs/x'
    """
    folder = checkpoint.parent.parent
    return folder.parent.parent if folder.parent.name == "tags" else folder


def tokenizer_hub(checkpoint: Path) -> Path:
    """Return the hub/ with a checkpoint's tokenizer: a tag's own if it has one, or the run's."""
    own = checkpoint.parent.parent / HUB
    return own if (own / TOKENIZER).is_file() else run_folder(checkpoint) / HUB
