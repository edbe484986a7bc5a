"""A student that learns from a prepared teacher, and saves itself with its settings in one file.

python distilled.py [--resume FILE]
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def build(width, dropout):
    return nn.Sequential(
        nn.Linear(12, width),
        nn.GELU(),
        nn.LayerNorm(width),
        nn.Dropout(dropout),
        nn.Linear(width, 5),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", default="")
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    set_seed(21, device_specific=True)
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(110, 12, generator=draws)
    train = DataLoader(TensorDataset(x[:90]), batch_size=5, shuffle=True)
    held = DataLoader(TensorDataset(x[90:]), batch_size=5)
    torch.manual_seed(0)
    teacher, student = build(64, 0.0), build(16, 0.1)
    teacher.requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    first = 0
    if args.resume:
        kept = torch.load(args.resume, weights_only=False)
        student.load_state_dict(kept["student"])
        first = kept["epoch"] + 1
    teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
    student, optimizer, train, held, schedule = accelerator.prepare(
        student, optimizer, train, held, schedule
    )
    teacher.eval()
    for epoch in range(first, first + 2):
        student.train()
        for step, (inputs,) in enumerate(train):
            with accelerator.accumulate(student):
                with torch.no_grad():
                    wanted = F.softmax(teacher(inputs) / 2, -1)
                found = F.log_softmax(student(inputs) / 2, -1)
                loss = F.kl_div(found, wanted, reduction="batchmean") * 4
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if step % 4 == 0:
                accelerator.print(f"{epoch} {step} {accelerator.reduce(loss.detach()).item()}")
        student.eval()
        agreed = []
        with torch.no_grad():
            for (inputs,) in held:
                same = (student(inputs).argmax(-1) == teacher(inputs).argmax(-1)).float()
                agreed.append(accelerator.gather_for_metrics(same))
        accelerator.print(f"agreed {torch.cat(agreed).mean().item()} of {len(torch.cat(agreed))}")
        state = {
            "student": accelerator.get_state_dict(student),
            "epoch": epoch,
            "args": args,
            "sizes": (12, 16, 5),
            "mean": x.mean(0).numpy(),
            "lr": schedule.get_last_lr(),
        }
        accelerator.save(state, f"student-{epoch}.pt")


if __name__ == "__main__":
    main()
