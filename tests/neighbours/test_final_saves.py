"""Final saves of scripts: written as safetensors, named before training, and never lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from shoal.neighbours.final_saves import read_source, safetensors_path, write_tensors

HEAD = """
import json, sys, torch
import deepspeed
from torch import nn

def main():
    torch.manual_seed(0)
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0,
              "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
              "zero_optimization": {"stage": STAGE}, "bf16": {"enabled": BF16}}
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    engine, *_ = deepspeed.initialize(model=model, config=config)
    generator = torch.Generator().manual_seed(engine.global_rank)
    for _ in range(2):
        loss = engine(torch.randn(2, 4, generator=generator).to(next(model.parameters()).dtype))
        engine.backward(loss.float().square().mean())
        engine.step()
    print("trained", file=sys.stderr)
"""
TAIL = "\nmain()\n"


def script(folder: Path, ending: str, stage: int = 0, bf16: bool = False, name: str = "a") -> str:
    """A script of DeepSpeed's that trains two steps and ends so."""
    head = HEAD.replace("STAGE", str(stage)).replace("BF16", str(bf16))
    lines = "".join(f"    {line}\n" for line in ending.splitlines())
    (folder / f"{name}.py").write_text(f"import shoal.neighbours.deepspeed\n{head}{lines}{TAIL}")
    return f"{name}.py"


def split(error: str) -> tuple[list[str], list[str]]:
    """The lines before and after training that name a place in the script."""
    before, _, after = error.partition("trained\n")
    return tuple([one for one in part.splitlines() if ".py:" in one] for part in (before, after))  # type: ignore[return-value]


def test_a_pickle_becomes_safetensors_and_is_named_before_training(
    programs: Any, tmp_path: Path
) -> None:
    ending = """
engine.save_16bit_model("out")
if False:
    engine.eval_batch(None)
def never():
    engine.eval_batch(None)
"""
    ended = programs.run(script(tmp_path, ending), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    before, after = split(ended.stderr)
    assert len(before) == 1
    assert before[0].endswith(
        "engine.save_16bit_model writes 'model.safetensors', which safetensors.torch reads: Shoal "
        "writes no pickle"
    )
    assert not after
    assert len(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")) == 4


def test_what_the_script_will_be_refused_is_named_before_training(
    programs: Any, tmp_path: Path
) -> None:
    ended = programs.run(script(tmp_path, "engine.eval_batch(None)"), cwd=tmp_path)
    assert ended.returncode == 2
    before, after = split(ended.stderr)
    assert [
        "engine.eval_batch is refused when the script comes to it" in one for one in before
    ] == [True]
    assert len(after) == 1


def test_a_script_that_saves_what_shoal_writes_hears_nothing(programs: Any, tmp_path: Path) -> None:
    ending = """
engine.save_checkpoint("d", tag="last")
engine.save_16bit_model("out", "model.safetensors")
torch.save(engine.module.state_dict(), "mine.pt")
deepspeed.zero.GatheredParameters(model.parameters())
"""
    ended = programs.run(script(tmp_path, ending), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert split(ended.stderr) == ([], [])


def test_parts_that_are_refused_leave_a_checkpoint(programs: Any, tmp_path: Path) -> None:
    """Stage 3: the script's own gathering is named before, refused after, and nothing is lost."""
    ending = """
with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
    torch.save(engine.module.state_dict(), "mine.pt")
"""
    ended = programs.world(2, script(tmp_path, ending, stage=3), cwd=tmp_path)
    assert [one.returncode for one in ended] == [2, 2]
    before, after = split(ended[0].stderr)
    assert ["GatheredParameters is refused" in before[0], "state_dict is refused" in before[1]] == [
        True,
        True,
    ]
    assert (
        "the weights of step 2 are in unsaved-weights/checkpoints/step-2; try: shoal" in after[-1]
    )
    assert (tmp_path / "unsaved-weights/checkpoints/step-2/manifest.json").exists()


@pytest.mark.proof("faults")
def test_a_save_of_one_rank_alone_is_refused_in_seconds(programs: Any, tmp_path: Path) -> None:
    ending = """
if engine.global_rank == 0:
    torch.save(engine.module.state_dict(), "mine.pt")
torch.distributed.barrier()
"""
    ended = programs.world(2, script(tmp_path, ending, stage=3), cwd=tmp_path)
    assert ended[0].returncode == 2
    assert "this rank holds a part of 0.weight only" in split(ended[0].stderr)[1][0]


@pytest.mark.proof("faults")
@pytest.mark.parametrize("stage", [1, 2])
def test_narrow_copies_are_saved_by_one_rank_as_in_deepspeed(
    programs: Any, tmp_path: Path, stage: int
) -> None:
    ending = """
if engine.global_rank == 0:
    torch.save(engine.module.state_dict(), "mine.pt")
"""
    ended = programs.world(2, script(tmp_path, ending, stage=stage, bf16=True), cwd=tmp_path)
    assert [one.returncode for one in ended] == [0, 0], ended[0].stderr
    assert split(ended[0].stderr) == ([], [])
    kinds = {one.dtype for one in torch.load(tmp_path / "mine.pt", weights_only=True).values()}
    assert kinds == {torch.bfloat16}


ACCELERATE = """
import shoal.neighbours.accelerate
import sys, torch
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
accelerator.backward(model(torch.ones(4, 2)).mean())
optimizer.step()
print("trained", file=sys.stderr)
state = {"model": accelerator.get_state_dict(model), "optimizer": optimizer.state_dict(), "epoch": 3}
"""


def test_an_accelerators_save_is_named_and_whole(programs: Any, tmp_path: Path) -> None:
    ending = 'accelerator.save(state, "out/last.pt")\naccelerator.save_model(model, "out")\n'
    (tmp_path / "a.py").write_text(ACCELERATE + ending)
    ended = programs.run("a.py", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    before, after = split(ended.stderr)
    assert ["accelerator.save writes 'out/last.safetensors'" in one for one in before] == [True]
    assert not after
    with safetensors.safe_open(tmp_path / "out/last.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["model.bias", "model.weight"]
        assert json.loads(file.metadata()["values"])["epoch"] == 3
    assert (tmp_path / "out/model.safetensors").exists()
    ending = 'accelerator.save(state["model"], "out/a.bin", safe_serialization=True)\n'
    (tmp_path / "b.py").write_text(ACCELERATE + ending)
    ended = programs.run("b.py", cwd=tmp_path)
    assert split(ended.stderr) == ([], []), "it is written where the script says"
    assert len(safetensors.torch.load_file(tmp_path / "out/a.bin")) == 2


def test_structures_are_flat_files(tmp_path: Path) -> None:
    """Tied names once, views copied, plain values in the header, what has a state by its state."""
    base = torch.arange(6.0).reshape(2, 3)
    layer = torch.nn.Linear(2, 2)
    value = {"a": base, "b": base, "row": base[1], "turned": base.t(), "layer": layer,
             "list": [torch.ones(1), 2], "plain": [1, 2], "empty": torch.zeros(0), "none": None}  # fmt: skip
    path = safetensors_path(tmp_path / "new" / "x.pt")
    write_tensors(path, value)
    found = safetensors.torch.load_file(path)
    assert sorted(found) == ["a", "empty", "layer.bias", "layer.weight", "list.0", "row", "turned"]
    assert torch.equal(found["turned"], base.t())
    with safetensors.safe_open(path, "pt") as file:
        header = file.metadata()
    assert header["b"] == "a"
    assert json.loads(header["values"]) == {"list.1": 2, "plain": [1, 2], "none": None}
    assert [one.name for one in path.parent.iterdir()] == ["x.safetensors"]


def test_this_very_process_has_a_source() -> None:
    """What pytest imports is read too, and nothing of it may fail."""
    assert read_source().calls
