"""statistics.jsonl of one process: what plain torch computes, in due steps alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainer_small import pair, run_of

from shoal.base.errors import ConfigError, TrainingError
from shoal.report.report_page import make_page
from shoal.report.run_contents import read_run
from shoal.trainer.statistics.tensor_statistics import TensorStatistics


class Blocks(nn.Module):
    """Two blocks that return a structure, around which nothing repeats."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head, self.unused = nn.Linear(4, 2), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x)


class Block(nn.Module):
    """A layer that returns its output and the number of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return torch.tanh(self.up(x)) * 3, 1


def lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "statistics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def expected(model: nn.Module, x: torch.Tensor, y: torch.Tensor, lr: float) -> dict[str, Any]:
    """What plain torch has of one SGD step, without Shoal; the model is left as it was."""
    seen = {}
    hooks = [
        layer.register_forward_hook(lambda m, i, o, n=n: seen.update({f"layers.{n}": o[0]}))
        for n, layer in enumerate(model.layers)
    ]
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(
        ((model(x) - y) ** 2).sum() / y.numel(), list(named.values()), allow_unused=True
    )
    for hook in hooks:
        hook.remove()
    norms = {
        name: float(g.norm()) if g is not None else 0.0
        for name, g in zip(named, grads, strict=True)
    }
    weights = {name: float(p.detach().norm()) for name, p in named.items()}
    return {
        "gradient_norm": norms,
        "weight_norm": weights,
        "update_ratio": {name: lr * norms[name] / weights[name] for name in named},
        "activation_rms": {
            name: float(o.detach().square().mean().sqrt()) for name, o in seen.items()
        },
        "activation_largest": {name: float(o.detach().abs().max()) for name, o in seen.items()},
    }


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_record_is_what_plain_torch_computes(tmp_path: Path, recompute: str) -> None:
    """Also where blocks run again in the backward pass; clipping changes no gradient's norm."""
    run = run_of(
        Blocks().double(), lambda p: torch.optim.SGD(p, lr=0.1), folder=tmp_path, precision="fp64",
        statistics=3, recompute=recompute, batch=8, micro_batch=4,
    )  # fmt: skip
    hooks = [len(layer._forward_hooks) for layer in run.model.layers]
    x, y = (one.double() for one in pair())
    for step in range(1, 7):
        due = expected(run.model, x, y, 0.1) if step in (1, 3, 6) else None
        run.step((x, y))
        if due is None:
            continue
        found = lines(tmp_path)[-1]
        assert found.pop("step") == step
        assert found.keys() == due.keys()
        for key, values in due.items():
            assert found[key] == pytest.approx(values, rel=1e-12, abs=1e-15), key
    assert len(lines(tmp_path)) == 3
    run.evaluate([(x, y)])
    assert [len(layer._forward_hooks) for layer in run.model.layers] == hooks, "none stays"
    page = make_page(read_run(tmp_path))
    assert "update ÷ weight of a parameter" in page
    assert "layers.1.up.weight" in page
    run.close()


def test_blocks_of_one_layer_have_activations_too(tmp_path: Path) -> None:
    """Recompute and the compiler leave them alone; their outputs are recorded like any block's."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    run = run_of(model, folder=tmp_path, statistics=1, batch=8)
    run.step(pair())
    assert list(lines(tmp_path)[0]["activation_rms"]) == ["0", "1", "2"]
    run.close()


def test_a_loop_that_writes_its_passes_out_has_the_same_records(tmp_path: Path) -> None:
    """Also one that clips between the halves of a step: norms are of gradients before that."""
    x, y = (one.double() for one in pair())
    found = {}
    for kind in ("step", "halves", "written out"):
        run = run_of(
            Blocks().double(), folder=tmp_path / kind, precision="fp64", statistics=2, batch=8,
            micro_batch=4,
        )  # fmt: skip
        for _ in range(2):
            if kind == "step":
                run.step((x, y))
            elif kind == "halves":
                run.forward_backward((x, y))
                run.clip_grad_norm_(1e9)
                run.update()
            else:
                for micro in run.micro_batches((x, y)):
                    loss = ((run.model(micro.inputs) - micro.targets) ** 2).sum()
                    run.backward(loss, micro.targets.numel())
                run.update()
        found[kind] = lines(tmp_path / kind)
        run.close()
    assert [one["step"] for one in found["step"]] == [1, 2]
    for kind in ("halves", "written out"):
        for here, there in zip(found[kind], found["step"], strict=True):
            assert here.keys() == there.keys()
            for key in here.keys() - {"step"}:
                assert here[key] == pytest.approx(there[key], rel=1e-12), (kind, key)


def test_numbers_that_are_not_finite_name_their_parameter(tmp_path: Path) -> None:
    """A skipped step has a record too: no update, and null where a gradient is no number."""
    model = Blocks()
    run = run_of(model, folder=tmp_path, statistics=1, batch=8, clip=0.01)
    x, y = pair()
    model.head.bias.register_hook(lambda gradient: gradient * float("nan"))
    run.step((x, y))
    (line,) = lines(tmp_path)
    assert [name for name, value in line["gradient_norm"].items() if value is None] == ["head.bias"]
    assert set(line["update_ratio"].values()) == {0.0}
    with pytest.raises(TrainingError, match="no weight moved"):
        run.close()


def test_a_step_that_is_not_due_enters_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No hook, no copy, no collective: only the question whether it is due."""
    run = run_of(Blocks(), folder=tmp_path, statistics=100, batch=8)
    batch = pair()
    run.step(batch)
    for name in ("end_passes", "before_update", "after_update"):
        monkeypatch.setattr(TensorStatistics, name, lambda *_: pytest.fail("not due"))
    monkeypatch.setattr(nn.Module, "register_forward_hook", lambda *_: pytest.fail("not due"))
    run.step(batch)
    assert run.statistics is not None
    assert run.statistics.activations.micro_batch(1, 0) is None
    run.close()


def test_without_a_folder_statistics_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"statistics = 5: is written into the run folder"):
        run_of(Blocks(), statistics=5)
