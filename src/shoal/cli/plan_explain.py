"""`shoal plan --explain`: show what a layout does to every parameter, and why.

This process builds the model and traces it on the CPU, with a few samples of its own data; it
starts no other process. The layout is the requested one, or else the plan's best.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.base.errors import ConfigError
from shoal.base.layouts.layout import Layout
from shoal.base.layouts.schedule_names import model_copies
from shoal.base.plans.parameter_splits import (
    ExchangeRow,
    FlopsRow,
    SplitReport,
    SplitRow,
    shard_text,
)
from shoal.base.plans.plan import Plan
from shoal.cli.words import split_arguments
from shoal.config.load import LoadedConfig
from shoal.config.sections import Config
from shoal.config.trust import load_trusted

SAMPLES = 3
"""Samples with which the model is traced: no power of two, as degrees are."""

ModelForward = Callable[[Any], Any]
"""Runs a model on the samples."""


@dataclass(frozen=True)
class ParameterShard:
    """Shard, collective and reason of one parameter on one axis."""

    axis: str = ""
    shard: str = "whole"
    collective: str = ""
    reason: str = ""


@dataclass(frozen=True)
class AxisEffect:
    """Effect of one axis on a model: parameters by name, exchanged messages, notices."""

    held: Mapping[str, ParameterShard] = field(default_factory=dict)
    exchanges: tuple[ExchangeRow, ...] = ()
    notices: tuple[str, ...] = ()


def explain(arguments: list[str], on: str, as_json: bool, *, trust: bool) -> None:
    """Print the table, or its JSON document.

    Raises:
        ConfigError, PlanError: the layout is impossible, or impossible for this model.
    """
    import json

    import typer

    from shoal.view.split_lines import print_splits

    loaded = load_trusted(*split_arguments(arguments), trust=trust)
    explained = explain_model(loaded.config, requested_layout(loaded, on))
    if as_json:
        typer.echo(json.dumps(explained.record(), indent=1))
    else:
        print_splits(explained, sys.stdout)


def requested_layout(loaded: LoadedConfig, on: str) -> Layout:
    """Return the requested layout, exactly as a run would take it; else the plan's best.

    Args:
        on: the text of --on, which sets the number of processes if nothing else does.
    """
    from shoal.base.estimates.facts import read_machine_facts
    from shoal.cli.plan_subject import resolve_subject
    from shoal.config.resolve import collect_layout_keys, count_processes, make_plan
    from shoal.forecast.machines.cluster_syntax import parse_machines
    from shoal.forecast.search.layout_search import search_layouts
    from shoal.planning.settle import settle_layout

    config = loaded.config
    section = config.layout
    if section.strategy == "auto" and not section.degrees():
        subject = resolve_subject(loaded, on)
        return search_layouts(subject.case, subject.space)[0].case.layout
    machine = read_machine_facts()
    processes = config.launch.processes
    if not processes and on:
        processes = parse_machines(on, machine).devices
    ranks = processes or count_processes(section, machine)
    return settle_layout(
        make_plan(config), collect_layout_keys(section), ranks, None, machine
    ).layout


def explain_model(config: Config, layout: Layout) -> SplitReport:
    """Return every parameter of the configured model under `layout`."""
    from shoal.config.resolve import make_plan
    from shoal.parallel.placement_rows import derive_division
    from shoal.trace.flow.forward_record import ForwardRecord

    module, look, flops = _build_and_trace(config)
    plan = replace(make_plan(config), layout=layout)
    found = derive_division(ForwardRecord(module, look, plan), plan)
    tensor = (
        _tensor_parallel_effect(module, found.split, plan)
        if found.split is not None
        else AxisEffect()
    )
    keep = found.cut.keep if found.cut is not None else ()
    experts = {
        f"{one.name}.{name}" for one in found.experts for name, _ in one.part.named_parameters()
    }
    rows = []
    for name, parameter in module.named_parameters():
        inside = tensor.held.get(name, ParameterShard())
        shape = tuple(parameter.shape)
        across = (
            data_parallel_shard(layout, shape)
            if parameter.requires_grad
            else ParameterShard(reason="frozen")
        )
        if name in experts:
            across = expert_parallel_shard(layout, shape)
        on = tuple(stage for stage, kept in enumerate(keep) if name in kept)
        tied = f"gradients of stages {', '.join(map(str, on))} summed" if len(on) > 1 else ""
        if model_copies(layout.schedule) > 1:
            tied = "gradients of both copies summed"
        said = [inside.collective, across.collective, tied if parameter.requires_grad else ""]
        shards = [one.shard for one in (inside, across) if one.shard != "whole"]
        rows.append(
            SplitRow(
                name,
                shape,
                axis=", ".join(one.axis for one in (inside, across) if one.axis),
                shard=", of these ".join(shards) or "whole",
                collective="; ".join(text for text in said if text),
                reason="; ".join(r for r in (inside.reason, across.reason) if r),
                stage=on,
            )
        )
    name = config.model.build or config.model.name
    return SplitReport(
        name, layout.text(), tuple(rows), tensor.exchanges, tensor.notices, SAMPLES, flops()
    )


def data_parallel_shard(layout: Layout, shape: tuple[int, ...]) -> ParameterShard:
    """Return the effect of the data-parallel axes on one trainable parameter.

    >>> data_parallel_shard(Layout(dp_replicate=2), (4, 4)).collective
    'all_reduce of its gradient over dp_replicate'
    >>> data_parallel_shard(Layout(dp_shard=2, zero=3), (4, 4)).shard
    'rows 0:2 of 4'
    """
    summed = "all_reduce of its gradient over dp_replicate"
    if layout.data_degree == 1:
        return ParameterShard()
    if not layout.zero:
        return ParameterShard(collective=summed)
    if layout.zero < 3:
        return ParameterShard(
            collective="reduce_scatter of its gradient, all_gather of its new values over dp_shard"
        )
    collective = "all_gather before use, reduce_scatter of its gradient over dp_shard"
    if layout.dp_replicate > 1:
        collective += f", {summed}"
    shard = shard_text(shape, 0, layout.dp_shard) if shape else "whole"
    return ParameterShard("dp_shard", shard, collective)


def expert_parallel_shard(layout: Layout, shape: tuple[int, ...]) -> ParameterShard:
    """Return the effect of expert parallelism on the stacked weights of experts.

    >>> expert_parallel_shard(Layout(dp_replicate=4, ep=2), (8, 4, 4)).shard
    'rows 0:4 of 8'
    >>> expert_parallel_shard(Layout(dp_shard=4, zero=3, ep=2), (8, 4, 4)).axis
    'ep, dp_shard'
    """
    own = Layout(
        dp_replicate=layout.expert_replicate,
        dp_shard=layout.expert_shard,
        zero=layout.zero if layout.expert_shard > 1 else 0,
    )
    rest = data_parallel_shard(own, (shape[0] // layout.ep, *shape[1:]))
    same = " of ranks with the same experts" if rest.collective else ""
    collectives = ["all_to_all of tokens to and from it", f"{rest.collective}{same}"]
    shards = [shard_text(shape, 0, layout.ep), rest.shard if rest.axis else ""]
    return ParameterShard(
        ", ".join(filter(None, ["ep", rest.axis])),
        ", of these ".join(filter(None, shards)),
        "; ".join(filter(None, collectives)),
    )


def _build_and_trace(
    config: Config,
) -> tuple[Any, ModelForward, Callable[[], tuple[FlopsRow, ...]]]:
    """Return the model, its forward pass on the first samples, and the flops of that pass."""
    import torch

    from shoal.data.loading.dataset_kind import is_indexed, join_samples
    from shoal.data.loading.sample_seeds import preserved_rng
    from shoal.data.sources import open_source
    from shoal.trace.costs.flops import count_module_flops
    from shoal.trainer.jobs.configured_run import build_model, import_loss
    from shoal.trainer.parallelize import build_module
    from shoal.trainer.step.call_contract import call_model, split_batch, sum_and_count

    source = open_source(config.data, config.train.seed)
    if not is_indexed(source.train):
        raise ConfigError(
            f"data.source = {config.data.source}: can only be iterated, so there is no sample to "
            f"look at; try: a dataset with __getitem__ and __len__"
        )
    with preserved_rng():
        few = [source.train[place] for place in range(min(SAMPLES, len(source.train)))]
        batch = join_samples(few, source.collate, "the first samples")
    module = build_module(lambda: build_model(config, source), config.train.seed).train()
    # The trace runs in fp32: the run's format changes none of the splits.
    inputs = split_batch(batch)[0]

    def run_sample(model: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            return call_model(model, inputs, config.model.call)

    def forward(model: Any, value: Any) -> Any:
        given, targets = split_batch(value)
        outputs = call_model(model, given, config.model.call)
        return sum_and_count(import_loss(config.model)(outputs, targets), targets)

    def flops() -> tuple[FlopsRow, ...]:
        counted = count_module_flops(module, batch, forward)
        return tuple(replace(row, flops=row.flops / len(few)) for row in counted)

    return module, run_sample, flops


def _tensor_parallel_effect(module: Any, split: Any, plan: Plan) -> AxisEffect:
    """Return the effect of tensor parallelism on every parameter."""
    from shoal.parallel.exchange_rows import list_exchanges
    from shoal.trace.find.blocks import residual_blocks

    held, layout = {}, plan.layout
    narrow = tuple(residual_blocks(module, plan)) if plan.residual == "bf16" else ()
    for name, parameter in module.named_parameters():
        one = split.parameters[name]
        shard = shard_label_text(tuple(parameter.shape), one.label, layout.tp)
        cut = shard != "whole"
        collective = "all_reduce of its gradient once a step" if one.partial else ""
        if cut and parameter.dim() > 1:
            collective = _weight_collectives(name, one.reason, split.exchanges)
        reason = one.reason.partition(":")[0] if cut else one.reason.removeprefix("whole: ")
        held[name] = ParameterShard("tp" if cut else "", shard, collective, reason)
    counted: Counter[tuple[str, str, str, int]] = Counter()
    for owner, exchanges in list_exchanges(split, narrow).items():
        counted.update((owner, e.when, e.kind, e.payload_bytes) for e in exchanges)
    rows = tuple(
        ExchangeRow(owner, kind, when, payload_bytes, count)
        for (owner, when, kind, payload_bytes), count in counted.items()
    )
    return AxisEffect(held, rows, split.notices)


def _weight_collectives(name: str, reason: str, exchanges: Mapping[str, Any]) -> str:
    """Return the collectives that the split of one weight requires, as text.

    Args:
        reason: begins with the weight's role: column, the outputs of its product are split; row,
            the inputs of its product are, so that every rank has a summand; else it is a table.
        exchanges: of the model by module.
    """
    owner = max((o for o in exchanges if name.startswith(f"{o}.") or not o), key=len, default="")
    kinds = [(one.kind, one.when) for one in exchanges.get(owner, ())]
    role = reason.partition(":")[0]
    if role == "row":
        wanted = {"all_reduce": "forward", "reduce_scatter": "forward"}
        said = [f"{kind} of its product" for kind, when in kinds if wanted.get(kind) == when]
    elif role == "column":
        wanted = {"all_reduce": "backward", "reduce_scatter": "backward"}
        said = [
            f"{kind} of its input's gradient" for kind, when in kinds if wanted.get(kind) == when
        ]
        said += ["all_gather of its input"] * (("all_gather", "forward") in kinds)
    else:
        said = [f"{kind} {when}" for kind, when in kinds]
    return ", ".join(dict.fromkeys(said))


def shard_label_text(shape: tuple[int, ...], label: Any, degree: int) -> str:
    """Return as text which part the first of `degree` tensor-parallel ranks holds under a label."""
    from shoal.parallel.spmd.labelling.labels import Split, Tiled

    if isinstance(label, Split):
        return shard_text(shape, label.dim, degree, groups=label.groups)
    if isinstance(label, Tiled):
        copies = math.prod(n for n, inner in label.axes if not isinstance(inner, Split))
        cut = next((inner for _, inner in label.axes if isinstance(inner, Split)), None)
        if cut is not None:
            return shard_text(shape, cut.dim, degree, groups=cut.groups, copies=copies)
    return "whole"
