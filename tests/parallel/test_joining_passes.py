"""A pass that only joins the others' collectives uses no parameter, as far as the step is told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.base.layouts.layout import Layout
from shoal.base.plans.placement import Placement
from shoal.base.plans.plan import Bucket, Plan
from shoal.fabric import start_world
from shoal.parallel.data_parallel.buckets import BucketReducer
from shoal.parallel.program import bind_placements, make_undivided_program, whole_local_parameters


@pytest.mark.parametrize("counted", [True, False])
def test_only_passes_that_count_use_parameters(counted: bool) -> None:
    module = nn.ParameterDict({name: nn.Parameter(torch.ones(3)) for name in "ab"})
    bucket = Bucket(("b", "a"), 6, "float32", 4)
    plan = Plan(Layout(), 2, 1, buckets=(bucket,))
    rows = [Placement(name, (3,), "float32", trains=True) for name in "ab"]
    program = bind_placements(make_undivided_program(module, plan, start_world({})), rows)
    parameters = program.parameters
    reducer = BucketReducer(program, whole_local_parameters(program))
    reducer.start_step(2)
    reducer.prepare_backward(last=False)
    parameters["a"].sum().backward()
    reducer.end_backward(counted=True)
    reducer.prepare_backward(last=True)
    (0 * parameters["b"]).sum().backward()
    reducer.end_backward(counted)
    reducer.finish()
    assert reducer.used_parameters() == [True, counted]
    reducer.close()
