"""A pass that only joins the others' collectives uses no parameter, as far as the step is told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.base.plan import Bucket
from shoal.base.shards import Shard
from shoal.fabric import start_world
from shoal.parallel.data_parallel.buckets import BucketReducer
from shoal.parallel.program import Local


@pytest.mark.parametrize("counted", [True, False])
def test_only_passes_that_count_use_parameters(counted: bool) -> None:
    parameters = {name: nn.Parameter(torch.ones(3)) for name in "ab"}
    local = {n: Local(p, Shard.whole(n, (3,), "float32")) for n, p in parameters.items()}
    bucket = Bucket(("b", "a"), 6, "float32", 4)
    reducer = BucketReducer(parameters, (bucket,), start_world({}), local)
    reducer.begin(2)
    reducer.arm(last=False)
    parameters["a"].sum().backward()
    reducer.passed(counted=True)
    reducer.arm(last=True)
    (0 * parameters["b"]).sum().backward()
    reducer.passed(counted)
    reducer.finish()
    assert reducer.used() == [True, counted]
    reducer.close()
