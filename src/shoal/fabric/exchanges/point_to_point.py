"""Point-to-point messages: tensors from one rank to another, without blocking other ranks.

Protocol  neither side blocks: both get a `Transfer` and wait for it when they need its end. Between
          two ranks and in one direction, messages arrive in the order in which they were sent, so
          receives are posted in that order and need no tags. A tensor travels as its bytes, in row
          order, so every dtype does; one without elements does not travel at all.
Deadlock  none, whatever the two directions do, because they never queue behind one another. NCCL
          runs all messages between two ranks in one queue, so there each direction has a
          communicator of its own; gloo keeps them apart by itself.
Source    torch.distributed.isend/irecv; order of equal tags: gloo's queue per pair and tag.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from shoal.fabric.collectives.traffic_counts import RECEIVE, SEND
from shoal.fabric.device import runs_messages_in_order
from shoal.fabric.world import COLLECTIVE_TIMEOUT, World


@dataclass
class Transfer:
    """Handle of a pending message between two ranks; `wait()` returns its tensor.

    Attributes:
        tensor: the received tensor, filled once `wait` has returned; or the sent tensor, which must
            not change until then.
        work: torch's handle; None: nothing was sent, or `wait` has returned.

    Raises:
        RuntimeError: from `wait`, if the peer is gone or the deadline has passed.
    """

    tensor: torch.Tensor
    world: World
    work: dist.Work | None = None

    def wait(self) -> torch.Tensor:
        """Wait for the transfer and return its tensor; the wait counts as exposed.

        The backend raises a RuntimeError if the peer is gone or the deadline has passed.
        """
        if self.work is not None:
            with self.world.traffic.waiting():
                self.work.wait()
            self.work = None  # a kept work would keep its group alive beyond `destroy`
        return self.tensor


class PointToPoint:
    """Point-to-point messages between ranks: `PointToPoint(world)`, created on all ranks together.

    send(tensor, peer)      start to send; returns a Transfer, until whose end the tensor must not
                            change
    receive(shape, dtype, peer)   start to receive the next tensor of `peer`; returns a Transfer
    Neither blocks. Between two ranks and in one direction, messages arrive in the order in which
    they were sent; receives are posted in that order.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._directed: tuple[dist.ProcessGroup, ...] = ()
        if world.group is not None and runs_messages_in_order(world.group, world.device):
            self._directed = tuple(
                dist.new_group(
                    list(world.ranks), timeout=COLLECTIVE_TIMEOUT, use_local_synchronization=True
                )
                for _ in ("to a higher rank", "to a lower rank")
            )

    def send(self, tensor: torch.Tensor, peer: int) -> Transfer:
        """Start to send a tensor of any shape and dtype; it must not change until sent."""
        whole = tensor.detach().contiguous()
        sent = Transfer(whole, self.world)
        if whole.numel():
            world, sent_bytes = self.world, whole.numel() * whole.element_size()
            world.traffic.count(SEND, sent_bytes, world.size, world.axis)
            group = self._group(self.world.rank, peer)
            sent.work = dist.isend(_bytes(whole), group=group, group_dst=peer)
        return sent

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int) -> Transfer:
        """Start to receive the next tensor from `peer`; shape and dtype must be known."""
        arriving = Transfer(torch.empty(shape, dtype=dtype, device=self.world.device), self.world)
        if arriving.tensor.numel():
            self.world.traffic.record_start(RECEIVE)
            group = self._group(peer, self.world.rank)
            arriving.work = dist.irecv(_bytes(arriving.tensor), group=group, group_src=peer)
        return arriving

    def _group(self, source: int, target: int) -> dist.ProcessGroup | None:
        # Looked up each time: a stored group would keep gloo's threads alive at exit.
        return self._directed[source > target] if self._directed else self.world.group


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
