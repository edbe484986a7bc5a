"""What a configuration says of a step beside its layout, in the words of a `Case`.

`shoal plan`, `auto` and the prediction of a run that has begun all read the sections of run.toml
here, so that they foresee the same step: a key that one of them left out would give one run two
predictions.
"""

from __future__ import annotations

from typing import Any

from shoal.base.policies import OptimizerPolicy
from shoal.config.sections import Config, ModelSection
from shoal.planner.model_facts import LANGUAGE, family_of
from shoal.planner.published import find
from shoal.planner.states import STATE_BYTES


def case_settings(config: Config, compute: str) -> dict[str, Any]:
    """Gives the fields that `Case` and `Asked` have in common, by name.

    compute   what precision.compute means on the machine in question

    >>> found = case_settings(Config(), compute="bf16")
    >>> found["loss"], found["optimizer_bytes"], found["reduce_bytes"]
    ('chunked', 8, 0)
    """
    return {
        "compute": compute,
        # Sums of fp64 gradients stay wide (`parallelize`); fp32 is how all others are kept.
        "reduce_bytes": 2 if config.precision.reduce == "bf16" and compute != "fp64" else 0,
        "recompute": config.memory.recompute,
        "offload": config.memory.offload,
        "sequence_parallel": config.layout.sequence_parallel != "off",
        "loss": loss_form(config.model),
        "defer_sync": config.train.defer_sync,
        "average": bool(config.optimizer.average),
        "optimizer_bytes": _state_bytes(config.optimizer),
        "compiled": config.train.compile != "none",
    }


def _state_bytes(optimizer: OptimizerPolicy) -> int:
    """Optimizer state per fp32 element; plain SGD has none."""
    name = optimizer.name.lower()
    return 0 if name == "sgd" and not optimizer.momentum else STATE_BYTES.get(name, 8)


def loss_form(section: ModelSection) -> str:
    """Returns how the loss meets the vocabulary: `chunked` for Shoal's own language models.

    They hand over hidden states, of which the loss makes logits chunk by chunk; so would a
    published shape that is planned by its name. A user's model, a transformers model, and a loss of
    the user's own work on all logits at once.

    >>> [loss_form(ModelSection(name=name)) for name in ("gpt", "gpt-3-13b", "hf:mine", "vit")]
    ['chunked', 'chunked', 'full', 'full']
    """
    if section.build or section.loss:
        return "full"
    if family_of(section.name) in LANGUAGE:
        return "chunked"
    shape = find(section.name)
    return "chunked" if shape is not None and not shape.patch else "full"
