"""Final saves of scripts: in their library's format, refusals named before training, nothing lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

from shoal.neighbours.outputs.final_saves import read_source, write_pickle, write_tensors

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


def test_a_final_save_is_the_librarys_own_pickle(programs: Any, tmp_path: Path) -> None:
    ending = """
engine.save_16bit_model("out")
engine.save_checkpoint("kept", tag="last")
if False:
    engine.eval_batch(None)
def never():
    engine.eval_batch(None)
"""
    ended = programs.run(script(tmp_path, ending, stage=1), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert split(ended.stderr) == ([], [])
    whole = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert len(whole) == 4
    ended = programs.run("kept/zero_to_fp32.py", "kept", "merged", "-t", "last", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    merged = torch.load(tmp_path / "merged" / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(merged[name], value) for name, value in whole.items())


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
    """Stage 3: parts are named before, refused after, and nothing is lost."""
    ending = 'torch.save(engine.module.state_dict(), "mine.pt")'
    ended = programs.world(2, script(tmp_path, ending, stage=3), cwd=tmp_path)
    assert [one.returncode for one in ended] == [2, 2]
    before, after = split(ended[0].stderr)
    assert ["state_dict is refused" in one for one in before] == [True]
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


def test_an_accelerators_save_is_a_pickle_of_tensors(programs: Any, tmp_path: Path) -> None:
    ending = """
import argparse, pathlib
state |= {"args": argparse.Namespace(lr=0.1, out=pathlib.Path("a")), "function": print}
accelerator.save(state, "out/last.pt")
accelerator.save_model(model, "out")
accelerator.save_model(model, "out", safe_serialization=False)
accelerator.save(state["model"], "out/a.bin", safe_serialization=True)
"""
    (tmp_path / "a.py").write_text(ACCELERATE + ending)
    ended = programs.run("a.py", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert split(ended.stderr) == ([], [])
    assert "left out of out/last.pt" in ended.stderr
    assert "function (builtin_function_or_method)" in ended.stderr
    found = torch.load(tmp_path / "out/last.pt", weights_only=True)
    assert sorted(found) == ["args", "epoch", "model", "optimizer"]
    assert (found["epoch"], found["args"]) == (3, {"lr": 0.1, "out": "a"})
    names = ["bias", "weight"]
    assert sorted(found["model"]) == names
    assert sorted(torch.load(tmp_path / "out/pytorch_model.bin", weights_only=True)) == names
    for name in ("model.safetensors", "a.bin"):
        assert sorted(safetensors.torch.load_file(tmp_path / "out" / name)) == names


def test_pickles_hold_plain_values(tmp_path: Path) -> None:
    """Views are cut, graphs and classes dropped; a module's versions stay; nothing is half there."""
    layer = torch.nn.BatchNorm1d(2)
    base = torch.arange(1000.0)
    value = {"a": base[:2], "p": layer.weight, "state": layer.state_dict(), "layer": layer,
             "list": [1, (2, {3}), np.int64(4)], "array": np.arange(2), "lr": np.float64(0.5)}  # fmt: skip
    path = tmp_path / "new" / "x.pt"
    assert write_pickle(path, value) == []
    assert path.stat().st_size < 8_000, "not the thousand numbers beside it"
    found = torch.load(path, weights_only=True)
    assert found["list"] == [1, (2, {3}), 4]
    assert (found["array"].tolist(), found["lr"], found["p"].requires_grad) == ([0, 1], 0.5, False)
    assert found["state"]._metadata[""] == {"version": 2}
    assert [one.name for one in path.parent.iterdir()] == ["x.pt"]
    with pytest.raises(FileExistsError):
        write_pickle(tmp_path / "new" / "x.pt" / "y.pt", value)


def test_structures_are_flat_files(tmp_path: Path) -> None:
    """Tied names once, views copied, plain values in the header, what has a state by its state."""
    base = torch.arange(6.0).reshape(2, 3)
    layer = torch.nn.Linear(2, 2)
    value = {"a": base, "b": base, "row": base[1], "turned": base.t(), "layer": layer,
             "list": [torch.ones(1), 2], "plain": [1, 2], "empty": torch.zeros(0), "none": None}  # fmt: skip
    path = tmp_path / "new" / "x.safetensors"
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
