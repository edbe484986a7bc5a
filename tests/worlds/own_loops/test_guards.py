"""Guards that need several processes: each mistake is one clear line on every rank, or is mended."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import guards
from proof_rows import chosen
from shoal.fabric import start_world


def everywhere(worlds, check: str, size: int = 2):
    """The answer of a check that must be the same on all ranks."""
    answers = worlds(size).call(f"guards:{check}")
    assert all(a == answers[0] for a in answers), answers
    return answers[0]


def test_a_replaced_gradient_is_found(worlds) -> None:
    told, state = everywhere(worlds, "gradient_replaced")
    assert told.startswith("PlanError: 0.weight.grad was replaced during the backward pass")
    assert state == "same"


def test_a_second_backward_in_one_micro_batch_is_found(worlds) -> None:
    """Its gradients would arrive after the sum was sent: each rank would train another model."""
    told, state, good = everywhere(worlds, "backward_twice")
    assert told.startswith("PlanError: layer.")
    assert "a second gradient arrived after its bucket was sent" in told
    assert told.endswith("use use_reentrant=False")
    assert state == "same"
    assert len(good) == 64


def test_other_structures_are_named(worlds) -> None:
    wide, frozen, strided = everywhere(worlds, "structures_differ")
    assert wide == (
        "PlanError: model: layer 2 is Linear(in_features=8, out_features=2, bias=True) on rank 0, "
        "and 2 is Linear(in_features=8, out_features=3, bias=True) on rank 1; every rank must "
        "build the same model: look for a builder that reads the rank or the environment"
    )
    assert "model: 0.bias is [8] torch.float32 on rank 0 and [8] torch.float32, frozen" in frozen
    assert "strides [27, 9, 3, 1] (memory format) on rank 0 and" in strided


def test_other_values_become_rank_0s_and_one_line_says_so(worlds) -> None:
    answers = worlds(2).call("guards:values_differ")
    assert answers[0]["digest"] == answers[1]["digest"]
    assert [a["kept"] for a in answers] == [True, True]
    assert answers[0]["lines"] == [
        "shoal: weights differ across ranks in 1 of 2 tensors, first: weight; rank 0's are used "
        "(seed the generator before building the model)"
    ]
    assert answers[1]["lines"] == []


def test_a_parameter_that_trains_later_is_named(worlds) -> None:
    (told,) = everywhere(worlds, "unfrozen_later")
    assert told.startswith("PlanError: 0.weight was frozen when shoal.parallelize was called")


def test_a_mean_is_refused_on_every_rank(worlds) -> None:
    told, state = everywhere(worlds, "mean_loss")
    assert told.startswith("ConfigError: loss returned a mean: ")
    assert state == "same"


def test_an_optimizer_that_moves_nothing_is_found(worlds) -> None:
    (told,) = everywhere(worlds, "movement")
    assert told.startswith("ConfigError: optimizer: its first step moved no parameter")


def test_poison_on_one_rank_moves_nobody(worlds) -> None:
    told = everywhere(worlds, "poison_on_one_rank")
    assert told["skipped"]
    assert told["still"]
    assert told["same"]


def test_weights_in_channels_last_train_as_in_one_process(worlds) -> None:
    """Fused kernels ignore strides: gradients must lie in memory as their weights do."""
    assert max(everywhere(worlds, "channels_last")) < 1e-5


def test_buffers_without_a_rule_stay_equal(worlds) -> None:
    answers = worlds(2).call("guards:loose_buffer")
    assert answers[0]["digest"] == answers[1]["digest"]
    assert [a["right"] for a in answers] == [True, True]
    (line,) = answers[0]["lines"]
    assert line.startswith("shoal: average is changed by the forward pass: rank 0's value is kept")
    assert answers[1]["lines"] == []


def test_frozen_statistics_stay_frozen(worlds) -> None:
    told = everywhere(worlds, "frozen_statistics")
    assert told["calls"] == [6, 0]
    assert told["mean"] == [0.0] * 6


def test_a_rank_that_runs_the_model_once_more_is_waited_for(worlds) -> None:
    """Its BatchNorm has one row more, of which all ranks learn."""
    found = everywhere(worlds, "a_forward_pass_more")
    assert found["calls"] == 2 * 2 + 2, "two ranks, two steps, and rank 0 once more in each"


def test_a_gan_on_two_ranks_is_the_gan_of_one(worlds) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = guards.gan(start_world({}))
    torch.set_num_threads(threads)
    for ours, theirs in zip(everywhere(worlds, "gan"), alone, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert math.isclose(a, b, rel_tol=1e-10)


@pytest.mark.parametrize("size", [2, 4])
def test_evaluation_counts_every_sample_once(worlds, size: int) -> None:
    told = everywhere(worlds, "evaluation", size)
    alone = guards.evaluation(start_world({}))
    assert told["targets"] == 46
    for name, value in alone.items():
        assert math.isclose(told[name], value, rel_tol=1e-12), name


def test_nothing_of_ours_is_left_after_close(worlds) -> None:
    hooks, gone = everywhere(worlds, "plain_after_close")
    assert hooks == [False] * 4
    assert gone == [True] * 4


SYNCED = [
    (2, "ddp", "class"),
    (4, "zero2", "argument"),
    (2, "tp", "class"),
    (4, "ddp", "class"),
    (2, "zero1", "argument"),
    (4, guards.PIPES, "class"),
    (4, "fsdp", "class"),
    (4, "hsdp", "argument"),
    (1, "single", "class"),
]


@pytest.mark.parametrize(("size", "layout", "how"), chosen(SYNCED, SYNCED[:3]))
def test_synchronised_statistics_are_those_of_one_process(
    worlds, size: int, layout: Any, how: str
) -> None:
    """Also in a step of 5 samples, of which some ranks have none, and in the running statistics."""
    alone = guards.sync_batch_norm(start_world({}), layout, "plain")
    for ours in worlds(size).call("guards:sync_batch_norm", layout=layout, how=how):
        assert len(ours) == len(alone)
        assert all(abs(a - b) <= 1e-12 * max(1, abs(b)) for a, b in zip(ours, alone, strict=True))


def test_synchronised_statistics_have_no_proof_against_single_micro_batches(worlds) -> None:
    told = everywhere(worlds, "synchronised_proof")
    assert told.startswith("the model's BatchNorm takes its statistics over all ranks")


def test_buffers_that_differ_are_named_before_a_save(worlds, tmp_path) -> None:
    told = worlds(2).call("guards:unlike_buffers", folder=str(tmp_path / "run"))
    (line,) = told[0]
    assert "buffer 1.running_mean (and 2 more) is another on rank 1 than on rank 0" in line
    assert told[1] == []


DRAWN = [("pp", "none"), ("ddp", "full"), ("pp", "full"), ("fsdp", "none")]


@pytest.mark.parametrize(("layout", "recompute"), chosen(DRAWN, DRAWN[:2]))
def test_draws_of_random_and_numpy_in_blocks_are_those_of_one_process(
    worlds, layout: str, recompute: str
) -> None:
    alone = guards.host_draws(start_world({}), "single")
    for ours in worlds(2).call("guards:host_draws", layout=layout, recompute=recompute):
        assert all(math.isclose(a, b, abs_tol=1e-12) for a, b in zip(ours, alone, strict=True))


def test_what_is_prepared_once_comes_first_on_local_rank_0(worlds, tmp_path) -> None:
    told = worlds(2).call("guards:prepared_by_one", folder=str(tmp_path))
    assert told == [[False], [True]]
