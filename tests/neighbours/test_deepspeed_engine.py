"""What scripts ask of DeepSpeed's engine: accumulation, schedules, checkpoints, on every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

CASE = str(Path(__file__).with_name("engine_case.py"))


@pytest.mark.parametrize(
    "stage", [*(pytest.param(n, marks=pytest.mark.proof) for n in (0, 1)), 2, 3]
)
def test_the_engine_computes_what_plain_torch_does(
    programs: Any, tmp_path: Path, stage: int
) -> None:
    """In `make test` stages 0 and 1 train the printed script."""
    ended = programs.world(2, CASE, str(stage), cwd=tmp_path)
    assert [one.returncode for one in ended] == [0, 0], ended[0].stderr + ended[1].stderr


TWICE = """
import shoal.neighbours.deepspeed
import deepspeed, torch
from torch import nn

torch.manual_seed(0)
config = {{"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0,
          "optimizer": {{"type": "Adam", "params": {{"lr": 0.1}}}}, "zero_optimization": {{"stage": {stage}}}}}
engine, *_ = deepspeed.initialize(model=nn.Linear(4, 1), config=config)
path, state = engine.load_checkpoint("saved"{more})
first = state["epoch"] + 1 if path else 0
generator = torch.Generator().manual_seed(engine.global_rank)
for epoch in range(first, first + 2):
    for _ in range(3):
        engine.backward(engine(torch.randn(2, 4, generator=generator)).square().mean())
        engine.step()
    engine.save_checkpoint("saved", tag=f"epoch {{epoch}}/best", client_state={{"epoch": epoch}})
if engine.global_rank == 0:
    print("epochs", first, "to", epoch, "steps", engine.global_steps)
"""


@pytest.mark.proof("faults")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_script_that_is_started_again_goes_on_at_its_newest_tag(
    programs: Any, tmp_path: Path, stage: int
) -> None:
    """It began anew: a tag of its own was found by nobody."""

    def run(more: str = "") -> str:
        (tmp_path / "a.py").write_text(TWICE.format(stage=stage, more=more))
        ended = programs.world(2, "a.py", cwd=tmp_path)
        assert [one.returncode for one in ended] == [0, 0], ended[0].stderr
        return ended[0].stdout

    assert "epochs 0 to 1 steps 6" in run()
    assert (tmp_path / "saved" / "latest").read_text() == "epoch 1/best"
    assert "epochs 2 to 3 steps 12" in run()
    assert "epochs 1 to 2 steps 9" in run(', tag="epoch 0/best"')
