"""The DeepSpeed script of the starting texts: between the marks as it is printed, lines added around it."""

# ruff: noqa: E402, F401, I001
import shoal.neighbours.deepspeed

import importlib.util
import json
import os
import sys

import torch
from torch import nn

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, batch):
        inputs, labels = batch
        return nn.functional.cross_entropy(self.last(torch.relu(self.first(inputs))), labels)


torch.manual_seed(0)
model = Model()
generator = torch.Generator().manual_seed(3)
inputs = torch.randn(320, 8, generator=generator)
labels = torch.randint(0, 4, (320,), generator=generator)
micro = 32 // 4 // SIZE
starts = [k * 8 + RANK * micro for k in range(40)]
dataloader = [(inputs[at : at + micro], labels[at : at + micro]) for at in starts]
# fmt: off
# ---- as printed
from deepspeed import DeepSpeedEngine

# DeepSpeed configuration
ds_config = {
    "train_batch_size": 32,
    "gradient_accumulation_steps": 4,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-4}
    },
    "zero_optimization": {
        "stage": 2,  # ZeRO stage 2
        "offload_optimizer": {
            "device": "cpu"
        }
    },
    "fp16": {"enabled": True}
}

# Initialize
model_engine, optimizer, _, _ = DeepSpeedEngine(
    model=model,
    model_parameters=model.parameters(),
    config=ds_config
)

# Training
for batch in dataloader:
    loss = model_engine(batch)
    model_engine.backward(loss)
    model_engine.step()
# ---- until here
# fmt: on
found = {"weights": {n: v.tolist() for n, v in model_engine.module_state_dict().items()}}
found |= {
    "steps": model_engine.global_steps,
    "installed": str(importlib.util.find_spec("deepspeed")),
}
if RANK == 0:
    with open(sys.argv[1], "w") as file:
        json.dump(found, file)
model_engine.destroy()
