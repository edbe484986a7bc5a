"""What people's loops have: losses and metrics by name, extras, the best, outputs, hooks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

LAYOUTS: list[tuple[int, Any]] = [
    (4, "fsdp"),
    (2, {"tp": 2}),
    (4, {"pp": 2, "dp_shard": 2}),
    (2, {"cp": 2}),
    *(
        pytest.param(*row, marks=pytest.mark.proof)
        for row in ((2, "ddp"), (4, "ddp"), (2, {"pp": 2}), (4, {"cp": 2, "tp": 2}))
    ),
]


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS, ids=str)
def test_values_by_name_are_those_of_one_process(worlds, ranks: int, layout: Any) -> None:
    """Parts of the loss and metrics, with counts of their own, in steps and in validation."""
    (alone,) = worlds(1).call("habits_case:measured", layout="single")
    assert set(alone["steps"][0]) == {"loss", "ce", "squares", "accuracy"}
    assert set(alone["evaluated"]) == {"loss", "ce", "squares", "accuracy", "targets"}
    assert set(alone["other"]) == {"loss", "ce", "squares", "tokens", "targets"}
    assert alone["other"]["tokens"] == 16
    for found in worlds(ranks).call("habits_case:measured", layout=layout):
        assert len(found["steps"]) == len(alone["steps"]) == 3
        for got, want in zip(found["steps"], alone["steps"], strict=True):
            assert got == pytest.approx(want, rel=1e-12)
        assert found["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-12)
        assert found["other"] == pytest.approx(alone["other"], rel=1e-12)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [pytest.param(4, "ddp", marks=pytest.mark.proof), (2, "fsdp"), (2, {"tp": 2})],
    ids=str,
)
def test_values_of_a_loop_written_out(worlds, ranks: int, layout: Any) -> None:
    """A name that one rank sees late is known to all from then on."""
    (alone,) = worlds(1).call("habits_case:logged", layout="single")
    assert [set(one) for one in alone] == [{"squares"}, {"squares", "rare"}, {"squares", "rare"}]
    assert alone[1]["rare"] == 2
    assert math.isnan(alone[2]["rare"])  # nobody said it
    for found in worlds(ranks).call("habits_case:logged", layout=layout):
        for got, want in zip(found, alone, strict=True):
            assert got == pytest.approx(want, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize(
    ("ranks", "layout"), [pytest.param(2, "ddp", marks=pytest.mark.proof), (4, "fsdp")]
)
def test_extras_and_the_best_survive(worlds, tmp_path: Path, ranks: int, layout: str) -> None:
    """Also on one process: types that JSON has not, a scheduler, the last of a tag alone."""
    for files in worlds(ranks).call("habits_case:saved", folder=str(tmp_path), layout=layout):
        assert files == ["checkpoints/step-3", "tags/best/checkpoints/step-2"]
    for world in (worlds(ranks), worlds(1)):
        name = layout if world is not worlds(1) else "single"
        for found in world.call("habits_case:gone_on", folder=str(tmp_path), layout=name):
            assert found["fresh"] == {}
            assert found["last"]["step"] == 3
            assert found["last"]["best"]["value"] == 0.5
            assert found["last"]["plateau"] == 0.5
            tagged = {"step": 2, "best": 0.5, "seen": "Counter", "pair": ["tuple", 1, True]}
            assert found["tagged"] == tagged


def test_the_best_of_a_future_that_was_left(worlds, tmp_path: Path) -> None:
    for names in worlds(2).call("habits_case:back_in_time", folder=str(tmp_path)):
        assert names == ["step-2"]


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(2, "ddp", marks=pytest.mark.proof),
        *((4, "fsdp"), (2, {"tp": 2}), (4, {"pp": 2, "dp_replicate": 2})),
    ],
    ids=str,
)
def test_outputs_are_on_every_rank(worlds, ranks: int, layout: Any) -> None:
    (alone,) = worlds(1).call("habits_case:predicted", layout="single")
    for found in worlds(ranks).call("habits_case:predicted", layout=layout):
        assert found[0] == pytest.approx(alone[0], rel=1e-10, abs=1e-12)
        assert found[1] == [1.0]  # training goes on


def test_hooks_stop_and_save(worlds, tmp_path: Path) -> None:
    """What one rank's hook asks for, all ranks do after the next step."""
    for found in worlds(2).call("habits_case:hooks", folder=str(tmp_path)):
        assert found["step"] == 4
        assert found["saved"] == ["step-2"]
        assert found["heard"].count("step") == 4


MISTAKES = {
    "log outside": "run.log is for loops over run.micro_batches(batch); try: "
    "shoal.parallelize(…, metrics={…})",
    "log a number": "run.log: hits is float, (sum, count) is wanted, over this micro-batch; "
    "try: hits=(value * n, n)",
    "log a vector": "run.log: the sum of hits must be a number or a tensor without dims, got Tensor "
    "of shape [3]",
    "taken name": "run.evaluate: metrics hold the name loss, which the result has already; try: "
    "loss_metric",
    "no function": "run.evaluate: metrics['hits'] is float, a function (outputs, targets) → (sum, "
    "count) is wanted",
    "function in extra": "extra.state.by: builtin_function_or_method cannot be saved; plain values "
    "and objects with state_dict() can; try: numbers that it can be made of again",
    "array in extra": "extra.weights: Tensor cannot be saved; plain values and objects with "
    "state_dict() can; try: its .tolist()",
    "one rank's own": "extra.best: 0 on rank 0 and 1 on rank 1; try: values of run.step's and "
    "run.evaluate's results, which all ranks have alike",
    "one rank's failure": "extra.best: builtin_function_or_method cannot be saved",
    "list as extra": "extra: a dict of names and values is wanted, got list; try: "
    'run.save(extra={"state": …})',
    "tag": "tag = '../best': a plain name is wanted; try: tag='best'",
    "no average": "run.state_dict: there is no average of the weights; try: parallelize(…, "
    "average=0.999)",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(worlds, mistake: str) -> None:
    for told in worlds(2).call("habits_case:told", mistake=mistake):
        assert MISTAKES[mistake] in told


def test_outputs_of_parts_of_sequences_are_refused(worlds) -> None:
    wanted = (
        "run.predict: layout.cp = 2 leaves each rank a part of every sequence; try: a metric of "
        "run.evaluate, which sees these parts"
    )
    assert worlds(2).call("habits_case:sequence_parts") == [wanted] * 2
