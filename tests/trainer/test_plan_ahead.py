"""`shoal.plan` gives a plan that `shoal.parallelize` takes; both refuse what means nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.base.errors import ShoalError

SAMPLE = (torch.zeros(2, 64), torch.zeros(2, 64))


def net() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(4)])


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return ((outputs - targets) ** 2).sum(), outputs.numel()


def test_the_best_of_a_server_is_settled_and_says_why() -> None:
    plan = shoal.plan(net, SAMPLE, squares, on="8xH100-80GB", batch=64, clip=0.5)
    assert plan.layout.processes == 8
    assert plan.batch == plan.micro_batch * plan.accumulate * plan.layout.data_degree == 64
    assert (plan.clip, plan.compute, plan.parameters) == (0.5, "bf16", 8 * 65 * 64)
    assert "per rank foreseen, best of" in plan.why
    assert "on 8xH100-80GB" in plan.why
    assert shoal.Plan.from_json(plan.to_json()) == plan


def test_what_is_fixed_is_kept() -> None:
    plan = shoal.plan(net, SAMPLE, layout={"pp": 2}, on="8xH100-80GB", recompute="full")
    assert (plan.layout.pp, plan.recompute) == (2, "full")
    assert shoal.plan(net, SAMPLE, layout="fsdp", on="8xH100-80GB").layout.zero == 3


def test_a_plan_starts_a_run() -> None:
    plan = shoal.plan(net, SAMPLE, squares, layout="single", batch=8, micro_batch=2)
    run = shoal.parallelize(net(), lambda p: torch.optim.SGD(p, lr=0.1), squares, plan=plan)
    assert replace(run.plan, placements=(), buckets=()) == plan
    x = torch.randn(8, 64)
    (result,) = run.steps([(x, x)])
    assert result.step == 1
    run.close()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"layout": {"tpp": 2}}, "try: tp"),
    ({"layout": 3}, 'try: layout={"tp": 2}'),
    ({"recompute": "ful"}, "recompute = ful: not one of none, selective, full; try: full"),
    ({"recomput": "full"}, "shoal.plan has no argument recomput; try: recompute"),
    ({"on": "8xH99"}, '"H99" is no device of the catalogue'),
    ({"batch": 0}, "batch = 0: a whole number of at least 1 is wanted; try: batch=32"),
    ({"micro_batch": -1}, "micro_batch = -1: a whole number of at least 0 is wanted"),
    ({"layout": {"pp": 16}, "on": "2x8xH100-80GB"}, "layout.pp = 16"),
]


@pytest.mark.parametrize(("words", "line"), WRONG, ids=lambda v: str(v)[:40])
def test_what_means_nothing_is_one_line(words: dict[str, Any], line: str) -> None:
    with pytest.raises(ShoalError) as failure:
        shoal.plan(net, SAMPLE, **{"on": "8xH100-80GB", **words})
    assert line in str(failure.value)
    assert "\n" not in str(failure.value)


def test_what_fits_nowhere_says_what_would() -> None:
    def huge() -> nn.Module:
        return nn.Sequential(*[nn.Linear(2**15, 2**15) for _ in range(16)])

    sample = (torch.zeros(2, 2**15, device="meta"), torch.zeros(2, 2**15, device="meta"))
    with pytest.raises(shoal.PlanError, match=r"lacks .* of memory on .*; try: "):
        shoal.plan(huge, sample, on="1xL4")


def test_what_would_not_start_says_so() -> None:
    """Steps that fit are no run where a node's ranks each hold the whole model first."""

    def large() -> nn.Module:
        return nn.Sequential(*[nn.Linear(2**15, 2**15) for _ in range(64)])

    sample = (torch.zeros(2, 2**15, device="meta"), torch.zeros(2, 2**15, device="meta"))
    assert shoal.plan(large, sample, on="8x8xH100-80GB", batch=64).layout.processes == 64
    with torch.device("meta"):
        built = large()
    for part in built:  # weights on the host, of one number's memory
        part.weight = nn.Parameter(torch.zeros(()).expand(2**15, 2**15))
        part.bias = nn.Parameter(torch.zeros(()).expand(2**15))
    told = (
        r"its steps would fit, but while building, each of a node's 8 ranks holds all 68.7B "
        r"weights: 2.0 TiB in a node's 1.8 TiB; try: give a function that builds the model"
    )
    with pytest.raises(shoal.PlanError, match=told):
        shoal.plan(built, sample, on="8x8xH100-80GB", batch=64)


def test_the_plan_is_one_that_carries_what_was_asked_for() -> None:
    """The fastest of these is hsdp, and no sum that is encoded goes with that."""

    def best(layout: Any, **words: Any) -> shoal.Layout:
        return shoal.plan(net, SAMPLE, squares, layout, on="8xH100-80GB", **words).layout

    fastest = best({"dp_shard": 4})
    assert (fastest.zero, fastest.dp_replicate) == (3, 2)
    assert best({"dp_shard": 4}, compress="int8").zero in (1, 2)
    with pytest.raises(shoal.PlanError, match=r"layout\.compress = topk: fsdp .*try: "):
        best("fsdp", compress="topk")


def test_samples_may_be_dictionaries() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()

        def forward(self, *, values: torch.Tensor) -> torch.Tensor:
            return self.body(values)

    sample = ({"values": SAMPLE[0]}, SAMPLE[1])
    plan = shoal.plan(Named, sample, squares, on="8xH100-80GB", call="kwargs")
    assert (plan.call, plan.layout.processes) == ("kwargs", 8)


def test_one_pattern_may_be_a_word() -> None:
    for words in ({"split": "*=whole"}, {"split": ["*=whole"]}, {"layout": {"split": "*=whole"}}):
        with pytest.raises(shoal.ConfigError, match=r"^split = \*=whole: says how layers"):
            shoal.parallelize(net(), lambda p: torch.optim.SGD(p, lr=0.1), squares, **words)


def test_words_beside_a_plan_are_refused() -> None:
    plan = shoal.Plan(shoal.Layout(), batch=8)
    for words, line in (
        ({"plan": 3}, "plan = int: a shoal.Plan is wanted"),
        ({"plan": plan, "batch": 3}, "batch = 3: stands beside a plan, which says it itself; "
         "try: plan=dataclasses.replace(plan, batch=…)"),
        ({"plan": plan, "precision": "bf16"}, "replace(plan, compute=…)"),
        ({"plan": plan, "clip": 1.0}, "replace(plan, clip=…)"),
        ({"plan": replace(plan, recompute="ful")}, "try: full"),
        ({"plan": replace(plan, layout=shoal.Layout(tp=2))}, "tp 2 = 2 processes"),
    ):  # fmt: skip
        with pytest.raises(shoal.ShoalError) as failure:
            shoal.parallelize(net(), lambda p: torch.optim.SGD(p, lr=0.1), squares, **words)
        assert line in str(failure.value)
