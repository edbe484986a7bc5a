"""Build the optimizer that the [optimizer] section describes, by name.

Names are those of torch.optim's classes, and three of Shoal: lion, lamb and muon.

Weight decay acts on matrices only: vectors and scalars (norms, biases) form a group without it.
AdamW runs fused where torch has a fused kernel (CPU and CUDA).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn

from shoal.base.errors import ConfigError, nearest_word
from shoal.base.layouts.policies import OptimizerPolicy
from shoal.base.moved_modules import current_path
from shoal.fabric.device import get_device_capabilities
from shoal.optim.optimizer_support import closure_error, refuse_closures

OWN = {"lamb": "LAMB", "lion": "Lion", "muon": "MuonWithAdamW"}
"""Shoal's classes, `shoal.optim.NAME:CLASS` by their name in `[optimizer]`: torch.optim lacks them,
or has them for some models only."""


def build_optimizer(
    policy: OptimizerPolicy, parameters: Sequence[nn.Parameter], module: nn.Module | None = None
) -> torch.optim.Optimizer:
    """Build the optimizer that `[optimizer]` describes, over all of `parameters`.

    Weight decay acts on parameters of two dims or more. The caller handles schedule and clipping.

    Args:
        module: shows muon which matrices are embeddings and the head; without it muon steps all
            matrices.

    Raises:
        ConfigError: unknown name (with the nearest spelling), no optimizer class, settings that
            the class refuses, or a class that calls the model itself (LBFGS, closures).
    """
    kind = _resolve_class(policy.name)
    if issubclass(kind, torch.optim.LBFGS):
        raise closure_error(kind)
    accepted = inspect.signature(kind).parameters
    settings: dict[str, Any] = {"lr": policy.lr}
    if "betas" in accepted and len(kind_default(kind, "betas")) == 2:
        settings["betas"] = policy.betas
    if "momentum" in accepted and kind is torch.optim.SGD:
        settings["momentum"] = policy.momentum
    if "fused" in accepted and _has_fused_kernel(parameters):
        settings["fused"] = True
    if policy.name.lower() == "muon" and module is not None:
        from shoal.optim.muon import hidden_matrices

        settings["matrix"] = hidden_matrices(module)
    decays = "weight_decay" in accepted
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    groups: list[dict[str, Any]] = []
    for members, decay in ((matrices, policy.weight_decay), (vectors, 0.0)):
        if members:
            groups.append({"params": members, **({"weight_decay": decay} if decays else {})})
    try:
        return refuse_closures(kind(groups, **settings))
    except (TypeError, ValueError) as failure:
        raise ConfigError(f"optimizer.name = {policy.name}: {failure}") from failure


def kind_default(kind: type, name: str) -> tuple[Any, ...]:
    """Return the default of a tuple-valued argument of an optimizer class; () if it has none."""
    default = inspect.signature(kind).parameters[name].default
    return default if isinstance(default, tuple) else ()


def _resolve_class(name: str) -> type[torch.optim.Optimizer]:
    if ":" in name:
        module_name, _, attribute = name.partition(":")
        module_name = current_path(module_name)
        try:
            found = getattr(importlib.import_module(module_name), attribute)
        except (ImportError, AttributeError, ValueError) as failure:
            raise ConfigError(f"optimizer.name = {name}: does not import: {failure}") from failure
        if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)):
            raise ConfigError(
                f"optimizer.name = {name}: is no subclass of torch.optim.Optimizer; try: adamw"
            )
        return found
    classes = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer)
    }
    for unfit in ("optimizer", "sparseadam"):  # the base class; and one for sparse gradients
        classes.pop(unfit, None)
    if own := OWN.get(name.lower()):
        found = getattr(importlib.import_module(f"shoal.optim.{name.lower()}"), own)
        return cast("type[torch.optim.Optimizer]", found)
    if name.lower() not in classes:
        there = sorted({*classes, *OWN})
        close = nearest_word(name.lower(), there)
        raise ConfigError(
            f"optimizer.name = {name}: no such optimizer"
            + (f"; try: {close}" if close else f"; there are {', '.join(there)}")
        )
    return classes[name.lower()]


def optimizer_name(class_name: str) -> str:
    """Return the value of `optimizer.name` for a class.

    >>> optimizer_name("AdamW"), optimizer_name("MuonWithAdamW")
    ('adamw', 'muon')
    """
    own = {kind: name for name, kind in OWN.items()}
    return own.get(class_name, class_name.lower())


def _has_fused_kernel(parameters: Iterable[nn.Parameter]) -> bool:
    return all(
        get_device_capabilities(p.device).fused and p.is_floating_point() for p in parameters
    )
