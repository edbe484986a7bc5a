"""Checks of the user's optimizer: its parameters, closures, and whether its step can be split.

Shoal refuses optimizers that call the model themselves (LBFGS and other closures): the layout
decides when the model runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import torch
from torch import nn

from shoal.base.errors import ConfigError, PlanError
from shoal.base.plans.tensor_shards import StepDivisibility

Parameters = Mapping[str, nn.Parameter]

ELEMENT_WISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad")
"""Classes of torch.optim, with any options, whose step on a piece is the piece of the step."""


def determine_slicing(optimizer: torch.optim.Optimizer) -> StepDivisibility:
    """Return the ways in which ranks may split a step: known for `ELEMENT_WISE`, else tested."""
    kind = type(optimizer)
    plain = kind.__module__.startswith("torch.optim.") and "step" not in vars(optimizer)
    if plain and kind.__name__ in ELEMENT_WISE:
        return StepDivisibility("", "", "")
    from shoal.optim.elementwise_probe import probe_slicing  # late: most runs use ELEMENT_WISE

    return probe_slicing(optimizer)


def check_user_optimizer(
    optimizer: torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    module: nn.Module,
    parameters: Parameters,
) -> torch.optim.Optimizer:
    """Return the user's optimizer, checked to hold parameters of the module only.

    Args:
        optimizer: an instance over the module's parameters, returned unchanged, or a function
            `params -> optimizer`, which is called with a list of `parameters`.
        parameters: the named trainable parameters of the program.

    Raises:
        PlanError: a parameter of the optimizer is not the module's; with its position and shape.
        ConfigError: neither an optimizer nor such a function, or an optimizer that calls the model
            itself (LBFGS, closures).
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        if not callable(optimizer):
            raise ConfigError(
                f"optimizer: a torch.optim.Optimizer or a function params -> optimizer is wanted, "
                f"got {type(optimizer).__name__}"
            )
        optimizer = optimizer(list(parameters.values()))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer: the function gave {type(optimizer).__name__}, a torch.optim.Optimizer "
                f"is wanted"
            )
    if "_optimizer_step_pre_hooks" not in vars(optimizer):  # set by torch's own __init__
        raise ConfigError(
            f"optimizer: {type(optimizer).__name__} was made without Optimizer.__init__, as "
            f"wrappers around another optimizer are, so its step has no hooks; try: "
            f"super().__init__(params, {{}}) in it, or the inner optimizer, and the wrapper's work "
            f"between steps"
        )
    names = {id(p): n for n, p in module.named_parameters(remove_duplicate=False)}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise PlanError(
                    f"optimizer: parameter {place} of group {number}, shape "
                    f"{list(parameter.shape)}, is not in the model: the optimizer was built over "
                    f"other parameters, and training would change nothing; build it from this "
                    f"model's parameters, or give a function params -> optimizer"
                )
    return refuse_closures(optimizer)


def refuse_closures(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer; raise ConfigError if its step requires a closure."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    needs = closure is not None and closure.default is inspect.Parameter.empty
    if needs or isinstance(optimizer, torch.optim.LBFGS):
        raise closure_error(type(optimizer))
    return optimizer


def closure_error(kind: type) -> ConfigError:
    """Return the error for an optimizer class that calls the model itself."""
    return ConfigError(
        f"optimizer: {kind.__name__} evaluates the model itself through a closure, which a layout "
        f"cannot split; try: torch.optim.AdamW"
    )
