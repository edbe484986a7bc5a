"""Checkpoints by the script's own torch.save, the best of them kept, and an early stop.

python own_checkpoints.py [--resume FILE]
"""

import argparse
import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.body(x)).squeeze(-1)


def save_checkpoint(accelerator, path, model, optimizer, scheduler, epoch, best):
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        checkpoint = {
            "epoch": epoch,
            "best": best,
            "model": accelerator.unwrap_model(model).state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }
        torch.save(checkpoint, path)


def evaluate(accelerator, model, loader):
    model.eval()
    total, count = torch.zeros(1), torch.zeros(1)
    with torch.no_grad():
        for x, y in loader:
            predictions, targets = accelerator.gather_for_metrics((model(x), y))
            total += (predictions - targets).square().sum()
            count += len(targets)
    return (total / count).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", default="")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(150, 10, generator=draws)
    y = x @ torch.randn(10, generator=draws) + 0.1 * torch.randn(150, generator=draws)
    train = DataLoader(TensorDataset(x[:120], y[:120]), batch_size=10, shuffle=False)
    held = DataLoader(TensorDataset(x[120:], y[120:]), batch_size=10)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=12, gamma=0.5)
    start, best, waited = 0, float("inf"), 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu", weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        start, best = checkpoint["epoch"] + 1, checkpoint["best"]
    model, optimizer, train, held, scheduler = accelerator.prepare(
        model, optimizer, train, held, scheduler
    )
    for epoch in range(start, args.epochs):
        model.train()
        for batch, (inputs, targets) in enumerate(train):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), max_norm=5.0)
            optimizer.step()
            scheduler.step()
            if batch % 2 == 0:
                accelerator.print(f"{epoch} {batch} {accelerator.gather(loss).mean().item()}")
        score = evaluate(accelerator, model, held)
        accelerator.print(f"epoch {epoch} held {score} lr {optimizer.param_groups[0]['lr']}")
        if score < best:
            best, waited = score, 0
            save_checkpoint(accelerator, "kept/best.pth", model, optimizer, scheduler, epoch, best)
        else:
            waited += 1
        save_checkpoint(accelerator, f"kept/{epoch}.pth", model, optimizer, scheduler, epoch, best)
        if waited > 2:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    accelerator.wait_for_everyone()
    kept = torch.load("kept/best.pth", map_location="cpu", weights_only=True)
    accelerator.unwrap_model(model).load_state_dict(kept["model"])
    accelerator.print(f"best {kept['epoch']} {evaluate(accelerator, model, held)}")


if __name__ == "__main__":
    main()
