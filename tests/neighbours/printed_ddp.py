"""The DDP script of the starting texts: between the marks as it is printed, lines added around it."""

# ruff: noqa: E402, F401, I001
import shoal.neighbours.without_cuda

import json
import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class MyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        kept.append(self)

    def forward(self, inputs):
        return self.last(torch.relu(self.first(inputs)))


kept: list[nn.Module] = []
criterion, num_epochs = nn.CrossEntropyLoss(), 2
torch.manual_seed(0)
generator = torch.Generator().manual_seed(3)
dataset = TensorDataset(
    torch.randn(256, 8, generator=generator), torch.randint(0, 4, (256,), generator=generator)
)
# fmt: off
# ---- as printed
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def setup_distributed():
    """Initialize distributed environment"""
    dist.init_process_group(backend='nccl')
    local_rank = int(os.environ['LOCAL_RANK'])
    torch.cuda.set_device(local_rank)
    return local_rank

def train_ddp():
    """DDP training example"""
    local_rank = setup_distributed()

    # Create model
    model = MyModel().cuda(local_rank)
    model = DDP(model, device_ids=[local_rank])

    # Optimizer
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    # Data loader
    train_loader = DataLoader(
        dataset,
        batch_size=32,
        sampler=DistributedSampler(dataset)
    )

    # Training loop
    for epoch in range(num_epochs):
        train_loader.sampler.set_epoch(epoch)

        for batch in train_loader:
            inputs, labels = batch
            inputs = inputs.cuda(local_rank)
            labels = labels.cuda(local_rank)

            # Forward
            outputs = model(inputs)
            loss = criterion(outputs, labels)

            # Backward
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            # Print only on main process
            if local_rank == 0:
                print(f"Epoch {epoch}, Loss: {loss.item():.4f}")

# Launch command: torchrun --nproc_per_node=4 train.py
# ---- until here
# fmt: on
train_ddp()
if dist.get_rank() == 0:
    with open(sys.argv[1], "w") as file:
        json.dump({name: value.tolist() for name, value in kept[0].state_dict().items()}, file)
dist.barrier()
dist.destroy_process_group()
