"""The subject of `shoal plan`: a configuration as facts of a model and of a machine.

Nothing here needs torch, but for a model of the user's own, which is traced. A fact that the data
does not supply (the sequence length of a published model, a batch that keeps a cluster busy) is
derived, and reported in one line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal.base.errors import ConfigError, PlanError, UserError
from shoal.base.estimates.cluster import Cluster
from shoal.base.estimates.estimate import ModelFacts, PlanningCase
from shoal.base.layouts.layout import Layout
from shoal.base.text.units import count_text
from shoal.cli.plan_traced import (
    config_json_length,
    has_transformers,
    trace_config_json,
    trace_configured_model,
)
from shoal.config.load import LoadedConfig
from shoal.config.resolve import make_plan, micro_batch_is_open, resolve_batch
from shoal.config.sections import Config
from shoal.forecast.machines.cluster_syntax import parse_machines
from shoal.forecast.machines.measured_machine import estimate_this_machine, read_measured
from shoal.forecast.memory.framework_memory import own_kernels
from shoal.forecast.memory.model_states import WIDTHS
from shoal.forecast.models.hf_config import UncountedModelError
from shoal.forecast.models.model_facts import FAMILIES, LANGUAGE
from shoal.forecast.models.model_facts import PUBLISHED as BUILDABLE
from shoal.forecast.models.own_transformers import own_shape
from shoal.forecast.models.published_models import published_shape, shape_from_config
from shoal.forecast.models.transformer_costs import transformer_facts
from shoal.forecast.search.case_settings import case_settings, choose_format, ignored_settings
from shoal.forecast.search.search_space import SearchSpace, search_space

TOKENS_PER_STEP = 4 * 2**20
MOST_TOKENS = 16 * 2**20
"""Tokens per step on a cluster if the user sets no batch: common for models of 1B and more."""

PUBLISHED_SEQUENCE = 8192


@dataclass
class PlanSubject:
    """Planned case, search space of its open fields, and assumptions made on the way."""

    case: PlanningCase
    space: SearchSpace
    notes: list[str] = field(default_factory=list)


def resolve_subject(loaded: LoadedConfig, machines: str) -> PlanSubject:
    """Return the facts of the model and the machine for one request.

    Args:
        machines: the text of --on; "" for this machine.

    Raises:
        ConfigError, PlanError: the request is wrong; one line each.
    """
    config = loaded.config
    notes: list[str] = list(loaded.notices)
    cluster = resolve_cluster(config, machines, notes)
    compute = choose_format(make_plan(config), cluster, notes)
    model = resolve_model_facts(loaded, cluster, WIDTHS[compute], notes)
    degrees = config.layout.degrees()
    # `auto` leaves these axes at degree 1; a user who names one of them wants it searched.
    built = not machines and not {"tp", "pp", "cp"} & degrees.keys()
    space = search_space(config.layout, cluster, built=built)
    layout = space.layout
    batch, micro_batch, accumulate = _resolve_plan_batch(
        loaded, model, cluster, layout, here=not machines
    )
    notes += [note for note in loaded.notices if note not in notes]
    space = replace(
        space,
        micro_batch=micro_batch,
        accumulate=accumulate,
        given=frozenset(name.partition(".")[2] for name in loaded.origins),
    )
    if layout is not None and layout.threads > 1 and cluster.device.kind == "cpu":
        notes.append("replicas in threads (dp) are not foreseen: the figures are one replica's")
    notes += ignored_settings(make_plan(config))
    plan = replace(make_plan(config), compute=compute, batch=batch, micro_batch=micro_batch)
    return PlanSubject(PlanningCase(model, cluster, plan, **case_settings(config)), space, notes)


def resolve_cluster(config: Config, machines: str, notes: list[str]) -> Cluster:
    """Return the machines that --on names, or this machine as it was measured."""
    from shoal.base.estimates.facts import read_machine_facts
    from shoal.base.runlog.atomic_files import cache_folder
    from shoal.config.resolve import count_processes
    from shoal.planning.layout_guide import check_cores

    machine = read_machine_facts()
    asked = config.launch
    if machines:
        found = parse_machines(machines, machine, cache_folder())
        if asked.processes and asked.processes * asked.nodes != found.devices:
            notes.append(f"--on has {found.devices} devices: launch.processes is left aside")
        return found
    if asked.nodes > 1:
        raise PlanError(
            f"launch.nodes = {asked.nodes}: a plan for several machines needs to know them; "
            f'try: --on "{asked.nodes}x{max(1, machine.gpus or 8)}xH100-80GB"'
        )
    processes = config.launch.processes or count_processes(config.layout, machine)
    if config.layout.strategy == "dp" and machine.gpus > 1 and processes == 1:
        processes = config.layout.threads or machine.gpus  # one device each, in one process
    check_cores(processes, machine)
    measured = read_measured(cache_folder(), processes)
    if measured is None:
        notes.append(
            "this machine is not measured yet, so typical figures stand in; "
            "the first run measures it, or: shoal plan --measure"
        )
    return measured or estimate_this_machine(machine, processes)


def resolve_model_facts(
    loaded: LoadedConfig, cluster: Cluster, element_bytes: int, notes: list[str]
) -> ModelFacts:
    """Return the model's facts: by its name, from config.json, or traced."""
    config = loaded.config
    section = config.model
    given = "data.sequence" in loaded.origins
    by_arithmetic = section.name in LANGUAGE and not config.layout.names_blocks
    if tuned := config.tune.adapter != "none":  # only the adapters of peft train
        from shoal.cli.start import check_tune

        check_tune(config, weights="data.source" in loaded.origins)
    if tuned and not section.build and "data.source" not in loaded.origins:
        return _trace_config_json(loaded, cluster, element_bytes, notes)
    if section.build or tuned or (section.name in FAMILIES and not by_arithmetic):
        if section.build and not {"data.source", "data.sequence"} & set(loaded.origins):
            length = config.data.sequence
            notes.append(f"data.source and data.sequence not given: text rows of {length} tokens")
        return trace_configured_model(config, cluster, element_bytes)
    sequence = config.data.sequence
    if section.name in FAMILIES:
        vocabulary = section.arguments.get("vocabulary") or _vocabulary(config)
        shape = own_shape(section.name, section.arguments, vocabulary=vocabulary, sequence=sequence)
        kernels = own_kernels(
            cluster.device.kind, sequence, element_bytes, config.precision.residual
        )
        return transformer_facts(shape, sequence, element_bytes, kernels)
    if section.name.startswith("hf:"):
        try:
            shape = shape_from_config(Path(section.name[3:]).expanduser())
        except UncountedModelError as refusal:
            return _trace_uncounted(refusal, loaded, cluster, element_bytes, notes)
    elif section.name in BUILDABLE and section.arguments:
        shape = own_shape(section.name, section.arguments)
    else:
        shape = published_shape(section.name)
        if section.arguments:
            key = next(iter(section.arguments))
            raise ConfigError(
                f"model.{key}: {section.name} has its published shape; try: leave it out"
            )
    most = shape.positions or shape.context
    if not given:
        # Whole samples of a fixed length; else at most a length that is usual in training.
        sequence = shape.positions or min(shape.context or PUBLISHED_SEQUENCE, PUBLISHED_SEQUENCE)
        of = f" of the {most} that it can take" if most > sequence else ""
        notes.append(f"data.sequence not given: {sequence}{of}")
    if most and sequence > most:
        notes.append(f"{shape.name} has {most} positions, fewer than data.sequence")
    kernels = own_kernels(cluster.device.kind, sequence, element_bytes, config.precision.residual)
    return transformer_facts(shape, sequence, element_bytes, kernels)


def narrow_model_facts(loaded: LoadedConfig, case: PlanningCase) -> ModelFacts | None:
    """Return the model's facts with a bf16 residual stream; None if the run cannot have one.

    Args:
        loaded: the user's configuration.
        case: what it became, with fp32 residuals.
    """
    if case.plan.compute != "bf16" or case.plan.residual == "bf16":
        return None
    config = loaded.config
    precision = replace(config.precision, compute="bf16", residual="bf16")
    narrow = replace(loaded, config=replace(config, precision=precision))
    try:
        return resolve_model_facts(narrow, case.cluster, WIDTHS["bf16"], [])
    except PlanError:  # a block that mixes formats
        return None


def _vocabulary(config: Config) -> int:
    kind, _, size = config.data.tokenizer.partition(":")
    return int(size) if kind == "bpe" and size.isdecimal() else 2048


def _trace_uncounted(
    refusal: UncountedModelError,
    loaded: LoadedConfig,
    cluster: Cluster,
    element_bytes: int,
    notes: list[str],
) -> ModelFacts:
    """Return the facts of a config.json that arithmetic does not count, by its class.

    Raises:
        ConfigError, PlanError: transformers is missing or its class cannot be traced; the line
            begins with the refusal, which has the file and the type.
    """
    if not has_transformers():
        raise ConfigError(f"{refusal}; or pip install 'shoal[hf]', whose class is then traced")
    brief = str(refusal).partition("; ")[0]
    notes.append(f"{brief}; its class of transformers is traced instead")
    try:
        if "data.source" in loaded.origins:
            return trace_configured_model(loaded.config, cluster, element_bytes)
        return _trace_config_json(loaded, cluster, element_bytes, notes)
    except UserError as failure:
        why = str(failure).partition("; ")[0]
        raise type(failure)(
            f"{brief}; its class is not traced ({why}); try: data.source=pkg.mod:function, whose "
            f"samples are traced, or model.build of a module that reads no values"
        ) from failure


def _trace_config_json(
    loaded: LoadedConfig, cluster: Cluster, element_bytes: int, notes: list[str]
) -> ModelFacts:
    """Return the traced facts of a config.json, on rows of the user's length or a usual one."""
    config, sequence = loaded.config, loaded.config.data.sequence
    most = config_json_length(config.model.name)
    if "data.sequence" not in loaded.origins:
        sequence = min(most or PUBLISHED_SEQUENCE, PUBLISHED_SEQUENCE)
        of = f" of the {most} that it can take" if most > sequence else ""
        notes.append(f"data.sequence not given: {sequence}{of}")
    return trace_config_json(config, sequence, cluster.device.kind, element_bytes, notes)


def _resolve_plan_batch(
    loaded: LoadedConfig, model: ModelFacts, cluster: Cluster, layout: Layout | None, here: bool
) -> tuple[int, int, int]:
    """Return samples per step, per forward pass, micro-batches per rank; the last two 0: any.

    On this machine the batch is the one that a run would choose. The plan chooses the other open
    keys; an open batch is a common batch that the given keys divide.

    Args:
        here: the plan is for this machine.
    """
    train, notes = loaded.config.train, loaded.notices
    degrees = loaded.config.layout.degrees()
    cut = math.prod(degrees.get(axis, 1) for axis in ("pp", "cp", "tp"))
    degree = layout.data_degree if layout else max(1, cluster.devices // cut)
    if here:
        tried = replace(loaded, notices=[])
        resolve_batch(tried, degree)
        given = 0 if micro_batch_is_open(tried) else tried.config.train.micro_batch
        return tried.config.train.batch, given, 0
    micro_batch, accumulate = train.micro_batch, train.accumulate
    if train.batch:
        return train.batch, micro_batch, accumulate
    unit = (micro_batch or 1) * (accumulate or 1)
    if micro_batch and accumulate:
        return unit * degree, micro_batch, accumulate
    batch = default_batch(model.sequence, cluster.devices)
    if unit > 1:
        batch = max(1, round(batch / (unit * degree))) * unit * degree
    tokens = f", {count_text(batch * model.sequence)} tokens" if model.sequence else ""
    notes.append(f"train.batch not given: {batch} samples per step{tokens}")
    return batch, micro_batch, accumulate


def default_batch(sequence: int, devices: int) -> int:
    """Return a common number of samples per step: 4M tokens, up to 16M on thousands of devices.

    The odd factor of the number of devices divides the batch, so that data-parallel degrees do.

    >>> default_batch(8192, 8), default_batch(8192, 16384), default_batch(8192, 100_000)
    (512, 2048, 3125)
    """
    odd = devices
    while odd % 2 == 0:
        odd //= 2
    tokens = min(MOST_TOKENS, max(TOKENS_PER_STEP, devices * PUBLISHED_SEQUENCE))
    wanted = tokens / sequence if sequence else 256 * devices
    return odd * 2 ** max(0, round(math.log2(max(1.0, wanted / odd))))
