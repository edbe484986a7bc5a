"""Expert parallelism: data-parallel ranks divide the experts of a mixture among themselves.

Each of `ep` neighbouring data-parallel ranks holds 1/ep of every layer's experts; tokens travel to
their experts and back by all-to-all (token_routing.py). Routing stays the model's own code, on the
token's own rank. So its decisions, and a loss on its balance, do not depend on the layout. Expert
layers are found by their parameters and calls (trace/find), and checked by running them
(expert_check.py). Experts that are a list of modules are called one by one by the model's own code,
with an exchange for each (expert_lists.py).

An expert sees the tokens of all ranks that exchange with it, so its gradient is summed only over
the data-parallel ranks that hold the same experts; everything else over all of them.
Every rank runs as many passes as the busiest one, since all must join every exchange.

Source: Lepikhin et al. 2020 (2006.16668); ep borrowed from data parallelism: Rajbhandari et al.
2022 (2201.05596), DeepSpeed-MoE
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from shoal.base.errors import PlanError
from shoal.base.layouts.layout import Layout
from shoal.base.plans.placement import DimCut, Placement, make_even_cut
from shoal.fabric.axis_worlds import axis_world
from shoal.parallel.build.mmap_init import cut_to_part
from shoal.parallel.expert_parallel.expert_check import NotExpertsError, check_layer, check_rows
from shoal.parallel.expert_parallel.expert_layer import RoutedForward
from shoal.parallel.expert_parallel.expert_lists import ListedForward
from shoal.parallel.expert_parallel.expert_load import ExpertLoads
from shoal.parallel.program import Program
from shoal.trace.find.listed_experts import ListedExperts
from shoal.trace.find.stacked_experts import ExpertLayer
from shoal.trace.flow.forward_record import ForwardRecord

Experts = ExpertLayer | ListedExperts
"""Layer whose experts are a stack, or a list."""


def plan(program: Program, record: ForwardRecord) -> list[Experts]:
    """Find and check the model's expert layers; none without `ep`.

    Raises:
        PlanError: the model has no experts, or they do not divide over the ranks.
    """
    layout = program.plan.layout
    if layout.ep == 1:
        return []
    return plan_layers(record, layout)


def plan_layers(record: ForwardRecord, layout: Layout) -> list[Experts]:
    """Find and check the expert layers that `layout` divides over ep."""
    layers, lists = record.stacked_experts(), record.listed_experts()
    if not layers and not lists:
        raise PlanError(
            f"layout.ep = {layout.ep}: the model has no part whose parameters are all stacked by "
            f"expert and that is called with tokens [n, d], chosen experts [n, k] and weights "
            f"[n, k], and no list of equal modules that are called with rows [n, d]; try: "
            f"layout.ep=1"
        )
    found: dict[Any, ExpertLayer] = {}
    done: list[Experts] = []
    kinds: set[Any] = set()
    for one in lists:
        _check_divisibility(one, layout)
        if layout.zero == 3 and layout.expert_shard > 1:
            raise PlanError(
                f"layout.ep = {layout.ep}: {one.name} holds its experts in a list, whose entries "
                f"are whole on a rank, and layout.dp_shard = {layout.dp_shard} would share each; "
                f"try: layout.ep={layout.dp_shard}, or layout.zero=2"
            )
        if layout.zero == 3 and layout.pp > 1:
            raise PlanError(
                f"layout.ep = {layout.ep}: {one.name} holds its experts in a list, which goes with "
                f"layout.pp = {layout.pp} where nothing is gathered block by block; try: "
                f"layout.zero=2"
            )
        if one.kind not in kinds:
            try:
                check_rows(one)
            except NotExpertsError as why:
                raise PlanError(
                    f"layout.ep = {layout.ep}: {one.names[0]} is called like an expert, but {why}; "
                    f"try: layout.ep=1"
                ) from why
            kinds.add(one.kind)
        done.append(one)
    for layer in layers:
        _check_divisibility(layer, layout)
        if layer.kind not in found:
            try:
                found[layer.kind] = check_layer(layer, layout.ep)
            except NotExpertsError as why:
                raise PlanError(
                    f"layout.ep = {layout.ep}: {layer.name} is called like experts, but {why}; "
                    f"try: layout.ep=1"
                ) from why
        done.append(replace(layer, counts=found[layer.kind].counts, sample=()))
    return done


def _check_divisibility(layer: Experts, layout: Layout) -> None:
    if layer.experts % layout.ep == 0:
        return
    even = (n for n in range(1, layer.experts + 1) if layer.experts % n == 0)
    fitting = filter(layout.can_share_experts, even)
    nearest = min(fitting, key=lambda n: (abs(n - layout.ep), n))
    raise PlanError(
        f"layout.ep = {layout.ep}: {layer.name} has {layer.experts} experts, which cannot be dealt "
        f"to {layout.ep} ranks evenly; try: layout.ep={nearest}"
    )


def place(
    rows: Mapping[str, Placement], layers: Sequence[Experts], module: nn.Module, layout: Layout
) -> dict[str, Placement]:
    """Divide the experts of every layer over ep, by rows of their stacks or module by module.

    Raises:
        PlanError: another technique has cut the experts already.
    """
    found, names = dict(rows), {id(p): name for name, p in module.named_parameters()}
    for layer in layers:
        for parameter, cut in _enumerate_cuts(layer, layout.ep):
            row = found[names[id(parameter)]]
            if row.cut is not None and row.cut.axis != "ep":
                raise PlanError(
                    f"layout.ep = {layout.ep}: {row.name} is cut by layout.tp = {layout.tp} "
                    f"already; try: layout.tp=1"
                )
            unit = "" if layout.zero < 3 or layout.expert_shard == 1 else layer.name
            found[row.name] = replace(row, cut=cut, unit=unit)
    return found


def _enumerate_cuts(layer: Experts, degree: int) -> Iterator[tuple[nn.Parameter, DimCut]]:
    """Yield each parameter of a layer's experts with its cut: some rows, all, or none per rank."""
    if isinstance(layer, ExpertLayer):
        for parameter in layer.part.parameters():
            yield parameter, make_even_cut("ep", 0, parameter.shape[0], degree)
        return
    for place, entry in enumerate(layer.entries):
        owner = place * degree // layer.experts
        for parameter in entry.parameters():
            ends = tuple(parameter.shape[0] * (rank > owner) for rank in range(degree + 1))
            yield parameter, DimCut("ep", 0, (ends,), tuple(range(degree)))


def apply(program: Program, layers: Sequence[Experts]) -> Program:
    """Keep this rank's experts, in place, and route tokens to them; no change without layers."""
    if not layers:
        return program
    degrees = program.plan.layout.expert_degrees
    axis = axis_world(program.world, degrees, ["ep"])
    own = [one for one in layers if not any(p.is_meta for p, _ in _enumerate_cuts(one, axis.size))]
    done: set[str] = set()
    names = {id(p): name for name, p in program.module.named_parameters()}
    loads = ExpertLoads({layer.name: layer.experts for layer in own}, program.data, program.notices)
    undo = []
    for layer in own:
        for parameter, _ in _enumerate_cuts(layer, axis.size):
            name = names[id(parameter)]
            if name not in done:  # else tied to another layer's
                cut_to_part(parameter, program.cuts[name], axis.rank)
                done.add(name)
        stand_in = (
            RoutedForward(layer, axis, loads)
            if isinstance(layer, ExpertLayer)
            else ListedForward(layer, axis, loads)
        )
        undo.append(stand_in.restore)
    program.notices.append(
        f"layout.ep = {axis.size}: {len(own)} layers of {own[0].experts} experts, "
        f"{own[0].experts // axis.size} on each rank"
        if own
        else f"layout.ep = {axis.size}: no layer of experts is on this stage"
    )
    return replace(
        program,
        together=True,
        around=(*program.around, loads.micro_batch),
        on_update=(*program.on_update, loads.commit) if own else program.on_update,
        on_close=(*program.on_close, *undo),
    )
