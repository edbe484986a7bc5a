"""A world: the processes that train together, and the few things they say to each other.

Everything else asks a `World` instead of `torch.distributed`: rank and size, sums, short JSON
messages (never pickled objects: a peer's pickle would run as code), a vote, a barrier. A world of
one process needs no process group, so code written against it runs alone, unchanged.

How a process learns its place, first match wins:
  a process group that exists already    adopted as it is
  SHOAL_STORE_PORT                       started by `shoal train`'s own supervisor
  RANK, WORLD_SIZE, MASTER_ADDR          torchrun, Kubernetes
  SLURM_PROCID, SLURM_NTASKS             srun
  none                                   one process
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shoal.base.errors import ClusterError
from shoal.fabric._torch import all_gather_single
from shoal.fabric.place import Place, find_place
from shoal.fabric.traffic import ALL_GATHER, ALL_REDUCE, BROADCAST, Traffic

JOIN_TIMEOUT = timedelta(seconds=120)
COLLECTIVE_TIMEOUT = timedelta(seconds=600)


class World:
    """The processes of one run, as seen by one of them.

    rank, size          this process and how many there are
    local_rank          its number on this machine; picks the GPU
    device              where its tensors live
    traffic             what it sent and how long it waited
    """

    def __init__(
        self,
        place: Place,
        device: torch.device,
        group: dist.ProcessGroup | None,
        *,
        owns_group: bool = False,
    ) -> None:
        self.rank = place.rank
        self.size = place.size
        self.local_rank = place.local_rank
        self.local_size = place.local_size
        self.started_by = place.started_by
        self.device = device
        self.group = group
        self.owns_group = owns_group
        self.traffic = Traffic()

    @property
    def is_first(self) -> bool:
        """Rank 0: the one that speaks for all."""
        return self.rank == 0

    def sum(self, tensor: torch.Tensor, *, wait: bool = True) -> dist.Work | None:
        """Sum a tensor over all ranks, in place; with `wait=False` the returned work is pending."""
        if self.group is None:
            return None
        self.traffic.count(ALL_REDUCE, tensor.numel() * tensor.element_size(), self.size)
        if wait:
            with self.traffic.waiting():
                dist.all_reduce(tensor, group=self.group)
            return None
        return dist.all_reduce(tensor, group=self.group, async_op=True)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stack one equal-shaped tensor of every rank: [...] → [size, ...]."""
        if self.group is None:
            return tensor.unsqueeze(0).clone()
        out = tensor.new_empty(self.size * tensor.numel())
        self.traffic.count(ALL_GATHER, out.numel() * out.element_size(), self.size)
        with self.traffic.waiting():
            all_gather_single(out, tensor.reshape(-1), group=self.group)
        return out.view(self.size, *tensor.shape)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite a tensor with rank `source`'s, in place."""
        if self.group is None:
            return
        size_bytes = tensor.numel() * tensor.element_size()
        self.traffic.count(BROADCAST, size_bytes if self.rank == source else 0, self.size)
        with self.traffic.waiting():
            dist.broadcast(tensor, group_src=source, group=self.group)

    def gather_json(self, message: Any) -> list[Any]:
        """Every rank's message, by rank, on every rank. Messages are JSON values."""
        if self.group is None:
            return [json.loads(json.dumps(message))]
        raw = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        raw = raw.to(self.device)
        lengths = self.gather(torch.tensor([raw.numel()], device=self.device)).flatten().tolist()
        padded = raw.new_zeros(max(lengths))
        padded[: raw.numel()] = raw
        rows = self.gather(padded).cpu().numpy()
        return [
            json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)
        ]

    def broadcast_json(self, message: Any, source: int = 0) -> Any:
        """Rank `source`'s message on every rank."""
        return self.gather_json(message if self.rank == source else None)[source]

    def all_true(self, flag: bool) -> bool:
        """Whether the flag is true on every rank; the same answer everywhere."""
        if self.group is None:
            return flag
        falses = torch.tensor([0 if flag else 1], device=self.device)
        self.sum(falses)
        return int(falses.item()) == 0

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.group is not None:
            with self.traffic.waiting():
                dist.barrier(group=self.group)

    def close(self) -> None:
        """Leave together: barrier, then destroy the group, else gloo may abort at exit (X1)."""
        if self.group is not None and self.owns_group:
            dist.barrier(group=self.group)
            dist.destroy_process_group()
        self.group = None


def pick_device(local_rank: int) -> torch.device:
    """This process's GPU if the machine has enough of them, else the CPU."""
    if torch.cuda.is_available() and local_rank < torch.cuda.device_count():
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def start_world(environ: Mapping[str, str] | None = None) -> World:
    """Join the processes that this one was started with; see the module for how they are found.

    Errors: ClusterError when peers do not appear within two minutes, naming how many were awaited.
    Source: environment contracts of torchrun and Slurm; restart race and guard, pytorch elastic.
    """
    if dist.is_initialized():
        place = Place(
            dist.get_rank(),
            dist.get_world_size(),
            int(os.environ.get("LOCAL_RANK", "0")),
            int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            "an existing process group",
        )
        return World(place, pick_device(place.local_rank), dist.group.WORLD)
    place = find_place(os.environ if environ is None else environ)
    device = pick_device(place.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if place.size == 1:
        return World(place, device, None)
    if place.host in ("127.0.0.1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        store = dist.TCPStore(
            place.host,
            place.port,
            place.size,
            is_master=place.hosts_store,
            timeout=JOIN_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=place.listen_fd,
        )
        # Each attempt has its own names: a stock restart may read a dead peer's address.
        named = dist.PrefixStore(f"attempt-{place.attempt}", store)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=named,
            rank=place.rank,
            world_size=place.size,
            timeout=COLLECTIVE_TIMEOUT,
        )
    except (RuntimeError, dist.DistError) as failure:
        raise ClusterError(
            f"rank {place.rank} of {place.size} ({place.started_by}): the processes did not meet "
            f"at {place.host}:{place.port} within {JOIN_TIMEOUT.seconds} s: {failure}"
        ) from failure
    atexit.register(_leave_at_exit)
    return World(place, device, dist.group.WORLD, owns_group=True)


def _leave_at_exit() -> None:
    """For scripts that never call `close`, or die of an exception: gloo's threads must end here.

    Without a barrier, since peers may be gone; those that still wait for this rank fail at once.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
