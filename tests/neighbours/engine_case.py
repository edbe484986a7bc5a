"""What scripts ask of DeepSpeed's engine, beside plain torch: run as a rank of a world.

python engine_case.py STAGE
"""

# ruff: noqa: I001
import shoal
import shoal.neighbours.deepspeed as deepspeed

import copy
import logging
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

STAGE = int(sys.argv[1])
ACCUMULATE, MICRO, LR, WARM = 3, 2, 0.01, 4


CURVES = {"enabled": True, "output_path": "curves", "job_name": "engine"}
BOTH = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(8, 16), nn.Linear(16, 4), nn.Dropout(0.2)

    def forward(self, inputs):
        return self.last(self.drop(torch.relu(self.first(inputs))))


def config(size: int, **more: object) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATE,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "Adam", "params": {"lr": LR, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": WARM}},
        "zero_optimization": {"stage": STAGE, **(BOTH if STAGE == 3 else {})},
        **more,
    }


def samples(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    count = 22 * MICRO * size
    inputs = torch.randn(count, 8, generator=generator)
    return inputs, torch.randint(0, 4, (count,), generator=generator)


def part(index: int, rank: int, size: int) -> slice:
    at = (index * size + rank) * MICRO
    return slice(at, at + MICRO)


def plain(model: nn.Module, size: int, steps: int) -> list[float]:
    """The losses of each update as plain torch has them, ranks one after another."""
    inputs, labels = samples(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.1)
    draws, losses = [], []
    for rank in range(size):
        torch.manual_seed(100 + rank)
        draws.append(torch.get_rng_state())
    for step in range(steps):
        total = 0.0
        optimizer.zero_grad()
        for rank in range(size):
            torch.set_rng_state(draws[rank])
            for k in range(ACCUMULATE):
                rows = part(step * ACCUMULATE + k, rank, size)
                loss = nn.functional.cross_entropy(model(inputs[rows]), labels[rows])
                (loss / ACCUMULATE / size).backward()
                total += loss.item() / ACCUMULATE / size
            draws[rank] = torch.get_rng_state()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        # ln(k + 1) / ln(N) with k two behind: the first two updates run at nothing
        rate = 0.0 if step < 2 else LR * min(1.0, math.log(step) / math.log(WARM))
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        losses.append(total)
    return losses


def main() -> None:
    deepspeed.init_distributed()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model()
    alone = copy.deepcopy(model)
    inputs, labels = samples(size)
    with deepspeed.zero.Init():
        engine, optimizer, loader, scheduler = deepspeed.initialize(
            model=model, model_parameters=model.parameters(),
            config=config(size, csv_monitor=CURVES),
        )  # fmt: skip
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    assert engine.train_batch_size() == ACCUMULATE * MICRO * size
    assert (loader, engine.zero_optimization_stage()) == (None, STAGE)
    torch.manual_seed(100 + rank)
    found, means, rates, mid = [], [], [], torch.Tensor()
    for index in range(16):  # five updates and one pass of a sixth
        if index == 7:
            engine.eval()
            with torch.no_grad():
                mid = engine(inputs[:4])
            engine.train()
        rows = part(index, rank, size)
        loss = nn.functional.cross_entropy(engine(inputs[rows]), labels[rows])
        boundary = engine.is_gradient_accumulation_boundary()
        assert boundary == (index % ACCUMULATE == ACCUMULATE - 1)
        scaled = engine.backward(loss)
        assert torch.allclose(scaled * ACCUMULATE, loss.detach())
        engine.step()
        found.append(loss.item())
        if boundary:
            means.append(engine.loop.last.loss)
            rates += [f"{engine.global_samples},{engine.get_lr()[0]}"]
    assert mid.shape == (4, 4)
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (5, 16, 0)
    curve = Path("curves", "engine", "Train_Samples_lr.csv")
    if rank == 0:
        assert curve.read_bytes().decode() == "\r\n".join(["step,lr", *rates, ""])
        assert [one.name for one in curve.parent.iterdir()] == [curve.name]  # no loss scale
    weights = engine.module_state_dict()
    wanted = plain(alone, size, 5)
    assert all(abs(a - b) < 2e-6 for a, b in zip(means, wanted, strict=True)), (means, wanted)
    for name, value in alone.state_dict().items():
        assert torch.allclose(weights[name], value, atol=2e-6), name
    assert engine.get_global_grad_norm() > 0
    gather(engine, weights)
    assert engine.get_lr() == [scheduler.get_last_lr()[0]]
    engine.tput_timer.update_epoch_count()

    resume(engine, weights, scheduler)
    narrow(torch.bfloat16, 0.992 if STAGE else 1.0)  # of stage 0 DeepSpeed has no masters then
    narrow(torch.float16, 0.992, fp16={"enabled": True, "loss_scale": 1})


def gather(engine, weights):
    """Whole weights in a script's hands under every stage; those of one rank are written to all."""
    held = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(held.values()):
        for name, one in held.items():
            assert torch.equal(one.data.cpu(), weights[name]), name
        if dist.get_rank() == 0:  # one rank alone may ask for all
            found = engine.module.state_dict()
            assert all(torch.equal(found[name], value) for name, value in weights.items())
        held["last.bias"].data.zero_() if STAGE == 3 else None  # nobody's values: lost
    name = "first.bias"
    with deepspeed.zero.GatheredParameters([held[name]], modifier_rank=1), torch.no_grad():
        held[name].fill_(0.5 + dist.get_rank())
    changed = engine.module_state_dict()
    if STAGE == 3:
        assert changed[name].eq(1.5).all(), "rank 1's values"
    assert torch.equal(changed["last.bias"], weights["last.bias"])
    with deepspeed.zero.GatheredParameters([held[name]], modifier_rank=0), torch.no_grad():
        held[name].copy_(weights[name])
    alike(engine, weights)


def resume(engine, weights, scheduler):
    """Checkpoints by tag, by `latest` and by step; what a script keeps of its own comes back."""
    size, kept = dist.get_world_size(), {"seen": 16, "draws": torch.arange(3)}
    engine.save_checkpoint("saved", client_state={**kept, "function": print})
    engine.save_checkpoint("saved", tag="epoch=1", client_state={"seen": 17})
    assert Path("saved/latest").read_text() == "epoch=1"
    engine.save_checkpoint("saved", tag="other", client_state={"seen": 18}, save_latest=False)
    assert Path("saved/latest").read_text() == "epoch=1"
    with Heard() as heard:
        engine.save_checkpoint("own tags", tag=f"rank-{dist.get_rank()}")
    held = sorted(one.name for one in Path("own tags").iterdir())
    assert held == ["latest", "rank-0", *(["zero_to_fp32.py"] if STAGE else [])]
    assert ["all ranks take rank 0's" in line for line in heard.lines] == [True] * (dist.get_rank() == 0)  # fmt: skip
    assert engine.save_16bit_model("weights")
    written = torch.load("weights/pytorch_model.bin", weights_only=True)
    assert {name: torch.equal(value, weights[name]) for name, value in written.items()} == dict.fromkeys(weights, True)  # fmt: skip
    engine.destroy()
    whole = get_fp32_state_dict_from_zero_checkpoint("saved")
    assert all(torch.equal(value, weights[name]) for name, value in whole.items())
    again, *_ = deepspeed.initialize(model=Model(), config=config(size))
    with Heard() as heard:
        assert again.load_checkpoint("nowhere") == (None, None)
    assert ["nothing was loaded, and training starts anew: nowhere is no folder" in line
            for line in heard.lines] == [True] * (dist.get_rank() == 0)  # fmt: skip
    assert again.load_checkpoint("saved", load_module_only=True)[1] == {"seen": 17}
    assert (again.global_steps, len(again.optimizer.state)) == (0, 0)
    alike(again, weights)
    path, state = again.load_checkpoint("saved")
    assert (Path(path).parent, state) == (Path("saved/epoch=1"), {"seen": 17})
    assert (again.global_steps, again.micro_steps) == (5, 0), "an open window starts anew"
    alike(again, weights)
    assert again.load_checkpoint("saved", tag="other")[1] == {"seen": 18}
    state = again.load_checkpoint("saved", tag="global_step5")[1]
    assert (state["seen"], state["draws"].tolist()) == (16, [0, 1, 2])
    assert again.lr_scheduler.state_dict() == scheduler.state_dict()
    with pytest.raises(
        shoal.ConfigError, match='holds no checkpoint of the tag othr; try: tag="other"'
    ):
        again.load_checkpoint("saved", tag="othr")
    again.destroy()
    fresh, *_ = deepspeed.initialize(model=Model(), config=config(size))
    fresh.load_checkpoint("saved", load_optimizer_states=False)
    assert (fresh.global_steps, len(fresh.optimizer.state)) == (5, 0)
    alike(fresh, weights)
    fresh.destroy()


class Heard(logging.Handler):
    """Collects the lines for the user."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> "Heard":
        logging.getLogger("shoal").addHandler(self)
        return self

    def __exit__(self, *what: object) -> None:
        logging.getLogger("shoal").removeHandler(self)


def alike(engine, weights):
    for name, value in engine.module_state_dict().items():
        assert torch.equal(value, weights[name]), name


def narrow(kind: torch.dtype, wanted: float, **more: object) -> None:
    """Weights that come so are stepped in fp32, as DeepSpeed's masters: no small step is lost."""
    model = nn.Linear(4, 1, bias=False, dtype=kind)
    nn.init.ones_(model.weight)
    small = {"optimizer": {"type": "SGD", "params": {"lr": 1e-3}}, "gradient_clipping": 0.0,
             "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": STAGE},
             "csv_monitor": {"enabled": True, "output_path": f"curves-{kind}"}, **more}  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, config=small)
    for _ in range(8):
        engine.backward(engine(torch.ones(1, 4, dtype=model.weight.dtype)).float().mean())
        engine.step()
    weight = engine.module_state_dict()["weight"]
    assert torch.allclose(weight.float(), torch.full((1, 4), wanted), atol=1e-6), weight
    if dist.get_rank() == 0:
        folder = Path(f"curves-{kind}", "DeepSpeedJobName")
        scales = folder / "Train_Samples_loss_scale.csv"
        assert scales.exists() == (kind is torch.float16)
        rows = (scales if scales.exists() else folder / "Train_Samples_lr.csv").read_text()
        assert rows.split()[0] == ("step,loss_scale" if scales.exists() else "step,lr")
        assert rows.split()[-1].startswith(f"{8 * dist.get_world_size()},")
    if kind is torch.bfloat16 and STAGE in (1, 2):  # as DeepSpeed's module: whole, and narrow
        assert engine.module.state_dict()["weight"].dtype == kind
    engine.destroy()


main()
