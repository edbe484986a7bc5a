"""What is foreseen of many small blocks under fsdp: one message for all of them."""

from __future__ import annotations

from dataclasses import replace

from shoal.base.estimates.cluster import Link
from shoal.base.estimates.estimate import ModelFacts, PlanningCase, UnitFacts
from shoal.base.estimates.facts import MachineFacts
from shoal.base.layouts.layout import Layout
from shoal.base.plans.plan import Plan
from shoal.forecast.machines.measured_machine import estimate_this_machine
from shoal.forecast.memory.transient_memory import gathered_elements
from shoal.forecast.time.step_time import predict_time
from shoal.planning.pipeline_stages import stage_units

LAPTOP = replace(
    estimate_this_machine(MachineFacts(cores=2, memory_bytes=2**34, gpus=0), 2),
    inside=Link("gloo", 5e-4, 5e8),
)


def chain(count: int, parameters: int, blocks: tuple[str, ...] = ()) -> PlanningCase:
    """So many blocks of so many weights, and a head."""
    block = UnitFacts(
        "blocks", count, parameters, operations=6, forward_flops=1e4, input_bytes=64.0
    )
    trainable = count * parameters + 100
    model = ModelFacts("chain", (block, UnitFacts("head", parameters=100)), 0, 4, trainable)
    plan = Plan(Layout(dp_shard=2, zero=3), 16, 8, 1, compute="fp32", blocks=blocks)
    return PlanningCase(model, LAPTOP, plan)


def test_small_blocks_cost_one_message_and_named_ones_as_many_as_they_are() -> None:
    together, apart = chain(300, 272), chain(300, 272, blocks=("Block",))
    assert predict_time(apart).step_s - predict_time(together).step_s > 300 * 5e-4
    ddp = replace(together, plan=replace(together.plan, layout=Layout(dp_replicate=2)))
    assert predict_time(together).step_s - predict_time(ddp).step_s < 10 * 5e-4


def test_together_they_are_gathered_with_the_rest() -> None:
    case = chain(300, 272)
    stage = stage_units(case, 0)
    assert gathered_elements(case, stage) == ([], 300 * 272 + 100)
    for other in (chain(300, 272, blocks=("Block",)), chain(31, 272), chain(300, 4000)):
        stage = stage_units(other, 0)
        sizes, root = gathered_elements(other, stage)
        assert len(sizes) in (31, 300)
        assert root == 100
