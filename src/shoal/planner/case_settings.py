"""What a configuration says of a step beside its plan, in the words of a `Case`.

`shoal plan`, `auto` and the prediction of a run that has begun all read the sections of run.toml
here, so that they foresee the same step: a key that one of them left out would give one run two
predictions.
"""

from __future__ import annotations

from typing import Any

from shoal.base.plan import Plan
from shoal.base.policies import CompressPolicy, OptimizerPolicy
from shoal.config.sections import Config, ModelSection
from shoal.planner.model_facts import LANGUAGE, family_of
from shoal.planner.model_states import STATE_BYTES
from shoal.planner.published import find


def beside(config: Config) -> dict[str, Any]:
    """Collect what a `Case` says beside model, cluster and plan, by name.

    >>> beside(Config())
    {'loss': 'chunked', 'optimizer_bytes': 8}
    """
    return {"loss": loss_form(config.model), "optimizer_bytes": state_bytes_of(config.optimizer)}


def left_out(plan: Plan) -> list[str]:
    """Name what a plan asks for and the figures do not hold."""
    if not plan.asks(CompressPolicy):
        return []
    return [f"layout.compress = {plan.compress} is left out of the figures"]


def state_bytes_of(optimizer: OptimizerPolicy) -> int:
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
