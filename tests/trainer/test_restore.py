"""Save, then restore in a fresh run: every bit is there, in mid-epoch, for every optimizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from trainer_small import Rows, assert_same_bits, bits, busy, linear, pair, run_of, sgd

from shoal.base.errors import CheckpointError, ConfigError
from shoal.base.layouts.policies import OptimizerPolicy

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "tensor-lr": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.05), momentum=0.9),
}


def made(optimizer, folder: Path | None = None, model: nn.Module | None = None, **settings):
    return run_of(
        model or busy(), optimizer, batch=6, micro_batch=2, clip=0.5, folder=folder, **settings
    )


def some(run, steps: int) -> list[tuple]:
    """Take steps over the epochs of a dataset of 22: its last step of each epoch holds 4."""
    told = []
    data = ROWS
    while len(told) < steps:
        for batch in run.loader(data):
            result = run.step(batch)
            told.append((result.step, result.loss, result.grad_norm, result.lr))
            if len(told) == steps:
                break
    return told


ROWS = Rows()


def state_bits(run) -> dict[str, torch.Tensor]:
    names = {p: n for n, p in run.model.named_parameters()}
    return {
        f"{names[p]}.{key}": torch.as_tensor(value).clone()
        for p, state in run.optimizer.state.items()
        for key, value in state.items()
    }


SIBLINGS = ("adamw", "adam-amsgrad", "rmsprop")
"""Their state is a count of steps and tensors of a weight's shape, as that of adamw-fused and nadam."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.proof] if name in SIBLINGS else [])
        for name in OPTIMIZERS
    ],
)
def test_resume_is_bit_for_bit(name: str, tmp_path: Path) -> None:
    """9 steps at once = 6 steps, save, restore in another object, 3 steps; 6 is in mid-epoch."""
    whole = made(OPTIMIZERS[name])
    expected = some(whole, 9)
    first = made(OPTIMIZERS[name], tmp_path)
    told = some(first, 6)
    assert first.save() is not None
    torch.manual_seed(99)  # neither weights nor randomness may come from here
    second = made(OPTIMIZERS[name], tmp_path, model=type(busy())())
    assert second.restore() is True
    assert second.step_count == 6
    told += some(second, 3)
    assert told == expected
    assert_same_bits(bits(second.model), bits(whole.model))
    assert_same_bits(state_bits(second), state_bits(whole))


def test_channels_last_weights_resume_with_a_fused_optimizer(tmp_path: Path) -> None:
    """torch's fused kernels walk weight and state side by side and ignore strides."""

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).to(
            memory_format=torch.channels_last
        )

    batch = (torch.randn(4, 3, 4, 4), torch.randn(4, 2))
    whole = run_of(net(), OPTIMIZERS["adamw-fused"])
    first = run_of(net(), OPTIMIZERS["adamw-fused"], folder=tmp_path)
    for run in (whole, first):
        for _ in range(2):
            run.step(batch)
    first.save()
    second = run_of(net(), OPTIMIZERS["adamw-fused"], folder=tmp_path)
    second.restore()
    for run in (whole, second):
        run.step(batch)
    assert_same_bits(bits(second.model), bits(whole.model))


def test_a_loader_made_before_restore_goes_on_too(tmp_path: Path) -> None:
    """Without the guard it would start the data anew, silently."""
    first = made(OPTIMIZERS["sgd"], tmp_path)
    some(first, 2)
    first.save()
    second = made(OPTIMIZERS["sgd"], tmp_path)
    loader = second.loader(ROWS)
    second.restore()
    batch = next(iter(loader))
    assert batch.position == 12


def test_the_same_dataset_gives_the_next_epoch() -> None:
    run = made(OPTIMIZERS["sgd"])
    orders = []
    for _ in range(2):
        epoch = []
        for batch in run.loader(ROWS):
            epoch += [i for ids in batch.sample_ids for i in ids]
            run.step(batch)
        assert sorted(epoch) == list(range(22))
        orders.append(epoch)
    assert orders[0] != orders[1]


def test_a_second_dataset_does_not_disturb_the_first(tmp_path: Path) -> None:
    """A loader for validation is no reason to refuse it, or to save its place as training's."""
    run = made(OPTIMIZERS["sgd"], tmp_path)
    some(run, 2)
    other = run.loader(Rows(10))
    assert other.position == 0
    run.evaluate(other)
    some(run, 1)
    assert run.feed.state == [{"position": 18, "samples": 22}]


def test_tied_weights_are_saved_once_and_come_back_tied(tmp_path: Path) -> None:
    run = made(OPTIMIZERS["sgd"], tmp_path)
    some(run, 1)
    folder = run.save()
    names: list[str] = []
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names += list(opened.keys())
    assert len(names) == len(set(names))
    assert "model.layers.1.1.weight" in names
    assert "model.again.weight" not in names
    fresh = made(OPTIMIZERS["sgd"], tmp_path)
    fresh.restore()
    assert fresh.model.again.weight is fresh.model.layers[1][1].weight
    assert_same_bits(bits(fresh.model), bits(run.model))


def test_restore_without_a_checkpoint_is_false(tmp_path: Path) -> None:
    assert run_of(linear(), folder=tmp_path).restore() is False


def test_a_restore_from_a_folder_that_does_not_exist_names_the_nearest(tmp_path: Path) -> None:
    """A folder inside of the run's own may be missing: a first start finds no best one there."""
    for name in ("pretrained", "own"):
        (tmp_path / name).mkdir()
    run = run_of(linear(), folder=tmp_path / "own")
    assert run.restore(tmp_path / "own" / "best") is False
    assert run.restore(tmp_path / "pretrained") is False
    where = f"run.restore: folder = {tmp_path}/"
    near = f'does not exist; try: run.restore("{tmp_path}/pretrained")'
    for missing in ("pretraind", "pretraind/best"):
        with pytest.raises(CheckpointError) as failure:
            run.restore(tmp_path / missing)
        assert str(failure.value) == f"{where}{missing}: {near}"
    with pytest.raises(CheckpointError, match="does not exist; try: a folder that holds a run, or"):
        run.restore(tmp_path / "zzz")
    assert run.step(pair()).step == 1, "the run goes on, if its loop catches the error"
    run.close()


def test_a_tag_or_a_step_without_a_checkpoint_is_one_line(tmp_path: Path) -> None:
    """A loop that ignores False would go on with other weights than it asked for."""
    run = run_of(linear(), folder=tmp_path)
    where = f"folder = {tmp_path}: no checkpoint with "
    for keys, line in (
        ({"tag": "best"}, "tag='best'; it holds no checkpoint at all"),
        ({"step": 4}, "step=4; it holds no checkpoint at all"),
    ):
        with pytest.raises(CheckpointError) as failure:
            run.restore(**keys)
        assert str(failure.value) == where + line
    for _ in range(3):
        run.step(pair())
        run.save()
    with pytest.raises(CheckpointError, match="no checkpoint has a tag; steps: 2, 3; try: step=3"):
        run.restore(tag="best")
    run.save(tag="best")
    for keys, line in (
        ({"tag": "bset"}, "tag='bset'; tags: best; steps: 2, 3; try: tag='best'"),
        ({"step": 999}, "step=999; steps: 2, 3; try: step=3"),
        ({"step": 0}, "step=0; steps: 2, 3; try: step=2"),
        ({"tag": "best", "step": 2}, "tag='best', step=2; steps: 3; try: tag='best', step=3"),
    ):
        with pytest.raises(CheckpointError) as failure:
            run.restore(**keys)
        assert str(failure.value) == where + line
    run.close()
    again = run_of(linear(), folder=tmp_path)
    with pytest.raises(CheckpointError):
        again.restore(step=999)
    with pytest.raises(ConfigError, match="holds checkpoints of an earlier run"):
        again.step(pair())  # a loop that passes over the refusal does not begin anew
    assert again.restore(tag="best")
    again.close()


def test_save_without_a_folder_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^no run folder; try: shoal.parallelize"):
        run_of(linear()).save()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="folder = .*file/x: cannot be made: "):
        run_of(linear(), folder=tmp_path / "file" / "x")


def test_a_new_folder_is_made_and_written(tmp_path: Path) -> None:
    """Without it the own loop's metrics would be dropped until the first save."""
    folder = tmp_path / "runs" / "x"
    run = run_of(linear(), folder=folder)
    run.step(pair())
    row = json.loads((folder / "metrics.jsonl").read_text())
    assert row["step"] == 1
    assert {"loss", "grad_norm", "lr", "tokens", "step_s", "comm_bytes"} <= row.keys()


def saved(tmp_path: Path):
    run = run_of(linear(), folder=tmp_path)
    run.step(pair())
    run.save()
    return run


def test_another_optimizer_class_is_one_line_and_moves_nothing(tmp_path: Path) -> None:
    saved(tmp_path)
    other = run_of(linear(3), lambda p: torch.optim.AdamW(p), folder=tmp_path)
    before = bits(other.model)
    with pytest.raises(CheckpointError) as failure:
        other.restore()
    assert str(failure.value) == (
        "optimizer: the checkpoint was written by SGD, this run has AdamW; try: torch.optim.SGD"
    )
    assert_same_bits(bits(other.model), before)


def test_another_model_is_one_line_and_moves_nothing(tmp_path: Path) -> None:
    saved(tmp_path)
    wider = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 2))
    deeper = nn.Sequential(*linear(), nn.Linear(2, 2))
    for model, words in (
        (wider, "model.0.weight: [8, 4] float32 in the checkpoint, [9, 4] float32 in this model"),
        (deeper, "model.3.bias: only in this model; the model was built with other arguments"),
        (linear()[:1], "model.2.bias: only in the checkpoint"),
        (linear().double(), "[8, 4] float32 in the checkpoint, [8, 4] float64 in this model"),
    ):
        run = run_of(model, folder=tmp_path)
        before = bits(model)
        with pytest.raises(CheckpointError) as failure:
            run.restore()
        assert words in str(failure.value)
        assert "\n" not in str(failure.value)
        assert_same_bits(bits(model), before)


def test_other_data_is_refused_before_anything_moves(tmp_path: Path) -> None:
    first = made(OPTIMIZERS["sgd"], tmp_path)
    some(first, 1)
    first.save()
    second = made(OPTIMIZERS["sgd"], tmp_path)
    second.loader(Rows(21))
    before = bits(second.model)
    with pytest.raises(ConfigError, match="has 21 samples, the checkpoint was made with 22"):
        second.restore()
    assert_same_bits(bits(second.model), before)


def test_what_differs_is_told(tmp_path: Path) -> None:
    saved(tmp_path)
    other = run_of(
        linear(), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5), folder=tmp_path, seed=4
    )
    other.restore()
    event = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-1])
    assert event["event"] == "resumed"
    assert "seed: 0 → 4" in event["differs"]
    assert "optimizer group 0: momentum: 0.9 → 0.5" in event["differs"]
    assert other.optimizer.param_groups[0]["momentum"] == 0.5


def test_groups_in_another_order_get_their_own_rates_back(tmp_path: Path) -> None:
    def build(model, order):
        parts = [model[0], model[2]]
        return torch.optim.SGD([{"params": parts[i].parameters()} for i in order], lr=1.0)

    model = linear()
    run = run_of(model, build(model, (0, 1)), folder=tmp_path)
    run.optimizer.param_groups[0]["lr"] = 0.25
    run.step(pair())
    run.save()
    twin = linear()
    other = run_of(twin, build(twin, (1, 0)), folder=tmp_path)
    other.restore()
    assert [g["lr"] for g in other.optimizer.param_groups] == [1.0, 0.25]


def test_a_schedule_resumes_exactly(tmp_path: Path) -> None:
    policy = OptimizerPolicy(schedule="one-cycle")
    settings = {"schedule": policy, "total_steps": 8}
    whole = made(sgd, **settings)
    expected = some(whole, 8)
    first = made(sgd, tmp_path, **settings)
    told = some(first, 5)
    first.save()
    second = made(sgd, tmp_path, **settings)
    second.restore()
    assert told + some(second, 3) == expected


def test_a_module_with_foreign_state_is_one_line_at_the_start(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"k": 1}

        def set_extra_state(self, state):
            pass

    with pytest.raises(ConfigError) as failure:
        run_of(Extra(4, 2), folder=tmp_path)
    assert str(failure.value).startswith("model: _extra_state keeps a dict in its state")
