"""A script of Accelerate's whose micro-batches hold unequal counts of targets.

python exact_script.py OUT ACCUMULATION BATCH
"""

import json
import sys

import torch
from accelerate import Accelerator
from torch import nn

OUT, ACCUMULATION, BATCH = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def main():
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION, cpu=True)
    draws = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 16, (32, 12), generator=draws)
    labels = tokens.roll(-1, 1)
    for row in range(32):  # the first have many targets, the last few
        labels[row, 1 + (31 - row) // 3 :] = -100
    data = torch.utils.data.TensorDataset(tokens, labels)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Embedding(16, 32), nn.Tanh(), nn.Linear(32, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    norms = []
    for _ in range(3):
        for ids, targets in loader:
            with accelerator.accumulate(model):
                loss = criterion(model(ids).flatten(0, 1), targets.flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                optimizer.zero_grad()
    weights = accelerator.unwrap_model(model).state_dict()
    if accelerator.is_main_process:
        sums = {name: one.double().abs().sum().item() for name, one in weights.items()}
        with open(OUT, "w") as file:
            json.dump({"norms": norms, "weights": sums}, file)
    accelerator.end_training()


if __name__ == "__main__":
    main()
