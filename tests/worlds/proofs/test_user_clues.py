"""What a user reads where a layout differs: where, how much, a cause in their words, what to do.

Bugs are planted inside Shoal, and the product is asked as users ask it, without the looks of our
tests (`inside_causes.py`) that would name each. What only users can do wrong is told of records made
by hand.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from shoal.base.layouts.layout import Layout
from shoal.proof.diagnosis.causes import explain_difference
from shoal.proof.diagnosis.clue import Clue
from shoal.proof.diagnosis.evidence import Evidence
from shoal.proof.equality_bounds import bounds_for
from shoal.proof.trajectory_record import StepRow, TrajectoryRecord
from shoal.proof.verdict import compare_records

OURS = (
    "report it with proof.json (shoal prove run.toml --json > proof.json): this is a mistake of Shoal, not "
    "of your model"
)
INSIDE = re.compile(r"\.py|Placement|exchange\.|autograd_collectives|reducer|bucket|_[a-z]+\(")
"""Words of ours that tell a user nothing."""

DIVIDED, DATA = "planted_divided:prove", "planted:prove"

# processes, what is asked, parameter, words that its line must have
PLANTED: list[tuple[int, str, dict[str, Any], str, list[str]]] = [
    (
        2, DIVIDED,
        {"bug": "backward not summed", "model": "gpt",
         "layout": {"tp": 2, "sequence_parallel": "off"}},
        "embedding.weight",
        ["like those of 21 other parameters", "of the whole gradient's norm",
         "ranks 0 and 1, which differ along layout.tp only and hold the same part of "
         "positions.weight, have different gradients", "the loss is right",
         "from blocks.1.mlp.up.weight on all gradients are right",
         "the split of layers over tensor-parallel ranks computes something else in its backward",
         f"try: layout.tp=1; {OURS}"],
    ),
    (
        2, DIVIDED, {"bug": "joined twice", "model": "gpt", "layout": {"tp": 2}},
        "blocks.0.attention_norm.weight",
        ["like those of 11 other parameters (only what tensor-parallel ranks hold whole), is 2 × "
         "that of one process, 2 for 2 tensor-parallel ranks", "try: layout.tp=1"],
    ),
    (
        2, DIVIDED, {"bug": "dropped", "model": "gpt", "layout": {"pp": 2}},
        "embedding.weight",
        ["holds micro-batch 1 with weight 0 instead of 1 (of 6 in the step); the loss is right",
         "the pipeline computes something else in its backward pass", f"layout.pp=1; {OURS}"],
    ),
    (
        2, DIVIDED, {"bug": "averaged", "model": "gpt", "layout": {"pp": 2}},
        "embedding.weight",
        ["is 0.166667 × that of one process, 1/6 for 6 micro-batches; the loss is right",
         "averaged where they should be summed, over micro-batches", "try: layout.pp=1"],
    ),
    (
        2, DIVIDED, {"bug": "tie not summed", "model": "gpt", "layout": {"pp": 2}},
        "embedding.weight",
        ["(it is head.weight too) (all of stages 0 and 1)",
         "ranks 0 and 1, which differ along layout.pp only and hold the same part of it, have "
         "different gradients, whose sum is the right one", f"try: layout.pp=1; {OURS}"],
    ),
    (
        2, DIVIDED, {"bug": "stages exchanged", "model": "untied", "layout": {"pp": 2}},
        "embedding.weight",
        ["the loss is 4.1017569 instead of 4.1019198", "the pipeline computes something else in "
         "the forward pass", "try: layout.pp=1; unless the model looks at its rank, report"],
    ),
    (
        2, "context_case:prove",
        {"bug": "not joined", "model": "llama", "layout": {"cp": 2}},
        "embedding.weight",
        ["which differ along layout.cp only", "whose sum is the right one",
         f"try: layout.cp=1; {OURS}"],
    ),
    (
        2, "context_case:prove",
        {"bug": "all speak", "model": "llama", "layout": {"cp": 2}},
        "",
        ["step 1 counted 176 targets, 2 × the 88 of one process; there are 2 context-parallel "
         "ranks", f"try: layout.cp=1; {OURS}"],
    ),
    (
        4, "expert_case:planted", {"bug": "averaged", "layout": "ddp4 ep2"},
        "blocks.0.mixture.experts.gate",
        ["like those of 5 other parameters (only experts, dealt to 2 ranks), is 0.5 × that of one "
         "process, 1/2 for 2 expert-parallel ranks", f"try: layout.ep=1; {OURS}"],
    ),
    (
        4, DATA, {"bug": "factor lost", "case": "mlp"},
        "sometimes",
        ["is 0.25 × that of one process, 1/4 for 4 data-parallel ranks", "averaged where they "
         "should be summed", "look for gradient hooks of your own"],
    ),
    (
        2, DATA, {"bug": "short window", "case": "mlp"},
        "first.weight",
        ["at step 3", "is 0.25 × that of one process", "the full steps before it are equal, and "
         "this one holds 0.2 × the targets of the one before"],
    ),
    (
        2, DATA, {"bug": "dropped from bucket", "case": "gpt"},
        "tokens.weight",
        ["(it is head.weight too) holds the micro-batches of the 2 data-parallel ranks with the "
         "weights 1 : 0 instead of 1 each", "the sum over data-parallel ranks leaves something"],
    ),
    (
        2, DATA, {"bug": "local norm", "case": "mlp"},
        "",
        ["by rank", "their squares add up to the true norm's (they differ between replicas)",
         "leave clipping to optimizer.clip"],
    ),
    (
        2, DIVIDED, {"bug": "replicas counted", "model": "gpt", "layout": {"tp": 2}},
        "",
        ["the gradient norm at step 1 is 0.932693 instead of 0.749099 (1.245 ×) on all ranks",
         "counted more than once", OURS],
    ),
    (
        2, DATA, {"bug": "stale shard", "case": "mlp", "layout": "zero1"},
        "sometimes",
        ["16 of 16 elements that should move are still as they were at the start, on rank 0; rank "
         "0 against rank 1", "try: layout.dp_replicate=2 and layout.dp_shard=1; without any"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("size", "call", "asked", "parameter", "words"),
    PLANTED,
    ids=[f"{row[2]['bug']}-{row[2].get('layout', 'ddp')}" for row in PLANTED],
)
def test_a_user_reads_where_how_much_and_what_to_do(
    planted, size, call, asked, parameter, words
) -> None:
    report = planted(size, call, **asked)[0]
    assert report["verdict"] == "different"
    told = report["users"]
    assert told["parameter"] == parameter, told["text"]
    for part in words:
        assert part in told["text"], told["text"]
    assert not INSIDE.search(told["text"]), told["text"]
    assert told["text"].endswith(told["advice"])
    assert told["advice"]


# ---- records made by hand

NAMES = ("first", "second")


def side(scale: dict[str, float] | None = None, **more: Any) -> TrajectoryRecord:
    """One step of a model of two parameters; `scale` multiplies gradients."""
    draw = torch.Generator().manual_seed(1)
    right = {name: torch.randn(8, generator=draw, dtype=torch.float64) for name in NAMES}
    start = {name: torch.zeros(8, dtype=torch.float64) for name in NAMES}
    row = StepRow("", 1, 2.0, 1.0, 4.0, False)
    known: dict[str, Any] = {
        "rows": [row],
        "gradients": [{name: right[name] * (scale or {}).get(name, 1.0) for name in NAMES}],
        "start": start,
        "weights": {name: start[name] - right[name] for name in NAMES},
        "rank_rows": [[row], [row]],
        "trainable": list(NAMES),
        "layout": Layout(dp_replicate=2),
    }
    return TrajectoryRecord(**{**known, **more})


def told(got: TrajectoryRecord, expected: TrajectoryRecord | None = None) -> Clue:
    """The clue, where the one process cannot be run again."""
    expected = expected or side()

    def again(*_: Any) -> None:
        raise RuntimeError("once only")

    return explain_difference(
        Evidence(expected, got, compare_records(expected, got, bounds_for("fp64", "sgd")), again)
    )


def test_a_gradient_that_is_lost_is_told_without_another_run() -> None:
    clue = told(side({"second": 0.0}))
    assert (clue.name, clue.parameter) == ("sum over ranks", "second")
    assert clue.seen == "at step 1 its gradient is 0, in one process it is not; the loss is right"


def test_a_step_that_the_layout_skips_is_told() -> None:
    row = StepRow("", 1, None, None, 4.0, True)
    clue = told(side(rows=[row], rank_rows=[[row], [row]], gradients=[{}]))
    assert clue.seen == (
        "at step 1 its gradient, like that of 1 other parameter, is 0, in one process it is not; "
        "the step was skipped on all ranks; the loss is not finite instead of 2"
    )


def test_another_factor_than_a_degree_is_told() -> None:
    clue = told(side(dict.fromkeys(NAMES, 3.0)))
    assert "its gradient, like that of 1 other parameter, is 3 × that of one process;" in clue.seen
    assert clue.cause == "gradients are divided by another number than the count of targets"


def test_a_degree_that_two_axes_have_names_both() -> None:
    layout = Layout(dp_replicate=2, pp=2)
    clue = told(side(dict.fromkeys(NAMES, 0.5), layout=layout))
    assert "1/2 for 2 ranks of the pipeline and 2 data-parallel ranks" in clue.seen
    assert clue.cause.endswith("over ranks of the pipeline or data-parallel ranks")
    assert clue.advice == f"try: layout.pp=1; {OURS}"


def test_a_loss_that_differs_by_rank_is_the_models_own() -> None:
    rows = [StepRow("", 1, 3.0, 1.0, 4.0, False)]
    gradients = [{name: torch.ones(8, dtype=torch.float64) for name in NAMES}]
    clue = told(side(rows=rows, gradients=gradients))
    assert clue.name == "forward pass"
    assert "the loss is 3 instead of 2" in clue.seen
    assert clue.advice.startswith("look for the rank, state kept between calls, and random numbers")


@pytest.mark.parametrize(("size", "name"), [(2.0**-24, "float32"), (2.0**-9, "bf16")])
def test_rounding_is_small_in_every_parameter(size: float, name: str) -> None:
    noise = torch.linspace(-1, 1, 8, dtype=torch.float64).roll(3) * size
    right = side().gradients[0]
    clue = told(side(gradients=[{n: right[n] * (1 + noise) for n in NAMES}]))
    assert clue.name == f"{name} accumulation", clue.text()
    assert "precision.reduce=fp32" in clue.advice
    # As far off in all, but in one small parameter alone: no format does that.
    small = {"second": torch.full((8,), size, dtype=torch.float64)}
    expected = side(gradients=[{**right, **small}])
    got = side(gradients=[{**right, "second": small["second"].roll(4) * noise.sign()}])
    assert told(got, expected).name == "sum over ranks"


def test_stale_elements_are_counted_and_their_ranks_named() -> None:
    weights = side().weights
    half = torch.where(torch.arange(8) < 4, weights["first"], 0.0)
    seen = "4 of 8 elements that should move are still as they were at the start, on "
    assert told(side(weights={**weights, "first": half})).seen == f"{seen}all ranks"
    drift = {"first": [[0, 1], [2, 3]]}
    clue = told(side(weights={**weights, "first": half}, drift=drift))
    assert clue.seen == f"{seen}rank 0; ranks 0 and 1 against ranks 2 and 3"


def test_parameters_that_nobody_stepped_are_counted() -> None:
    weights = {**side().weights, "second": side().start["second"]}
    clue = told(side(weights=weights))
    assert (clue.name, clue.parameter) == ("parameter not stepped", "second")
    assert "1 of 2 parameters that should move" in clue.seen


def test_ranks_that_drift_are_named() -> None:
    clue = told(side(drift={"first": [[0], [1], [2]], "second": [[0, 1], [2]]}))
    assert (clue.name, clue.parameter) == ("ranks drift apart", "first")
    assert clue.seen == (
        "2 parameters ended differently on different ranks (each of 3 ranks has its own)"
    )


def test_an_optimizers_step_on_pieces_has_a_setting_without_them() -> None:
    weights = {**side().weights, "first": side().weights["first"] * 1.5}
    clue = told(side(weights=weights, layout=Layout(dp_shard=2, zero=2)))
    assert clue.name == "optimizer step"
    assert "try: layout.dp_replicate=2 and layout.dp_shard=1; " in clue.advice


@pytest.mark.parametrize("drift", [{}, {"count": [[0], [1]]}], ids=["other", "by rank"])
def test_a_buffer_of_the_users_own_is_named(drift: dict[str, list[list[int]]]) -> None:
    expected = side(buffers={"count": torch.ones(2)})
    clue = told(side(buffers={"count": torch.full((2,), 1.5)}, drift=drift), expected)
    assert (clue.name, clue.parameter) == ("buffer drift", "count")
    how = (
        "differently on each rank (rank 0 against rank 1)" if drift else "other than in one process"
    )
    assert clue.seen == f"1 buffer ended {how}, all parameters equal"


def test_what_looks_like_nothing_known_is_told_as_it_was_seen() -> None:
    clue = told(side(rows=[StepRow("", 1, math.pi, 1.0, 4.0, False)]))
    assert clue.text() == (
        "the loss differs at step 1 by 4.3e-01, 1e-12 is allowed. Likely cause: no known mistake "
        "looks like this. Next: prove with another layout, which tells whether it depends on this "
        "one, and report it with proof.json (shoal prove run.toml --json > proof.json)"
    )
