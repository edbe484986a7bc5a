"""Two ranks that save with torch.distributed.checkpoint; rank 0 keeps the whole weights beside.

python dcp_folder.py FOLDER    writes FOLDER/dcp and FOLDER/whole.safetensors
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh


class Net(nn.Module):
    """Rows that two ranks cannot halve, a buffer, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 3, bias=False)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(self.up(x)))


def main(folder: Path) -> None:
    signal.alarm(100)
    rank = 1 if os.fork() == 0 else 0
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    net = Net()
    for part in (net.up, net.down, net):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(3):
        net(torch.randn(8, 6)).square().sum().backward()
        optimizer.step()
    model, states = get_state_dict(net, optimizer)
    more = {
        "columns": distribute_tensor(torch.randn(4, 5), mesh, [Shard(1)]),
        "copies": distribute_tensor(torch.randn(3, 2).bfloat16(), mesh, [Replicate()]),
        "transposed": torch.randn(5, 4).T,
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "small": torch.randn(4).to(torch.float8_e4m3fn),
    }
    state = {"model": model | more, "optim": states, "step": 3}
    writer = dcp.FileSystemWriter(folder / "dcp", thread_count=2)
    dcp.save(state, storage_writer=writer)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_state_dict(net, optimizer, options=options)[0]
    whole |= {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in more.items()}
    if rank == 0:
        kept = {name: tensor.contiguous() for name, tensor in whole.items()}
        safetensors.torch.save_file(kept, folder / "whole.safetensors")
    dist.barrier()
    dist.destroy_process_group()
    if rank == 1:
        os._exit(0)
    os.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
