"""Data owners that one group of processes trains: datasets, loaders, agreement, validation.

    owners/east.jsonl  ── open_source ──> samples of owner 0 ── loader ──> its inner steps
    owners/north.jsonl ── open_source ──> samples of owner 1 …

No sample leaves its owner, and no digest of one. Owners exchange the numbers of their samples, the
kind of the data, the hash of the tokenizer (`island_join.check_same_tokenizer`), and the sums of a
validation: loss, targets and accuracy.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.base.errors import ConfigError
from shoal.base.text.units import bytes_text
from shoal.config.owners import OWNER, list_owner_names, select_owner
from shoal.config.paths import TEXTS, split_source
from shoal.config.sections import Config
from shoal.data.digits import EvenSubset
from shoal.data.loading.dataset_kind import is_indexed
from shoal.data.loading.loader import Loader
from shoal.data.owner_split import DealtSamples, OwnerDeal, OwnerSubset
from shoal.data.sources import Source, open_source
from shoal.data.text.token_bytes import compute_bits_per_byte
from shoal.fabric import World
from shoal.islands.peer_deadline import MOST_S
from shoal.trainer.islands.island_join import MEET_S, IslandConnection
from shoal.trainer.jobs.validation import Values, count_correct, make_byte_counter
from shoal.trainer.loaders.run_loaders import open_loader
from shoal.trainer.run import Run
from shoal.trainer.step.call_contract import Metric

SHARED_TOKENIZER = "tokenizer.json"
"""File of an island's folder: the tokenizer of owner 0, on one machine."""

MOST_NAMES = 8
"""Owners whose names the first line lists."""

TEXT_BYTES = "bytes_per_target"
"""Metric of a validation of text: bytes of the text that a target stands for, in the mean."""

TEXT_KEYS = ("bytes", "bits_per_byte")
"""Values of a validation of text that follow from TEXT_BYTES."""


@dataclass(frozen=True)
class OwnerData:
    """Dataset, loader and validation of one data owner.

    Attributes:
        loader: of its training samples; None if it has none.
        validation: its held-out samples; None if it holds out none.
    """

    number: int
    name: str
    loader: Loader | None
    validation: Any
    source: Source

    @property
    def samples(self) -> int:
        """Return the number of its training samples."""
        return 0 if self.loader is None else self.loader.samples


def open_first_source(config: Config) -> Source:
    """Open the data of a run; with data owners, those of the first owner of this group.

    With `data.split` it is the whole dataset, of which every owner has a part.
    """
    if not config.islands.owned:
        return open_source(config.data, config.train.seed)
    first = config.islands.owners_of(config.islands.index)[0]
    return _open_own_source(config, list_owner_names(config)[first])


def _open_own_source(config: Config, name: str) -> Source:
    """Open one data owner's source; errors name the owner first."""
    try:
        return open_source(select_owner(config.data, name), config.train.seed)
    except ConfigError as error:
        raise ConfigError(f"owner {name}: {error}") from error


def share_tokenizer(config: Config, folder: Path, world: World) -> Config:
    """Return a configuration in which the owners of one machine use the tokenizer of owner 0.

    It changes nothing where `data.tokenizer` is a file, and on several machines, where an owner
    does not see the text of another.

    Args:
        folder: of this island's run, inside the run's own folder.
    """
    is_here = not config.islands.at or (folder.parent / "run.toml").exists()
    if not is_here or OWNER not in config.data.source:
        return config
    first = select_owner(config.data, list_owner_names(config)[0])
    if split_source(first.source)[0] not in TEXTS:
        return config
    if not config.data.tokenizer.startswith("bpe:"):
        return config
    path = folder / SHARED_TOKENIZER

    def write() -> Any:
        source = _open_own_source(config, list_owner_names(config)[0])
        if world.writes_files and source.tokenizer is not None:
            source.tokenizer.save(str(path))
        return source.tokenizer

    if world.run_local_first(write) is None:
        return config  # hf:FOLDER may hold images
    return replace(config, data=replace(config.data, tokenizer=str(path)))


def open_owners(
    run: Run, source: Source, config: Config, deal: OwnerDeal | None
) -> list[OwnerData]:
    """Open the data of all data owners that this group trains.

    Args:
        source: result of `open_first_source`, whose training data the run's first loader reads.
        deal: of `data.split`; None: each owner has a source of its own.

    Raises:
        ConfigError: data that can only be iterated, or as of `open_source`.
    """
    islands, names = config.islands, list_owner_names(config)
    numbers = islands.owners_of(islands.index)
    found = []
    for number in numbers:
        if deal is not None:
            train: Any = OwnerSubset(source.train, deal.parts[number])
            own = replace(source, train=train, validation=None)
        elif number == numbers[0]:
            own = source
        else:
            own = _open_own_source(config, names[number])
        if not is_indexed(own.train):
            raise ConfigError(
                f"data.source: the samples of owner {names[number]} can only be iterated, and an "
                "owner's samples are counted; try: a dataset with __getitem__ and __len__"
            )
        workers = config.data.workers if len(numbers) == 1 else 0
        found.append(
            OwnerData(
                number,
                names[number],
                open_owner_loader(run, own, workers) if len(own.train) else None,
                own.validation,
                own,
            )
        )
    return found


def deal_held_out(source: Source, deal: OwnerDeal, names: Sequence[str]) -> tuple[Source, str]:
    """Return a source whose held-out samples are dealt to the data owners, and a line about it.

    Held-out data that can only be iterated, or that have no labels, stay as they are.

    Args:
        source: of the whole dataset.
        names: of all owners, by number.
    """
    if not is_indexed(source.validation):
        return source, ""
    held = len(source.validation)
    try:
        owners = deal.deal_held_out(source.validation)
    except ConfigError:  # training samples have labels, these have none
        return source, f"data.split = {deal.split}: the {held} held-out samples have no labels"
    counts = np.bincount(owners, minlength=len(names))
    some = counts[counts > 0]
    return (
        replace(source, validation=DealtSamples(source.validation, owners, names)),
        f"data.split = {deal.split}: deals the {held} held-out samples by the same shares; "
        f"{len(some)} of {len(names)} owners have some, {some.min()} to {some.max()} each",
    )


def open_owner_loader(run: Run, source: Source, workers: int) -> Loader:
    """Return a loader over an owner's training samples; the run's own if it reads the same."""
    known = run.feed.loaders[0] if run.feed.loaders else None
    if isinstance(known, Loader) and known.dataset is source.train:
        return known
    plan, world = run.plan, run.feed.world
    loader = open_loader(
        source.train,
        batch=plan.batch,
        micro_batch=plan.micro_batch,
        seed=plan.seed,
        rank=world.rank if world.rank < plan.layout.data_degree else -1,
        degree=plan.layout.data_degree,
        workers=workers,
        collate=source.collate,
    )
    if not isinstance(loader, Loader):
        raise ConfigError("data.source: owners need a dataset with __getitem__ and __len__")
    return loader


def agree_on_owners(
    joined: IslandConnection, owners: Sequence[OwnerData]
) -> tuple[list[int], list[str]]:
    """Exchange the numbers of all owners' samples; return them, and the owners' names, by owner.

    Every rank of every island calls it.

    Raises:
        ConfigError: owners hold data of different kinds, none holds a sample, or an owner holds
            another number than at the checkpoint from which the run continues.
    """
    if joined.is_alone:  # a replay: the state before a round has the numbers of all
        return list(joined.common.held), [str(owner) for owner in range(joined.policy.count)]
    own = {
        str(one.number): [one.samples, one.source.kind, one.source.vocabulary, one.name]
        for one in owners
    }
    message = json.dumps(own).encode()
    told = [json.loads(one) for one in joined.plane.gather(message, deadline_s=MEET_S)]
    rows = {int(number): row for one in told for number, row in one.items()}
    if (kept := joined.common.held) and len(kept) != len(rows):
        raise ConfigError(
            f"islands.count = {len(rows)}: the checkpoint is of {len(kept)} owners, whose number "
            f"is fixed; try: islands.count={len(kept)}, or a new run"
        )
    for number, (_, *about, name) in sorted(rows.items()):
        if about != rows[0][1:3]:
            raise ConfigError(
                f"data.source: owner {name} has {_describe_kind(about)}, owner {rows[0][3]} has "
                f"{_describe_kind(rows[0][1:3])}; try: data of one kind for all owners"
            )
        if kept and kept[number] != rows[number][0]:
            raise ConfigError(
                f"data.source: owner {name} has {rows[number][0]} samples, and had "
                f"{kept[number]} at the checkpoint: its order would be another; try: the same "
                "data, or a new run"
            )
    held = [rows[number][0] for number in sorted(rows)]
    if not any(held):
        raise ConfigError("data.source: no owner has a sample; try: files with data in them")
    return held, [rows[number][3] for number in sorted(rows)]


def _describe_kind(about: Sequence[Any]) -> str:
    kind, vocabulary = about
    return f"{kind} of a vocabulary of {vocabulary}" if vocabulary else str(kind)


def describe_sent_data(
    run: Run,
    joined: IslandConnection,
    held: Sequence[int],
    names: Sequence[str],
    *,
    has_text: bool,
) -> str:
    """Return the line that names all that leaves an owner.

    Args:
        has_text: the data have a tokenizer, whose hash leaves.
    """
    shares = joined.merger.shares
    message = joined.method.message_like(joined.common.outer, joined.fragments[0])
    codec = joined.merger.codec
    sizes = joined.inner.gather_json(codec.size_bytes(shares.count_elements(message)))
    empty = sum(not samples for samples in held)
    without = f", {empty} without any" if empty else ""
    known = any(name != str(number) for number, name in enumerate(names))
    listed = ", ".join(f"{number} {name}" for number, name in enumerate(names))
    listed = f" ({listed})" if known and len(names) <= MOST_NAMES else ""
    tokenizer = ", the tokenizer's hash" if has_text else ""
    return (
        f"own data of {len(held)} owners{listed}, {sum(held)} samples{without}: no sample leaves "
        f"its owner; what does: the change of the weights once a round ({bytes_text(sum(sizes))}, "
        f"codec {joined.policy.codec}), numbers of samples, tokens and steps, loss and accuracy of "
        f"validations{tokenizer}. A change can reveal samples: there are no secure sums "
        f"and no differential privacy"
    )


def make_owner_validator(
    run: Run, joined: IslandConnection, owners: Sequence[OwnerData], config: Config
) -> Callable[[], Values | None]:
    """Return a function that validates the merged weights on every owner's held-out samples.

    The function emits `validated`: the mean over all targets of all owners, the loss of each owner,
    and the owner with the largest. It returns None if no owner holds out samples. Every rank of
    every island calls it.
    """
    run.tells_validation = False
    images = owners[0].source.kind == "samples" and not config.model.loss
    metrics: dict[str, Metric] = {"accuracy": count_correct} if images else {}
    if not config.model.loss and (count_bytes := make_byte_counter(owners[0].source)):
        metrics[TEXT_BYTES] = count_bytes
    text = config.train.validate_samples
    limit = int(text) if text.isdecimal() else 0

    def evaluate(owner: OwnerData) -> dict[str, float]:
        data, most = (
            owner.validation,
            min(limit or math.inf, owner.source.validation_samples or math.inf),
        )
        most = max(most, run.plan.layout.data_degree)
        if is_indexed(data) and most < len(data):
            data = EvenSubset(data, int(most), True)
        source = owner.source
        values = run.evaluate(
            run.feed.held_out_batches(data, config.data.workers, source.collate), metrics
        )
        entropy = source.unigram_entropy
        return describe_text(values) | ({} if entropy is None else {"entropy": entropy})

    def validate() -> Values | None:
        began_s = time.perf_counter()
        own = {one.name: evaluate(one) for one in owners if one.validation is not None}
        message = json.dumps(own).encode()
        told = [json.loads(one) for one in joined.plane.gather(message, deadline_s=MOST_S)]
        by_owner = {name: values for one in told for name, values in one.items()}
        if not by_owner:
            return None
        values = merge_validations(by_owner)
        numbers = {name: values[name] for name in values if name != "entropy"}
        run.recorder.log_validation(
            run.step_count,
            {**numbers, "targets": int(values["targets"])},
            by_owner,
            accuracy=values.get("accuracy"),
            unigram_entropy=values.get("entropy"),
            baseline="unigram entropy",
            **{name: values[name] for name in TEXT_KEYS if name in values},
            seconds=time.perf_counter() - began_s,
            worst=find_worst_owner(by_owner),
        )
        return values

    return validate


def merge_validations(by_owner: Mapping[str, Mapping[str, float]]) -> Values:
    """Return the means of the owners' values, weighted by their targets; and all targets.

    Bits per byte are those of all targets over the bytes of all owners' text.

    >>> merge_validations({"a": {"loss": 1.0, "targets": 3}, "b": {"loss": 2.0, "targets": 1}})
    {'loss': 1.25, 'targets': 4}
    """
    counting = [values for values in by_owner.values() if values["targets"]]
    targets = sum(values["targets"] for values in counting)
    apart = ("targets", *TEXT_KEYS)
    keys = [key for key in next(iter(by_owner.values())) if key not in apart]
    found = {
        key: sum(values[key] * values["targets"] for values in counting) / targets
        if targets
        else math.nan
        for key in keys
        if all(key in values for values in by_owner.values())
    }
    if counting and all("bytes" in values for values in counting):
        whole = sum(values["bytes"] for values in counting)
        bits = compute_bits_per_byte(found["loss"], targets, whole)
        found |= {"bytes": whole, "bits_per_byte": bits}
    return {**found, "targets": targets}


def describe_text(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values of a validation with its bytes and bits per byte, if bytes were counted.

    Args:
        values: means by name, with TEXT_BYTES the bytes per target.
    """
    found = {name: value for name, value in values.items() if name != TEXT_BYTES}
    if (each := values.get(TEXT_BYTES)) is None or not math.isfinite(each):
        return found
    whole = round(each * values["targets"])
    bits = compute_bits_per_byte(values["loss"], values["targets"], whole)
    return {**found, "bytes": whole, "bits_per_byte": bits}


def find_worst_owner(by_owner: Mapping[str, Mapping[str, float]]) -> str:
    """Return the data owner with the most bits per byte, or largest loss if bytes are unknown.

    A loss that is not finite is the largest. Owners without targets do not count.

    >>> find_worst_owner({"a": {"loss": 1.0}, "b": {"loss": 2.0}, "c": {"loss": math.nan}})
    'c'
    """
    counting = {name: values for name, values in by_owner.items() if values.get("targets", 1)}
    in_bytes = all("bits_per_byte" in values for values in counting.values())
    key = "bits_per_byte" if in_bytes else "loss"

    def rank(name: str) -> float:
        value = counting[name][key]
        return value if math.isfinite(value) else math.inf

    return max(counting or by_owner, key=rank if counting else str)
