"""A rank that runs out of memory: one line with what fits, or half micro-batches on all ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_run import TOY_ARGUMENTS, CommandLine, trajectory

HUNGRY = '''
import os
from pathlib import Path
import torch, toy

class Hungry(toy.Toy):
    """From the first checkpoint on rank 1 asks for a pebibyte where a micro-batch has over 2."""
    def forward(self, x):
        saved = Path("runs/run/checkpoints/step-3").exists()
        if self.training and saved and len(x) > 2 and os.environ["RANK"] == "1":
            torch.empty(2**50, dtype=torch.uint8)
        return super().forward(x)

def build():
    return Hungry()
'''


def hungry(folder: Path, *arguments: str) -> CommandLine:
    (folder / "hungry.py").write_text(HUNGRY)
    kept = [one for one in TOY_ARGUMENTS if not one.startswith(("model.build", "train.micro"))]
    more = ("model.build=hungry:build", "train.micro_batch=8", "launch.processes=2")
    return CommandLine(folder, *kept, *more, *arguments)


def test_half_micro_batches_until_they_fit(tmp_path: Path) -> None:
    """8 does not fit, nor do 4; two restarts, the step is taken again, every sample once."""
    command = hungry(tmp_path, "train.on_oom=halve")
    code, output = command.finish()
    assert code == 0, output
    for size, before in ((4, 8), (2, 4)):
        assert f"with train.micro_batch={size} in the place of {before} on all ranks" in output
    assert "masks of dropout and statistics of BatchNorm" in " ".join(output.split())
    assert len(command.events("restarting")) == 2
    died = command.events("worker_died")
    assert {one["rank"] for one in died} == {1}
    kept = json.loads((command.run / "micro_batch.json").read_text())
    assert (kept["asked"], kept["micro_batch"]) == (8, 2)
    rows = [json.loads(line) for line in (command.run / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == list(range(1, 13))
    places = [place for row in rows for place in range(*row["samples"])]
    assert places == list(range(len(places)))
    assert all(loss is not None for loss in trajectory(command.run))


@pytest.mark.parametrize("asked", ["stop"])
def test_the_run_ends_with_what_fits(tmp_path: Path, asked: str) -> None:
    command = hungry(tmp_path, f"train.on_oom={asked}")
    code, output = command.finish()
    assert code == 2, output
    assert "train.micro_batch = 8: rank 1, step " in output
    assert "you tried to allocate 1125899906842624 bytes" in output
    assert (
        "try: train.micro_batch=4 (the same batch in more passes), or memory.recompute=full, "
        "train.on_oom=halve to have that done by itself"
    ) in output
    assert command.events("restarting") == []
