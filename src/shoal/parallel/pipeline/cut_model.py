"""Cut a plain module into checked pipeline stages, from one sample, in four steps.

    1. the trunk: the repeated blocks, in call order (`trace.record`)
    2. watch a forward pass, in training and in evaluation: dependencies of values (`liveness`)
    3. assign the calls to stages by cost: crossing tensors, weights of each stage (`assign_stages`)
    4. verify: run the code between the blocks as every stage will, and compare

Step 4: for every stage the user's forward runs once more with all units left out. Arriving values
are those of the sample, irrelevant values are NaN, and another time 0.7. The inputs of each unit of
the stage must then be, bit for bit, its inputs in the sample. Only code between the units runs, so
this costs little. It catches what `marks` cannot follow: values that reach Python through numpy or
tolist, and random numbers drawn between the blocks by code that is left out.

All steps run the real module on real inputs, under no_grad, and leave no trace in it.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from shoal.base.errors import PlanError
from shoal.parallel.pipeline.partition_model import StageCut, assign_stages
from shoal.parallel.pipeline.stage import PipelineStages, StagePass, UnitForward
from shoal.trace.find.trunk import ForwardFunction
from shoal.trace.flow.forward_record import ForwardRecord, in_mode
from shoal.trace.flow.liveness import Flow, have_same_calls, merge_flows, trace_flow
from shoal.trace.isolation.meta_inputs import first_line, map_tensors, tensors_of
from shoal.trace.isolation.preserve_state import preserve_attributes, preserve_state

FILLS = (math.nan, 0.7)
"""NaN spreads to every result, but torch.where can hide it; 0.7 equals no usual value by chance."""


def cut_stages(record: ForwardRecord, stages: int) -> StageCut:
    """Cut a model into `stages` between the blocks of its trunk, and check the cut.

    Stages cost about the same, by FLOP and parameters.

    Returns:
        The stage of each call, the crossing tensors, and the weights of each stage; the same on
        every rank.

    Raises:
        PlanError: more stages than blocks, a block whose result is read later otherwise than
            through its return value, or values that leave torch between the blocks.
    """
    # The checks of a stage need the attributes that its blocks set in the sample.
    with preserve_attributes(record.module), in_mode(record.module, training=True):
        return _cut(record, stages)


def _cut(record: ForwardRecord, stages: int) -> StageCut:
    module = record.module
    flow = trace_flow(record)
    with in_mode(module, training=False):
        evaluated = trace_flow(record)
        both = have_same_calls(
            flow, evaluated
        )  # if not, an evaluation that calls other blocks raises
    cut = assign_stages(module, merge_flows(flow, evaluated) if both else flow, stages)
    verify_cut(record, cut, flow)
    if both:
        with in_mode(module, training=False):
            verify_cut(record, cut, evaluated)
    return cut


def verify_cut(record: ForwardRecord, cut: StageCut, flow: Flow) -> None:
    """Check that every stage gets its inputs; `flow` is of the module's present mode.

    A module on the meta device has no values to compare: such a cut is checked where it is run.

    Raises:
        PlanError: a stage gets other inputs; the text names the first such block.
    """
    module = record.module
    if any(p.is_meta for p in module.parameters()):
        return
    run = partial(record.run, "check")
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    held = PipelineStages(module, cut, range(cut.stages), device)
    try:
        for number in range(cut.stages):
            for fill in FILLS:
                with torch.no_grad(), preserve_state(module, attributes=False):
                    _replay(held, number, flow, run, fill)
    finally:
        held.restore_forwards()


class _ReplayPass(StagePass):
    """Pass of a stage whose units compare their inputs with the sample's and return its outputs."""

    def __init__(self, held: PipelineStages, number: int, flow: Flow, fill: float) -> None:
        recorded = [tensors_of(call.outputs) for call in flow.calls]
        crossing = held.cut.crossings[number]
        arrivals = tuple(recorded[call][leaf].clone() for call, leaf in crossing)
        super().__init__(held.cut, number, arrivals, held.shapes)
        self.flow, self.fill = flow, fill

    def call(self, unit: UnitForward, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Replay the next call; after a block reseed the generator, as in training."""
        number = self.at
        try:
            return super().call(unit, inputs, named)
        finally:
            if number < len(self.cut.calls) and self.cut.calls[number].block:
                torch.manual_seed(number)

    def run_unit(
        self, number: int, unit: UnitForward, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Return the recorded outputs of a call, if its inputs are the recorded ones."""
        if not is_bit_equal((inputs, named), self.flow.calls[number].inputs):
            raise _changed_inputs_error(self.cut, unit.name)
        return map_tensors(torch.clone, self.flow.calls[number].outputs)


def _replay(
    held: PipelineStages, number: int, flow: Flow, run: ForwardFunction, fill: float
) -> None:
    cut, passage = held.cut, _ReplayPass(held, number, flow, fill)
    try:
        outputs = held.stages[number].run_pass(run, passage)
    except PlanError:
        raise
    except Exception as failure:  # code between the blocks that reads values
        raise _changed_inputs_error(
            cut, f"code before {_next_call_name(cut, passage)}", first_line(failure)
        ) from failure
    if number == cut.stages - 1 and not is_bit_equal(outputs, flow.calls[-1].outputs):
        raise _changed_inputs_error(cut, "the model's outputs")


def _next_call_name(cut: StageCut, passage: StagePass) -> str:
    return cut.calls[passage.at].name if passage.at < len(cut.calls) else "the model's outputs"


def is_bit_equal(one: Any, two: Any) -> bool:
    """Return whether two structures hold the same bits; a NaN equals a NaN."""
    pairs = list(zip(tensors_of(one), tensors_of(two), strict=False))
    return len(tensors_of(one)) == len(tensors_of(two)) and all(
        a is b
        or (
            a.shape == b.shape
            and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
            and torch.equal(torch.isnan(a), torch.isnan(b))
        )
        for a, b in pairs
    )


def _changed_inputs_error(cut: StageCut, who: str, why: str = "") -> PlanError:
    return PlanError(
        f"layout.pp = {cut.stages}: {who} would get other values than in the whole model, since "
        f"code between the blocks depends on blocks of other stages in a way that cannot be "
        f"followed (numpy, tolist, random numbers){': ' + why if why else ''}; try: torch "
        f"operations in their place, or layout.pp=1"
    )
