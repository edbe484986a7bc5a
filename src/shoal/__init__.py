"""Shoal: distributed training for PyTorch. Any module, any layout; planned, proven, exact.

    run = shoal.parallelize(model, optimizer, loss)
    for batch in run.loader(dataset):
        result = run.step(batch)

Names load at first use, so that the command line answers without importing torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from shoal.base import moved_modules

__version__ = "0.2.0"

_HOMES = {
    "CheckpointError": "shoal.base.errors",
    "ConfigError": "shoal.base.errors",
    "Layout": "shoal.base.layouts.layout",
    "OptimizerPolicy": "shoal.base.layouts.policies",
    "Plan": "shoal.base.plans.plan",
    "PlanError": "shoal.base.errors",
    "Run": "shoal.trainer.run",
    "ShoalError": "shoal.base.errors",
    "StepResult": "shoal.trainer.step.optimizer_step",
    "TrainingError": "shoal.base.errors",
    "World": "shoal.fabric",
    "linear_cross_entropy": "shoal.models.loss",
    "mean_of_samples": "shoal.trainer.step.call_contract",
    "parallelize": "shoal.trainer.parallelize",
    "plan": "shoal.trainer.jobs.plan_ahead",
}

__all__ = sorted([*_HOMES, "__version__"])

_INSIDE = {"prove_first_batch": "shoal.proof.loop_proof"}
"""Names that a room takes from a room above it, if the user switches that on."""

if TYPE_CHECKING:
    from shoal.base.errors import CheckpointError as CheckpointError
    from shoal.base.errors import ConfigError as ConfigError
    from shoal.base.errors import PlanError as PlanError
    from shoal.base.errors import ShoalError as ShoalError
    from shoal.base.errors import TrainingError as TrainingError
    from shoal.base.layouts.layout import Layout as Layout
    from shoal.base.layouts.policies import OptimizerPolicy as OptimizerPolicy
    from shoal.base.plans.plan import Plan as Plan
    from shoal.fabric import World as World
    from shoal.models.loss import linear_cross_entropy as linear_cross_entropy
    from shoal.trainer.jobs.plan_ahead import plan as plan
    from shoal.trainer.parallelize import parallelize as parallelize
    from shoal.trainer.run import Run as Run
    from shoal.trainer.step.call_contract import mean_of_samples as mean_of_samples
    from shoal.trainer.step.optimizer_step import StepResult as StepResult

moved_modules.install_import_aliases()

if os.environ.get("WORLD_SIZE", "1") != "1":  # a rank of a script, before it builds its model
    from shoal.base.estimates.facts import host_memory_variables

    for _variable, _value in host_memory_variables().items():
        os.environ.setdefault(_variable, _value)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name) or _INSIDE.get(name)
    if home is None:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    if not home.startswith("shoal.base."):
        systems = importlib.import_module("shoal.base.operating_systems")
        systems.untested_system_warning()  # before an import that cannot work
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__]
