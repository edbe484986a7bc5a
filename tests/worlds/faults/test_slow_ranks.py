"""A slow rank of the real command: who it is and where, told by the launcher; silence otherwise."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cli_run import CommandLine
from shoal.report.verdict import find_verdict
from shoal.view.diagnose import diagnose

HERE = Path(__file__).parents[1]
ARGUMENTS = [
    "model.build=dawdling:build", "data.source=dawdling:data", "train.batch=4",
    "train.micro_batch=2", "train.steps=90", "precision.compute=fp32", "train.prove=off",
    "launch.processes=2",
]  # fmt: skip
AFTER = 25
NONE = {"part": "", "rank": 0, "extra_s": 0.0, "after": AFTER, "each_s": 0.008}


def dawdle(folder: Path, asked: dict[str, Any], *arguments: str) -> tuple[CommandLine, str]:
    """A run with a slow rank; (command, what it said)."""
    shutil.copy(HERE / "dawdling.py", folder)
    (folder / "slow.json").write_text(json.dumps({**NONE, **asked}))
    command = CommandLine(folder, *ARGUMENTS, *arguments)
    code, output = command.finish()
    assert code == 0, output
    return command, output


STAGES = {"passes": 2, "samples": 4, "heavy": 0}
"""A pipeline of which the first stage has twice as much to do in its passes."""


@pytest.mark.parametrize(
    ("part", "layout", "more"),
    [
        pytest.param("data", "layout.strategy=ddp", {}, marks=pytest.mark.proof),
        ("forward", "layout.strategy=ddp", {}),
        pytest.param("backward", "layout.pp=2", STAGES, marks=pytest.mark.proof),
    ],
)
def test_a_slow_rank_is_named_with_the_part_of_the_step(
    tmp_path: Path, part: str, layout: str, more: dict[str, Any]
) -> None:
    extra_s = 0.03 if more else 0.02
    asked = {"part": part, "rank": 1, "extra_s": extra_s, **more}
    command, output = dawdle(tmp_path, asked, layout)
    (told,) = command.events("slow_rank")
    assert (told["rank"], told["phase"]) == (1, part)
    assert AFTER < told["step"] <= AFTER + 50
    assert 0.75 * extra_s < told["extra_s"] < 1.5 * extra_s
    assert f"rank 1 on {told['host']} is slow in {part}" in output
    assert f"all wait for rank 1 ({part})" in " ".join(output.split())
    (found,) = diagnose(command.run)
    assert (found.kind, found.rank, found.advice) == ("slow_rank", 1, True)
    if not more:  # a stage's host is told by more than half of its steps
        verdict = find_verdict(command.run)
        name = {"forward": "forward pass"}.get(part, part)
        assert (verdict.kind, verdict.cause) == ("slow_rank", f"rank 1's {name}")
        assert verdict.step_s is not None
        assert verdict.without_s == pytest.approx(verdict.step_s * (1 - (verdict.share or 0)))


def test_ranks_alike_are_not_told(tmp_path: Path) -> None:
    command, output = dawdle(tmp_path, {}, "layout.strategy=ddp")
    assert command.steps() == 90, output
    assert command.events("slow_rank") == []
