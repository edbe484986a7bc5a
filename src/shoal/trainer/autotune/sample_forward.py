"""Forward pass on a few samples, from which tp, pp, cp and ep are derived.

Every rank runs the same samples: a fact that one rank derives about the model must hold on all.

A tensor that all samples share may have as many rows as there are samples (a table, an adjacency),
so that the first rows of it break the model. The pass then runs again with such tensors whole, and
at last with the whole batch.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shoal.base.errors import ConfigError, shorten
from shoal.base.plans.plan import Plan
from shoal.fabric import World
from shoal.parallel.compose import SampleForward, place, record_forward
from shoal.parallel.program import Program, dtype_of
from shoal.trainer._torch import pytree
from shoal.trainer.batches.batch_split import (
    batch_length,
    has_plain_tensors,
    split_into_micro_batches,
)
from shoal.trainer.batches.batch_values import NEAREST
from shoal.trainer.step.call_contract import call_model, split_batch
from shoal.trainer.step.micro_batch import prepare_batch

if TYPE_CHECKING:
    from shoal.parallel.placement_rows import ModelDivision

LOOKED_AT = 3
"""Number of samples: few, for speed, and no power of two, unlike most degrees."""

SHORT = 256
"""Tokens of a sample in the forward pass, for models of token ids with longer sequences."""


def build_sample_forward(sample: Any, plan: Plan, world: World) -> SampleForward:
    """Return a forward pass on a few samples, for techniques that trace the model.

    Args:
        sample: a batch, or a function that returns one.
        plan: the settled plan.
        world: all ranks.

    Raises:
        ConfigError: there is no sample, or one that cannot be cut along dim 0.
    """
    layout = plan.layout
    if sample is None:
        raise ConfigError(
            f"layout = {layout.text()}: is derived from what the model does with a few samples; "
            f"try: shoal.parallelize(…, sample=batch), a batch as run.step takes it"
        )
    given = sample() if callable(sample) else sample
    try:
        if not has_plain_tensors(given):
            from shoal.trainer.batches.uncut_tensors import refuse_uncut_tensors

            refuse_uncut_tensors(given)
        cut = next(split_into_micro_batches(given, min(LOOKED_AT, plan.micro_batch)))
        samples = batch_length(cut)
    except ConfigError as failure:
        raise ConfigError(
            f"sample= (without it, the first batch): {str(failure).removeprefix('batch: ')}, as "
            f"layout {layout.text()} traces the model on a few of them; try: layout fsdp or zero2, "
            f"which trace nothing"
        ) from failure
    few = _broadcast_batch(cut, world)
    if layout.cp > 1:  # one rank may lack memory for all tokens of a long sequence
        few = _shorten_tokens(few, layout.cp)

    return _SampleForward(few, plan.call, samples, given)


class _CutSampleError(ConfigError):
    """A ConfigError: the model failed on the first samples of a batch."""


@dataclass(frozen=True)
class _SampleForward:
    """Forward pass on a batch of `samples` samples, the first of those of `given`."""

    batch: Any
    call: str
    samples: int
    given: Any

    def place(self, program: Program) -> tuple[Program, ModelDivision]:
        """Place every tensor of a model by what it does with the samples.

        Args:
            program: of the whole model.

        Raises:
            ConfigError: the model fails on these samples.
            PlanError: the model cannot be divided as the layout asks.
        """
        try:
            return place(program, record_forward(program, self), self.samples)
        except _CutSampleError:
            from shoal.trainer.autotune.shared_sample import list_wider_batches  # a rare batch

            for batch, samples in list_wider_batches(self.given, self.samples):
                sent = _broadcast_batch(batch, program.world)
                wider = replace(self, batch=sent, samples=samples)
                with contextlib.suppress(_CutSampleError):
                    return place(program, record_forward(program, wider), samples)
            raise

    def __call__(self, program: Program, module: nn.Module) -> Any:
        """Return the module's outputs for the batch."""
        with program.autocast():
            inputs = split_batch(prepare_batch(program, self.batch))[0]
            if all(p.is_meta for p in module.parameters()):  # only shapes are needed, not values
                inputs = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), inputs)
            try:
                return call_model(module, inputs, self.call)
            except (RuntimeError, IndexError, ValueError) as error:
                shapes = [list(one.shape) for one in pytree.tree_leaves(inputs)
                          if isinstance(one, torch.Tensor) and one.ndim]  # fmt: skip
                given = batch_length(self.given)
                if self.samples == given or len(shapes) < 2:
                    raise
                raise _CutSampleError(
                    f"sample=: the model raised {type(error).__name__} ({shorten(str(error))}) on "
                    f"inputs {', '.join(map(str, shapes))}, the first {self.samples} of "
                    f"{given} samples; if all samples share one of these tensors, "
                    f"{NEAREST}"
                ) from error


def _shorten_tokens(batch: Any, cp: int) -> Any:
    """Return token ids [samples, tokens] cut to their first tokens; other batches unchanged."""
    leaves, form = pytree.tree_flatten(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    lengths = {t.shape[1] for t in tensors if t.dim() == 2 and not t.is_floating_point()}
    plain = all(t.dim() < 2 or (t.dim() == 2 and not t.is_floating_point()) for t in tensors)
    length = max(lengths, default=0)
    if not plain or len(lengths) != 1 or length <= SHORT or length % (2 * cp):
        return batch
    few = max(SHORT // (2 * cp), 1) * 2 * cp
    return pytree.tree_unflatten(
        [v[:, :few] if isinstance(v, torch.Tensor) and v.dim() == 2 else v for v in leaves], form
    )


def _broadcast_batch(batch: Any, world: World) -> Any:
    """Broadcast rank 0's batch to every rank: what it shows of the model must hold on all ranks."""
    leaves, form = pytree.tree_flatten(batch)
    told = [(list(v.shape), dtype_of(v)) if isinstance(v, torch.Tensor) else None for v in leaves]
    for number, spec in enumerate(world.broadcast_json(told)):
        if spec is None:
            continue
        own = (
            leaves[number].to(world.device).contiguous()
            if world.is_first
            else torch.empty(spec[0], dtype=getattr(torch, spec[1]), device=world.device)
        )
        world.broadcast(own)
        leaves[number] = own
    return pytree.tree_unflatten(leaves, form)
