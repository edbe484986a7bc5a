"""What a loop changes of its optimizer's groups goes on after a restore, to the bit, on any layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forks import Forks

LOOP = """
import json, os, sys, torch, shoal
from torch import nn
how, layout, folder, steps = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
first, last = list(model.parameters())[:2], list(model.parameters())[2:]
momentum = how in ("cyclic", "dampened")
groups = [{"params": first}, {"params": last, "weight_decay": 0.1}]
optimizer = (torch.optim.SGD(groups, lr=0.1, momentum=0.5) if momentum
             else torch.optim.AdamW(groups, lr=0.01))
data = [(torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))) for _ in range(8)]
run = shoal.parallelize(model, optimizer, layout=layout, precision="fp64", folder=folder, sample=data[0])
rank, size = run.world.rank, run.world.size
scheduler = None
if how == "onecycle":
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=8)
if how == "cyclic":
    scheduler = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3)
if run.restore() and scheduler:
    scheduler.load_state_dict(run.extra["scheduler"])
shares = not isinstance(layout, dict)
for step in range(run.step_count, steps):
    x, y = data[step]
    if how == "decays" and step == 2:
        optimizer.param_groups[1]["weight_decay"] = 0.7
    if how == "betas" and step == 1:
        for group in optimizer.param_groups:
            group["betas"] = (0.5, 0.9)
    if how == "dampened" and step == 2:
        optimizer.param_groups[0]["dampening"] = 0.3
    mine = (x.chunk(size)[rank], y.chunk(size)[rank]) if shares else (x, y)
    result = run.step(mine)
    if scheduler:
        scheduler.step()
run.save(extra={"scheduler": scheduler} if scheduler else {})
if run.world.is_first:
    print(json.dumps([result.loss, result.grad_norm]))
run.close()
"""
HOW = ("onecycle", "cyclic", "decays", "betas", "dampened")
LAYOUTS: dict[str, tuple[int, object]] = {
    "single": (1, "single"), "ddp": (2, "ddp"), "zero2": (2, "zero2"), "fsdp": (2, "fsdp"),
    "tp": (2, {"tp": 2}),
}  # fmt: skip
ROWS = [
    pytest.param(how, name, marks=() if quick else pytest.mark.proof)
    for name in LAYOUTS
    for how in HOW
    for quick in [
        (how, name) in {("onecycle", "single"), ("decays", "single"), ("cyclic", "zero2")}
    ]
]


@pytest.mark.parametrize(("how", "layout"), ROWS)
def test_a_restored_run_goes_on_with_them(
    how: str, layout: str, tmp_path: Path, programs: Forks
) -> None:
    size, words = LAYOUTS[layout]
    (tmp_path / "loop.py").write_text(LOOP)

    def last(folder: str, steps: int) -> list[float]:
        done = programs.world(
            size, "loop.py", how, json.dumps(words), folder, str(steps), cwd=tmp_path, timeout=300
        )
        assert [one.returncode for one in done] == [0] * size, done[0].stderr + done[-1].stderr
        found: list[float] = json.loads(done[0].stdout.splitlines()[-1])
        return found

    whole = last("whole", 6)
    last("cut", 4)
    assert last("cut", 6) == whole
