"""What `shoal plan` is asked about: a configuration turned into facts of a model and of a machine.

Nothing here needs torch, but for a model of the user's own, which is traced. What a plan cannot
take from the data (the sequence of a published model, a batch that keeps a cluster busy) is
derived, and said in one line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.base.batches import default_micro_batch
from shoal.base.cluster import Cluster
from shoal.base.errors import ConfigError
from shoal.base.estimate import ModelFacts
from shoal.base.layout import Layout
from shoal.base.units import count_text
from shoal.config.load import Loaded
from shoal.config.sections import Config
from shoal.planner.frameworks import own_kernels
from shoal.planner.machines import parse_machines
from shoal.planner.measured import read_measured, this_cluster
from shoal.planner.model_facts import FAMILIES, NOT_BUILT
from shoal.planner.model_facts import PUBLISHED as BUILDABLE
from shoal.planner.published import from_config, published
from shoal.planner.search import Asked
from shoal.planner.transformer import model_facts, own_family

ELEMENT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
TOKENS_PER_STEP = 4 * 2**20
"""Of a cluster whose batch nobody gave: what models of 1B and more are usually trained with."""

PUBLISHED_SEQUENCE = 8192

SIZED = {"gpt": "gpt-3-6.7b", "moe": "mixtral-8x7b", "vit": "vit-b"}
"""A published size for every family that is only named."""


@dataclass
class Subject:
    """What is planned, and what was assumed on the way."""

    model: ModelFacts
    cluster: Cluster
    asked: Asked
    notes: list[str] = field(default_factory=list)


def find_subject(loaded: Loaded, machines: str) -> Subject:
    """Facts for one request.

    machines   the text of --on; "" for this machine
    Errors     ConfigError, PlanError: one line each
    """
    config = loaded.config
    notes: list[str] = list(loaded.notices)
    cluster = find_cluster(config, machines, notes)
    compute = _format(config.precision.compute, cluster, notes)
    model = find_model(loaded, cluster, ELEMENT_BYTES[compute], notes)
    batch = _batch(config, model, cluster, notes)
    # What `shoal train` would take on this machine; on others it is the plan's to choose.
    usual = None if machines else default_micro_batch(batch)
    asked = Asked(
        batch=batch,
        layout=_layout(config, cluster),
        micro_batch=config.train.micro_batch or usual,
        recompute=config.memory.recompute if "memory.recompute" in loaded.origins else None,
        compute=compute,
        offload=config.memory.offload,
        defer_sync=config.train.defer_sync,
        average=bool(config.optimizer.average),
        compiled=config.train.compile != "none",
        built=not machines,
    )
    if config.layout.compress != "none":
        notes.append(f"layout.compress = {config.layout.compress} is left out of the figures")
    return Subject(model, cluster, asked, notes)


def find_cluster(config: Config, machines: str, notes: list[str]) -> Cluster:
    """The machines that --on names, or this one as it was measured."""
    from shoal.base.files import cache_folder
    from shoal.launch.machine import this_machine
    from shoal.planner.guide import default_processes

    machine = this_machine()
    if machines:
        return parse_machines(machines, machine, cache_folder())
    degrees = config.layout.degrees()
    processes = config.launch.processes or (
        Layout(**degrees).processes if degrees else default_processes(machine)
    )
    measured = read_measured(cache_folder(), processes)
    if measured is None:
        notes.append(
            "this machine is not measured yet, so typical figures stand in; "
            "the first run measures it, or: shoal plan --measure"
        )
    return measured or this_cluster(machine, processes)


def find_model(
    loaded: Loaded, cluster: Cluster, element_bytes: int, notes: list[str]
) -> ModelFacts:
    """The model's facts: by name, by config.json, or traced."""
    config = loaded.config
    section = config.model
    given = "data.sequence" in loaded.origins
    if section.build or (section.name in FAMILIES and section.name != "llama"):
        return _traced(config, cluster, element_bytes)
    sequence = config.data.sequence
    if section.name in FAMILIES:
        vocabulary = section.arguments.get("vocabulary") or _vocabulary(config)
        shape = own_family(
            section.name, section.arguments, vocabulary=vocabulary, sequence=sequence
        )
        kernels = own_kernels(cluster.device.kind, sequence, element_bytes)
        return model_facts(shape, sequence, element_bytes, kernels)
    if section.name.startswith("hf:"):
        shape = from_config(Path(section.name[3:]))
    elif section.name in NOT_BUILT:
        raise ConfigError(
            f"model.name = {section.name}: a family without a size; nearest: "
            f"model.name={SIZED[section.name]}"
        )
    elif section.name in BUILDABLE and section.arguments:
        shape = own_family(section.name, section.arguments)
    else:
        shape = published(section.name)
        if section.arguments:
            key = next(iter(section.arguments))
            raise ConfigError(
                f"model.{key}: {section.name} has its published shape; nearest: leave it out"
            )
    if not given:
        sequence = shape.positions or PUBLISHED_SEQUENCE
        notes.append(f"data.sequence not given: {sequence}")
    kernels = own_kernels(cluster.device.kind, sequence, element_bytes)
    return model_facts(shape, sequence, element_bytes, kernels)


def _vocabulary(config: Config) -> int:
    kind, _, size = config.data.tokenizer.partition(":")
    return int(size) if kind == "bpe" and size.isdecimal() else 2048


def _traced(config: Config, cluster: Cluster, element_bytes: int) -> ModelFacts:
    """A module that has no arithmetic of its own: one unit of each kind is looked at with torch."""
    from shoal.data.sources import open_source
    from shoal.trainer.foresee import facts_of

    source = open_source(config.data, config.train.seed)
    return facts_of(config, source, kernels=cluster.device.kind, element_bytes=element_bytes)


def _format(asked: str, cluster: Cluster, notes: list[str]) -> str:
    """The number format: the user's, or bf16 where the device is fast in it."""
    rates = cluster.device.matrix_flops_per_s
    if asked == "auto":
        if cluster.device.kind != "gpu":
            return "fp32"
        return "bf16" if rates.get("bf16", 0) > rates.get("fp32", 0) else "fp16"
    narrow = {"bf16": "fp16", "fp16": "bf16"}.get(asked, "")
    if rates.get(narrow, 0.0) > 2 * rates.get(asked, 0.0) and narrow:
        times = rates[narrow] / rates[asked]
        notes.append(f"{cluster.device.name} multiplies {narrow} {times:.0f} times as fast")
    return asked


def _batch(config: Config, model: ModelFacts, cluster: Cluster, notes: list[str]) -> int:
    """Samples per step: the user's, the run's default on one machine, a usual one on a cluster."""
    train = config.train
    if train.batch:
        return train.batch
    if train.micro_batch:
        return train.micro_batch * (train.accumulate or 8) * cluster.devices
    from shoal.config.resolve import DEFAULT_BATCH

    if cluster.device.kind != "gpu":
        return max(DEFAULT_BATCH, cluster.devices)
    per_sample = max(1, model.sequence)
    wanted = max(TOKENS_PER_STEP // per_sample, 1) if model.sequence else 256
    batch = max(1, math.ceil(wanted / cluster.devices)) * cluster.devices
    tokens = f", {count_text(batch * per_sample)} tokens" if model.sequence else ""
    notes.append(f"train.batch not given: {batch} samples per step{tokens}")
    return batch


def _layout(config: Config, cluster: Cluster) -> Layout | None:
    """The layout that the user fixed; None where it is left to the planner."""
    from shoal.base.layout import expand, planned_degrees

    section = config.layout
    degrees: dict[str, Any] = section.degrees()
    zero = None if section.zero < 0 else section.zero
    if degrees:
        return planned_degrees(degrees, cluster.devices, zero)
    if section.strategy == "auto":
        return None
    return expand(section.strategy, cluster.devices, threads=section.threads, zero=zero)
