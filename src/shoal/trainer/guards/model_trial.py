"""Try a copy of the model once, on samples together and apart: are its outputs the same?

    outputs of rows 0 … n−1  =  outputs of rows 0 … k−1, then those of rows k … n−1

They are not where a model compares the samples of a batch: a mean over dim 0, attention between
samples, sequences whose first dim is time. Such a model computes other numbers with each
micro-batch size, and so with each layout. The trial runs in the first step, on one rank, in
evaluation mode and without gradients. `model_checks.py` makes the copy before a layout splits the
model, and only of a small one.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.data.loading.sample_seeds import preserved_rng
from shoal.data.loading.step_samples import StepBatch
from shoal.parallel.program import Program
from shoal.trace.isolation.collective_ban import forbid_collectives
from shoal.trainer._torch import pytree
from shoal.trainer.batches.batch_split import batch_length, split_into_micro_batches
from shoal.trainer.batches.batch_values import Readings
from shoal.trainer.step.call_contract import call_model, split_batch
from shoal.trainer.step.micro_batch import prepare_batch

ROWS = 4
"""Samples of a trial at most."""
TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-3}
EQUAL, UNLIKE, OTHER_SHAPE = "equal", "unlike", "other shape"


@dataclass(frozen=True)
class TrialOutcome:
    """Comparison of samples together with samples apart.

    Attributes:
        outputs: EQUAL, UNLIKE, or OTHER_SHAPE beyond dim 0; "": no output has a row per sample.
        calls: outputs and batch of all samples, then those of the parts.
    """

    outputs: str = ""
    calls: Sequence[tuple[Any, Any]] = ()


class ModelTrial:
    """Copy of a model for one trial.

    Args:
        module: the copy.
        call: as in `call_model`.

    Attributes:
        outcome: of the user's first batch, if `shared_tensors.py` compared it.
    """

    def __init__(self, module: nn.Module, call: str) -> None:
        self.module, self.call = module, call
        self.outcome: TrialOutcome | None = None

    def compares_samples(self, program: Program, batch: Any) -> bool:
        """Return whether outputs of some samples depend on the others.

        Args:
            program: the run's, which prepares batches.
            batch: of a step; a batch that cannot be cut, and a model that fails, are not tried.
        """
        if isinstance(batch, StepBatch):
            batch = batch.micro_batches[0].value
        try:
            found = self.outcome or self.compare(program, batch, {})
            if found.outputs != EQUAL:
                return found.outputs == UNLIKE
            scaled = _scale_rows(next(iter(split_into_micro_batches(batch, ROWS))))
            return self.compare(program, scaled, {}).outputs == UNLIKE
        except Exception:  # the run itself reports what is wrong
            return False

    def compare(self, program: Program, batch: Any, known: Readings) -> TrialOutcome:
        """Compare some samples of a batch with their parts.

        Args:
            program: the run's, which prepares batches.
            batch: the user's own, or a micro-batch.
            known: how its tensors and lists are read.

        Raises:
            Exception: of the model, or the batch cannot be cut.
        """
        quiet = warnings.catch_warnings()
        with torch.no_grad(), preserved_rng(), forbid_collectives(), quiet:
            warnings.simplefilter("ignore")
            return self._compare(program, batch, known)

    def _compare(self, program: Program, batch: Any, known: Readings) -> TrialOutcome:
        rows = min(batch_length(batch, dict(known)), ROWS)
        if rows < 2:
            return TrialOutcome()
        prepared = prepare_batch(program, batch)
        whole = next(iter(split_into_micro_batches(prepared, rows, dict(known))))
        first = rows - rows // 2
        parts = list(split_into_micro_batches(whole, first, dict(known)))
        self.module.to(program.world.device)
        together, again = self.call_module(whole), self.call_module(whole)
        apart = [self.call_module(one) for one in parts]
        columns = zip(*map(list_leaves, (together, again, *apart)), strict=True)
        found = {_judge_leaf(leaves, [first, rows - first]) for leaves in columns}
        outputs = next((one for one in (UNLIKE, OTHER_SHAPE, EQUAL) if one in found), "")
        return TrialOutcome(outputs, list(zip((together, *apart), (whole, *parts), strict=True)))

    def takes_whole(self, program: Program, batch: Any) -> bool:
        """Return whether the model takes a whole batch.

        Args:
            program: the run's, which prepares batches.
            batch: the user's own.
        """
        try:
            with torch.no_grad(), preserved_rng(), forbid_collectives():
                self.module.to(program.world.device)
                self.call_module(prepare_batch(program, batch))
        except Exception:
            return False
        return True

    def call_module(self, batch: Any) -> Any:
        """Return the outputs of the copy for a batch, which it may write in place."""
        return call_model(self.module, split_batch(clone_tensors(batch))[0], self.call)


LARGE = 16.0
"""Factor of every second sample in the second trial: what a model asks of a batch may change."""


def _scale_rows(batch: Any) -> Any:
    """Return a batch whose every second sample has large numbers: `if x.abs().max() > limit`."""

    def scale(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim or not leaf.is_floating_point():
            return leaf
        factors = torch.ones(len(leaf), dtype=leaf.dtype, device=leaf.device)
        factors[1::2] = LARGE
        return leaf.detach() * factors.reshape(-1, *[1] * (leaf.ndim - 1))

    return pytree.tree_map(scale, batch)


def clone_tensors(batch: Any) -> Any:
    """Return a batch with tensors of its own, so that what writes them leaves the user's alone."""
    return pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.detach().clone(), batch)


def list_leaves(outputs: Any) -> list[torch.Tensor]:
    """Return the tensors of outputs."""
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def _judge_leaf(leaves: Sequence[torch.Tensor], samples: list[int]) -> str:
    """Return how an output of all samples, twice, compares with those of the parts."""
    one, same, *pieces = leaves
    rows = [piece.shape[0] if piece.ndim else 0 for piece in pieces]
    near = TOLERANCES.get(one.dtype)
    if not one.ndim or one.shape[0] != sum(samples) or rows != samples:
        return ""
    if any(piece.shape[1:] != one.shape[1:] for piece in pieces):
        return OTHER_SHAPE
    if near is None or not torch.equal(one, same):
        return ""
    size = one.abs().max() + 1e-30
    return UNLIKE if bool(((torch.cat(pieces) - one).abs().max() / size) > near) else EQUAL
