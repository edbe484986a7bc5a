"""Notices about parts of a model that train otherwise than its user may think, one line each.

    BatchNorm        takes statistics over a micro-batch, which may be less than a step's batch
    buffers          that the user's own forward pass changes, once in a micro-batch
    InstanceNorm     moves its running statistics with every micro-batch, if it has any
    mixtures         of transformers: the default loss reads logits, and adds no auxiliary loss;
                     nor any other loss that a model returns beside its logits
    unheld weights   get gradients, and are in no optimizer: Muon over matrices leaves norms out

Users may leave weights out on purpose: to train a head alone, adapters, biases. So a notice needs a
block, layer or model that is torn: the optimizer holds its matrices and not its vectors, or all but
a small part of a block. Matrices that are left out with their whole layer are not reported.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shoal.base.plans.plan import Plan
from shoal.parallel._torch import BatchNorm, version_counter
from shoal.parallel.buffers.sync_batch_norm import joins_ranks
from shoal.parallel.program import Program
from shoal.trace.find.blocks import detect_blocks
from shoal.trainer.step.call_contract import Loss, is_default

AUXILIARY = re.compile("aux_loss|z_loss")
SMALL = 4
"""Ratio of elements from which the smaller of two parts counts as small."""


class FirstBatch:
    """A run's first batch: whether layers or buffers saw it in parts.

    Args:
        program: the run's.
        is_own: the user made the batch, not `run.loader`.
    """

    def __init__(self, program: Program, *, is_own: bool) -> None:
        self._program, self._is_own = program, is_own
        self._before = mark_buffers(program.module)

    def print_notices(self, passes: int, notice: Callable[[str], None]) -> None:
        """Print notices after the passes of the step.

        Args:
            passes: micro-batches of this rank.
            notice: prints a line, by rank 0.
        """
        module = self._program.module
        if line := batch_norm_line(module, self._program.plan, passes * self._is_own):
            notice(line)
        if not self._is_own or passes < 2 or self._program.data.size > 1:
            return  # where ranks have other samples, parallel/buffers/ names them
        now = mark_buffers(module)
        if changed := [name for name, mark in self._before.items() if now.get(name) != mark]:
            notice(changed_buffers_line(changed, passes))


def mark_buffers(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return identity and write counter of each buffer, except those of BatchNorm."""
    return {
        f"{path}.{name}".lstrip("."): (id(buffer), version_counter(buffer))
        for path, part in module.named_modules()
        if not isinstance(part, BatchNorm)
        for name, buffer in part.named_buffers(recurse=False)
        if not buffer.is_meta
    }


def batch_norm_line(module: nn.Module, plan: Plan, own_passes: int = 0) -> str:
    """Return the notice on BatchNorm whose statistics are not those of a step; "" without one.

    Args:
        module: as it trains.
        plan: the run's; its micro-batch is the default, or the batch is the user's own.
        own_passes: micro-batches of a rank's own batch; 0: the batch is of `run.loader`.
    """
    ranks, share = plan.layout.data_degree, plan.batch // plan.layout.data_degree
    is_cut = own_passes > 1 if own_passes else plan.micro_batch < share
    if not is_cut and ranks == 1:
        return ""
    found = [
        name
        for name, part in module.named_modules()
        if isinstance(part, BatchNorm)
        and (part.training or part.running_mean is None)
        and (is_cut or not joins_ranks(part))
    ]
    if not found:
        return "" if own_passes or not is_cut else _instance_norm_line(module, plan, share)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    line = (
        f"model: {found[0] or 'it'}{more} is a BatchNorm, whose statistics are those of a "
        f"micro-batch"
    )
    if not is_cut:
        return (
            f"{line}, on each of {ranks} ranks its own; try: sync_batch_norm=True "
            f"(train.sync_batch_norm) for those of all ranks, or GroupNorm"
        )
    if own_passes:
        return (
            f"{line}: a rank's batch is {own_passes} of them, as micro_batch={plan.micro_batch} "
            f"says; try: no micro_batch, or GroupNorm; as a loop that accumulates, all is well"
        )
    near = "a larger micro_batch" if plan.layout.pp > 1 else f"micro_batch={share}"
    return (
        f"{line}: {plan.micro_batch} samples by default, of the {share} that a rank has in a "
        f"step; try: {near} (train.micro_batch), or GroupNorm; if {plan.micro_batch} samples are "
        f"meant, say micro_batch={plan.micro_batch}"
    )


def changed_buffers_line(names: Sequence[str], passes: int) -> str:
    """Return the notice on buffers that every micro-batch of a step changes.

    Args:
        names: of the buffers.
        passes: micro-batches of the step.
    """
    return (
        f"model: {_format_names(names)} is a buffer that every forward pass changes, so {passes} "
        f"times in a step, once for each micro-batch; try: no micro_batch, if it is to see whole "
        f"batches; a sum over samples, or a loop that accumulates: all is well"
    )


def _instance_norm_line(module: nn.Module, plan: Plan, share: int) -> str:
    """Return the notice on running statistics of InstanceNorm, which count micro-batches."""
    kinds = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
    named = module.named_modules()
    found = [n for n, part in named if isinstance(part, kinds) and part.track_running_stats]
    if not found:
        return ""
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return (
        f"model: {found[0] or 'it'}{more} is an InstanceNorm with running statistics, which move "
        f"with every micro-batch: {share // plan.micro_batch} times a step by default; "
        f"try: micro_batch={share} (train.micro_batch); if {plan.micro_batch} samples are meant, "
        f"say micro_batch={plan.micro_batch}"
    )


def print_dropped_losses(
    module: nn.Module, names: Collection[str], notice: Callable[[str], None]
) -> None:
    """Print a notice on losses that a model returns and the default loss does not read.

    For models with a configuration, `auxiliary_loss_lines` names them.
    """
    if any(hasattr(getattr(part, "config", None), "to_dict") for part in module.modules()):
        return
    first, *others = sorted(names)
    more = f" (and {len(others)} more)" if others else ""
    notice(
        f"model: its outputs hold {first}{more}, a loss with a gradient, and the default loss "
        f"reads logits alone, so it adds nothing; try: a loss (model.loss) that adds it × count to "
        f"its sum, or {first}.detach()"
    )


def list_dropped_losses(outputs: Any) -> set[str]:
    """Return names of losses beside the logits in a model's outputs: scalars with a gradient.

    >>> list_dropped_losses(
    ...     {"logits": torch.ones(2), "aux_loss": torch.ones((), requires_grad=True)}
    ... )
    {'aux_loss'}
    """
    held = outputs if isinstance(outputs, Mapping) else getattr(outputs, "__dict__", {})
    return {
        str(name)
        for name, value in held.items()
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.requires_grad
        if "loss" in str(name) and name != "loss"
    }


def auxiliary_loss_lines(module: nn.Module, loss: Loss) -> list[str]:
    """Return the notice on auxiliary losses of a transformers model that the default loss drops."""
    if not is_default(loss):
        return []
    configs = (getattr(part, "config", None) for part in module.modules())
    config = next((one for one in configs if hasattr(one, "to_dict")), None)
    told = dict(_numbers(config.to_dict())) if config is not None else {}
    experts = [n for key, n in told.items() if key.endswith(("num_experts", "local_experts"))]
    weights = {
        key: number
        for key, number in told.items()
        if number and ((AUXILIARY.search(key) and "coef" in key) or key == "moe_loss_weight")
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
            yield str(key), value
        elif isinstance(value, Mapping):
            yield from _numbers(value)


def list_forgotten_weights(module: nn.Module, unheld: Collection[str]) -> set[str]:
    """Return the weights that no optimizer holds if that looks like a mistake; else none.

    Args:
        module: the whole model.
        unheld: names of trainable weights that the optimizer does not hold.
    """
    weights = {name: p for name, p in module.named_parameters() if p.requires_grad}
    blocks = list(detect_blocks(module))
    units: dict[str, list[str]] = {}
    for name in weights:
        block = next((one for one in blocks if name.startswith(f"{one}.")), None)
        units.setdefault(name.rpartition(".")[0] if block is None else block, []).append(name)
    for names in units.values():
        left = [weights[name] for name in names if name in unheld]
        held = [weights[name] for name in names if name not in unheld]
        if left and held and _is_torn(left, held):
            return set(unheld)
    left = [weight for name, weight in weights.items() if name in unheld]
    held = [weight for name, weight in weights.items() if name not in unheld]
    return set(unheld) if left and _are_vectors_left(left, held) else set()


def _are_vectors_left(left: Sequence[nn.Parameter], held: Sequence[nn.Parameter]) -> bool:
    return all(p.ndim < 2 for p in left) and any(p.ndim > 1 for p in held)


def _is_torn(left: Sequence[nn.Parameter], held: Sequence[nn.Parameter]) -> bool:
    return _are_vectors_left(left, held) or SMALL * sum(p.numel() for p in left) < sum(
        p.numel() for p in held
    )


def unheld_line(names: Sequence[str], parameters: Mapping[str, nn.Parameter]) -> str:
    """Return the notice on weights that get gradients and are in no optimizer of this process.

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


def narrow_line(narrow: Sequence[str], parameters: Mapping[str, nn.Parameter], compute: str) -> str:
    """Return the notice for weights whose dtype is too narrow for updates.

    Args:
        narrow: their names.
        parameters: all that train.
        compute: the format of products.
    """
    kind = str(parameters[narrow[0]].dtype).removeprefix("torch.")
    products = compute if compute in ("bf16", "fp16") else "bf16"
    return (
        f"model: {len(narrow)} of {len(parameters)} trainable tensors are {kind}, first: "
        f"{narrow[0]}; updates smaller than their rounding are lost; try: model.float() before, "
        f'and precision="{products}" for products in that format'
    )


def cut_off_line(names: Sequence[str]) -> str:
    """Return the notice for weights that ran in step 1 and have no gradient on any rank."""
    return (
        f"model: {_format_names(names)} computed in step 1, and no rank got a gradient for it: a "
        f".detach(), torch.no_grad() or a kernel without a backward pass lies between it and the "
        f"loss, so it will not train; try: requires_grad_(False) on it, if that is meant"
    )


def untrained_line(names: Sequence[str], steps: int) -> str:
    """Return the notice for weights that got no gradient in `steps` steps."""
    return (
        f"model: {_format_names(names)} got no gradient in {steps} steps, and stays as it is; try: "
        f"requires_grad_(False) on it, if that is meant"
    )


def _format_names(names: Sequence[str]) -> str:
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"{names[0]}{more}"


def compared_samples_line() -> str:
    """Return the notice on a model whose output for a sample depends on the others."""
    return (
        "model: its outputs for some samples depend on the other samples of the micro-batch (a "
        "mean over dim 0, attention between samples, time as the first dim), so they depend on "
        "micro_batch and the ranks; try: samples in dim 0, statistics by BatchNorm with "
        "sync_batch_norm=True; if it is meant, coupled=True of shoal.parallelize"
    )


def bent_gradient_line(name: str) -> str:
    """Return the notice on a model that clamps or normalises gradients in its backward pass.

    Args:
        name: of a weight whose gradient is no multiple of that of the outputs.
    """
    return (
        f"model: its backward pass is not linear: {name} gets no multiple of the gradient of the "
        f"outputs (an autograd.Function or a hook clamps, rounds or normalises it); it sees sums "
        f"over a micro-batch, not a mean over the step; try: clip=… of shoal.parallelize, or a "
        f"limit times the count of a step"
    )


def backward_hooks_line(names: Sequence[str]) -> str:
    """Return the notice on modules with a backward hook.

    Args:
        names: of the modules.
    """
    count = f"{len(names)} module{'s' if len(names) > 1 else ''}"
    return (
        f"model: {count} with a backward hook, first {names[0] or 'the model'}: it sees gradients "
        f"of sums over one micro-batch, and no mean; a factor is right, a clamp or a number for a "
        f"log is not: try: clip=… of shoal.parallelize, or divide by the count of a step"
    )


def counted_passes_line(name: str) -> str:
    """Return the notice on a number of the model that each forward pass changes.

    Args:
        name: of the attribute.
    """
    return (
        f"model: each forward pass changes {name}, so it counts the micro-batches of this rank, "
        f"not the steps, and no checkpoint has it; try: set it before run.step from run.step_count"
    )


def written_buffers_line(names: Sequence[str]) -> str:
    """Return the notice on buffers that the loops of ranks wrote unlike.

    Args:
        names: of the buffers that this rank wrote.
    """
    return (
        f"model: buffer {names[0] if names else 'of another rank'} was written between steps, by "
        f"other numbers on each rank, so ranks train unlike models; try: numbers of the whole "
        f"batch (torch.distributed.all_reduce of sums and counts), or the forward pass; if each "
        f"rank keeps a queue of its own, all is well"
    )


def own_generator_line(name: str) -> str:
    """Return the notice on a random generator of the model's own, from which a pass draws.

    Args:
        name: of the attribute.
    """
    return (
        f"model: the forward pass draws from {name}, a generator of its own: every rank draws the "
        f"same numbers for other samples, and micro-batches draw one after another, so the numbers "
        f"depend on the layout; try: torch's own generator, which a run keys by micro-batch, or "
        f"numbers that come with the batch"
    )


def global_hooks_line(layout: str) -> str:
    """Return the notice on forward hooks for all modules where blocks run as graphs."""
    return (
        f"model: a forward hook on all modules (register_module_forward_hook) does not run for "
        f"layers inside of blocks under {layout}; try: block.register_forward_hook(…) on the "
        f"blocks that need it"
    )
