"""`dp` over several devices: what its first device holds, what goes through its link, how long it takes."""

from __future__ import annotations

import pytest

from shoal.base.errors import PlanError
from shoal.base.estimates.estimate import PlanningCase
from shoal.base.layouts.layout import Layout
from shoal.base.plans.plan import Plan
from shoal.config.sections import LayoutSection
from shoal.forecast.fit.memory_instants import predict_run
from shoal.forecast.machines.cluster_syntax import parse_machines
from shoal.forecast.models.published_models import published_shape
from shoal.forecast.models.transformer_costs import transformer_facts
from shoal.forecast.search.search_space import search_space
from shoal.forecast.time.replica_costs import describe_replicas
from shoal.forecast.time.step_time import predict_time

NODE = parse_machines("4xA100-80GB")
MODEL = transformer_facts(published_shape("gpt2"), 1024, 4)


def case(layout: Layout, batch: int = 32) -> PlanningCase:
    return PlanningCase(MODEL, NODE, Plan(layout, batch, 4, compute="fp32"))


def test_the_first_device_holds_the_optimizer_and_a_passes_memory_of_one_process() -> None:
    dp, one = predict_run(case(Layout(threads=4))), predict_run(case(Layout(), batch=8))
    assert dp.peak_bytes == one.peak_bytes
    assert dp.peak_bytes - dp.others_bytes == pytest.approx(8 * MODEL.trainable)
    assert one.others_bytes == 0
    assert "the first device holds" in describe_replicas(case(Layout(threads=4)), dp, 1e9)


def test_weights_leave_and_gradients_come_through_one_link() -> None:
    dp, ddp = (predict_time(case(layout)) for layout in (Layout(threads=4), Layout(dp_replicate=4)))
    assert dp.bytes == {NODE.inside.name: 2 * 3 * 4 * MODEL.trainable}
    assert sum(ddp.bytes.values()) == pytest.approx(2 * 3 / 4 * 4 * MODEL.trainable, rel=0.01)
    assert dp.parts["parameters"] >= 3 * 4 * MODEL.trainable / NODE.inside.bytes_per_s
    assert "parameters" not in ddp.parts
    assert dp.step_s > ddp.step_s


def test_rounds_are_those_of_the_busiest_device() -> None:
    full, more = (predict_time(case(Layout(threads=4), batch)) for batch in (32, 36))
    assert more.parts["matrix"] == pytest.approx(1.5 * full.parts["matrix"])
    assert more.model_flops == pytest.approx(36 / 32 * full.model_flops)


def test_a_plan_takes_all_devices_of_a_node_and_no_more() -> None:
    assert search_space(LayoutSection(strategy="dp"), NODE).layout == Layout(threads=4)
    assert search_space(LayoutSection(strategy="dp", threads=2), NODE).layout == Layout(threads=2)
    with pytest.raises(PlanError, match=r"layout.threads = 8: .*try: layout.threads=4$"):
        search_space(LayoutSection(strategy="dp", threads=8), NODE)
    with pytest.raises(PlanError, match="is one process, got launch.processes = 2"):
        search_space(LayoutSection(strategy="dp"), parse_machines("2x4xA100-80GB"))
