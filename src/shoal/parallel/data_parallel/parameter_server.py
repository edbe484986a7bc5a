"""A synchronous parameter server: workers push gradients to the servers and pull new weights.

The last ranks are servers. Every gradient bucket is cut into one part per server. A server adds up
the workers' pushes, steps its part, and sends the new weights to all others; a worker keeps no
optimizer state.

    push   worker → server   its part of each bucket, as soon as that is full; one message each
    pull   server → all      its part of each bucket, after the optimizer's step

Messages between two ranks in one direction come in the order of the buckets on all ranks, so they
need no tags, and no rank waits for a message that was not sent. A server adds in the order of the
ranks: the same bits whichever message comes first. All else is as in zero1 (zero.py).

Source: Li et al. 2014 (Scaling Distributed Machine Learning with the Parameter Server)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.base.layouts.parameter_servers import own_batches_error
from shoal.fabric.exchanges.point_to_point import PointToPoint, Transfer
from shoal.parallel.data_parallel.buckets import BucketReducer
from shoal.parallel.data_parallel.zero import FlatWeights, add_sharded_reducer
from shoal.parallel.program import LocalParameter, Program
from shoal.wire import phases


def apply(program: Program) -> Program:
    """Return the program with a reducer that pushes gradients to servers and pulls new weights."""
    weights = FlatWeights(program)
    servers = program.plan.layout.servers
    links = ServerLinks(PointToPoint(program.world), servers)
    weights.worlds = [links for _ in weights.worlds]  # type: ignore[misc]  # as a World does
    weights.buffers = ()  # its messages have memory of their own
    local = weights.local()
    reducer = _ParameterServerReducer(program, weights, local, links)
    phases.mark_unequal_parts(phases.UPDATE, always=True)  # only servers update
    who = f"rank {', '.join(map(str, links.servers))}"
    program.notices.append(f"parameter-server: {who} holds the optimizer's state and no samples")
    return add_sharded_reducer(program, reducer, weights, local)


@dataclass
class PendingPush:
    """A pending push; `result(out)` waits, and returns a server's part of the sum.

    Attributes:
        sent: transfers of a worker.
        arriving: transfers on a server, by worker.
        nothing: an empty part, for ranks that receive none.
    """

    sent: Sequence[Transfer]
    arriving: Sequence[Transfer]
    nothing: torch.Tensor

    def result(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Wait, then return this rank's part of the sum, written into `out` if given."""
        for one in self.sent:
            one.wait()
        if not self.arriving:
            return self.nothing if out is None else out
        parts = torch.stack([one.wait() for one in self.arriving])
        if out is None:
            return torch.sum(parts, 0)
        # In the dtype of the buffer; the messages may be narrower.
        return torch.sum(parts, 0, dtype=out.dtype, out=out)


@dataclass
class PendingPull:
    """Pending transfers of new weights, in both directions."""

    transfers: Sequence[Transfer]
    into: Sequence[torch.Tensor]

    def wait(self) -> None:
        """Wait until the received weights are copied and the sent ones have left."""
        for one, place in zip(self.transfers, self.into, strict=True):
            arrived = one.wait()
            if place.numel():
                place.copy_(arrived)


class ServerLinks:
    """Messages between workers and servers, with the collective methods of a world."""

    def __init__(self, pairs: PointToPoint, servers: int) -> None:
        self.pairs, self.rank = pairs, pairs.world.rank
        ranks = range(pairs.world.size)
        self.workers, self.servers = ranks[:-servers], ranks[-servers:]

    def reduce_scatter(self, tensor: torch.Tensor, cuts: Sequence[int]) -> PendingPush:
        """Push a bucket: server r gets the workers' sum of cuts[r] to cuts[r + 1]."""
        if self.rank in self.workers:
            parts = [(server, tensor[slice(*cuts[server : server + 2])]) for server in self.servers]
            sent = [self.pairs.send(part, server) for server, part in parts]
            return PendingPush(sent, [], tensor[:0])
        shape = (cuts[self.rank + 1] - cuts[self.rank],)
        coming = [self.pairs.receive(shape, tensor.dtype, worker) for worker in self.workers]
        return PendingPush([], coming, tensor[:0])

    def all_gather_parts(self, tensor: torch.Tensor, cuts: Sequence[int]) -> PendingPull:
        """Begin to complete a bucket of weights on every rank, in place, by the servers' parts."""
        parts = {server: tensor[slice(*cuts[server : server + 2])] for server in self.servers}
        transfers, into = [], []
        if self.rank in self.servers:
            for peer in range(self.pairs.world.size):
                if peer != self.rank:
                    transfers.append(self.pairs.send(parts[self.rank], peer))
                    into.append(tensor[:0])
        for server, part in parts.items():
            if server != self.rank:
                transfers.append(self.pairs.receive(tuple(part.shape), part.dtype, server))
                into.append(part)
        return PendingPull(transfers, into)


class _ParameterServerReducer(BucketReducer):
    """Reducer of full gradients on workers, and of the sums of their parts on servers."""

    def __init__(
        self,
        program: Program,
        weights: FlatWeights,
        local: dict[str, LocalParameter],
        links: ServerLinks,
    ) -> None:
        super().__init__(program, local)
        self.weights, self.links, self.layout = weights, links, program.plan.layout
        self.rank = program.world.rank
        self.worlds = [links for _ in self.worlds]  # type: ignore[misc]  # as a World does

    def prepare_backward(self, last: bool, once: bool = True) -> None:
        """Prepare a backward pass on a worker; refuse it on a server, which has no samples.

        Args:
            last, once: as for `Reducer.prepare_backward`.

        Raises:
            ConfigError: this rank is a server and brought a batch.
        """
        if self.rank in self.links.servers:
            raise own_batches_error(self.layout)
        super().prepare_backward(last, once)

    def publish(self) -> None:
        """Send the servers' parts of the new weights to all ranks."""
        self.weights.publish()
