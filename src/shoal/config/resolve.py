"""Resolution of values that the user left open: batch, length of the run, names, folders.

`train.batch` decides what is computed, so its default does not depend on the layout. An open
micro-batch is chosen once, for the layout of the first start (`planning/settle.py`), and saved.
`train.accumulate` follows from both at every start. If the user sets it, it fixes the micro-batch
once: micro_batch = batch / (accumulate × ranks).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from shoal.base.errors import ConfigError
from shoal.base.estimates.facts import MachineFacts, default_processes
from shoal.base.layouts.island_options import check_keep
from shoal.base.layouts.layout import Layout
from shoal.base.layouts.policies import Policies
from shoal.base.plans.batches import check_batch, default_turn, samples_per_rank
from shoal.base.plans.plan import Plan
from shoal.base.validation_size import default_validation_samples
from shoal.config.load import LoadedConfig
from shoal.config.paths import TEXTS
from shoal.config.sections import Config, LayoutSection, ModelSection, keys

NAMESAKES = {"data.split"}
"""Keys with the name of a plan's key that are none of it: a plan's `split` is layout.split."""
DEFAULT_BATCH = 16
DEFAULT_STEPS = 150


def resolve_batch(loaded: LoadedConfig, degree: int) -> None:
    """Set train.batch in `loaded`, and train.micro_batch if the user fixes it.

    An open micro-batch stays as it is: 0, or the choice of an earlier start of the run
    (`chosen_micro_batch`).

    Args:
        loaded: is changed: train.accumulate, if given, fixes micro_batch (or batch) once and
            becomes 0. Changes are reported in its notices.
        degree: data-parallel ranks.

    Raises:
        ConfigError: they do not divide, with the nearest legal values.
    """
    train = loaded.config.train
    batch, accumulate = train.batch, train.accumulate
    micro_batch = 0 if micro_batch_is_open(loaded) else train.micro_batch
    origin = "derived"
    if accumulate and batch and micro_batch:
        if batch != micro_batch * accumulate * degree:
            raise ConfigError(
                f"train.accumulate = {accumulate}: batch {batch} ≠ micro_batch {micro_batch} × "
                f"accumulate {accumulate} × {degree} ranks = {micro_batch * accumulate * degree}; "
                f"try: leave train.accumulate out, or "
                f"train.batch={micro_batch * accumulate * degree}"
            )
    elif accumulate and batch:
        if batch % (accumulate * degree):
            unit = accumulate * degree
            close = max(unit, round(batch / unit) * unit)
            raise ConfigError(
                f"train.batch = {batch}: not divisible by train.accumulate {accumulate} × {degree} "
                f"data-parallel ranks = {unit}; try: train.batch={close}"
            )
        micro_batch = batch // (accumulate * degree)
        origin = f"from accumulate = {accumulate} on {degree} ranks, fixed from now on"
        loaded.notices.append(
            f"train.accumulate = {accumulate} on {degree} ranks fixes train.micro_batch = "
            f"{micro_batch}; on other layouts accumulate is derived from it"
        )
    elif accumulate:
        micro_batch = micro_batch or default_turn(DEFAULT_BATCH)
        origin = f"from accumulate = {accumulate}, fixed from now on"
        batch = micro_batch * accumulate * degree
        loaded.notices.append(
            f"train.accumulate = {accumulate} on {degree} ranks fixes train.batch = {batch}"
        )
    else:
        batch = batch or (micro_batch * 8 if micro_batch else DEFAULT_BATCH)
    if batch != train.batch:
        loaded.replace("train", "derived", batch=batch)
    if micro_batch:
        if micro_batch != train.micro_batch:
            loaded.replace("train", origin, micro_batch=micro_batch)
        check_batch(batch, micro_batch, degree)
    elif batch % degree and not (train.batch or accumulate):
        raise ConfigError(
            f"launch.processes: {degree} data-parallel ranks do not divide the default of {batch} "
            f"samples per step; try: train.batch={8 * degree}"
        )
    else:
        samples_per_rank(batch, degree)
    loaded.replace("train", "derived at every start", accumulate=0)


def micro_batch_is_open(loaded: LoadedConfig) -> bool:
    """Return whether the user left the micro-batch to Shoal, which may have chosen it before."""
    chosen = loaded.origins.get("train.micro_batch") == "derived"
    return chosen or not loaded.config.train.micro_batch


def chosen_micro_batch(loaded: LoadedConfig) -> int:
    """Return the micro-batch that an earlier start of the run chose; 0: none, or the user did."""
    return loaded.config.train.micro_batch if micro_batch_is_open(loaded) else 0


def resolve_length(loaded: LoadedConfig) -> None:
    """Set train.steps to 150, in place, if neither steps nor epochs are given."""
    if not loaded.config.train.steps and not loaded.config.train.epochs:
        loaded.replace("train", "derived", steps=DEFAULT_STEPS)


def resolve_validation(loaded: LoadedConfig) -> None:
    """Set train.validate_samples from the length of the run, in place, if it is left open.

    If the length is in epochs, the workers do it: they know how many samples an epoch has.
    """
    train = loaded.config.train
    if train.validate_samples == "auto" and train.steps:
        samples = default_validation_samples(train.batch, train.steps, train.validate_every)
        loaded.replace("train", "derived", validate_samples=str(samples))


def resolve_islands(loaded: LoadedConfig) -> None:
    """Set, in place, the values of [islands] that the user left to the method.

    Raises:
        ConfigError: invalid values of [islands], fewer than 2 kept checkpoints, or a remote folder
            for them.
    """
    asked = loaded.config.islands
    settled = asked.resolved()
    found = {f.name: getattr(settled, f.name) for f in fields(settled)}
    changed = {key: value for key, value in found.items() if value != getattr(asked, key)}
    if changed:
        loaded.replace("islands", f"of {settled.method}", **changed)
    if settled.on:
        check_keep(loaded.config.checkpoint.keep)
        if remote := loaded.config.checkpoint.remote:
            raise ConfigError(
                f"checkpoint.remote = {remote}: is one run's, and each island has checkpoints of "
                f"its own; try: leave checkpoint.remote out"
            )


READS = {
    **dict.fromkeys(("llama", "gpt", "moe", "mixtral"), "tokens"),
    **{"resnet": "images", "vit": "images", "mlp": "numbers"},
}
"""Kind of data that each named model reads."""


def check_model_data(model: str, source: str, find_kind: Callable[[], str]) -> None:
    """Refuse a named model for data that it cannot read, before training starts.

    Args:
        model, source: `model.name` and `data.source`; a model that is not Shoal's passes.
        find_kind: returns the kind of the data: text (tokens of Shoal's own sources), tokens (whole
            numbers, or unknown), images or numbers; called only for a model of Shoal's.

    Raises:
        ConfigError: with the nearest model that reads such data.
    """
    family = model.partition("-")[0]
    reads = READS.get(family, "")
    if not reads:
        return
    gives = find_kind()
    if reads == "tokens" and gives in ("images", "numbers"):
        nearest = "model.name=resnet or model.name=vit" if gives == "images" else "model.name=mlp"
    elif reads != "tokens" and gives == "text":
        gives, nearest = "tokens", "model.name=llama, or data.source=digits"
    else:
        return
    raise ConfigError(
        f"model.name = {model}: reads {reads}, data.source = {source} gives {gives}; try: {nearest}"
    )


def kind_by_name(source: str) -> str:
    """Return the kind of a built-in source by its name alone: text or images; "" for others.

    >>> kind_by_name("text:*.md"), kind_by_name("digits"), kind_by_name("mine:samples")
    ('text', 'images', '')
    """
    name = source.partition(":")[0]
    ours = {**dict.fromkeys((*TEXTS, "tokens", "synthetic"), "text")}
    ours["digits"] = ours["images"] = ours["wds"] = "images"
    del ours["hf"]  # text or images, by its columns
    return ours.get(name, "")


def model_label(model: ModelSection) -> str:
    """Return the model's name for file names, or "custom" for a builder.

    For `hf:PATH` it is the folder's own name.

    >>> model_label(ModelSection(name="hf:models/tiny/config.json"))
    'tiny'
    """
    if model.build:
        return "custom"
    if not model.name.startswith("hf:"):
        return model.name
    path = Path(model.name.removeprefix("hf:"))
    return (path.parent if path.suffix == ".json" else path).resolve().name


def resolve_folder(loaded: LoadedConfig) -> Path:
    """Return the run's own folder, run.folder / run.name; create nothing on disk.

    Note:
        without a name, sets run.name to the first free `MODEL-SOURCE-N`, from 1.

    Raises:
        ConfigError: the name leads out of run.folder, or a file is in the way.
    """
    run = loaded.config.run
    if ".." in Path(run.name).parts or Path(run.name).is_absolute() or run.name == ".":
        raise ConfigError(
            f"run.name = {run.name}: leads out of run.folder = {run.folder}; try: "
            f"run.name={Path(run.name).name.strip('.') or 'mine'}, or another run.folder"
        )
    for key, path in (("folder", Path(run.folder)), ("name", Path(run.folder) / run.name)):
        if path.is_file():
            raise ConfigError(f"run.{key} = {getattr(run, key)}: {path} is a file, not a folder")
    if run.name:
        return Path(run.folder) / run.name
    model = model_label(loaded.config.model)
    source = loaded.config.data.source.split(":")[0].replace(".", "-")
    number = 1
    while (Path(run.folder) / f"{model}-{source}-{number}").exists():
        number += 1
    loaded.replace("run", "derived", name=f"{model}-{source}-{number}")
    return Path(run.folder) / loaded.config.run.name


def collect_layout_keys(section: LayoutSection) -> dict[str, Any]:
    """Return the keys of [layout] that describe the layout: strategy, degrees and related keys.

    `strategy` is always there; degrees, zero, threads, schedule and chunks only if set.

    >>> collect_layout_keys(LayoutSection(tp=2, zero=2, context="ring"))
    {'strategy': 'auto', 'tp': 2, 'zero': 2}
    """
    given: dict[str, Any] = {"strategy": section.strategy, **section.degrees()}
    if section.zero >= 0:
        given["zero"] = section.zero
    for key in ("threads", "schedule", "chunks", "servers", "updates", "staleness", "serves"):
        if value := getattr(section, key):
            given[key] = value
    return given


def make_plan(config: Config) -> Plan:
    """Return the plan of a configuration, before its layout is known.

    It takes every key that a `Plan` has by the same name, from all sections. Still open: layout
    (all degrees 1), accumulate (0), placements and buckets; formats stay as written, `auto` too. An
    open micro-batch is 0.
    """
    known = {key.name for key in fields(Plan)}
    found = {
        key.name: getattr(getattr(config, section.name), key.name)
        for section in fields(Config)
        for key in keys(getattr(config, section.name))
        if key.name in known and f"{section.name}.{key.name}" not in NAMESAKES
    }
    found["accumulate"] = 0  # follows from the layout
    return Plan(Layout(), **found)


def set_policies(loaded: LoadedConfig, plan: Plan, origin: str) -> None:
    """Write a plan's policy keys back into a configuration, in place: the inverse of `make_plan`.

    Only values that differ change, and get `origin`; layout, batch and similar keys stay.
    """
    known = {key.name for key in fields(Policies)}
    for section in fields(Config):
        values = getattr(loaded.config, section.name)
        names = [key.name for key in keys(values) if f"{section.name}.{key.name}" not in NAMESAKES]
        found = {name: getattr(plan, name) for name in names if name in known}
        changed = {key: value for key, value in found.items() if value != getattr(values, key)}
        if changed:
            loaded.replace(section.name, origin, **changed)


def count_processes(section: LayoutSection, machine: MachineFacts) -> int:
    """Return the default number of processes of a layout, for one island.

    It is the product of the degrees; without any, 1 for single, dp and threads, else the machine's
    `default_processes`.

    >>> machine = MachineFacts(cores=2, memory_bytes=2**34, gpus=0)
    >>> [
    ...     count_processes(LayoutSection(**given), machine)
    ...     for given in ({}, {"tp": 4}, {"threads": 2})
    ... ]
    [2, 4, 1]
    """
    if degrees := section.degrees():
        return Layout.of(degrees).processes
    alone = section.strategy in ("single", "dp") or section.threads
    return 1 if alone else default_processes(machine)
