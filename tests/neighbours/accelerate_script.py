"""A script of Accelerate's: accumulation, clipping, a schedule, dropout, uneven batches, metrics, state.

python accelerate_script.py OUT ACCUMULATION [split]
"""

import json
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn

OUT, ACCUMULATION, SPLIT = sys.argv[1], int(sys.argv[2]), "split" in sys.argv


def main():
    set_seed(1)
    accelerator = Accelerator(
        gradient_accumulation_steps=ACCUMULATION,
        cpu=True,
        dataloader_config=DataLoaderConfiguration(split_batches=SPLIT),
    )
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(203, 16, generator=generator)
    data = torch.utils.data.TensorDataset(inputs, inputs @ torch.randn(16, 4, generator=generator))
    train = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    held = torch.utils.data.DataLoader(data, batch_size=16)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 4))
    criterion = nn.MSELoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))
    model, optimizer, train, held, schedule = accelerator.prepare(
        model, optimizer, train, held, schedule
    )
    found = []

    def epoch():
        model.train()
        for inputs, targets in train:
            with accelerator.accumulate(model):
                loss = criterion(model(inputs), targets)
                accelerator.backward(loss)
                row = [loss.item()]
                if accelerator.sync_gradients:
                    row.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            found.append([*row, schedule.get_last_lr()[0]])
        model.eval()
        total, count = 0.0, 0
        with torch.no_grad():
            for inputs, targets in held:
                losses = accelerator.gather_for_metrics(((model(inputs) - targets) ** 2).mean(1))
                total, count = total + losses.sum().item(), count + len(losses)
        found.append([total / count, count])

    epoch()
    epoch()
    accelerator.save_state("state")
    epoch()
    last = found[-1]
    accelerator.load_state("state")
    epoch()
    found.append([last[0] - found[-1][0]])
    if accelerator.is_main_process:
        with open(OUT, "w") as file:
            json.dump(found, file)
    accelerator.end_training()


if __name__ == "__main__":
    main()
