"""Check that ranks train on different samples of the same data, in a run's first steps.

A user's own loader does not know of ranks: under torchrun it shows each of them the whole dataset,
in the same order if seeds are equal. A dataset made of unseeded numbers differs between ranks. Both
train, and the loss goes down. So before the first forward passes ranks send each other, in a few
hundred bytes, the number of their samples and a hash of them.

    ranks that work on the same samples (tp, pp, cp)   must hold equal ones
    ranks that do not                                  must not, unless they could by chance
    batches of `run.loader`                            must come from the same dataset on all
    batch=…                                            must equal the samples of all ranks together
    a DistributedSampler                               must have equal settings, and a new epoch
    tensors that all samples share                     are found once, by rank 0, for all ranks
    the same sample of a loader's dataset              must have the same label
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from shoal.base.errors import ConfigError
from shoal.data.loading.dataset_kind import digest_of
from shoal.data.loading.step_samples import StepBatch
from shoal.parallel.program import Program
from shoal.trainer.batches.batch_split import batch_length, has_plain_tensors
from shoal.trainer.batches.batch_values import Readings, has_objects
from shoal.trainer.guards import reports
from shoal.trainer.guards.guard import Guard

if TYPE_CHECKING:  # of batches that are cut
    from shoal.trainer.guards.model_trial import ModelTrial
    from shoal.trainer.guards.shared_tensors import SharedTensorCheck
    from shoal.trainer.step.call_contract import Loss

LOOKS = 3
"""Largest number of steps whose own batches are compared."""


class BatchConsistencyGuard(Guard):
    """Guard against ranks with equal samples, or with different samples where they must be equal.

    Args:
        program: the run's.
        batch: samples of a step over all ranks, if the user set it; 0: not set.
        notice: prints a line, by rank 0.
        cut: samples of a micro-batch of the user's own batches; 0: they are not cut.
        trial: returns the copy of a small model, for one trial.

    Attributes:
        loss: the run's.
        readings: how lists and tensors in the batches of this and other ranks are read.
    """

    def __init__(
        self,
        program: Program,
        batch: int,
        notice: Callable[[str], None],
        cut: int,
        trial: Callable[[], ModelTrial | None],
    ) -> None:
        self.program, self.batch, self.notice = program, batch, notice
        self.cut, self.trial, self.loss = cut, trial, cast("Loss | None", None)
        self._shared: SharedTensorCheck | None = None
        self.looks = 0
        self.readings: Readings = {}
        self._alike_bits = 0.0
        self._alike = True
        self._short = 0
        self._refusal = ""
        self._epochs: list[Any] = []

    def before(self, step: int, batch: Any) -> None:
        """Compare the batches of all ranks; all of them call it.

        Raises:
            ConfigError: the same on all ranks.
        """
        if batch is None:  # a loop that calls the model itself
            return
        loaded, world = isinstance(batch, StepBatch), self.program.world
        if not loaded:
            self._read_own_batch(batch)
        shared = world.size > self.program.data.size
        compared = self.looks < LOOKS and (shared or not loaded)
        if not compared and not (isinstance(batch, StepBatch) and batch.probe):
            return
        self.looks += 1
        told = self._gather(self._describe_batch(batch))
        if world.size == 1:
            if not loaded:
                self._check_size(step, told)
            return
        mixed = len({one["loaded"] for one in told}) > 1
        samples = {(one["place"], one["hash"]) for one in told}
        unlike = len(samples) > len({one["place"] for one in told})
        if mixed or unlike or any(one["probe"] != told[0]["probe"] for one in told):
            reports.batch_report.refuse_different_data(step, told, self.program.plan.layout.text())
        if loaded:
            return
        for one in told:
            self.readings = {**one["readings"], **self.readings}
        shares = list({one["place"]: one for one in told}.values())
        if shares[0].get("samplers") or shares[0].get("rows"):
            reports.batch_report.refuse_unlike_loaders(step, shares)
        self._check_distinct(step, shares)
        self._check_size(step, shares)
        if not self._short and (len(shares) == 1 or not self._alike):
            self.looks = LOOKS  # no doubt remains: stop comparing

    def _gather(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the descriptions of all ranks.

        Raises:
            ConfigError: one of them cannot cut its batch.
        """
        world = self.program.world
        told: list[Any] = world.gather_json(mine) if world.size > 1 else [mine]
        if refused := [one["refusal"] for one in told if one["refusal"]]:
            raise ConfigError(refused[0])
        return told

    def _read_own_batch(self, batch: Any) -> None:
        """Read a batch; of the first ones a refusal is kept, for all ranks to raise it."""
        self._refusal = ""
        try:
            self._check_own_batch(batch)
        except ConfigError as error:
            if self.looks >= LOOKS:
                raise
            self._refusal = str(error)

    def _check_own_batch(self, batch: Any) -> None:
        """Find tensors that all samples share, and an epoch in the order of the one before."""
        if self.looks < LOOKS and not has_plain_tensors(batch):
            from shoal.trainer.batches.uncut_tensors import check_graphs

            line = check_graphs(batch, self.readings, self.program.plan.micro_batch)
            if line and not self.looks:
                self.notice(line)
        if self.cut and self._shared is None:
            from shoal.trainer.guards.shared_tensors import SharedTensorCheck

            more = self.trial(), self.notice, self.loss
            self._shared = SharedTensorCheck(self.program, self.cut, *more)
        if self._shared is not None:
            self.readings = self._shared.read(batch, self.readings, is_first=not self.looks)
        if self._epochs:
            length = batch_length(batch, self.readings)
            if any([one.repeats(length) for one in self._epochs]):
                self._epochs = []
                self.notice(reports.batch_report.EPOCH)

    def _describe_batch(self, batch: Any) -> dict[str, Any]:
        if self._refusal:
            return {"refusal": self._refusal}
        loaded = isinstance(batch, StepBatch)
        values = batch.values if isinstance(batch, StepBatch) else [batch]
        samples = 0 if loaded else batch_length(batch, self.readings)
        if has_objects(values):
            from shoal.trainer.batches.batch_objects import list_tensors

            values = list_tensors(values)
        told: dict[str, Any] = {
            "loaded": loaded,
            "place": self.program.data.rank,
            "samples": samples,
            "readings": self.readings,
            "hash": digest_of(values),
            "bits": 0.0,
            "probe": list(batch.probe) if loaded else [],
            "loaders": [],
            "refusal": "",
        }
        if not loaded and self.program.data.size > 1:
            from shoal.trainer.guards.reports import own_loaders

            told["bits"] = own_loaders.count_information_bits(values)
            if self.looks == 1:
                more, self._epochs = own_loaders.describe_loaders(told["samples"])
                told |= more
        return told

    def _check_distinct(self, step: int, shares: Sequence[dict[str, Any]]) -> None:
        """Raise ConfigError if all ranks read the whole data, or the same samples."""
        if len(shares) == 1:
            return
        hashes = [one["hash"] for one in shares]
        self._alike = self._alike and len(set(hashes)) < len(shares)
        self._alike_bits += min(one["bits"] for one in shares)
        by_chance = not self._alike or self._alike_bits < reports.own_loaders.CHANCE_BITS
        if shares[0]["loaders"] or not by_chance:
            reports.batch_report.refuse_duplicate_samples(step, shares, by_chance=by_chance)

    def _check_size(self, step: int, shares: Sequence[dict[str, Any]]) -> None:
        """Raise ConfigError if the ranks' samples do not add up to the batch that the user set."""
        brought = sum(one["samples"] for one in shares)
        if not self.batch or brought == self.batch:
            return
        may_be = brought < self.batch and brought != self._short
        line = reports.batch_report.batch_size_line(step, self.batch, shares, may_be=may_be)
        if not may_be:
            raise ConfigError(line)
        if self.looks == 1:  # the last step of an epoch may be short
            self._short = brought
            self.notice(line)
