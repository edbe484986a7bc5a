"""Try a copy of the model once, on samples together and apart: are its outputs the same?

    outputs of rows 0 … n−1  =  outputs of rows 0 … k−1, then those of rows k … n−1

They are not where a model compares the samples of a batch: a mean over dim 0, attention between
samples, sequences whose first dim is time. Such a model computes other numbers with each
micro-batch size, and so with each layout. The trial runs in the first step, on one rank, in
evaluation mode and without gradients. The copy is made before a layout splits the model, and only
of a small one.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import nn

from shoal.data.loading.sample_seeds import preserved_rng
from shoal.data.loading.step_samples import StepBatch
from shoal.parallel.program import Program
from shoal.trace.isolation.collective_ban import forbid_collectives
from shoal.trace.isolation.module_copies import copy_module, refuse_shared_parts
from shoal.trainer._torch import pytree
from shoal.trainer.batches.batch_split import batch_length, split_into_micro_batches
from shoal.trainer.step.call_contract import call_model, split_batch
from shoal.trainer.step.micro_batch import prepare_batch

LARGE, LAYERS, ROWS = 1 << 20, 300, 4
"""Elements and modules of a model that is copied, at most · samples of a trial at most."""
TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-3}


class ModelTrial:
    """Copy of a model for one trial.

    Args:
        module: the copy.
        call: as in `call_model`.
    """

    def __init__(self, module: nn.Module, call: str) -> None:
        self.module, self.call = module, call

    def compares_samples(self, program: Program, batch: Any) -> bool:
        """Return whether outputs of some samples depend on the others.

        Args:
            program: the run's, which prepares batches.
            batch: of a step; a batch that cannot be cut, and a model that fails, are not tried.
        """
        try:
            with torch.no_grad(), preserved_rng(), forbid_collectives(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return self._try(program, batch)
        except Exception:  # the run itself reports what is wrong
            return False

    def _try(self, program: Program, batch: Any) -> bool:
        if isinstance(batch, StepBatch):
            batch = batch.micro_batches[0].value
        rows = min(batch_length(batch), ROWS)
        if rows < 2:
            return False
        whole = next(iter(split_into_micro_batches(prepare_batch(program, batch), rows)))
        first = rows - rows // 2
        parts = list(split_into_micro_batches(whole, first))
        self.module.to(program.world.device)
        together, again = self._outputs(whole), self._outputs(whole)
        apart = [self._outputs(one) for one in parts]
        for one, same, *pieces in zip(together, again, *apart, strict=True):
            samples = [piece.shape[0] if piece.ndim else 0 for piece in pieces]
            if not one.ndim or one.shape[0] != rows or samples != [first, rows - first]:
                continue
            near = TOLERANCES.get(one.dtype)
            if near is None or not torch.equal(one, same):
                continue
            size = one.abs().max() + 1e-30
            if bool(((torch.cat(pieces) - one).abs().max() / size) > near):
                return True
        return False

    def _outputs(self, batch: Any) -> list[torch.Tensor]:
        found = call_model(self.module, split_batch(batch)[0], self.call)
        return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]


def copy_for_trial(module: nn.Module) -> None:
    """Copy a model that is still whole, for the trial of the next run over it; not a large one.

    Args:
        module: the model.
    """
    layers = list(module.modules())
    tensors = [*module.parameters(), *module.buffers()]
    elements = sum(one.numel() for one in tensors)
    if any(one.is_meta for one in tensors) or elements > LARGE or len(layers) > LAYERS:
        return
    known: dict[int, Any] = {  # torch cannot copy its generators
        id(value): value.clone_state()
        for layer in layers
        for value in vars(layer).values()
        if isinstance(value, torch.Generator)
    }
    try:
        copied = copy_module(module, known)
        refuse_shared_parts(module, copied)  # before its mode and hooks are changed
    except Exception:  # it has what nobody can copy: a lock, a file, a group of processes
        return
    for layer in copied.eval().modules():
        for hooks in (layer._forward_hooks, layer._forward_pre_hooks):
            hooks.clear()
    COPIES[module] = copied


def pop_trial(program: Program) -> ModelTrial | None:
    """Return the trial of a run's model, if there is a copy of it."""
    copied, plan = COPIES.pop(program.module, None), program.plan
    tries = copied is not None and plan.guards == "on" and plan.layout.cp == 1
    return ModelTrial(copied, plan.call) if tries and copied is not None else None


COPIES: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()
"""Copies of models whose run has not begun."""
