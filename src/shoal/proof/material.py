"""What a run is made of, as far as a proof needs it: model, loss, data, layout, portions of a step.

The proof trains on the first samples of the user's own data, so few that an epoch soon ends: its
short last step, whose last micro-batch is short too and in which some ranks have nothing to do, is
where layouts err.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

from torch import nn

from shoal.config.resolve import asked_layout, portions
from shoal.config.sections import Config
from shoal.data.fetch import draws_nothing, first_samples, is_indexed, kept_draws
from shoal.data.sources import Source
from shoal.planner.model_facts import FAMILIES, family_of
from shoal.proof.side import Side, Trial
from shoal.trainer.contract import Loss
from shoal.trainer.job import build_model, import_loss
from shoal.trainer.result import StepResult


@dataclass(frozen=True)
class Material:
    """One run's ingredients.

    build               gives the module, with the same weights at every call under one seed
    data, collate       the training dataset, or an iterable; how samples join
    layout              as `shoal.parallelize` takes it
    batch, micro_batch  samples per step over all ranks, per forward pass
    full_steps          full steps in the epoch that the proof sees, before the short one
    ours                the module is one of Shoal's own, which may be built without numbers
    policies            what else `shoal.parallelize` is told on the layout's side only: defer_sync,
                        recompute, offload; never compress, which changes numbers on purpose
    """

    build: Callable[[], nn.Module]
    loss: Loss
    data: Any
    collate: Any
    layout: str | Mapping[str, Any]
    batch: int
    micro_batch: int
    call: str = "single"
    seed: int = 0
    full_steps: int = 2
    ours: bool = False
    policies: Mapping[str, Any] = field(default_factory=dict)

    def small(self, degree: int) -> Material:
        """The same with two small micro-batches per rank and step; `degree` data-parallel ranks."""
        micro_batch = min(self.micro_batch, 2)
        return replace(self, micro_batch=micro_batch, batch=2 * degree * micro_batch, full_steps=1)

    @property
    def samples(self) -> int:
        """Samples of the epoch that a proof sees; fewer where the dataset is shorter."""
        return epoch_samples(self.batch, self.micro_batch, self.full_steps)

    def trial(self) -> Trial:
        """Trains on the first samples of the data, epoch after epoch."""
        few = head(self.data, self.batch, self.micro_batch, self.full_steps)

        def train(side: Side) -> Iterator[tuple[str, StepResult]]:
            run = side.parallelize(
                self.build,
                self.loss,
                batch=self.batch,
                micro_batch=self.micro_batch,
                call=self.call,
                sample=partial(first_samples, few, self.collate),
            )
            loader = run.loader(few, collate=self.collate)
            while True:
                for batch in loader:
                    yield "", run.step(batch)

        return train


def head(data: Any, batch: int, micro_batch: int, full_steps: int) -> Any:
    """The first samples of a dataset or iterable: some full steps and a short one.

    The short step has one full micro-batch and a half one (of two samples at least, since layers
    such as BatchNorm cannot train on one). Datasets that are shorter stay as they are.
    """
    samples = epoch_samples(batch, micro_batch, full_steps)
    if not is_indexed(data):
        # What trains afterwards must find the data, and the generators, as they were.
        state = copy.deepcopy(data.state_dict()) if hasattr(data, "state_dict") else None
        with kept_draws():
            few = list(islice(iter(data), samples))
        if state is not None:
            data.load_state_dict(state)
        return few
    return data if len(data) <= samples else Head(data, samples)


def epoch_samples(batch: int, micro_batch: int, full_steps: int) -> int:
    """Samples of the full steps and of the short one, see `head`."""
    half = max(2, micro_batch // 2) if micro_batch > 2 else 0
    return full_steps * batch + micro_batch + half


class Head:
    """The first samples of a map-style dataset."""

    def __init__(self, dataset: Any, samples: int) -> None:
        self.dataset = dataset
        self.samples = samples
        self.draws_nothing = draws_nothing(dataset)

    def __len__(self) -> int:
        """How many there are."""
        return self.samples

    def __getitem__(self, index: int) -> Any:
        """The dataset's own sample."""
        return self.dataset[index]


def material_of(
    config: Config, source: Source, layout: Mapping[str, Any] | None = None
) -> Material:
    """What a proof of this configuration's layout is made of.

    layout   what `auto` came to; default: as the configuration says
    """
    batch, micro_batch = portions(config.train)
    return Material(
        lambda: build_model(config.model, source, config.data.sequence),
        import_loss(config.model),
        source.train,
        source.collate,
        layout or asked_layout(config.layout),
        batch,
        micro_batch,
        call=config.model.call,
        seed=config.train.seed,
        ours=not config.model.build and family_of(config.model.name) in FAMILIES,
        policies={
            "defer_sync": config.train.defer_sync,
            "recompute": config.memory.recompute,
            "offload": config.memory.offload,
        },
    )
