"""Accumulation by hand with no_sync, noise on the inputs, evaluation in mid-epoch, a stop that one process asks for.

python by_hand.py [--resume FOLDER]
"""

import argparse
import contextlib
import time

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EVERY = 2


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 7) for _ in range(3)])
        self.drop, self.out = nn.Dropout(0.2), nn.Linear(7, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls += 1
        for layer in self.layers:
            x = x + self.drop(torch.tanh(layer(x)))
        return self.out(x)[:, 0]


def evaluate(accelerator, model, loader):
    was = model.training
    model.eval()
    parts = []
    with torch.no_grad(), accelerator.autocast():
        for x, y in loader:
            parts.append(accelerator.gather_for_metrics((model(x) - y).abs()))
    model.train(was)
    return torch.cat(parts).mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", default="")
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    set_seed(31)
    name = [f"run-{int(time.time())}"]
    broadcast_object_list(name)
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(100, 7, generator=draws)
    data = TensorDataset(x, (x[:, :3].prod(1) + x[:, 3]))
    loader = DataLoader(data, batch_size=5, shuffle=True)
    held = DataLoader(torch.utils.data.Subset(data, range(80, 100)), batch_size=5)
    model = Regressor()
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
    model, optimizer, loader, held = accelerator.prepare(model, optimizer, loader, held)
    step, epoch = 0, 0
    if args.resume:
        accelerator.load_state(args.resume)
        epoch = 1
        step = epoch * len(loader)
    started = time.time()
    for epoch in range(epoch, 3):  # noqa: B020
        model.train()
        for inputs, targets in loader:
            step += 1
            last = step % EVERY == 0
            with contextlib.nullcontext() if last else accelerator.no_sync(model):
                noisy = inputs + 0.01 * torch.randn_like(inputs)
                loss = nn.functional.l1_loss(model(noisy), targets) / EVERY
                accelerator.backward(loss)
            if last:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            if step % 7 == 0:
                accelerator.print(f"step {step} held {evaluate(accelerator, model, held)}")
        accelerator.save_state(f"by-hand/{epoch}", safe_serialization=False)
        if accelerator.process_index == 1 and time.time() - started > 3600:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    weights = accelerator.unwrap_model(model).state_dict()
    accelerator.print(f"calls {weights['calls'].item()}")
    if accelerator.is_main_process:
        torch.save({"weights": weights, "step": step}, "by-hand/model.tar")
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
