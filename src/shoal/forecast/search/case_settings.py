"""Settings of a configuration that a `PlanningCase` needs beside the plan.

`shoal plan`, `auto` and the prediction of a running run all read the sections of run.toml here, so
that all three predict the same step. If one of them ignored a key, a run would have two
predictions.
"""

from __future__ import annotations

from typing import Any

from shoal.base.errors import PlanError
from shoal.base.estimates.cluster import Cluster
from shoal.base.layouts.policies import CompressPolicy, OptimizerPolicy
from shoal.base.plans.plan import Plan
from shoal.config.sections import Config, ModelSection
from shoal.forecast.memory.model_states import STATE_BYTES, WIDTHS
from shoal.forecast.models.model_facts import LANGUAGE, family_of
from shoal.forecast.models.published_models import get_published_shape


def case_settings(config: Config) -> dict[str, Any]:
    """Return the fields of `PlanningCase` that follow from [model], [optimizer] and train.prove.

    loss             chunked for Shoal's own and published language models, full for all others and
                     under model.build or model.loss
    optimizer_bytes  from `optimizer_state_bytes`
    proves           whether `train.prove` requests a proof before the run

    >>> case_settings(Config())
    {'loss': 'chunked', 'optimizer_bytes': 8, 'proves': True}
    """
    return {
        "loss": loss_form(config.model),
        "optimizer_bytes": optimizer_state_bytes(config.optimizer),
        "proves": config.train.prove != "off",
    }


def ignored_settings(plan: Plan) -> list[str]:
    """List the settings of a plan that predictions ignore: a line on `compress`, else []."""
    if not plan.differs_from_default(CompressPolicy):
        return []
    return [
        f"layout.compress = {plan.compress} is left out of the figures; what it keeps takes 8 "
        f"bytes per trainable element on every rank"
    ]


def choose_format(plan: Plan, cluster: Cluster, notes: list[str]) -> str:
    """Return the format of matrix products: `plan.compute`, or for "auto" the devices' best.

    "auto" gives fp32 on a CPU. On GPUs it gives bf16 if its rate is above fp32's, else fp16. In a
    mixed cluster each format has the rate of its slowest part.

    Args:
        notes: the function appends a line if a GPU is over twice as fast in the other 16-bit
            format.

    Raises:
        PlanError: a cluster with CPUs and GPUs, fp16 on a CPU, or offload to files on GPUs.
    """
    asked, parts = plan.compute, (cluster, *cluster.groups)
    if any(part.device.kind != cluster.device.kind for part in parts):
        raise PlanError("--on: devices and cores cannot share one run; try: leave cpu out")
    if cluster.device.kind != "gpu":
        if asked == "fp16":
            raise PlanError(
                "precision.compute = fp16: a CPU has no fast fp16 and no rate for it; try: "
                "precision.compute=bf16"
            )
        return "fp32" if asked == "auto" else asked
    if plan.states_in_files:
        raise PlanError(
            "memory.offload_to = files: states in files are stepped by the CPU, and these are "
            "devices; try: memory.offload_to=host"
        )
    every = [part.device.matrix_flops_per_s for part in parts]
    rates = {name: min(rate.get(name, 0.0) for rate in every) for name in WIDTHS}
    if asked == "auto":
        return "bf16" if rates["bf16"] > rates["fp32"] else "fp16"
    narrow = {"bf16": "fp16", "fp16": "bf16"}.get(asked, "")
    if narrow and rates[narrow] > 2 * rates[asked]:
        slowest = min(parts, key=lambda part: part.device.matrix_flops_per_s.get(asked, 0.0))
        times = rates[narrow] / max(rates[asked], 1.0)
        notes.append(f"{slowest.device.name} multiplies {narrow} {times:.0f} times as fast")
    return asked


def optimizer_state_bytes(optimizer: OptimizerPolicy) -> int:
    """Return an optimizer's bytes of state per fp32 parameter element, by its name.

    Case is ignored: 8 for adam and similar rules, 4 for sgd with momentum, rmsprop and other rules
    with one moment, 0 for sgd without (`STATE_BYTES`); 8 for an unknown name.
    """
    name = optimizer.name.lower()
    return 0 if name == "sgd" and not optimizer.momentum else STATE_BYTES.get(name, 8)


def loss_form(section: ModelSection) -> str:
    """Return the form of the loss over the vocabulary: `chunked` or `full`.

    Shoal's own language models return hidden states, from which the loss makes logits chunk by
    chunk; published shapes planned by name count as such. A user's model, a transformers model and
    a user's loss work on all logits at once: `full`.

    >>> [loss_form(ModelSection(name=name)) for name in ("gpt", "gpt-3-13b", "hf:mine", "vit")]
    ['chunked', 'chunked', 'full', 'full']
    """
    if section.build or section.loss:
        return "full"
    if family_of(section.name) in LANGUAGE:
        return "chunked"
    shape = get_published_shape(section.name)
    return "chunked" if shape is not None and not shape.patch else "full"
