"""A script that freezes weights and lets them train later: their gradients are summed from then on."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from shoal.neighbours.sources import frozen_weights

SCRIPT = """
import shoal.neighbours.accelerate
import sys
import torch
from accelerate import Accelerator
from torch import nn

HOW = sys.argv[1]


def net():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))
    for layer in made[:4]:
        layer.requires_grad_(False)
    return made


def optimizer_of(model):
    held = model.parameters() if HOW == "all" else model[4].parameters()
    return torch.optim.AdamW(held, lr=0.02)


def let_train(layer, flag):
    for p in layer.parameters():
        p.requires_grad = flag


def change(step, model, optimizer):
    if step == 2:
        let_train(model[2], True)
        if HOW == "groups":
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.05})
    if step == 4 and HOW == "all":
        let_train(model[2], False)
        let_train(model[0], True)


def batch(step):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    return x, x[:, :3].cumsum(1)


def plain():
    model = net()
    optimizer = optimizer_of(model)
    for step in range(6):
        change(step, model, optimizer)
        x, y = batch(step)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def main():
    accelerator = Accelerator(cpu=True)
    rank, size = accelerator.process_index, accelerator.num_processes
    model = net()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    for step in range(6):
        change(step, accelerator.unwrap_model(model), optimizer)
        x, y = (one[rank::size] for one in batch(step))
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    for name, wanted in plain().items():
        found = accelerator.get_state_dict(model)[name]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6, msg=lambda s: name + s)
    accelerator.end_training()
    accelerator.print("trained")


main()
"""


@pytest.mark.parametrize(
    ("how", "size"),
    [
        ("all", 2),
        pytest.param("groups", 2, marks=pytest.mark.proof),
        pytest.param("all", 1, marks=pytest.mark.proof),
        pytest.param("groups", 1, marks=pytest.mark.proof),
    ],
)
def test_weights_that_train_later_are_summed_over_ranks(
    programs: Any, tmp_path: Path, how: str, size: int
) -> None:
    """In mid-training: held by the optimizer from the start, or in a group that comes with them."""
    (tmp_path / "train.py").write_text(SCRIPT)
    ended = programs.world(size, "train.py", how, cwd=tmp_path)
    assert [one.returncode for one in ended] == [0] * size, ended[0].stderr
    assert ended[0].stdout == "trained\n"
    assert "no gradient in" not in ended[0].stderr  # of the layer that stays frozen


@pytest.mark.proof
def test_fsdp_refuses_it_before_the_first_step(programs: Any, tmp_path: Path) -> None:
    script = SCRIPT.replace("change(step, accelerator.unwrap_model(model), optimizer)",
                            "accelerator.unwrap_model(model)[2].requires_grad_(True)")  # fmt: skip
    (tmp_path / "train.py").write_text(script)
    environ = {"ACCELERATE_USE_FSDP": "true"}
    ended = programs.world(2, "train.py", "all", cwd=tmp_path, environ=environ)
    line = ended[0].stderr
    assert [one.returncode for one in ended] == [2, 2], line
    assert "lets weights train later, of which 4 are frozen now (0.weight, …)" in line


SOURCES = {
    # a script's source → whether weights may train later
    "for p in m.parameters():\n    p.requires_grad = False\nm = a.prepare(m)": False,
    "m.requires_grad_(False)\nm.head.requires_grad_(True)\nm = a.prepare(m)": False,
    "def build():\n    m.head.requires_grad_()\nbuild()\na.prepare(m)": False,
    "m = a.prepare(m)\nm.requires_grad_(False)": False,
    "m = a.prepare(m)\nm.trunk.requires_grad_()": True,
    "def thaw():\n    setattr(p, 'requires_grad', flag)\na.prepare(m)\nthaw()": True,
    "def thaw():\n    p.requires_grad = True\ndef later():\n    thaw()\na.prepare(m)\nlater()": True,
    "class C:\n    def on_epoch_begin(self):\n        p.requires_grad = True\nt.fit(m)": True,
    "class M:\n    def __init__(self):\n        p.requires_grad = True\nm = a.prepare(M())": False,
}


@pytest.mark.parametrize("source", SOURCES)
def test_what_the_source_lets_train_later(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ast.parse(source)
    (tmp_path / "a.py").write_text(source)
    files = {"__main__": [str(tmp_path / "a.py"), ""]}
    monkeypatch.setattr(frozen_weights, "find_user_code", lambda: files)
    place, _ = frozen_weights.find_thaw()
    assert bool(place) == SOURCES[source]
    assert not place or place.startswith("a.py:")
