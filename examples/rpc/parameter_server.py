"""A parameter server over torch RPC: two trainers send gradients, one server steps.

Not part of Shoal: RPC runs its peers' pickles by design, so whoever reaches a process runs code in
it. This stays on the loopback of one machine, and meets in a folder that only its user may read.
Shoal's own server, on plain messages: layout.strategy=parameter-server.
Start: python examples/rpc/parameter_server.py
"""

import os
import tempfile
import threading

import torch
from torch import nn
from torch.distributed import rpc
from torch.multiprocessing.spawn import start_processes

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))  # every process's own copy
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1, momentum=0.9)
TRAINERS, STEPS, LOCK, SENT = 2, 20, threading.Lock(), []


@rpc.functions.async_execution
def push(gradients: list[torch.Tensor]) -> torch.futures.Future:  # on the server
    with LOCK:
        SENT.append((gradients, answer := torch.futures.Future()))
        if len(SENT) == TRAINERS:  # the last one steps for all
            for weight, *parts in zip(MODEL.parameters(), *(one for one, _ in SENT), strict=True):
                weight.grad = torch.stack(parts).mean(0)
            SGD.step()
            while SENT:
                SENT.pop()[1].set_result(MODEL.state_dict())
    return answer


def train(rank: int) -> float:  # runs on a trainer
    draws = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        inputs = torch.randn(16, 8, generator=draws)
        loss = nn.functional.mse_loss(MODEL(inputs), inputs.sum(1, keepdim=True).tanh())
        gradients = list(torch.autograd.grad(loss, list(MODEL.parameters())))
        MODEL.load_state_dict(rpc.rpc_sync("rank-0", push, (gradients,)))
    return loss.item()


def main(rank: int, folder: str) -> None:
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # this machine alone
    there = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/meet")
    rpc.init_rpc(f"rank-{rank}", rank=rank, world_size=TRAINERS + 1, rpc_backend_options=there)
    if rank == 0:
        sent = [rpc.rpc_async(f"rank-{r}", train, (r,)) for r in range(1, TRAINERS + 1)]
        total = sum(torch.futures.wait_all(sent))
        print(f"loss {total / TRAINERS!r} after {STEPS} steps of {TRAINERS} trainers")
    rpc.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as private:  # of mode 0700
        start_processes(main, (private,), nprocs=TRAINERS + 1, start_method="fork")
