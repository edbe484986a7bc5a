"""A student under ZeRO 1 and a teacher that only predicts, dropout, losses of two parts, several saves in a run.

python teacher_and_student.py [--resume TAG]
"""

import argparse
import random

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


def seed(value):
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def build(width):
    return nn.Sequential(
        nn.Linear(10, width), nn.ReLU(), nn.Dropout(0.15), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, 4),
    )  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", default=None)
    args = parser.parse_args()
    deepspeed.init_distributed("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    seed(0)
    teacher, student = build(48).eval(), build(12)
    for p in teacher.parameters():
        p.requires_grad_(False)
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 6e-3, "betas": [0.9, 0.95], "weight_decay": 0.05, "torch_adam": True},
        },
        "scheduler": {
            "type": "OneCycle",
            "params": {
                "cycle_min_lr": 1e-3, "cycle_max_lr": 6e-3, "cycle_first_step_size": 6,
                "cycle_momentum": False,
            },
        },
        "zero_optimization": {"stage": 1},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=student, model_parameters=student.parameters(), config=config
    )
    draws = np.random.RandomState(5)
    data = torch.tensor(draws.randn(96, 10), dtype=torch.float32)
    first = 0
    if args.resume:
        path, state = engine.load_checkpoint("student", args.resume)
        first = state["step"]
        torch.set_rng_state(torch.as_tensor(state["rng"][rank], dtype=torch.uint8))
    else:
        seed(100 + rank)
    for step in range(first, first + 12):
        at = (step * size + rank) * 6 % 96
        inputs = data[at : at + 6]
        with torch.no_grad():
            wanted = teacher(inputs)
        scores = engine(inputs)
        soft = F.kl_div(F.log_softmax(scores, -1), F.softmax(wanted, -1), reduction="batchmean")
        hard = F.cross_entropy(scores, wanted.argmax(-1))
        loss = 0.7 * soft + 0.3 * hard
        engine.backward(loss)
        engine.step()
        if rank == 0 and step % 3 == 0:
            print(f"step {step} {soft.item()} {hard.item()} {engine.get_lr()[0]}")
        if step in (5, 11):
            rng = [torch.empty_like(torch.get_rng_state()) for _ in range(size)]
            dist.all_gather(rng, torch.get_rng_state())
            state = {"step": step + 1, "rng": [one.tolist() for one in rng], "name": "student"}
            engine.save_checkpoint("student", tag=f"step_{step + 1}", client_state=state)
    engine.eval()
    with torch.no_grad():
        agreed = (engine(data).argmax(-1) == teacher(data).argmax(-1)).float().mean()
    dist.reduce(agreed, 0)
    if rank == 0:
        print(f"agreed {agreed.item() / size}")
    engine.save_checkpoint(
        "student", tag="last", client_state={"step": step + 1}, save_latest=False
    )
    if rank == 0:
        with open("student/latest") as file:
            print(file.read())
        torch.save(engine.module, "student.whole") if False else None
        torch.save({k: v.cpu() for k, v in engine.module.state_dict().items()}, "student.pt")


if __name__ == "__main__":
    main()
