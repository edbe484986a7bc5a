"""Lightning's Trainer with Shoal's strategy, beside its own ddp: the same script, the same numbers."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.base.errors import ConfigError
from shoal.neighbours import lightning as facade

HERE = Path(__file__).parent
RELATIVE = {"32-true": 1e-6, "64-true": 1e-12}


@pytest.mark.parametrize("layout", ["pp", "tp", "cp", "3d", "1f1b", {"tp": 2}, {"pp": 2}])
def test_layouts_that_its_loop_cannot_make_are_refused_by_name(layout: Any) -> None:
    with pytest.raises(ConfigError, match=r"calls training_step on whole layers.*sample=") as told:
        facade.check_layout(layout)
    assert repr(layout) in str(told.value)


def test_what_only_a_pickle_would_carry_does_not_travel() -> None:
    with pytest.raises(ConfigError, match="Thing would travel as a pickle"):
        facade._encode_json([type("Thing", (), {})()])
    assert facade._decode_json(facade._encode_json(Path("a/b"))) == Path("a/b")


def test_without_lightning_it_says_what_to_install() -> None:
    if facade._made:
        pytest.skip("Lightning is installed here")
    with pytest.raises(ImportError, match="pip install lightning"):
        facade.ShoalStrategy()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs the script: (size, strategy, accumulation, precision, …) → (what it found, its folder)."""
    pytest.importorskip("lightning")
    pytest.importorskip("pytorch_lightning")

    @functools.cache
    def run(
        size: int, strategy: str, accumulation: int, precision: str,
        package: str = "lightning.pytorch", start: str = "", by: str = "torchrun",
    ) -> tuple[Any, Path]:  # fmt: skip
        folder = tmp_path_factory.mktemp("ran")
        words = [str(HERE / "lightning_script.py"), "out.json", strategy]
        words += [str(accumulation), precision, *([start] if start else [])]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={size}"]
        own = {"LIGHTNING": package, "SIZE": str(size), "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(
            [sys.executable, *(torchrun if by == "torchrun" else []), *words],
            cwd=folder, env={**os.environ, **own}, capture_output=True, text=True, timeout=400,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr[-3000:]
        return json.loads((folder / "out.json").read_text()), folder

    return run


def same(ours: Any, theirs: Any, precision: str, parts: tuple[str, ...]) -> None:
    """Every number of those parts, one by one."""
    for part in parts:
        kinds = {kind for kind, _ in ours[part]} & {kind for kind, _ in theirs[part]}
        assert {"loss", "held"} <= kinds
        for kind in kinds:
            mine, other = ([v for k, v in one[part] if k == kind] for one in (ours, theirs))
            assert mine == pytest.approx(other, rel=RELATIVE[precision]), (part, kind)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("size", "strategy", "accumulation", "precision"),
    [
        (1, "shoal", 2, "32-true"),
        (2, "shoal", 2, "32-true"),
        (2, "shoal_ddp", 1, "64-true"),
        (2, "shoal_zero1", 2, "32-true"),
        (2, "shoal:zero2", 1, "64-true"),
        (2, "shoal_fsdp", 2, "32-true"),
        (4, "shoal:zero2", 2, "32-true"),
        (4, "shoal_fsdp", 2, "32-true"),
        (4, "shoal:hsdp", 2, "32-true"),
    ],
)
def test_the_numbers_are_those_of_its_own_ddp(
    ran: Any, size: int, strategy: str, accumulation: int, precision: str
) -> None:
    theirs, _ = ran(size, "ddp", accumulation, precision)
    ours, _ = ran(size, strategy, accumulation, precision)
    same(ours, theirs, precision, ("steps", "again"))
    assert ours["global_step"] == theirs["global_step"]
    assert list(ours["weights"]) == list(theirs["weights"])
    for part in ("weights", "moments"):
        mine, other = (
            list(one[part].values()) if part == "weights" else one[part] for one in (ours, theirs)
        )
        assert mine == pytest.approx(other, rel=RELATIVE[precision])


@pytest.mark.proof
def test_its_checkpoints_stay_lightnings_own(ran: Any) -> None:
    """Saved under zero2 on 4, gone on by Lightning's ddp alone, and the other way round."""
    theirs, folder = ran(4, "ddp", 2, "32-true")
    _, mine = ran(4, "shoal:zero2", 2, "32-true")
    start = str(mine / "kept" / "epoch=1.ckpt")
    went_on, _ = ran(4, "ddp", 2, "32-true", start=start)
    same(went_on, theirs, "32-true", ("again",))
    start = str(folder / "kept" / "epoch=1.ckpt")
    went_on, _ = ran(4, "shoal_fsdp", 2, "32-true", start=start)
    same(went_on, theirs, "32-true", ("again",))


@pytest.mark.proof
def test_by_its_own_launcher_and_its_other_name(ran: Any) -> None:
    theirs, _ = ran(2, "ddp", 2, "32-true")
    ours, _ = ran(2, "shoal", 2, "32-true", package="pytorch_lightning", by="itself")
    same(ours, theirs, "32-true", ("steps",))


REFUSED = """
import sys
import torch
import lightning.pytorch as pl
from shoal.neighbours.lightning import ShoalStrategy

class Model(pl.LightningModule):
    def __init__(self, hand=False, optimizers=1):
        super().__init__()
        self.automatic_optimization, self.optimizers_wanted = not hand, optimizers
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(self.optimizers_wanted)]

class Own(Model):
    def backward(self, loss):
        loss.backward()

def fit(model, strategy="shoal", **more):
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **more)
    trainer.fit(model, torch.utils.data.DataLoader(torch.ones(4, 4)))
    print("fit")

for attempt in (
    lambda: fit(Model(hand=True)), lambda: fit(Model(optimizers=0)), lambda: fit(Own()),
    lambda: fit(Model(), precision="bf16-true"), lambda: ShoalStrategy(layout="pp"),
    lambda: ShoalStrategy(layout={"tp": 2}), lambda: ShoalStrategy(find_unused_parameters=True),
    lambda: ShoalStrategy(recomput="full"),
    lambda: fit(Model(), ShoalStrategy(recompute="full"), precision="bf16-mixed"),
):
    try:
        attempt()
    except Exception as error:
        print(type(error).__name__, error)
"""
SAID = [
    "ConfigError LightningModule.automatic_optimization = False: a run makes each step whole",
    "ConfigError configure_optimizers: no optimizer that steps a weight; try: one",
    "ConfigError LightningModule.backward is overridden",
    "ConfigError Trainer(precision='bf16-true'): weights are stepped in fp32; try: bf16-mixed",
    "ConfigError ShoalStrategy(layout='pp')",
    "ConfigError ShoalStrategy(layout={'tp': 2})",
    "ConfigError ShoalStrategy: find_unused_parameters is no argument of it; try: leave it out",
    "ConfigError ShoalStrategy: recomput is no argument of it; try: recompute",
    "fit",
]


AGAIN = """
import sys
import torch
import lightning.pytorch as pl
import shoal.neighbours.lightning
import shoal.neighbours.exact

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
    def test_step(self, batch, batch_idx):
        self.log("held", self.training_step(batch, batch_idx), sync_dist=True)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)

def trainer(strategy):
    return pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)

def fitted(strategy):
    torch.manual_seed(0)
    model, losses = Model(), []
    for _ in range(2):  # the second goes on with what the first left
        trainer(strategy).fit(model, loader)
        losses.append(trainer(strategy).test(model, loader, verbose=False)[0]["held"])
    return losses, model.layer.weight.tolist()

draws = torch.Generator().manual_seed(0)
labels = torch.randint(0, 3, (32,), generator=draws)
labels[1::2][:6] = -100  # the second rank has fewer
data = torch.utils.data.TensorDataset(torch.randn(32, 4, generator=draws), labels)
loader = torch.utils.data.DataLoader(data, batch_size=8)
print([*fitted("ddp"), *fitted("shoal_zero2")])
shoal.neighbours.exact.install()
print(fitted("shoal_ddp")[1])
model = Model()
trainer("shoal_fsdp").fit(model, loader)
try:
    trainer("shoal_fsdp").test(model, loader, verbose=False)
except Exception as error:
    print(error)
"""


def one_process() -> torch.Tensor:
    """The weights that both epochs of AGAIN leave, where all targets of a step are under one mean."""
    draws = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (32,), generator=draws)
    labels[1::2][:6] = -100
    inputs = torch.randn(32, 4, generator=draws)
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    deal = functools.partial(torch.utils.data.DistributedSampler, range(32), 2)
    orders = [list(deal(rank, shuffle=True)) for rank in (0, 1)]  # as Lightning deals for training
    for first in (0, 8, 0, 8):
        rows = [row for order in orders for row in order[first : first + 8]]
        torch.nn.functional.cross_entropy(layer(inputs[rows]), labels[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return layer.weight.detach()


@pytest.mark.proof
def test_a_module_again_and_losses_by_their_counts(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    (tmp_path / "again.py").write_text(AGAIN)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    ended = subprocess.run(
        [sys.executable, *torchrun, "--local-ranks-filter=0", "again.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    numbers, weights, refused = ended.stdout.splitlines()
    losses, means, ours, own_means = json.loads(numbers)
    assert ours == pytest.approx(losses, rel=1e-6)
    assert torch.allclose(torch.tensor(own_means), torch.tensor(means), rtol=1e-6)
    weighed, alone = torch.tensor(json.loads(weights)), one_process()
    assert torch.allclose(weighed, alone, rtol=1e-5)
    assert not torch.allclose(torch.tensor(means), alone, rtol=1e-2), "else nothing was weighed"
    assert refused.startswith("LightningModule: since a fit under fsdp it holds this rank's parts")


@pytest.mark.proof
def test_what_it_cannot_carry_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    (tmp_path / "refused.py").write_text(REFUSED)
    ended = subprocess.run(
        [sys.executable, "refused.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    lines = ended.stdout.splitlines()
    assert [one[: len(two)] for one, two in zip(lines, SAID, strict=True)] == SAID, ended.stderr
