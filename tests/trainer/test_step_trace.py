"""`train.trace`: the steps that were asked for are in the files, all of them, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.base.errors import ConfigError
from shoal.config.load import load_config


class Marked(nn.Linear):
    """Each of its passes is a range of its own in a trace, with the step that its weights had."""

    step = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function(f"pass of {self.step}"):
            return super().forward(inputs)


def train(folder: Path, trace: str, until: int) -> None:
    """Steps of four micro-batches each, with a validation after every one."""
    torch.manual_seed(0)
    model = Marked(8, 4)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.arange(64) % 4)
    loss, adam = nn.CrossEntropyLoss(reduction="none"), torch.optim.AdamW(model.parameters())
    run = shoal.parallelize(model, adam, loss, batch=8, micro_batch=2, folder=folder, trace=trace)
    run.restore()
    while run.step_count < until:
        for batch in run.loader(data):
            model.step = run.step_count + 1
            run.step(batch)
            if run.step_count == until:
                break
    run.save()
    run.close()


def events(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())["traceEvents"])


def ranges(path: Path, word: str) -> list[str]:
    """Names that begin so, in the order of time, of the profiler's ranges."""
    found = [e for e in events(path) if e.get("name", "").startswith(word) and e.get("ph") == "X"]
    found = [e for e in found if e["cat"] in ("user_annotation", "cpu_op")]
    return [str(e["name"]) for e in sorted(found, key=lambda e: e["ts"])]


def test_exactly_these_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, "3:4", until=6)
    traces = tmp_path / "traces"
    names = ["steps-3-4-rank-0-memory.json", "steps-3-4-rank-0.json"]
    assert sorted(p.name for p in traces.iterdir()) == names
    path = traces / names[1]
    assert ranges(path, "step ") == ["step 3", "step 4"]
    assert ranges(path, "pass of") == ["pass of 3"] * 4 + ["pass of 4"] * 4
    assert ranges(path, "aten::addmm") == ["aten::addmm"] * 8
    assert f"shoal: trace = 3:4: steps 3 to 4, of every rank, operations and memory: {traces}" in (
        caplog.text
    )
    moves = json.loads((traces / names[0]).read_text())
    assert any(one["bytes"] > 0 for one in moves)
    assert any(one["bytes"] < 0 for one in moves)
    assert moves == sorted(moves, key=lambda one: one["time_us"])


def test_a_run_that_goes_on_among_them_traces_what_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, "", until=3)
    assert not (tmp_path / "traces").exists()
    train(tmp_path, "2:9", until=5)  # it ends before the last of them
    path = tmp_path / "traces" / "steps-4-5-rank-0.json"
    assert ranges(path, "pass of") == ["pass of 4"] * 4 + ["pass of 5"] * 4
    caplog.clear()
    train(tmp_path, "2:3", until=6)
    assert "shoal: trace = 2:3: none of these steps was taken, but 6 to 6; try: trace=" in (
        caplog.text
    )
    assert [p.name for p in sorted((tmp_path / "traces").iterdir())][1:] == [path.name]


@pytest.mark.parametrize(
    ("given", "near"),
    [("100", "100:100"), ("4-5", "100:103"), ("5:4", "4:5"), ("0:2", "1:2"), ("1:2:3", "1:3")],
)
def test_other_texts_are_one_line(given: str, near: str) -> None:
    said = f"{given}: FIRST:LAST, two steps from 1 on, is wanted; try: "
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"train.trace={given}"])
    assert str(caught.value) == f"train.trace = {said}train.trace={near}"
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=f"^trace = {said}trace={near}"):
        shoal.parallelize(model, torch.optim.SGD(model.parameters()), trace=given)


def test_without_a_folder_there_is_no_place_for_them() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r'run folder; try: folder="runs/mine"'):
        shoal.parallelize(model, torch.optim.SGD(model.parameters()), trace="1:2")
