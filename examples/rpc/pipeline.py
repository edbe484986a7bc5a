"""A pipeline over torch RPC: two stages on two processes, micro-batches under way at once.

Not part of Shoal: RPC runs its peers' pickles by design, so whoever reaches a process runs code in
it. This stays on the loopback of one machine, and meets in a folder that only its user may read.
Shoal's own pipelines, on plain messages: layout.strategy=pp.
Start: python examples/rpc/pipeline.py
"""

import os
import tempfile

import torch
from torch import nn
from torch.distributed import autograd, rpc
from torch.distributed.optim import DistributedOptimizer
from torch.multiprocessing.spawn import start_processes

STEPS, MICRO_BATCHES = 10, 4
torch.manual_seed(0)
STAGES = [nn.Sequential(nn.Linear(8, 32), nn.Tanh()), nn.Sequential(nn.Linear(32, 1), nn.Tanh())]


def run(stage: int, inputs: rpc.RRef) -> torch.Tensor:  # where the stage is
    return STAGES[stage](inputs.to_here())


def weights(stage: int) -> list[rpc.RRef]:
    return [rpc.RRef(one) for one in STAGES[stage].parameters()]


def drive() -> None:
    parts = [one for k in (0, 1) for one in rpc.rpc_sync(f"rank-{k + 1}", weights, (k,))]
    optimizer = DistributedOptimizer(torch.optim.SGD, parts, lr=0.2)
    draws = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        inputs = torch.randn(32, 8, generator=draws)
        with autograd.context() as step:
            # What the first stage gives stays there until the second asks for it.
            ready = [rpc.RRef(one) for one in inputs.chunk(MICRO_BATCHES)]
            halves = [rpc.remote("rank-1", run, (0, one)) for one in ready]
            sent = [rpc.rpc_async("rank-2", run, (1, one)) for one in halves]
            outputs = torch.cat(torch.futures.wait_all(sent))
            loss = nn.functional.mse_loss(outputs, inputs.sum(1, keepdim=True).tanh())
            autograd.backward(step, [loss])
            optimizer.step(step)
    print(f"loss {loss.item()!r} after {STEPS} steps of {MICRO_BATCHES} micro-batches")


def main(rank: int, folder: str) -> None:
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # this machine alone
    there = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/meet")
    rpc.init_rpc(f"rank-{rank}", rank=rank, world_size=3, rpc_backend_options=there)
    if rank == 0:
        drive()
    rpc.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as private:  # of mode 0700
        start_processes(main, (private,), nprocs=3, start_method="fork")
