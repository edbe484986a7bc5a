"""Step-throughs of DDP, tp, cp, ep and DiLoCo: their rules, and that a wrong result is never shown."""

from __future__ import annotations

from fractions import Fraction

import pytest

from shoal.base.errors import BugError, PlanError
from shoal.base.plans.timeline import Timeline
from shoal.teach.calculators.collectives_costs import ring_all_reduce_s
from shoal.teach.walks import cp_walk, ddp_walk, ep_walk, local_steps_walk, tp_walk
from shoal.teach.walks.walk import StepThrough
from shoal.teach.walks.walk_messages import ALPHA_S, BYTES_PER_S

WALKS = [ddp_walk.ddp, tp_walk.tp, cp_walk.cp, ep_walk.ep, local_steps_walk.local_steps]


def timeline(walk: StepThrough) -> Timeline:
    assert walk.timeline is not None
    return walk.timeline


@pytest.mark.parametrize("make", WALKS, ids=lambda make: make.__name__)
def test_every_number_of_ranks_ends_right(make) -> None:
    """A walk compares its own result with one process and raises otherwise."""
    for ranks in (2, 3, 4, 7, 8):
        walk = make(ranks)
        assert len(walk.rows) == ranks
        assert all(len(row) == len(walk.columns) for step in walk.steps for row in step.cells)
    for ranks in (1, 17):
        with pytest.raises(PlanError, match="try: --ranks"):
            make(ranks)


def test_buckets_travel_during_the_backward_pass() -> None:
    bucket_s = ring_all_reduce_s(4, ddp_walk.GRADIENT_BYTES / 3, ALPHA_S, 1 / BYTES_PER_S)
    compute_s = ddp_walk.LAYERS * (ddp_walk.FORWARD_S + ddp_walk.BACKWARD_S)
    spans = timeline(ddp_walk.ddp(4)).spans
    sums = sorted(s.start_s for s in spans if s.kind == "all-reduce" and s.rank == 0)
    layer_s, forward_s = ddp_walk.BACKWARD_S, ddp_walk.LAYERS * ddp_walk.FORWARD_S
    assert sums == pytest.approx([forward_s + 2 * k * layer_s for k in (1, 2, 3)])
    end_s = timeline(ddp_walk.ddp(4)).end_s
    assert end_s == pytest.approx(compute_s + bucket_s + ddp_walk.UPDATE_S)
    slow = timeline(ddp_walk.ddp(4, backward_s=1e-4)).end_s
    assert slow == pytest.approx(forward_s + 2e-4 + 3 * bucket_s + ddp_walk.UPDATE_S)


def test_a_bucket_that_is_left_out_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ddp_walk._DdpSimulation.all_reduce

    def only_own(self: ddp_walk._DdpSimulation, bucket: int) -> None:
        right(self, bucket)
        for own, mean in zip(self.own, self.mean, strict=True):
            mean[0] = Fraction(own.get(0, 0))

    monkeypatch.setattr(ddp_walk._DdpSimulation, "all_reduce", only_own)
    with pytest.raises(BugError, match="weights of rank 0"):
        ddp_walk.ddp(4)


def test_parts_of_a_layer_are_sums_that_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = tp_walk.tp(4).steps[1].cells
    parts = [[int(word) for word in row[3].text.split()] for row in shown]
    whole = [int(word) for word in tp_walk.tp(4).steps[2].cells[0][3].text.split()]
    assert [sum(column) for column in zip(*parts, strict=True)] == whole
    assert any(part != whole for part in parts)
    real = tp_walk.product
    monkeypatch.setattr(
        tp_walk, "transpose", lambda m: [[2 * x for x in r] for r in zip(*m, strict=True)]
    )
    assert tp_walk.tp(2)  # both sides change alike: not a difference between ranks and one process
    monkeypatch.setattr(
        tp_walk, "product", lambda row, m: [x + (len(row) == 2) for x in real(row, m)]
    )
    with pytest.raises(BugError, match="must be"):
        tp_walk.tp(2)


def test_a_query_meets_each_earlier_block_once(monkeypatch: pytest.MonkeyPatch) -> None:
    last = cp_walk.cp(4).steps[-1].cells
    assert [sorted(row[1].text.split()) for row in last] == [
        ["0"], ["0", "1"], ["0", "1", "2"], ["0", "1", "2", "3"],
    ]  # fmt: skip
    right = cp_walk._QueryBlock.attend

    def skips(self: cp_walk._QueryBlock, block: int, key: int, value: int) -> None:
        right(self, block, key + (block == 1), value)

    monkeypatch.setattr(cp_walk._QueryBlock, "attend", skips)
    with pytest.raises(BugError, match="output of rank"):
        cp_walk.cp(4)


def test_experts_lose_no_token() -> None:
    walk = ep_walk.ep(4)
    got = sorted(int(t) for row in walk.steps[0].cells for t in row[2].text.split())
    assert got == list(range(12))
    with pytest.raises(PlanError, match="try: --ranks 8"):
        ep_walk.ep(9)


def test_outer_steps_are_those_of_torch() -> None:
    """The outer optimizer is torch.optim.SGD with Nesterov momentum, to rounding."""
    import torch

    shared = local_steps_walk.SharedWeights([Fraction(4 * k) for k in range(3)])
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    outer = torch.optim.SGD([weight], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(4):
        own = shared.inner_steps()
        weight.grad = (weight - float(sum(own) / len(own))).detach()
        outer.step()
        shared.outer_step(own)
        assert weight.item() == pytest.approx(float(shared.merged), abs=1e-12)
