"""A process group for ranks that share one GPU: tensors are copied to the host and go over gloo.

NCCL refuses two ranks on one device, and gloo reads host memory for messages from rank to rank. So
every collective copies what it sends to the host, runs gloo there, and copies back on the stream of
the caller. Slow, and right by construction: what is checked is what Shoal does with the device.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from device import DEVICE, PATIENCE
from shoal.fabric import World, start_world

NAME = "host"
LIMIT = timedelta(seconds=100 * PATIENCE)
"""Of one message: a stage may compile while the other one waits."""


class Done(dist._Work):
    """What was finished before anybody asked."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.future.set_result(value)

    def wait(self, timeout: timedelta = LIMIT) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        return self.future


class Moving(dist._Work):
    """A message under way; what arrives is copied to its tensor by whoever waits."""

    def __init__(self, work: Any, host: torch.Tensor, target: torch.Tensor | None) -> None:
        super().__init__()
        self.work, self.host, self.target = work, host, target

    def wait(self, timeout: timedelta = LIMIT) -> bool:
        self.work.wait()
        if self.target is not None:
            self.target.copy_(self.host)
        return True


class HostGroup(dist.ProcessGroup):
    """Collectives by way of the host's memory."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.place, self.count = rank, size
        self.gloo = dist.ProcessGroupGloo(store, rank, size, LIMIT)

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        """As torch registered it; a group that is written in Python is not told its name."""
        name: str = dist.distributed_c10d._world.pg_names[self]
        return name

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Done:
        for tensor in tensors:
            host = tensor.detach().cpu().clone()
            self._reduce(host, opts)
            tensor.detach().copy_(host)
        return Done(tensors)

    def _reduce(self, host: torch.Tensor, opts: Any) -> None:
        """In place over all ranks; FSDP2 asks for means, which gloo does not know."""
        asked = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        options, mean = dist.AllreduceOptions(), asked == dist.ReduceOp.AVG
        options.reduceOp = dist.ReduceOp.SUM if mean else asked
        self.gloo.allreduce([host], options).wait()
        if mean:
            host.div_(self.count)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Done:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Done:
        for tensor in tensors:
            host = tensor.detach().cpu().clone()
            self.gloo.broadcast([host], opts).wait()
            tensor.detach().copy_(host)
        return Done(tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        """Parts may be of unequal sizes, as NCCL allows: each is its rank's to send."""
        for parts, own in zip(outputs, inputs, strict=True):
            for source, part in enumerate(parts):
                host = (own if source == self.place else part).detach().cpu().clone()
                options = dist.BroadcastOptions()
                options.rootRank = source
                self.gloo.broadcast([host], options).wait()
                part.detach().copy_(host.view_as(part))
        return Done(outputs)

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Done:
        return self.allgather([list(output.view(-1).chunk(self.count))], [own.reshape(-1)])

    all_gather_single = _allgather_base

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Done:
        """Every rank's tensor to the root, which alone has somewhere to put them."""
        for place, own in enumerate(inputs):
            own_host, options = own.detach().cpu().clone(), dist.GatherOptions()
            options.rootRank = opts.rootRank
            parts = outputs[place] if outputs else []
            hosts = [torch.empty_like(own_host) for _ in parts]
            self.gloo.gather([hosts] if parts else [], [own_host], options).wait()
            for part, host in zip(parts, hosts, strict=True):
                part.detach().copy_(host)
        return Done(outputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        for own, parts in zip(outputs, inputs, strict=True):
            host = torch.cat([part.detach().reshape(-1).cpu() for part in parts])
            self._reduce(host, opts)
            start = sum(part.numel() for part in parts[: self.place])
            own.detach().copy_(host[start : start + own.numel()].view_as(own))
        return Done(outputs)

    def _reduce_scatter_base(
        self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None
    ) -> Done:
        return self.reduce_scatter([output], [list(whole.reshape(-1).chunk(self.count))], opts)

    reduce_scatter_single = _reduce_scatter_base

    def alltoall_base(
        self, output: torch.Tensor, whole: torch.Tensor, of: Any, to: Any, opts: Any = None
    ) -> Done:
        sent, received = whole.detach().cpu().clone(), torch.empty_like(output, device="cpu")
        self.gloo.alltoall_base(
            received, sent, list(of or ()), list(to or ()), dist.AllToAllOptions()
        ).wait()
        output.detach().copy_(received)
        return Done(output)

    all_to_all_single = alltoall_base

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> Moving:
        host = tensors[0].detach().cpu().clone()
        return Moving(self.gloo.send([host], target, tag), host, None)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Moving:
        host = torch.empty_like(tensors[0], device="cpu")
        return Moving(self.gloo.recv([host], source, tag), host, tensors[0])

    def barrier(self, opts: Any = None) -> Done:
        self.gloo.allreduce([torch.zeros(1)], dist.AllreduceOptions()).wait()
        return Done(None)


def start_shared_world() -> World:
    """The world of a member that shares its device with all others."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["SHOAL_STORE"])
    if DEVICE.type == "cuda":
        torch.cuda.set_device(0)
    dist.Backend.register_backend(NAME, HostGroup, devices=["cpu", "cuda"])
    dist.init_process_group(NAME, store=store, rank=rank, world_size=size, timeout=LIMIT)
    world = start_world()  # adopts the group, and takes its tensors to be the host's
    world.device = torch.device("cuda", 0) if DEVICE.type == "cuda" else DEVICE
    return world
