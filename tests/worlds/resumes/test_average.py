"""An average of the weights, held in parts like them: evaluated, saved and restored."""

from __future__ import annotations

import math

import pytest

import average_case
from precision_case import alone


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory):
    return average_case.train(alone(), "single", str(tmp_path_factory.mktemp("average")))


@pytest.mark.parametrize(
    "layout",
    [*(pytest.param(n, marks=pytest.mark.proof) for n in ("ddp", "zero1")), "zero2", "fsdp"],
)
def test_every_layout_averages_alike(worlds, reference, tmp_path, layout: str) -> None:
    for answer in worlds(2).call("average_case:train", layout=layout, folder=str(tmp_path)):
        assert answer["same"], "the weights did not come back bit for bit"
        assert answer["updates"] == 3
        assert answer["averaged"] != answer["plain"]
        for key in ("averaged", "restored", "plain"):
            assert math.isclose(answer[key], reference[key], rel_tol=1e-9)
        assert answer["restored"] == answer["averaged"]


def test_masters_are_averaged(worlds, tmp_path) -> None:
    told = worlds(2).call(
        "average_case:train", layout="zero2", folder=str(tmp_path), precision="bf16"
    )
    assert told[0]["same"]
    assert told[0]["averaged"] == told[0]["restored"] != told[0]["plain"]
