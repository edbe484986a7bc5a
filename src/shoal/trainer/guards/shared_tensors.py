"""Find tensors that all samples share, although their dim 0 is the number of samples.

    x [8, 6], table [8, 6]     8 samples beside a table of 8 classes: a cut along dim 0 cuts both

A table, class weights, an adjacency or a prior belongs to every sample. Shapes alone cannot tell it
from a column. Two signs can:

    a trial     parts of the batch have the outputs and losses of the whole only if it is not cut;
                on rank 0, in the first step, with the copy of a small model; all ranks follow
    two steps   its numbers stay while those of other tensors change: one line, and it is cut on

The second sign is not proof: noise that is fixed for each sample stays too. A tensor whose rows are
all equal is not named, as a mask of ones. Nothing is checked where a batch is not cut.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.base.errors import ConfigError, shorten
from shoal.data.loading.dataset_kind import digest_of
from shoal.data.loading.sample_seeds import preserved_rng
from shoal.parallel.program import Program
from shoal.trace.isolation.collective_ban import forbid_collectives
from shoal.trainer._torch import pytree
from shoal.trainer.batches.batch_split import read_columns
from shoal.trainer.batches.batch_values import SAMPLES, SHARED, Readings, is_tensor, says_samples
from shoal.trainer.guards.model_trial import (
    EQUAL,
    OTHER_SHAPE,
    TOLERANCES,
    ModelTrial,
    TrialOutcome,
    clone_tensors,
)
from shoal.trainer.step.call_contract import Loss, is_default, split_batch, sum_and_count
from shoal.trainer.step.micro_batch import prepare_batch

MOST, TOGETHER, STEPS = 8, 2, 4
"""Tensors of a batch that are tried · shared ones at most · steps that are compared at most."""
HALF = 3e-2
"""Relative difference of equal sums in a format of 16 bits."""
SMALL = 1 << 20
"""Elements up to which all rows of a tensor are read; of larger ones the first and the last."""


@dataclass(frozen=True)
class TriedColumn:
    """A tensor of a batch that is cut along the samples.

    Attributes:
        tensor: the tensor.
        is_target: it goes to the loss alone.
        is_alone: no other tensor is of the same half of the batch.
    """

    tensor: torch.Tensor
    is_target: bool
    is_alone: bool


@dataclass
class SharedTensorCheck:
    """Check of the user's own batches for tensors that all samples share.

    Attributes:
        program: the run's.
        cut: samples of a micro-batch.
        trial: copy of the model, on rank 0; None: no trial is made.
        notice: prints a line, by rank 0.
        loss: the run's.
    """

    program: Program
    cut: int
    trial: ModelTrial | None
    notice: Callable[[str], None]
    loss: Loss | None
    _digests: dict[str, str] = field(default_factory=dict)
    _watched: set[str] = field(default_factory=set)
    _steps: int = 0

    def read(self, batch: Any, known: Readings, *, is_first: bool) -> Readings:
        """Return how the tensors of a batch are read; print a line on a tensor that may be shared.

        Args:
            batch: the user's own.
            known: how earlier batches are read.
            is_first: the ranks gather what this rank returns.
        """
        if self._steps >= STEPS:
            return known
        self._steps += 1
        if not (columns := list_columns(batch, known, self.cut)):
            return known
        trial, self.trial = self.trial, None
        if is_first and trial is not None and len(columns) > 1:
            known = {**known, **self._try(trial, batch, columns, known)}
        self._compare_steps(columns, known)
        return known

    def _try(
        self, trial: ModelTrial, batch: Any, columns: dict[str, TriedColumn], known: Readings
    ) -> Readings:
        """Return readings that a trial proves, and print a line on shared tensors."""
        from shoal.trainer.guards.loss_trial import copy_loss  # in the first step alone

        loss = None if self.loss is None else copy_loss(self.loss, self.program.module)

        failures, refusals = list[Exception](), list[Exception]()

        def attempt(shared: tuple[str, ...]) -> tuple[TrialOutcome, bool | None]:
            more = dict.fromkeys(shared, SHARED)
            try:
                one = trial.compare(self.program, batch, {**known, **more})
            except Exception as error:  # the cut of a table may break the model, as any mistake
                failures.append(error)
                return TrialOutcome(), None
            return one, None if loss is None else _add_up(loss, one.calls, refusals)

        inputs = [path for path, one in columns.items() if not one.is_target]
        (plain, adds_up), found = attempt(()), Readings()
        trial.outcome = plain
        if plain.outputs == EQUAL:
            proven = list(columns) if adds_up else inputs if _is_pair(batch) else []
            found = dict.fromkeys(proven, SAMPLES)
            if adds_up:
                return found
        # A loop that writes out its passes has a loss of its own.
        bare = self.loss is None or (is_default(self.loss) and adds_up is None)
        by_outputs = bare and plain.outputs not in (EQUAL, OTHER_SHAPE)
        tried = [path for path in columns if path not in found]
        tries = list(_subsets(tried, inputs))
        for shared in tries:
            one, adds_up = attempt(shared)
            if one.outputs == EQUAL and (adds_up or (by_outputs and adds_up is None)):
                trial.outcome = one
                for path in shared:
                    self.notice(shared_line(path, list(columns[path].tensor.shape)))
                return {**found, **dict.fromkeys(shared, SHARED)}
        if len(failures) > len(tries) and trial.takes_whole(self.program, batch):
            raise ConfigError(uncut_text(columns, self.cut, failures[0]))
        if isinstance(next(iter(refusals), None), IndexError) and self._takes_whole(trial, batch):
            raise ConfigError(uncut_targets_text(columns, self.cut, refusals[0]))
        return found

    def _takes_whole(self, trial: ModelTrial, batch: Any) -> bool:
        """Return whether the loss takes a whole batch."""
        from shoal.trainer.guards.loss_trial import copy_loss

        if self.loss is None:
            return False
        try:
            with torch.no_grad(), preserved_rng(), forbid_collectives():
                prepared = clone_tensors(prepare_batch(self.program, batch))
                outputs = trial.call_module(prepared)
                copy_loss(self.loss, self.program.module)(outputs, split_batch(prepared)[1])
        except Exception:
            return False
        return True

    def _compare_steps(self, columns: dict[str, TriedColumn], known: Readings) -> None:
        """Print a line on tensors that stay while others change."""
        digests = {
            path: _digest(one.tensor)
            for path, one in columns.items()
            if self._steps <= 2 or getattr(one.tensor, "is_cpu", True)  # else the host waits
        }
        if not self._digests:
            self._digests = digests
            self._watched = {
                path for path, one in columns.items() if path not in known and _may_be_shared(one)
            }
        else:
            changed = {path for path, one in digests.items() if self._digests.get(path) != one}
            if changed:
                for path in self._watched & digests.keys() - changed - known.keys():
                    self.notice(unchanged_line(path, columns[path]))
                self._watched = set()
        if not self._watched:
            self._steps = STEPS


def list_columns(batch: Any, known: Readings, cut: int) -> dict[str, TriedColumn]:
    """Return the tensors of a batch that are cut, by path; {} if it is not cut, or cannot be.

    Args:
        batch: the user's own.
        known: how earlier batches are read.
        cut: samples of a micro-batch.
    """
    if says_samples(batch):
        return {}
    try:
        columns = read_columns(batch, dict(known))
    except ConfigError:  # the cut itself reports it
        return {}
    if columns.samples <= cut:
        return {}
    found = [
        (path, leaf)
        for path, leaf, cuts in zip(columns.paths, columns.leaves, columns.is_cut, strict=True)
        if cuts and is_tensor(leaf)
    ]
    halves = [_is_target(path, batch) for path, _ in found]
    return {
        path: TriedColumn(leaf, is_target, halves.count(is_target) == 1)
        for (path, leaf), is_target in zip(found, halves, strict=True)
    }


@torch.no_grad()
def _add_up(loss: Loss, calls: Sequence[tuple[Any, Any]], refusals: list[Exception]) -> bool | None:
    """Return whether (sum, count) of the first call is that of the others; None: it failed.

    Args:
        loss: a copy of the run's.
        calls: outputs and batch of all samples, then those of the parts.
        refusals: gets the error of the loss.
    """
    sums = []
    try:
        with preserved_rng(), forbid_collectives(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for outputs, batch in calls:
                targets = split_batch(clone_tensors(batch))[1]
                total, count = sum_and_count(loss(outputs, targets), targets)
                sums.append((float(total), float(count), TOLERANCES.get(total.dtype, HALF)))
    except Exception as error:  # it lacks a gradient, a row of each kind, or a class beyond the cut
        refusals.append(error)
        return None
    (whole, targets_of_all, near), *parts = sums
    size = max(abs(whole), sum(abs(one[0]) for one in parts), 1e-30)
    if abs(whole - sum(one[0] for one in parts)) > near * size:
        return False
    return math.isclose(targets_of_all, sum(one[1] for one in parts), rel_tol=1e-6)


def _is_pair(batch: Any) -> bool:
    """Return whether a batch is (inputs, targets)."""
    return isinstance(batch, tuple | list) and len(batch) == 2


def _is_target(path: str, batch: Any) -> bool:
    """Return whether a path leads into the second half of a pair."""
    if not _is_pair(batch):
        return False
    halves = pytree.tree_flatten_with_path(batch, is_leaf=lambda value: value is not batch)[0]
    start = pytree.keystr(halves[1][0])
    return path.startswith(start) and path[len(start) :][:1] in ("", "[", ".")


def _subsets(paths: list[str], inputs: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield the sets of tensors that may be shared: one of the inputs at least is not."""
    for size in range(1, TOGETHER + 1):
        for shared in itertools.combinations(paths[:MOST], size):
            if not set(inputs) <= set(shared):
                yield shared


def _may_be_shared(column: TriedColumn) -> bool:
    """Return whether a tensor that stays in two steps is worth a line."""
    tensor = column.tensor
    if column.is_alone:  # the samples themselves, or numbers of places in the batch
        places = torch.arange(len(tensor), device=tensor.device)
        if not column.is_target or (tensor.ndim == 1 and bool((tensor == places).all())):
            return False
    rows = tensor if tensor.numel() <= SMALL else tensor[[0, -1]]
    return not bool((rows == rows[:1]).all())


def _digest(tensor: torch.Tensor) -> str:
    """Return a hash of a tensor; of a large one its first and last rows."""
    small = tensor.numel() <= SMALL
    return digest_of([list(tensor.shape), tensor if small else [tensor[0], tensor[-1]]])


def shared_line(path: str, shape: list[int]) -> str:
    """Return the notice on a tensor that goes whole into every micro-batch.

    Args:
        path: of the tensor in the batch.
        shape: of the tensor.
    """
    return (
        f"batch{path}: all samples share this tensor {shape}, although its dim 0 is their number: "
        f"every micro-batch gets it whole, since its rows alone give other outputs, or another "
        f"loss, than the whole batch; if it has a row per sample, and samples are compared on "
        f"purpose, try: coupled=True"
    )


def uncut_text(columns: dict[str, TriedColumn], cut: int, error: Exception) -> str:
    """Return the error for a model that takes a whole batch, and no part of it.

    Args:
        columns: tensors of the batch that are cut.
        cut: samples of a micro-batch.
        error: of the model with a part.
    """
    shapes = ", ".join(str(list(one.tensor.shape)) for one in columns.values())
    return (
        f"batch: of tensors {shapes} the model takes all samples, and raises "
        f"{type(error).__name__} ({shorten(str(error))}) on some of them, as micro-batches of "
        f"{cut} are: samples need each other (nodes of one graph); try: no micro_batch, or a batch "
        f"of a class whose slices are graphs"
    )


def uncut_targets_text(columns: dict[str, TriedColumn], cut: int, error: Exception) -> str:
    """Return the error for a loss that takes a whole batch, and no part of it.

    Args:
        columns: tensors of the batch that are cut.
        cut: samples of a micro-batch.
        error: of the loss with a part.
    """
    shapes = ", ".join(str(list(one.tensor.shape)) for one in columns.values() if one.is_target)
    return (
        f"loss: of targets {shapes} it takes all rows, and raises {type(error).__name__} "
        f"({shorten(str(error))}) on some of them, as micro-batches of {cut} are: they hold places "
        f"of samples in the batch (boxes with the number of their image); try: a list with a "
        f"tensor for each sample, or no micro_batch"
    )


def unchanged_line(path: str, column: TriedColumn) -> str:
    """Return the notice on a tensor that may be shared by all samples and is cut.

    Args:
        path: of the tensor in the batch.
        column: the tensor.
    """
    cure = (
        "a loss that holds it (functools.partial)"
        if column.is_target
        else "a buffer of the model, or tensor[None], which goes whole into every micro-batch"
    )
    return (
        f"batch{path}: a tensor {list(column.tensor.shape)} has the same numbers in two steps, and "
        f"is cut into micro-batches, since its dim 0 is the number of samples; if all samples "
        f"share it, try: {cure}; if it has a row per sample, all is well"
    )
