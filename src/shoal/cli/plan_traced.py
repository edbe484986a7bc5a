"""Facts of models that `shoal plan` cannot count by arithmetic, by a trace of shapes.

    model.build                  the user's module, on a sample of the user's data
    hf:PATH, a type without row  the class that the installed transformers builds, on the meta
    hf:PATH, with adapters       device, on rows of token ids: config.json alone, no weights

The number of parameters is that of the module itself, whatever its layers are: hybrids of attention
and Mamba, sliding windows in some blocks, experts in every n-th block, an encoder and a decoder.
"""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import Any

from shoal.base.errors import PlanError
from shoal.base.estimates.cluster import Cluster
from shoal.base.estimates.estimate import ModelFacts
from shoal.config.sections import Config

TOKEN_IDS = ("input_ids", "decoder_input_ids")
"""Main inputs of transformers models for which rows of token ids can be made up."""


def trace_configured_model(config: Config, cluster: Cluster, element_bytes: int) -> ModelFacts:
    """Return the facts of the configured module, traced on a sample of the configured data."""
    from shoal.data.sources import open_source
    from shoal.trainer.jobs.run_forecast import collect_model_facts

    source = open_source(config.data, config.train.seed)
    return collect_model_facts(
        config, source, kernels=cluster.device.kind, element_bytes=element_bytes
    )


def has_transformers() -> bool:
    """Return whether transformers is installed, without importing it."""
    return importlib.util.find_spec("transformers") is not None


def trace_config_json(
    config: Config, sequence: int, kernels: str, element_bytes: int, notes: list[str]
) -> ModelFacts:
    """Return the facts of the class of transformers that a config.json names, adapters included.

    Args:
        config: its `model.name` is hf:PATH; weights in the folder are not read.
        sequence: tokens of a row.
        kernels: cpu or gpu, as `trace_facts`.
        notes: gets a line on parts of the model that rows of token ids do not reach.

    Raises:
        PlanError: the model reads something other than token ids, or needs their values.
        ConfigError: this transformers lacks the type or the class, or peft refuses the model.
    """
    import torch

    from shoal.models.huggingface import build_transformers_model
    from shoal.models.loss import token_loss
    from shoal.trace.isolation.meta_inputs import build_meta_model
    from shoal.trainer.adapters import add_adapters
    from shoal.trainer.autotune.rank_layouts import trace_facts_from_sample

    name = config_json_name(config.model.name)
    model: Any = build_meta_model(partial(build_transformers_model, name))
    reads = model.main_input_name
    if reads not in TOKEN_IDS:
        raise PlanError(
            f"model.name = {name}: {type(model).__name__} reads {reads}, and rows of token ids "
            f"alone are made up here; try: model.build and data.source, functions of your own"
        )
    _note_other_parts(name, notes)
    ids = torch.zeros(2, sequence, dtype=torch.int64)
    several = model.config.is_encoder_decoder
    for part in (model.config, model.config.get_text_config()):
        # Else a model looks for padding, in ids that have no values here. Strict classes of
        # configurations refuse None in their setter.
        vars(part)["pad_token_id"] = None
    if config.tune.adapter != "none":
        with torch.device("meta"):
            model = add_adapters(model, config.tune, name)
    return trace_facts_from_sample(
        model,
        (dict.fromkeys(TOKEN_IDS, ids) if several else ids, ids),
        token_loss,
        "kwargs" if several else "",
        kernels=kernels,
        element_bytes=element_bytes,
        residual=config.precision.residual,
        blocks=config.layout,
        name=name,
    )


def config_json_name(name: str) -> str:
    """Return hf:PATH with the path of the config.json itself, beside which no weights are read.

    >>> config_json_name("hf:models/mine")
    'hf:models/mine/config.json'
    """
    return name if name.endswith(".json") else f"{name}/config.json"


def config_json_length(name: str) -> int:
    """Return the longest sequence that the file states for its text; 0 if it states none."""
    path = Path(config_json_name(name).removeprefix("hf:")).expanduser()
    found = json.loads(path.read_text(encoding="utf-8"))
    parts = [found, *(part for part in found.values() if isinstance(part, dict))]
    keys = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
    known = [part[key] for part in parts for key in keys if isinstance(part.get(key), int)]
    return known[0] if known else 0


def _note_other_parts(name: str, notes: list[str]) -> None:
    """Append a line if the file describes parts that read images or sound."""
    found = json.loads(Path(name.removeprefix("hf:")).expanduser().read_text(encoding="utf-8"))
    other = [key for key, part in found.items() if isinstance(part, dict) and _reads_no_text(key)]
    if other:
        notes.append(
            f"{', '.join(sorted(other))}: parameters counted; rows of token ids do not reach their "
            f"layers, whose activations and FLOP are left out"
        )


def _reads_no_text(key: str) -> bool:
    """Return whether a key's part is a model that reads something other than text."""
    text = ("text", "decoder", "llm", "language", "rope", "quantization", "generation")
    return key.endswith("_config") and not key.startswith(text)
