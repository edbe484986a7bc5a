"""`--exact`: ranks with unequal counts of targets compute what one process with one batch computes.

exact_found.json is what accelerate 1.15 itself finds: `.venv-proof/bin/torchrun --standalone
--nproc_per_node=2 tests/neighbours/exact_script.py OUT 2 4`, and alone `… OUT 1 16`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from shoal.base.errors import ConfigError
from shoal.neighbours import exact, library_loop

HERE = Path(__file__).parent
THEIRS = json.loads((HERE / "exact_found.json").read_text())["found"]
AS = ("-m", "shoal", "run", "--as")


def found(programs: Any, folder: Path, size: int, *words: str) -> Any:
    """What a script writes to out.json on so many ranks."""
    ended = programs.world(size, *AS, *words, cwd=folder)
    assert [one.returncode for one in ended] == [0] * size, ended[0].stderr
    return json.loads((folder / "out.json").read_text())


def close(mine: Any, other: Any, rel: float = 1e-6) -> bool:
    weights = {name: pytest.approx(value, rel=rel) for name, value in other["weights"].items()}
    return mine["norms"] == pytest.approx(other["norms"], rel=rel) and mine["weights"] == weights


def test_by_default_the_neighbours_numbers_exact_those_of_one_process(
    programs: Any, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text((HERE / "exact_script.py").read_text())
    script = ("train.py", "out.json", "2", "4")
    plain = found(programs, tmp_path, 2, "accelerate", "--", *script)
    weighed = found(programs, tmp_path, 2, "accelerate", "--exact", "--", *script)
    assert close(plain, THEIRS["2 2 4"])
    assert close(weighed, THEIRS["1 1 16"])
    assert not close(plain, THEIRS["1 1 16"], rel=1e-2), "else nothing was weighed here"


ENGINE = """
import json, os
import torch
from torch import nn
import deepspeed

class Model(nn.Module):
    "Computes its loss itself, as models of transformers do where they are given labels."
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(16, 32), nn.Linear(32, 16)
    def forward(self, ids, labels):
        scores = self.out(self.embed(ids).tanh())
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())}

config = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4 // int(os.environ.get("WORLD_SIZE", "1")),
          "gradient_clipping": 1.0, "zero_optimization": {"stage": 2},
          "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
torch.manual_seed(0)
engine, *_ = deepspeed.initialize(model=Model(), config=config)
rank, ranks = engine.global_rank, engine.world_size
draws, norms = torch.Generator().manual_seed(1), []
for step in range(3):
    ids = torch.randint(0, 16, (4, 8, 12), generator=draws)
    labels = ids.roll(-1, 2)
    for number, keep in enumerate((12, 1, 5, 0)):  # one micro-batch has no target at all
        labels[number, :, keep:] = -100
    for place in range(rank, 4, ranks):
        loss = engine(ids[place], labels[place])["loss"]
        engine.backward(loss)
        engine.step()
    norms.append(engine.get_global_grad_norm())
weights = engine.module_state_dict()
if rank == 0:
    sums = {name: one.double().abs().sum().item() for name, one in weights.items()}
    json.dump({"norms": norms, "weights": sums}, open("out.json", "w"))
engine.destroy()
"""


def one_process() -> Any:
    """The same by plain torch, all targets of a step under one mean."""
    torch.manual_seed(0)
    embed, out = nn.Embedding(16, 32), nn.Linear(32, 16)
    parameters = [*embed.parameters(), *out.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    draws, norms = torch.Generator().manual_seed(1), []
    for _ in range(3):
        ids = torch.randint(0, 16, (4, 8, 12), generator=draws)
        labels = ids.roll(-1, 2)
        for number, keep in enumerate((12, 1, 5, 0)):
            labels[number, :, keep:] = -100
        functional.cross_entropy(out(embed(ids).tanh()).flatten(0, 2), labels.flatten()).backward()
        norms.append(float(nn.utils.clip_grad_norm_(parameters, 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    named = {"embed.weight": embed.weight, "out.weight": out.weight, "out.bias": out.bias}
    sums = {name: one.detach().double().abs().sum().item() for name, one in named.items()}
    return {"norms": norms, "weights": sums}


@pytest.mark.parametrize("size", [1, 2])
def test_a_models_own_loss_under_an_engine(programs: Any, tmp_path: Path, size: int) -> None:
    (tmp_path / "train.py").write_text(ENGINE)
    mine = found(programs, tmp_path, size, "deepspeed", "--exact", "--", "train.py")
    assert close(mine, one_process(), rel=2e-6)


BY_HAND = """
import json
import torch
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
draws = torch.Generator().manual_seed(1)
for rows in (6, 2):  # accumulated by the script's own words
    inputs, labels = torch.randn(rows, 4, generator=draws), torch.zeros(rows, dtype=torch.long)
    accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), labels) / 2)
optimizer.step()
json.dump(accelerator.unwrap_model(model).weight.tolist(), open("out.json", "w"))
accelerator.end_training()
"""


def test_a_script_that_accumulates_by_itself(programs: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BY_HAND)
    weight = found(programs, tmp_path, 1, "accelerate", "--exact", "--", "train.py")
    torch.manual_seed(0)
    model, draws = nn.Linear(4, 3), torch.Generator().manual_seed(1)
    inputs = torch.cat([torch.randn(rows, 4, generator=draws) for rows in (6, 2)])
    functional.cross_entropy(model(inputs), torch.zeros(8, dtype=torch.long)).backward()
    assert model.weight.grad is not None
    assert torch.allclose(torch.tensor(weight), model.weight - model.weight.grad, rtol=1e-6)


OWN = """
import torch
from accelerate import Accelerator
accelerator = Accelerator()
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
accelerator.backward(model(torch.ones(4, 2)).square().mean())
"""


def test_a_loss_of_ones_own_is_one_line(programs: Any, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    ended = programs.run(*AS, "accelerate", "--exact", "--", "own.py", cwd=tmp_path)
    assert ended.returncode == 2
    assert "--exact: the loss (its last operation: MeanBackward0) is no mean that" in ended.stderr
    greeting, _ = ended.stderr.splitlines()
    assert "batches are those of the script's loaders" in greeting


@pytest.fixture
def weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `install` leaves it, for one test."""
    monkeypatch.setattr(library_loop, "count_of", None)
    for name in (*exact.ELEMENTS, *exact.CLASSES):
        monkeypatch.setattr(functional, name, getattr(functional, name))
    exact.install()


SCORES = torch.randn(6, 4, requires_grad=True)
LABELS = torch.tensor([0, 1, -100, 3, -100, 2])
SHARES = torch.rand(6, 4)


@pytest.mark.usefixtures("weighed")
@pytest.mark.parametrize(
    ("loss", "count"),
    [
        (lambda: nn.CrossEntropyLoss()(SCORES, LABELS), 4.0),
        (lambda: nn.CrossEntropyLoss(label_smoothing=0.1)(SCORES, LABELS), 4.0),
        (lambda: nn.CrossEntropyLoss(torch.tensor([1.0, 2, 4, 8]))(SCORES, LABELS), 15.0),
        (lambda: functional.cross_entropy(SCORES, SHARES), 6.0),
        (lambda: functional.nll_loss(SCORES.log_softmax(1), LABELS, ignore_index=-100) / 3, 4.0),
        (lambda: nn.MSELoss()(SCORES, SHARES).mean() * 0.5, 24.0),
        (lambda: nn.BCEWithLogitsLoss()(SCORES, SHARES).reshape(1).squeeze(), 24.0),
        (lambda: nn.KLDivLoss(reduction="batchmean")(SCORES.log_softmax(1), SHARES), 6.0),
        (lambda: nn.MSELoss()(SCORES, SHARES) + 0.1 * nn.L1Loss()(SCORES, SHARES), 24.0),
    ],
)
def test_what_a_loss_is_the_mean_of(loss: Any, count: float) -> None:
    assert exact.count_targets(loss()).item() == count


@pytest.mark.usefixtures("weighed")
@pytest.mark.parametrize(
    "loss",
    [
        lambda: SCORES.mean(),
        lambda: functional.cross_entropy(SCORES, LABELS, reduction="sum"),
        lambda: functional.cross_entropy(SCORES, LABELS) + 0.01 * SCORES.square().mean(),
        lambda: functional.cross_entropy(SCORES, LABELS) + functional.mse_loss(SCORES, SHARES),
        lambda: functional.cross_entropy(SCORES, LABELS).exp(),
        lambda: functional.cross_entropy(SCORES, LABELS) * SCORES.mean(),
    ],
)
def test_what_nobody_knows_is_refused(loss: Any) -> None:
    with pytest.raises(ConfigError, match="try: loss = nn"):
        exact.count_targets(loss())


@pytest.mark.usefixtures("weighed")
def test_a_model_of_transformers_with_labels() -> None:
    hf = pytest.importorskip("transformers")
    config = hf.LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                            num_attention_heads=2, vocab_size=32)  # fmt: skip
    ids = torch.randint(0, 32, (2, 8))
    labels = ids.clone()
    labels[0, 3:] = -100
    loss = hf.LlamaForCausalLM(config)(input_ids=ids, labels=labels).loss
    assert exact.count_targets(loss).item() == (labels[:, 1:] != -100).sum().item() == 9


def test_nothing_is_weighed_unless_asked() -> None:
    assert library_loop.count_of is None
    assert not hasattr(functional.cross_entropy, "__wrapped__")
