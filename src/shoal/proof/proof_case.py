"""Ingredients of a run that a proof needs: model, loss, data, layout, sizes of a step.

The proof trains on the first samples of the user's own data, so few that an epoch soon ends. Its
last step is short, its last micro-batch is short too, and some ranks have nothing to do: layouts
err there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from torch import nn

from shoal.base.estimates.facts import read_machine_facts
from shoal.base.plans.batches import default_turn, proof_batch
from shoal.base.plans.plan import Plan
from shoal.config.resolve import collect_layout_keys, make_plan
from shoal.config.sections import Config
from shoal.data.loading.dataset_kind import is_indexed
from shoal.data.loading.sample_inspection import first_samples
from shoal.data.loading.sample_order import permute
from shoal.data.loading.sample_seeds import draws_nothing, preserved_rng
from shoal.data.sources import Source
from shoal.forecast.models.model_facts import FAMILIES, family_of
from shoal.planning.settle import Words, layout_keys, settle_layout
from shoal.proof.trial_side import Trial, TrialSide
from shoal.trainer.jobs.configured_run import build_model, import_loss
from shoal.trainer.known_proofs import PROVEN
from shoal.trainer.step.call_contract import Loss
from shoal.trainer.step.optimizer_step import StepResult


@dataclass(frozen=True)
class ProofCase:
    """A run's ingredients, and the plan that is to be proven.

    Attributes:
        build: returns the module, with the same weights at every call under one seed.
        data, collate: the training dataset, or an iterable; the function that joins samples.
        layout: in words, as `shoal.parallelize` takes it.
        plan: batch, micro-batch and policies; its layout is not read.
        full_steps: full steps in the proof's epoch, before the short one.
        ours: the module is one of Shoal's own, which may be built without numbers.
        spread: take samples from all over the dataset, not its first ones.
    """

    build: Callable[[], nn.Module]
    loss: Loss
    data: Any
    collate: Any
    layout: Words
    plan: Plan
    full_steps: int = 2
    ours: bool = False
    spread: bool = False

    @property
    def policies(self) -> dict[str, Any]:
        """Policies of the run under the layout; the single-process reference has none.

        Policies that change numbers on purpose (compress, formats, compile's fused kernels) are
        left out, and those that a proof sets itself.
        """
        return {key: getattr(self.plan, key) for key in PROVEN}

    def shrink(self, processes: int) -> ProofCase:
        """Return the case with few small micro-batches per step, see `proof_batch`.

        Raises:
            PlanError: the layout does not fit this number of processes.
        """
        layout = settle_layout(self.plan, self.layout, processes, None, read_machine_facts()).layout
        batch, micro_batch = proof_batch(layout, self.plan.micro_batch)
        plan = replace(self.plan, micro_batch=micro_batch, batch=batch)
        return replace(self, plan=plan, full_steps=1)

    @property
    def samples(self) -> int:
        """Samples of the proof's epoch; fewer where the dataset is shorter."""
        return epoch_samples(self.plan.batch, self.plan.micro_batch, self.full_steps)

    def trial(self) -> Trial:
        """Return a trial that trains on the first samples of the data, epoch after epoch."""
        plan = self.plan
        sizes = (plan.batch, plan.micro_batch, self.full_steps)
        few = select_first_samples(self.data, *sizes, spread=self.spread)

        def train(side: TrialSide) -> Iterator[tuple[str, StepResult]]:
            run = side.parallelize(
                self.build,
                self.loss,
                batch=plan.batch,
                micro_batch=plan.micro_batch,
                call=plan.call,
                sample=partial(first_samples, few, self.collate),
            )
            loader = run.loader(few, collate=self.collate)
            while True:
                for batch in loader:
                    yield "", run.step(batch)

        return train


def select_first_samples(
    data: Any, batch: int, micro_batch: int, full_steps: int, *, spread: bool = False
) -> Any:
    """Return the first samples of a dataset or iterable: some full steps and a short one.

    The short step has one full micro-batch and a half one (of two samples at least, since layers
    such as BatchNorm cannot train on one). Datasets that are shorter stay as they are.

    Args:
        spread: of a dataset with an index, take samples from all over it instead.
    """
    samples = epoch_samples(batch, micro_batch, full_steps)
    if not is_indexed(data):
        # What trains afterwards must find the data, and the generators, as they were.
        state = copy.deepcopy(data.state_dict()) if hasattr(data, "state_dict") else None
        with preserved_rng():
            few = list(islice(iter(data), samples))
        if state is not None:
            data.load_state_dict(state)
        return few
    if len(data) <= samples:
        return data
    if spread:  # drawn: at equal distances all might be of one kind
        return SelectedSamples(data, [int(n) for n in permute(range(samples), len(data), 0, 0)])
    return SelectedSamples(data, range(samples))


def epoch_samples(batch: int, micro_batch: int, full_steps: int) -> int:
    """Return the samples of the full steps and of the short one, see `select_first_samples`."""
    half = max(2, micro_batch // 2) if micro_batch > 2 else 0
    return full_steps * batch + micro_batch + half


class SelectedSamples:
    """Some samples of a map-style dataset, by their indices."""

    def __init__(self, dataset: Any, indices: Sequence[int]) -> None:
        self.dataset, self.indices = dataset, indices
        self.draws_nothing = draws_nothing(dataset)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        """Return the dataset's own sample."""
        return self.dataset[self.indices[index]]


def make_case(
    config: Config, source: Source, plan: Plan | None = None, layout: Words | None = None
) -> ProofCase:
    """Return the case that proves a configuration's layout.

    Args:
        plan, layout: after planning; default: as in the configuration.
    """
    settled = layout_keys(plan.layout) if plan is not None else collect_layout_keys(config.layout)
    plan = plan or make_plan(config)
    if not plan.micro_batch and plan.batch:
        plan = replace(plan, micro_batch=default_turn(plan.batch))
    return ProofCase(
        lambda: build_model(config, source),
        import_loss(config.model),
        source.train,
        source.collate,
        settled if layout is None else layout,
        plan,
        ours=not config.model.build and family_of(config.model.name) in FAMILIES,
    )
