"""What `shoal plan` is asked about: a configuration turned into facts of a model and of a machine.

Nothing here needs torch, but for a model of the user's own, which is traced. What a plan cannot
take from the data (the sequence of a published model, a batch that keeps a cluster busy) is
derived, and said in one line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal.base.cluster import Cluster
from shoal.base.degrees import planned_degrees
from shoal.base.errors import ConfigError, PlanError
from shoal.base.estimate import ModelFacts
from shoal.base.layout import PIPELINES, STAGES, Layout, expand
from shoal.base.schedules import canonical, settle_schedule
from shoal.base.units import count_text
from shoal.config.load import Loaded
from shoal.config.resolve import resolve_batch
from shoal.config.sections import Config
from shoal.planner.case_settings import case_settings
from shoal.planner.frameworks import own_kernels
from shoal.planner.hf_config import assumed
from shoal.planner.machines import parse_machines
from shoal.planner.measured import read_measured, this_cluster
from shoal.planner.model_facts import FAMILIES, LANGUAGE
from shoal.planner.model_facts import PUBLISHED as BUILDABLE
from shoal.planner.own_family import own_family
from shoal.planner.published import from_config, published
from shoal.planner.search import Asked
from shoal.planner.states import WIDTHS
from shoal.planner.transformer import model_facts

TOKENS_PER_STEP = 4 * 2**20
MOST_TOKENS = 16 * 2**20
"""Of a cluster whose batch nobody gave: what models of 1B and more are usually trained with."""

PUBLISHED_SEQUENCE = 8192


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
    compute = _format(config.precision.compute, config.memory.offload, cluster, notes)
    model = find_model(loaded, cluster, WIDTHS[compute], notes)
    layout = _layout(config, cluster)
    batch, micro_batch, accumulate = _batch(loaded, model, cluster, layout, here=not machines)
    notes += [note for note in loaded.notices if note not in notes]
    degrees = config.layout.degrees()
    zero = _zero(config)
    schedule, chunks = _schedule(config, degrees.get("pp", 1))
    settings = case_settings(config, compute)
    if "memory.recompute" not in loaded.origins:
        settings["recompute"] = None
    asked = Asked(
        batch=batch,
        layout=layout,
        degrees=tuple(degrees.items()),
        zero=zero,
        micro_batch=micro_batch,
        accumulate=accumulate,
        **settings,
        schedule=schedule,
        chunks=chunks,
        # `auto` leaves these axes whole; whoever asks for them wants them searched.
        built=not machines and not {"tp", "pp", "cp"} & degrees.keys(),
    )
    if asked.layout is not None and asked.layout.threads > 1:
        notes.append("replicas in threads (dp) are not foreseen: the figures are one replica's")
    if config.layout.compress != "none":
        notes.append(f"layout.compress = {config.layout.compress} is left out of the figures")
    return Subject(model, cluster, asked, notes)


def _schedule(config: Config, pp: int) -> tuple[str, int]:
    """The schedule that the user fixed beside degrees, and its chunks; "" leaves it open."""
    section = config.layout
    named = section.strategy if section.degrees() and section.strategy in PIPELINES[1:] else ""
    schedule = section.schedule or named
    if (section.strategy != "auto" and not named) or not (schedule or section.chunks):
        return "", 1
    name = canonical(schedule or "interleaved")
    return settle_schedule(name, section.chunks, pp)


def find_cluster(config: Config, machines: str, notes: list[str]) -> Cluster:
    """The machines that --on names, or this one as it was measured."""
    from shoal.base.files import cache_folder
    from shoal.config.resolve import processes_of
    from shoal.launch.machine import this_machine
    from shoal.planner.guide import check_cores

    machine = this_machine()
    asked = config.launch
    if machines:
        found = parse_machines(machines, machine, cache_folder())
        if asked.processes and asked.processes * asked.nodes != found.devices:
            notes.append(f"--on has {found.devices} devices: launch.processes is left aside")
        return found
    if asked.nodes > 1:
        raise PlanError(
            f"launch.nodes = {asked.nodes}: a plan for several machines needs to know them; "
            f'nearest: --on "{asked.nodes}x{max(1, machine.gpus or 8)}xH100-80GB"'
        )
    processes = config.launch.processes or processes_of(config.layout, machine)
    check_cores(processes, machine)
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
    if section.build or (section.name in FAMILIES and section.name not in LANGUAGE):
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
        shape = from_config(Path(section.name[3:]).expanduser())
        if known := assumed(Path(section.name[3:]).expanduser()):
            notes.append(known)
    elif section.name in BUILDABLE and section.arguments:
        shape = own_family(section.name, section.arguments)
    else:
        shape = published(section.name)
        if section.arguments:
            key = next(iter(section.arguments))
            raise ConfigError(
                f"model.{key}: {section.name} has its published shape; nearest: leave it out"
            )
    most = shape.positions or shape.context
    if not given:
        # Whole samples of a fixed number of positions; else no more than is usual in training.
        sequence = shape.positions or min(shape.context or PUBLISHED_SEQUENCE, PUBLISHED_SEQUENCE)
        of = f" of the {most} that it can take" if most > sequence else ""
        notes.append(f"data.sequence not given: {sequence}{of}")
    if most and sequence > most:
        notes.append(f"{shape.name} has {most} positions, fewer than data.sequence")
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


def _format(asked: str, offload: str, cluster: Cluster, notes: list[str]) -> str:
    """The number format: the user's, or bf16 where the device is fast in it."""
    parts = (cluster, *cluster.groups)
    if any(part.device.kind != cluster.device.kind for part in parts):
        raise PlanError("--on: devices and cores cannot share one run; nearest: leave cpu out")
    if cluster.device.kind != "gpu":
        if offload != "none":
            raise PlanError(
                f"memory.offload = {offload}: there is no device to offload from on a CPU; "
                f"nearest: memory.offload=none"
            )
        if asked == "fp16":
            raise PlanError(
                "precision.compute = fp16: a CPU has no fast fp16 and no rate for it; nearest: "
                "precision.compute=bf16"
            )
        return "fp32" if asked == "auto" else asked
    every = [part.device.matrix_flops_per_s for part in parts]
    rates = {name: min(rate.get(name, 0.0) for rate in every) for name in WIDTHS}
    if asked == "auto":
        return "bf16" if rates["bf16"] > rates["fp32"] else "fp16"
    narrow = {"bf16": "fp16", "fp16": "bf16"}.get(asked, "")
    if narrow and rates[narrow] > 2 * rates[asked]:
        slowest = min(parts, key=lambda part: part.device.matrix_flops_per_s.get(asked, 0.0))
        times = rates[narrow] / max(rates[asked], 1.0)
        notes.append(f"{slowest.device.name} multiplies {narrow} {times:.0f} times as fast")
    return asked


def _batch(
    loaded: Loaded, model: ModelFacts, cluster: Cluster, layout: Layout | None, here: bool
) -> tuple[int, int | None, int]:
    """Returns samples per step, per forward pass (None: any), micro-batches per rank (0: any).

    On this machine all three are what a run would settle. On others what the user leaves open is
    the plan's to choose; a batch that nobody gave is a usual one that what was given divides.

    here   the plan is for this machine
    """
    train, notes = loaded.config.train, loaded.notices
    degrees = loaded.config.layout.degrees()
    cut = math.prod(degrees.get(axis, 1) for axis in ("pp", "cp", "tp"))
    degree = layout.data_degree if layout else max(1, cluster.devices // cut)
    if here:
        tried = replace(loaded, notices=[])
        resolve_batch(tried, degree)
        return tried.config.train.batch, tried.config.train.micro_batch, 0
    micro_batch, accumulate = train.micro_batch or None, train.accumulate
    if train.batch:
        return train.batch, micro_batch, accumulate
    unit = (micro_batch or 1) * (accumulate or 1)
    if micro_batch and accumulate:
        return unit * degree, micro_batch, accumulate
    batch = usual_batch(model.sequence, cluster.devices)
    if unit > 1:
        batch = max(1, round(batch / (unit * degree))) * unit * degree
    tokens = f", {count_text(batch * model.sequence)} tokens" if model.sequence else ""
    notes.append(f"train.batch not given: {batch} samples per step{tokens}")
    return batch, micro_batch, accumulate


def usual_batch(sequence: int, devices: int) -> int:
    """A usual number of samples per step: 4M tokens, up to 16M on thousands of devices.

    What no power of two divides of the devices, divides the batch: so data-parallel degrees do.

    >>> usual_batch(8192, 8), usual_batch(8192, 16384), usual_batch(8192, 100_000)
    (512, 2048, 3125)
    """
    odd = devices
    while odd % 2 == 0:
        odd //= 2
    tokens = min(MOST_TOKENS, max(TOKENS_PER_STEP, devices * PUBLISHED_SEQUENCE))
    wanted = tokens / sequence if sequence else 256 * devices
    return odd * 2 ** max(0, round(math.log2(max(1.0, wanted / odd))))


def _zero(config: Config) -> int | None:
    """What dp_shard splits, as the user fixed it: by its key, or by a name beside degrees.

    Errors   PlanError for a name that says nothing beside degrees
    """
    section = config.layout
    if section.zero >= 0:
        return section.zero
    if not section.degrees() or section.strategy in ("auto", "3d", *PIPELINES):
        return None
    stages = {**STAGES, "ddp": 0}
    if section.strategy not in stages:
        raise PlanError(
            f"layout.strategy = {section.strategy}: is a whole layout, and so are degrees beside "
            f"it; nearest: leave layout.strategy out"
        )
    return stages[section.strategy]


def _layout(config: Config, cluster: Cluster) -> Layout | None:
    """The layout that the user fixed, as a run would take it; None where the planner has a choice.

    Errors   PlanError for a name or degrees that do not go with the devices
    """
    section, zero = config.layout, _zero(config)
    if degrees := section.degrees():
        planned_degrees(degrees, cluster.devices, None)  # refuses what does not divide
        if Layout.of(degrees).processes < cluster.devices:
            return None
        return planned_degrees(degrees, cluster.devices, zero)
    strategy = "dp" if section.strategy == "auto" and section.threads else section.strategy
    if strategy == "auto":
        return None
    return expand(
        strategy,
        cluster.devices,
        threads=section.threads,
        zero=zero,
        schedule=section.schedule,
        chunks=section.chunks,
    )
