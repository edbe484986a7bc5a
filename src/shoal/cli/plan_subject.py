"""What `shoal plan` is asked about: a configuration turned into facts of a model and of a machine.

Nothing here needs torch, but for a model of the user's own, which is traced. What a plan cannot
take from the data (the sequence of a published model, a batch that keeps a cluster busy) is
derived, and said in one line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal.base.batches import default_micro_batch
from shoal.base.cluster import Cluster
from shoal.base.degrees import planned_degrees
from shoal.base.errors import ConfigError, PlanError
from shoal.base.estimate import ModelFacts
from shoal.base.layout import Layout, expand
from shoal.base.schedules import canonical, settle_schedule
from shoal.base.units import count_text
from shoal.config.load import Loaded
from shoal.config.resolve import resolve_batch
from shoal.config.sections import Config
from shoal.planner.frameworks import own_kernels
from shoal.planner.machines import parse_machines
from shoal.planner.measured import read_measured, this_cluster
from shoal.planner.model_facts import FAMILIES, LANGUAGE
from shoal.planner.model_facts import PUBLISHED as BUILDABLE
from shoal.planner.own_family import own_family
from shoal.planner.published import from_config, published
from shoal.planner.search import Asked
from shoal.planner.states import STATE_BYTES, WIDTHS
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
    batch = _batch(loaded, model, cluster, here=not machines)
    notes += [note for note in loaded.notices if note not in notes]
    # What `shoal train` would take on this machine; on others it is the plan's to choose.
    usual = None if machines else default_micro_batch(batch)
    degrees = config.layout.degrees()
    planned_degrees(degrees, cluster.devices, None)  # refuses what does not divide
    zero = None if config.layout.zero < 0 else config.layout.zero
    if zero is not None and zero > 3:
        raise PlanError(f"layout.zero = {zero}: a stage is 0, 1, 2 or 3; nearest: layout.zero=3")
    schedule, chunks = _schedule(config, degrees.get("pp", 1))
    asked = Asked(
        batch=batch,
        layout=_layout(config, cluster),
        degrees=tuple(degrees.items()),
        zero=zero,
        optimizer_bytes=STATE_BYTES.get(config.optimizer.name, 8),
        micro_batch=config.train.micro_batch or usual,
        recompute=config.memory.recompute if "memory.recompute" in loaded.origins else None,
        compute=compute,
        offload=config.memory.offload,
        defer_sync=config.train.defer_sync,
        average=bool(config.optimizer.average),
        compiled=config.train.compile != "none",
        schedule=schedule,
        chunks=chunks,
        # `auto` leaves these axes whole; whoever asks for them wants them searched.
        built=not machines and not {"tp", "pp", "cp"} & degrees.keys(),
    )
    if config.layout.compress != "none":
        notes.append(f"layout.compress = {config.layout.compress} is left out of the figures")
    return Subject(model, cluster, asked, notes)


def _schedule(config: Config, pp: int) -> tuple[str, int]:
    """The schedule that the user fixed beside degrees, and its chunks; "" leaves it open."""
    section = config.layout
    if section.strategy != "auto" or not (section.schedule or section.chunks):
        return "", 1
    name = canonical(section.schedule or "interleaved")
    return settle_schedule(name, section.chunks, pp)


def find_cluster(config: Config, machines: str, notes: list[str]) -> Cluster:
    """The machines that --on names, or this one as it was measured."""
    from shoal.base.files import cache_folder
    from shoal.launch.machine import this_machine
    from shoal.planner.guide import default_processes

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
    degrees = config.layout.degrees()
    processes = config.launch.processes or (
        Layout.of(degrees).processes if degrees else default_processes(machine)
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
        shape = from_config(Path(section.name[3:]))
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
    if shape.positions and sequence > shape.positions:
        notes.append(f"{shape.name} has {shape.positions} positions, fewer than data.sequence")
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


def _batch(loaded: Loaded, model: ModelFacts, cluster: Cluster, here: bool) -> int:
    """Samples per step: the user's; on this machine the run's default, on others a usual one.

    here   the plan is for this machine, whose runs settle their batch by the same function
    """
    train, notes = loaded.config.train, loaded.notices
    if here or train.batch or train.micro_batch or train.accumulate:
        tried = replace(loaded, notices=[])
        given = loaded.config.layout.degrees()
        cut = math.prod(given.get(axis, 1) for axis in ("pp", "cp", "tp"))
        resolve_batch(tried, max(1, cluster.devices // cut))
        return tried.config.train.batch
    batch = usual_batch(model.sequence, cluster.devices)
    tokens = f", {count_text(batch * model.sequence)} tokens" if model.sequence else ""
    notes.append(f"train.batch not given: {batch} samples per step{tokens}")
    return batch


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


def _layout(config: Config, cluster: Cluster) -> Layout | None:
    """The layout that the user fixed; None where it is left to the planner."""
    section = config.layout
    zero = None if section.zero < 0 else section.zero
    if section.strategy == "auto" or section.degrees():
        return None
    return expand(
        section.strategy,
        cluster.devices,
        threads=section.threads,
        zero=zero,
        schedule=section.schedule,
        chunks=section.chunks,
    )
