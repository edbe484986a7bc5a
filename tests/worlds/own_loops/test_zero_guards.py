"""Guards of zero1, zero2, fsdp and dp: what cannot be right is one line, all else is exact."""

from __future__ import annotations

import functools
import math
import threading
from typing import Any

import pytest
import torch
from torch import nn

import shoal
import zero_guards
from guards import INPUTS, TARGETS, message, sgd, squares
from shoal.fabric import start_world
from shoal.trace.find.blocks import fsdp_blocks as units

WAIT_S = 30.0


def long(*row: Any) -> Any:
    """A row that `make proof` runs: others hold most of it."""
    return pytest.param(*row, marks=pytest.mark.proof)


@functools.cache
def short_steps_alone() -> dict[str, Any]:
    return zero_guards.short_steps(start_world({}), "single")


def everywhere(worlds, check: str, size: int = 2, **arguments: Any) -> Any:
    """The answer of a check that must be the same on all ranks."""
    answers = worlds(size).call(f"zero_guards:{check}", **arguments)
    assert all(a == answers[0] for a in answers), answers
    return answers[0]


def test_fsdp_refuses_what_it_cannot_cut(worlds) -> None:
    mixed, muon = everywhere(worlds, "refusals")
    assert mixed == (
        "PlanError: layout = fsdp: gathers parameters of one format, the model has "
        'float32, float64; try: layout="zero2"'
    )
    assert muon.startswith(
        "PlanError: layout = fsdp: cuts every parameter by rows, and MuonWithAdamW: a "
        "step on some rows of a parameter differs"
    )
    assert muon.endswith('; try: layout="zero2"')


@pytest.mark.parametrize("layout", ["fsdp", "zero2"])
def test_a_scalar_trains(worlds, layout: str) -> None:
    answers = worlds(2).call("zero_guards:trains_a_scalar", layout=layout)
    assert answers == ["nothing was raised"] * 2


def test_a_parameter_without_elements_hinders_nothing(worlds, tmp_path) -> None:
    """DINOv3 has one by default; torch's fully_shard fails on it."""
    answers = {
        layout: worlds(2).call(
            "zero_guards:trains_with_nothing", layout=layout, folder=str(tmp_path / layout)
        )[0]
        for layout in ("ddp", "zero2", "fsdp")
    }
    assert [len(values) for values in answers["ddp"]] == [2, 8, 0]
    for layout in ("zero2", "fsdp"):
        for ours, theirs in zip(answers[layout], answers["ddp"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-14)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *(("fsdp", "pair"), ("fsdp", "dict"), ("zero2", "pair")),
        *(long(*row) for row in (("zero2", "dict"), ("hsdp", "pair"), ("hsdp", "dict"))),
    ],
)
def test_a_first_step_may_leave_ranks_without_samples(worlds, layout: str, kind: str) -> None:
    """As the first step after a kill does, where it is the last of an epoch."""
    told = everywhere(worlds, "first_step_without_samples", 4, layout=layout, kind=kind)
    assert told < 1e-12


def test_samples_that_cannot_be_given_to_others_are_told(worlds) -> None:
    told = everywhere(worlds, "first_step_without_samples", layout="fsdp", kind="own class")
    assert told == (
        "ConfigError: the first step has no sample for some ranks, which must run the model with "
        "the others, and what others have is more than tensors, numbers and texts in tuples, lists "
        "and dicts; try: a smaller micro_batch, or layout zero2"
    )


@pytest.mark.parametrize("layout", ["zero1", "zero2"])
def test_gradients_are_in_the_parts_only(worlds, layout: str) -> None:
    """What lies outside of a rank's part is no sum: `.grad` is a placeholder without memory."""
    answers = worlds(2).call("zero_guards:gradients_after_a_step", layout=layout)
    for told in answers:
        assert all(told["none"])
        assert told["apart"] < 1e-6
    assert sum(told["parts"] for told in answers) == answers[0]["elements"]
    assert all(told["parts"] for told in answers)


def test_blocks_that_share_a_weight_are_no_units() -> None:
    shared = zero_guards.Shared()
    assert list(units(shared).values()) == [shared.blocks[1]]
    plain = zero_guards.Stack()
    assert list(units(plain).values()) == list(plain.blocks)
    bare = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert units(bare) == {}


def test_a_weight_in_two_blocks_trains_as_in_one_process(worlds) -> None:
    assert everywhere(worlds, "shared_over_blocks") < 1e-12


def test_outputs_may_be_written_to(worlds) -> None:
    """An in-place operation on a view loses the hook with which backward gathers the weights."""
    assert everywhere(worlds, "written_in_place") < 1e-12


def test_more_ranks_than_rows(worlds) -> None:
    assert everywhere(worlds, "few_rows", 4) < 1e-12


@pytest.mark.parametrize(
    ("layout", "defer_sync"),
    [
        *(("zero2", False), ("fsdp", False), ("hsdp", True)),
        *(long(*row) for row in (("zero2", True), ("fsdp", True), ("hsdp", False))),
    ],
)
def test_the_last_step_of_an_epoch_may_leave_ranks_without_samples(
    worlds, layout: str, defer_sync: bool
) -> None:
    answers = worlds(4).call("zero_guards:short_steps", layout=layout, defer_sync=defer_sync)
    assert [a["own"] for a in answers] == [[2, 1, 2, 1], *[[2, 0, 2, 0]] * 3]
    alone = short_steps_alone()
    for told in answers:
        assert told["losses"] == pytest.approx(alone["losses"], rel=1e-12)
        for name, weight in alone["weights"].items():
            assert told["weights"][name] == pytest.approx(weight, rel=1e-11, abs=1e-13), name


@pytest.mark.parametrize("layout", ["fsdp", "zero2"])
def test_evaluation_with_unequal_numbers_of_micro_batches(worlds, layout: str) -> None:
    """17 samples by two are nine micro-batches: three on rank 0, two on the others."""
    told = everywhere(worlds, "evaluation", 4, layout=layout, samples=17)
    alone = zero_guards.evaluation(start_world({}), "single", 17)
    assert told["targets"] == alone["targets"] == 34
    for name, value in alone.items():
        assert math.isclose(told[name], value, rel_tol=1e-12), name


def test_evaluation_of_less_than_a_sample_per_rank_is_refused(worlds) -> None:
    assert everywhere(worlds, "evaluation", 4, layout="fsdp", samples=3) == (
        "ConfigError: run.evaluate: fewer micro-batches than ranks, and layout fsdp runs the model "
        "on all ranks at once; try: more validation samples, or a smaller micro_batch"
    )


@pytest.mark.parametrize("layout", ["fsdp", "zero1"])
def test_what_is_frozen_stays(worlds, layout: str) -> None:
    told = everywhere(worlds, "frozen_stays", layout=layout)
    assert told["still"] == ["blocks.1.inner.weight", "blocks.1.inner.bias", "head.bias"]
    assert told["later"].startswith(
        "PlanError: head.bias was frozen when shoal.parallelize was called and trains now"
    )


@pytest.mark.parametrize("layout", [long("zero1"), "zero2", "fsdp"])
def test_weights_in_channels_last_are_cut_by_their_elements(worlds, layout: str) -> None:
    """Slices are counted row by row, whatever the order in memory was."""
    assert max(everywhere(worlds, "channels_last", layout=layout)) < 1e-5


def dp_run(model: nn.Module, threads: int, batch: int = 24) -> Any:
    return shoal.parallelize(
        model, sgd, squares, layout={"threads": threads}, batch=batch, micro_batch=2,
        precision="fp64", world=start_world({}),
    )  # fmt: skip


def test_replicas_of_dp_run_at_once_and_compute_what_one_process_does() -> None:
    together = threading.Barrier(3)
    seen: list[set[int]] = []

    def meet(module: nn.Module, inputs: Any) -> None:
        seen[-1].add(threading.get_ident())
        if len(seen) > 1:  # the first step runs in turn, to look at the generators
            together.wait(WAIT_S)

    model, twin = zero_guards.Stack(), zero_guards.Stack()
    model.blocks[0].register_forward_pre_hook(meet)
    batch = (INPUTS[:18].double(), TARGETS[:18].double())
    run, alone = dp_run(model, 3, 18), shoal.parallelize(
        twin, sgd, squares, layout="single", batch=18, micro_batch=2, precision="fp64",
        world=start_world({}),
    )  # fmt: skip
    for _ in range(3):
        seen.append(set())
        ours, theirs = run.step(batch), alone.step(batch)
        assert math.isclose(ours.loss, theirs.loss, rel_tol=1e-12)
        assert math.isclose(ours.grad_norm, theirs.grad_norm, rel_tol=1e-12)
    assert seen[0] == {threading.get_ident()}
    assert all(len(threads) == 3 for threads in seen[1:])
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-13)


class Noisy(zero_guards.Stack):
    """Dropout inside of a block, between blocks and head, or in the loss alone."""

    def __init__(self, where: str) -> None:
        super().__init__()
        if where == "block":
            self.blocks[1] = nn.Sequential(self.blocks[1], nn.Dropout(0.3))
        if where == "head":
            self.head = nn.Sequential(nn.Dropout(0.3), self.head)


@pytest.mark.parametrize("where", ["block", "head", "loss"])
def test_replicas_that_draw_take_turns(where: str) -> None:
    """Threads share one generator: in turn, masks are those of one process."""

    def noisy_squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return squares(outputs + noise(outputs), targets)

    batch = (INPUTS.double(), TARGETS.double())
    told = []
    for layout in ({"threads": 2}, "single"):
        run = shoal.parallelize(
            Noisy(where), sgd, noisy_squares if where == "loss" else squares, layout=layout,
            batch=24, micro_batch=2, precision="fp64", world=start_world({}),
        )  # fmt: skip
        told.append([run.step(batch).grad_norm for _ in range(3)])
    assert told[0] == pytest.approx(told[1], rel=1e-12)


class DrawsLater(nn.Module):
    """Noise that somebody switches on during training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + noise(x) if NOISY else x)


NOISY: list[bool] = []


def noise(x: torch.Tensor) -> torch.Tensor:
    return 0.01 * torch.randn_like(x)


def test_dp_refuses_random_numbers_that_come_late() -> None:
    batch = (INPUTS.double(), TARGETS.double())
    run = dp_run(DrawsLater(), 2)
    run.step(batch)
    NOISY.append(True)
    told = message(lambda: run.step(batch))
    assert told == (
        "PlanError: layout = dp: the model drew random numbers for the first time after "
        'its first step; threads share one generator; try: layout="ddp"'
    )
    early = dp_run(DrawsLater(), 2)  # from the first step on: in turn, and allowed
    assert message(lambda: [early.step(batch) for _ in range(2)]) == "nothing was raised"
    NOISY.clear()
