"""Ranks that run different blocks under fsdp, or step by other settings, end in one line."""

from __future__ import annotations

from typing import Any

import pytest

QUIET = "nothing was raised"
HSDP = {"dp_replicate": 2, "dp_shard": 2}
LATER = pytest.mark.proof("faults")


def named(answers: list[dict[str, Any]], *parts: str) -> None:
    for answer in answers:
        for part in parts:
            assert part in answer["error"], answers
        assert answer["error"].startswith("ConfigError: ")
        assert "\n" not in answer["error"]
        assert "; try: " in answer["error"]


@pytest.mark.parametrize(
    ("kind", "way", "more", "first", "second"),
    [
        ("heads", "batches", {}, "heads.a", "heads.b"),
        ("layer drop", "own passes", {}, "trunk.2", "trunk.1"),
        ("experts", "evaluation", {}, "trunk.1", "trunk.2"),
        pytest.param("heads", "own passes", {}, "heads.a", "heads.b", marks=LATER),
        pytest.param("order", "batches", {}, "trunk.0", "trunk.1", marks=LATER),
        pytest.param("layer drop", "batches", {"recompute": "full"}, "trunk.2", "trunk.1",
                     marks=LATER),
        pytest.param("experts", "batches", {}, "trunk.1", "trunk.2", marks=LATER),
    ],
)  # fmt: skip
def test_different_blocks_of_equal_sizes(
    worlds, kind: str, way: str, more: dict[str, Any], first: str, second: str
) -> None:
    """They gathered each other's weights, without an error, and went on."""
    answers = worlds(2).call("unlike_ranks_case:blocks", layout="fsdp", kind=kind, way=way, **more)
    what = f"{first} (forward pass) on rank 0, {second} (forward pass) on rank 1"
    when = "run.evaluate" if way == "evaluation" else "step 1"
    named(answers, f"{when}: ranks run different blocks: {what}", "try: layout.strategy=zero2")
    assert [a["losses"] for a in answers] == [[], []], "before the first update"


@pytest.mark.parametrize("kind", ["heads", "layer drop", "order"])
@pytest.mark.parametrize("layout", ["ddp", pytest.param("zero2", marks=LATER)])
def test_what_is_right_without_gathers_stays_silent(worlds, kind: str, layout: str) -> None:
    answers = worlds(2).call("unlike_ranks_case:blocks", layout=layout, kind=kind)
    assert [(a["error"], a["lines"]) for a in answers] == [(QUIET, [])] * 2


@pytest.mark.parametrize("more", [{}, pytest.param({"recompute": "full"}, marks=LATER)])
def test_blocks_that_all_ranks_run_or_leave_out_stay_silent(worlds, more: Any) -> None:
    world = worlds(2)
    losses = {}
    for layout in ("ddp", "fsdp"):
        answers = world.call(
            "unlike_ranks_case:blocks", layout=layout, kind="layer drop", tasks="one", **more
        )
        assert [(a["error"], a["lines"]) for a in answers] == [(QUIET, [])] * 2
        losses[layout] = answers[0]["losses"]
    assert losses["fsdp"] == pytest.approx(losses["ddp"], rel=1e-12)


def test_a_rank_without_samples_stays_silent(worlds) -> None:
    answers = worlds(2).call("unlike_ranks_case:no_samples", layout="fsdp")
    assert answers == [{"steps": 4, "lines": []}] * 2


def test_replicas_that_sum_gradients_of_different_blocks(worlds) -> None:
    """Each replica gathers its own, rightly; what they sum does not belong together."""
    answers = worlds(4).call("unlike_ranks_case:blocks", layout=HSDP, kind="heads", tasks="halves")
    what = "heads.a (gradients) on rank 0, heads.b (gradients) on rank 2"
    named(answers, f"step 1: ranks run different blocks: {what}")


def test_replicas_whose_different_blocks_have_no_gradients_stay_silent(worlds) -> None:
    world = worlds(4)
    losses = {}
    for layout in ("ddp", HSDP):
        answers = world.call(
            "unlike_ranks_case:blocks", layout=layout, kind="groups", tasks="halves"
        )
        assert [a["error"] for a in answers] == [QUIET] * 4
        losses[str(layout)] = answers[0]["losses"]
    assert losses[str(HSDP)] == pytest.approx(losses["ddp"], rel=1e-12)


FOUND = {
    "lr of group 1": "optimizer: the learning rate of group 1 is 0.02 on rank 0, 0.5 on rank 1",
    "lr of group 0": "optimizer: the learning rate is 0.01 on rank 0, 0.5 on rank 1",
    "weight_decay": "optimizer: weight_decay of group 1 is 0.01 on rank 0, 0.3 on rank 1",
    "betas": "optimizer: betas of group 0 is (0.9, 0.999) on rank 0, (0.8, 0.99) on rank 1",
    "eps": "optimizer: eps of group 1 is 1e-08 on rank 0, 0.001 on rank 1",
    "amsgrad": "optimizer: amsgrad of group 1 is False on rank 0, True on rank 1",
    "a new key": "optimizer: lr_scale of group 1 is not there on rank 0, 0.3 on rank 1",
    "tensor": "optimizer: the learning rate is 0.01 on rank 0, 0.5 on rank 1",
}
SHORT = {("lr of group 1", "ddp"), ("weight_decay", "fsdp"), ("betas", "zero1"),
         ("lr of group 1", "tp"), ("tensor", "ddp")}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "layout"),
    [
        pytest.param(change, layout, marks=[] if (change, layout) in SHORT else LATER)
        for change in FOUND
        for layout in ("ddp", "zero1", "zero2", "fsdp", "tp", "pp")
    ],
)
def test_settings_of_one_rank_alone(worlds, change: str, layout: str) -> None:
    answers = worlds(2).call("unlike_ranks_case:settings", layout=layout, change=change)
    named(answers, FOUND[change])
    assert [a["steps"] for a in answers] == [2, 2], "before the update"


@pytest.mark.parametrize("layout", ["ddp", pytest.param("tp", marks=LATER)])
def test_settings_that_change_between_the_halves_of_a_step(worlds, layout: str) -> None:
    """The all-reduce of that step is over: the next one names them, and no worn-out memory."""
    answers = worlds(2).call(
        "unlike_ranks_case:settings", layout=layout, change="weight_decay", when="between"
    )
    named(answers, FOUND["weight_decay"])


@pytest.mark.parametrize("layout", ["zero1", pytest.param("fsdp", marks=LATER)])
@pytest.mark.parametrize("change", ["lr of group 1", "tensor"])
def test_settings_that_all_ranks_change_stay_silent(worlds, layout: str, change: str) -> None:
    answers = worlds(2).call("unlike_ranks_case:settings", layout=layout, change=change, who="all")
    assert [(a["error"], a["steps"]) for a in answers] == [(QUIET, 4)] * 2
