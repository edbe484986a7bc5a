"""Name, in a line each, parts of a model that train otherwise than its user may think.

    BatchNorm        takes statistics over a micro-batch, whose default is an eighth of the batch
    mixtures         of transformers: the default loss reads logits, and adds no auxiliary loss
    unheld weights   get gradients, and are in no optimizer: Muon over matrices leaves norms out

Weights may be left out on purpose: a head alone is trained, adapters, biases. So a line is written
only where a block or a layer is torn: its matrices are held and its vectors are not, or all but a
small part is. Parts of the model that are left out whole are meant to stay.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shoal.base.plan import Plan
from shoal.parallel._torch import BatchNorm
from shoal.trace.blocks import find_blocks
from shoal.trainer.contract import Loss, is_default

SMALL = 4
"""A part is small beside another that has so many times its elements."""


def batch_norm_line(module: nn.Module, plan: Plan) -> str:
    """Return the line on BatchNorm under the default micro-batch, or "" where nothing changes.

    Args:
        module: as it trains.
        plan: whose micro-batch nobody gave.
    """
    share = plan.batch // plan.layout.data_degree
    if plan.micro_batch >= share:
        return ""
    found = [
        name
        for name, part in module.named_modules()
        if isinstance(part, BatchNorm) and (part.training or part.running_mean is None)
    ]
    if not found:
        return ""
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    near = "a larger micro_batch" if plan.layout.pp > 1 else f"micro_batch={share}"
    return (
        f"model: {found[0] or 'it'}{more} is a BatchNorm, whose statistics are those of a "
        f"micro-batch: {plan.micro_batch} samples by default, of the {share} that a rank has in a "
        f"step; try: {near} (train.micro_batch), or GroupNorm; if {plan.micro_batch} samples are "
        f"meant, say micro_batch={plan.micro_batch}"
    )


def auxiliary_loss_lines(module: nn.Module, loss: Loss) -> list[str]:
    """Return the line on auxiliary losses of a transformers model that the default loss drops."""
    if not is_default(loss):
        return []
    configs = (getattr(part, "config", None) for part in module.modules())
    config = next((one for one in configs if hasattr(one, "to_dict")), None)
    told = dict(_numbers(config.to_dict())) if config is not None else {}
    experts = [n for key, n in told.items() if key.endswith(("num_experts", "local_experts"))]
    weights = {
        key: number
        for key, number in told.items()
        if number and ("aux_loss" in key or "z_loss" in key) and "coef" in key
    }
    if not weights or (experts and max(experts) < 2):
        return []
    named = ", ".join(f"{key} = {number:g}" for key, number in weights.items())
    key = next(iter(weights))
    return [
        f"model: {named} of its configuration adds nothing: the default loss reads logits alone, "
        f"so no loss balances the experts; try: output_router_logits=True in the configuration and "
        f"a loss (model.loss) that adds {key} × out.aux_loss × count to its sum, or {key}=0"
    ]


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in config.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield key, value
        elif isinstance(value, Mapping):
            yield from _numbers(value)


def forgotten(module: nn.Module, unheld: Collection[str]) -> set[str]:
    """Return the weights that no optimizer holds, where that seems to be a mistake; else none.

    Args:
        module: the whole model.
        unheld: names of trainable weights that the optimizer does not hold.
    """
    weights = {name: p for name, p in module.named_parameters() if p.requires_grad}
    blocks = list(find_blocks(module))
    units: dict[str, list[str]] = {}
    for name in weights:
        block = next((one for one in blocks if name.startswith(f"{one}.")), None)
        units.setdefault(name.rpartition(".")[0] if block is None else block, []).append(name)
    for names in units.values():
        left = [weights[name] for name in names if name in unheld]
        held = [weights[name] for name in names if name not in unheld]
        if left and held and _torn(left, held):
            return set(unheld)
    return set()


def _torn(left: Sequence[nn.Parameter], held: Sequence[nn.Parameter]) -> bool:
    vectors = all(p.ndim < 2 for p in left) and any(p.ndim > 1 for p in held)
    return vectors or SMALL * sum(p.numel() for p in left) < sum(p.numel() for p in held)


def unheld_line(names: Sequence[str], parameters: Mapping[str, nn.Parameter]) -> str:
    """Return the line on weights that get gradients and are in no optimizer of this process.

    Args:
        names: of weights that the run's optimizer does not hold.
        parameters: this rank's, by name.
    """
    kinds = (one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer))
    held = {id(p) for one in kinds for group in one.param_groups for p in group["params"]}
    names = [n for n in names if n not in parameters or id(parameters[n]) not in held]
    if not names:
        return ""
    return (
        f"optimizer: {len(names)} of the weights that get gradients are in no optimizer, first: "
        f"{names[0]}, so they stay as they are; try: a group for them (optimizer.name=muon steps "
        f"what is no matrix by AdamW), or requires_grad_(False) on them"
    )
