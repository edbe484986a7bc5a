"""Validation in the main job: the held-out loss next to the loss of a model without context.

The samples of one validation are bounded (`train.validate_samples`, by default a fraction of the
training samples, and the configured share). They are spread evenly over the held-out data, and the
same every time. Without gradients more samples fit into a forward pass than in training, and the
time of many small passes is mostly overhead. So validation uses the plan's larger micro-batch where
sums over samples stay the same:

    our models, our loss       each sample is computed alone: used
    other models, our loss     used if the first samples give the same loss both ways; a model that
                               couples samples (experts with a capacity, batch statistics) does not
    a loss or a collate of     as in training: a loss may look across samples, and padding depends
    the user's, mixtures       on which samples are joined
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from shoal.base.errors import ConfigError
from shoal.base.runlog.damaged_lines import is_number, read_object
from shoal.base.text.units import seconds_text
from shoal.base.validation_size import default_validation_samples
from shoal.config.save import is_derived, write_derived
from shoal.config.sections import Config
from shoal.data.digits import EvenSubset, LeadingSamples
from shoal.data.loading.dataset_kind import is_indexed
from shoal.data.sources import Source
from shoal.forecast.models.model_facts import FAMILIES, family_of
from shoal.models.loss import find_logits, token_loss
from shoal.trainer.jobs.configured_run import count_total_steps
from shoal.trainer.run import Run
from shoal.trainer.step.call_contract import IGNORED_TARGET, Metric

SAME = 1e-5
"""Relative difference of two losses that rounding explains, in any of Shoal's formats."""

FEW = 16
"""Held-out samples whose mean loss says little of other samples: a line says so."""

FORWARD_SHARE = 1 / 3
"""Share of a training step's work that is its forward pass."""

Values = dict[str, float]


@dataclass(frozen=True)
class ValidationData:
    """Data of one validation: samples (None: unknown count), and its micro-batch size."""

    data: Any
    held: int | None
    samples: int | None
    micro_batch: int
    why: str


def make_validator(
    run: Run,
    source: Source,
    config: Config,
    find_worst: Callable[[dict[str, Any]], str] | None = None,
) -> Callable[[], Values | None]:
    """Return a function that evaluates the held-out data and emits `validated`.

    The function returns None without such data, and if a stop was requested meanwhile: then
    `run.stopping` is true. At a fresh start this function reports the samples and the time of a
    validation. Every rank calls both.

    Args:
        find_worst: of held-out samples that were dealt to data owners: returns the worst owner of
            those with samples.
    """
    run.tells_validation = False  # this module reports more
    if source.validation is None:
        return lambda: None
    images = source.kind == "samples" and not config.model.loss
    baseline = "unigram entropy" if source.kind == "tokens" else "class entropy"
    foreseen = run.world.broadcast_json(_read_forecast(run) if run.world.is_first else None)
    asked = _read_sample_limit(run, source, config)
    fits = int(foreseen.get("validation_micro_batch") or 0)
    reading = _split_for_all_ranks(run, _choose_validation_data(run, source, asked.samples, fits))
    if run.world.writes_files and run.step_count == 0:
        text = _format_notice(run, reading, config, foreseen.get("step_s"), asked.by_default)
        run.recorder.events.emit("notice", text=text, opening=6)
    is_own = not config.model.build and family_of(config.model.name) in FAMILIES
    unsure = reading.micro_batch > run.plan.micro_batch and not is_own

    def validate() -> Values | None:
        nonlocal reading, unsure
        if unsure:
            reading, unsure = (
                _check_larger_micro_batch(run, source, reading, config.data.workers),
                False,
            )
        began_s = time.perf_counter()
        values = run.evaluate(
            run.feed.held_out_batches(
                reading.data, config.data.workers, source.collate, reading.micro_batch
            ),
            {"accuracy": count_correct} if images else {},
            stops=True,
        )
        if not values:
            return None
        by_source, worst = dict(run.validated_by_source), dict[str, str | int]()
        if find_worst is not None and by_source:
            owners = len(by_source)
            by_source = {name: row for name, row in by_source.items() if row["targets"]}
            worst = {"worst": find_worst(by_source), "owners": owners}
        run.recorder.log_validation(
            run.step_count,
            {**values, "targets": int(values["targets"])},
            by_source,
            accuracy=values.get("accuracy"),
            unigram_entropy=source.unigram_entropy,
            baseline=baseline,
            seconds=time.perf_counter() - began_s,
            **worst,
        )
        return values

    return validate


def _read_forecast(run: Run) -> dict[str, Any]:
    """Return the forecast in plan.json, {} without one."""
    folder = run.recorder.folder
    found = read_object(folder / "plan.json").get("predicted") if folder else None
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class _SampleLimit:
    """Limit of the samples of one validation, 0: all; whether it is Shoal's choice."""

    samples: int
    by_default: bool


def _read_sample_limit(run: Run, source: Source, config: Config) -> _SampleLimit:
    """Read `train.validate_samples`; settle and store it for a run whose length is epochs."""
    text, folder = config.train.validate_samples, run.recorder.folder
    if text == "auto":
        steps = count_total_steps(config, source, run.plan.batch)
        samples = default_validation_samples(run.plan.batch, steps, config.train.validate_every)
        if run.world.writes_files and folder is not None:
            write_derived(folder / "run.toml", "train", validate_samples=str(samples))
        return _SampleLimit(samples, True)
    derived = folder is not None and is_derived(folder / "run.toml", "train.validate_samples")
    return _SampleLimit(0 if text == "all" else int(text), derived)


def _choose_validation_data(run: Run, source: Source, asked: int, fits: int) -> ValidationData:
    """Choose the samples and the micro-batch of a validation.

    Args:
        run: the run.
        source: its data.
        asked: samples of one validation at most; 0: all of the configured share.
        fits: samples per forward pass that need no more memory than a training step; 0: unknown.
    """
    data = source.validation
    held = len(data) if is_indexed(data) else None
    limits = [n for n in (asked, source.validation_samples) if n]
    samples = held
    if limits:
        # If parameters are gathered, every rank needs a sample to run with the others.
        most = max(min(limits), run.plan.layout.data_degree)
        if held is None:
            data, samples = LeadingSamples(data, most), None
        elif most < held:
            data, samples = EvenSubset(data, most, True), most
    training = run.plan.micro_batch
    why = ""
    if run.loss is not token_loss:
        why = "the loss may look across samples"
    elif source.collate is not None:
        why = "data.collate may pad to the longest sample"
    elif run.plan.layout.threads > 1 or fits <= training:
        why = "no larger one is known to fit"
    if why or samples is None:
        return ValidationData(data, held, samples, training, why)
    own = samples // run.plan.layout.data_degree  # so that every rank has a sample to run
    return ValidationData(data, held, samples, max(training, min(fits, own)), "")


def _split_for_all_ranks(run: Run, reading: ValidationData) -> ValidationData:
    """Return a reading that has a micro-batch for every rank, if ranks run the model together.

    Raises:
        ConfigError: before the first step, since training would end without its validation.
    """
    ranks, samples = run.plan.layout.data_degree, reading.samples
    if not run.program.together or samples is None or samples > reading.micro_batch * (ranks - 1):
        return reading
    if samples < ranks:
        raise ConfigError(
            f"validation: {samples} held-out sample{'s' * (samples > 1)}, and layout "
            f"{run.plan.layout.strategy} runs the model on all {ranks} ranks at once; try: more "
            f"data (data.validation holds out a part of it), or layout.strategy=ddp"
        )
    why = f"{samples} samples, a part for each of {ranks} ranks"
    return replace(reading, micro_batch=samples // ranks, why=why)


def _check_larger_micro_batch(
    run: Run, source: Source, reading: ValidationData, workers: int
) -> ValidationData:
    """Return `reading`, with training's micro-batch if the larger one gives another loss."""
    few = reading.micro_batch * run.plan.layout.data_degree
    data = reading.data if few >= len(reading.data) else EvenSubset(reading.data, few, True)
    small, large = (
        run.evaluate(run.feed.held_out_batches(data, workers, source.collate, size))
        for size in (run.plan.micro_batch, reading.micro_batch)
    )
    apart = abs(large["loss"] - small["loss"])
    if large["targets"] == small["targets"] and apart <= SAME * abs(small["loss"]):
        return reading
    run.recorder.notice(
        f"validation: {run.plan.micro_batch} samples at a time, as in training: with "
        f"{reading.micro_batch} the loss of the same samples is {large['loss']:.6f}, not "
        f"{small['loss']:.6f}, so the model looks across samples"
    )
    return replace(reading, micro_batch=run.plan.micro_batch)


def _format_notice(
    run: Run, reading: ValidationData, config: Config, step_s: Any, by_default: bool = False
) -> str:
    """Return one line about the samples and the time of a validation.

    Args:
        by_default: Shoal chose the number of samples: the line names the key that reads all.
    """
    what = "held-out samples"
    if reading.samples is not None:
        of = "" if reading.samples == reading.held else f" of {reading.held}"
        what = f"{reading.samples}{of} held-out samples"
    elif isinstance(reading.data, LeadingSamples):
        what = f"the first {reading.data.samples} held-out samples"
    if reading.held is None and (ranks := run.plan.layout.data_degree) > 1:
        what += (
            f" of what can only be iterated, so that each of {ranks} ranks reads all of them "
            f"(try: a dataset with __getitem__ and __len__)"
        )
    size = f"{reading.micro_batch} at a time"
    if reading.micro_batch == run.plan.micro_batch and reading.why:
        size += f" as in training ({reading.why})"
    every = config.train.validate_every
    when = f"every {every} steps and at the end" if every else "at the end"
    text = f"validation {when}: {what}, {size}"
    if by_default and (reading.samples != reading.held or reading.held is None):
        text += " (all: train.validate_samples=all)"
    if reading.samples is not None and reading.samples < FEW and config.data.validation:
        text += "; so few say little, try: data.validation=0.1 or a file of its own"
    if not is_number(step_s) or reading.samples is None:
        return text
    each_s = step_s * reading.samples / run.plan.batch * FORWARD_SHARE
    return f"{text}; about {seconds_text(each_s)} each time"


def make_byte_counter(source: Source) -> Metric | None:
    """Return a metric that sums the bytes of text behind the targets, over their number.

    Returns:
        None for samples other than text, and if the tokenizer does not tell the bytes of a token.
    """
    if source.kind != "tokens" or source.tokenizer is None or not source.vocabulary:
        return None
    from shoal.data.text.token_bytes import count_token_bytes  # other data do without

    counted = count_token_bytes(source.tokenizer, source.vocabulary)
    if counted is None:
        return None
    by_id = torch.from_numpy(counted)

    def count_bytes(_outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        valid = targets.long() != IGNORED_TARGET  # long: −100 wraps around to 156 in uint8
        ids = targets.long().where(valid, 0)
        return (by_id.to(targets.device)[ids] * valid).sum().double(), valid.sum()

    return count_bytes


def count_correct(outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (right answers, answers) of scores [..., classes] for labels [...], without −100."""
    right = find_logits(outputs).argmax(-1) == targets
    return right.sum().float(), (targets != IGNORED_TARGET).sum()
