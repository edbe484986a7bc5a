"""A world: the processes that train together, with their collectives and short messages.

Other packages use a `World` instead of `torch.distributed`: rank and size, sums, short JSON
messages, a vote, a barrier. Messages are never pickled objects, since a peer's pickle would run as
code. A world of one process needs no process group, so the same code runs on one process.

Sources of rank and size; the first match wins:
  a process group that exists already    adopted as it is
  SHOAL_STORE                            started by `shoal train`'s own supervisor
  RANK, WORLD_SIZE, MASTER_ADDR          torchrun, Kubernetes
  SLURM_PROCID, SLURM_NTASKS             srun
  none                                   one process
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import os
import secrets
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shoal.base.errors import ClusterError
from shoal.base.operating_systems import loopback_interface
from shoal.base.standard_streams import open_closed_streams
from shoal.fabric._torch import (
    all_gather_single,
    clone_store_connection,
    drop_mesh_groups,
    get_default_store,
)
from shoal.fabric.collectives import json_messages
from shoal.fabric.collectives.json_messages import authenticate_peers, derive_group_key
from shoal.fabric.collectives.traffic_counts import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    REDUCE_SCATTER,
    SEND,
    WORLD,
    TrafficCounter,
)
from shoal.fabric.device import (
    HOST,
    device_of_group,
    process_group_backend,
    select_local_device,
    supports_host_tensors,
)
from shoal.fabric.rendezvous.process_info import ProcessInfo, read_process_info

if TYPE_CHECKING:
    from shoal.fabric.collectives import uneven_collectives as uneven

JOIN_TIMEOUT = timedelta(seconds=120)
COLLECTIVE_TIMEOUT = timedelta(seconds=600)
PREPARE_TIMEOUT = timedelta(hours=24)
TELL_AFTER_S = 10.0


_worlds: weakref.WeakSet[World] = weakref.WeakSet()
_holders: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def register_group_owner(owner: Any, forget: Callable[[Any], None]) -> None:
    """Register `forget(owner)`, called when process groups end, so that `owner` drops its own.

    Args:
        owner: held by a weak reference; a second call replaces its `forget`.
        forget: must not refer to `owner`, else it keeps `owner` alive.
    """
    _holders[owner] = forget


class World:
    """The processes of one run, seen from one of them.

    Attributes:
        rank, size: rank of this process, and the number of processes.
        local_rank: rank on this machine; selects the GPU.
        device: device of its tensors.
        messages: device of its short messages.
        ranks: global ranks of its members.
        backend: backend of its sub-worlds; None: torch's choice for the device.
        parts, meshes: cached sub-worlds and meshes (see `axis_worlds.py`).
        traffic: counters of sent bytes and waiting time.
        axis, degrees: axis of its traffic, and degrees of the layout (see `axis_worlds.py`).
        key: key by which members of its groups authenticate (collectives/json_messages.py).
        keepers: by rank, the first rank that sees the same disk; () if all ranks share one.
    """

    def __init__(
        self,
        place: ProcessInfo,
        device: torch.device,
        group: dist.ProcessGroup | None,
        *,
        owns_group: bool = False,
        store: dist.Store | None = None,
    ) -> None:
        self.rank, self.size = place.rank, place.size
        self.local_rank = place.local_rank
        self.local_size = place.local_size
        self.started_by = place.started_by
        self.device = device
        # A message in host memory does not wait for the device.
        self.messages = HOST if group is None or supports_host_tensors(group) else device
        self.group = group
        self.owns_group = owns_group
        self.store = store
        self.traffic = TrafficCounter()
        self.key, self.keepers = b"", tuple[int, ...]()
        self.axis, self.degrees = WORLD, dict[str, int]()
        self._turns = itertools.count()
        self.backend: str | None = None
        self.ranks = tuple(range(place.size))
        self.parts: dict[tuple[int, ...], World] = {}
        self.meshes: dict[Any, DeviceMesh] = {}
        _worlds.add(self)

    @property
    def is_first(self) -> bool:
        """True on rank 0, which prints and writes for all ranks."""
        return self.rank == 0

    @property
    def writes_files(self) -> bool:
        """True on the rank that writes for all ranks on its disk: rank 0 if all ranks share one."""
        return self.rank == (self.keepers[self.rank] if self.keepers else 0)

    def all_reduce(self, tensor: torch.Tensor, *, wait: bool = True) -> dist.Work | None:
        """All-reduce a tensor by sum, in place; `wait=False` returns the pending work.

        Args:
            tensor: overwritten by the sum; the same shape and dtype on all ranks.
            wait: return when the sum is there; False: return the pending work.
        """
        if self.group is None:
            return None
        self.traffic.count(ALL_REDUCE, tensor.numel() * tensor.element_size(), self.size, self.axis)
        # `dist.all_reduce` takes 17 calls to check its arguments.
        work = self.group.allreduce([torch.view_as_real(tensor) if tensor.is_complex() else tensor])
        if wait and work is not None:
            with self.traffic.waiting():
                work.wait()
        return None if wait else work

    def reduce_scatter(
        self, tensor: torch.Tensor, cuts: Sequence[int], buffer: uneven.TransferBuffer | None = None
    ) -> uneven.PendingFlatReduceScatter:
        """Reduce-scatter a flat tensor by sum; return a handle of this rank's part.

        Args:
            tensor: [elements]; must not change until the result is read.
            cuts: rank r gets elements cuts[r] to cuts[r + 1].
            buffer: memory on the host for the received parts; None: allocate it.
        """
        from shoal.fabric.collectives import uneven_collectives as sums

        if self.group is None:
            return sums.PendingFlatReduceScatter(None, tensor.clone().unsqueeze(0), tensor)
        self.traffic.count(REDUCE_SCATTER, tensor.nbytes, self.size, self.axis)
        return sums.reduce_scatter(tensor, cuts, self.rank, self.group, buffer)

    def all_gather_parts(
        self, tensor: torch.Tensor, cuts: Sequence[int], buffer: uneven.TransferBuffer | None = None
    ) -> uneven.PendingGather | None:
        """All-gather a flat tensor in place, of which each rank holds a part; may be unequal.

        Args:
            tensor: flat, [n]; this rank's part is filled, and the others are overwritten.
            cuts: boundaries of the ranks' parts, size + 1 of them, from 0 to n.
            buffer: memory on the host for what this rank sends; None: allocate it.
        """
        if self.group is None:
            return None
        from shoal.fabric.collectives.uneven_collectives import all_gather_parts

        self.traffic.count(ALL_GATHER, tensor.numel() * tensor.element_size(), self.size, self.axis)
        # ranks of a machine follow each other
        direct = buffer is not None and len({rank // self.local_size for rank in self.ranks}) == 1
        return all_gather_parts(tensor, cuts, self.rank, self.group, buffer, direct=direct)

    def all_reduce_max(self, number: int) -> int:
        """All-reduce a number by maximum over ranks.

        Args:
            number: this rank's.
        """
        negated = torch.tensor([-number], device=self.messages)
        self.all_reduce_min(negated)
        return -int(negated.item())

    def find_extremes(self, number: int) -> tuple[int, int]:
        """Return the largest and the smallest of a number over ranks, by one all-reduce.

        Args:
            number: this rank's.
        """
        both = torch.tensor([-number, number], device=self.messages)
        self.all_reduce_min(both)
        negated, least = both.tolist()
        return -negated, least

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-gather one equal-shaped tensor of every rank: [...] → [size, ...].

        Args:
            tensor: of equal shape and dtype on all ranks.
        """
        if self.group is None:
            return tensor.unsqueeze(0).clone()
        out = tensor.new_empty(self.size * tensor.numel())
        self.traffic.count(ALL_GATHER, out.numel() * out.element_size(), self.size, self.axis)
        with self.traffic.waiting():
            all_gather_single(out, tensor.reshape(-1), group=self.group)
        return out.view(self.size, *tensor.shape)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Gather one equal-shaped tensor of every rank: [size, ...] on rank 0, else None.

        Args:
            tensor: of equal shape and dtype on all ranks.
        """
        if self.group is None:
            return tensor.unsqueeze(0).clone()
        out = tensor.new_empty((self.size, *tensor.shape)) if self.is_first else None
        size_bytes = 0 if self.is_first else tensor.numel() * tensor.element_size()
        self.traffic.count(SEND, size_bytes, self.size, self.axis)
        with self.traffic.waiting():
            rows = None if out is None else list(out.unbind())
            dist.gather(tensor.contiguous(), rows, group=self.group, group_dst=0)
        return out

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite a tensor with that of rank `source`, in place.

        Args:
            tensor: read on rank `source`, overwritten on the others.
            source: a rank of this world.
        """
        if self.group is None:
            return
        size_bytes = tensor.numel() * tensor.element_size()
        self.traffic.count(
            BROADCAST, size_bytes if self.rank == source else 0, self.size, self.axis
        )
        with self.traffic.waiting():
            dist.broadcast(tensor, group_src=source, group=self.group)

    def all_reduce_min(self, tensor: torch.Tensor) -> None:
        """All-reduce a tensor by minimum over ranks, in place.

        Args:
            tensor: overwritten by the minimum.
        """
        if self.group is not None:
            self.traffic.count(
                ALL_REDUCE, tensor.numel() * tensor.element_size(), self.size, self.axis
            )
            with self.traffic.waiting():
                dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self.group)

    def gather_json(self, message: Any) -> list[Any]:
        """All-gather every rank's JSON message, by rank.

        Use it for short messages that differ between ranks. Compare (`differing`) or broadcast
        (`broadcast_json`) messages that grow with the model and are equal on all ranks.

        Args:
            message: what JSON can hold; lengths may differ between ranks.
        """
        if self.group is None:
            return [json.loads(json.dumps(message))]
        return json_messages.gather_json(self, message)

    def collect_json(self, message: Any, *, here: bool) -> list[Any] | None:
        """Collect every rank's JSON message on some ranks; the other ranks do not wait.

        The messages travel through the store: no collective, whatever the number of ranks. Every
        rank calls it.

        Args:
            message: what JSON can hold.
            here: whether this rank wants the messages.

        Returns:
            The messages by rank; None on other ranks than those.
        """
        if self.size == 1 or self.store is None:
            return self.gather_json(message)
        turn = next(self._turns)
        keys = [f"collected/{turn}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], json.dumps(message))
        if not here:
            return None
        _wait(self.store, keys, COLLECTIVE_TIMEOUT)
        return [json.loads(self.store.get(key)) for key in keys]

    def broadcast_json(self, message: Any, source: int = 0) -> Any:
        """Broadcast rank `source`'s JSON message and return it on every rank.

        Args:
            message: what JSON can hold; read on rank `source` alone.
            source: a rank of this world.
        """
        if self.group is None:
            return json.loads(json.dumps(message))
        return json_messages.broadcast_json(self, message, source)

    def find_differing_rank(self, message: Any) -> tuple[int, Any, Any] | None:
        """Return (rank, rank 0's message, its own) of the first rank that differs, else None.

        Args:
            message: what JSON can hold; its hash is compared first.
        """
        return None if self.group is None else json_messages.find_differing_rank(self, message)

    def find_differing_indices(self, numbers: Sequence[int]) -> list[int]:
        """Return the indices at which ranks' integers differ; every rank must pass as many.

        Args:
            numbers: integers of 64 bits, as many on every rank.
        """
        return [] if self.group is None else json_messages.find_differing_indices(self, numbers)

    def all_true(self, flag: bool) -> bool:
        """Return whether the flag is true on every rank; all ranks get the same answer.

        Args:
            flag: this rank's.
        """
        if self.group is None:
            return flag
        falses = torch.tensor([0 if flag else 1], device=self.messages)
        self.all_reduce(falses)
        return int(falses.item()) == 0

    def run_local_first(self, work: Callable[[], Any]) -> Any:
        """Run `work()` on every rank, on local rank 0 of each machine before the others there.

        Use it for work that is prepared once per machine (data, a cache) and may take hours. The
        other ranks wait at the store, since the deadline of a collective is for peers that hang.

        Args:
            work: a function without arguments.
        """
        if self.size == 1 or self.store is None:
            return self._local_first_by_barrier(work)
        machine = f"prepared/{next(self._turns)}/{self.rank - self.local_rank}"
        if self.local_rank == 0:
            try:
                return work()
            finally:
                self.store.set(machine, "")
        _wait(self.store, [machine], PREPARE_TIMEOUT)
        return work()

    def run_once_per_machine(self, work: Callable[[], Any]) -> Any:
        """Run `work()` on each machine's local rank 0; return its JSON value on all ranks there.

        It may take hours, as in `run_local_first`; if it raises, the others get None.

        Args:
            work: a function without arguments, whose value JSON can hold.
        """
        first = self.rank - self.local_rank
        if self.size == 1 or self.store is None:
            return self.gather_json(work() if self.local_rank == 0 else None)[first]
        key = f"told/{next(self._turns)}/{first}"
        if self.local_rank == 0:
            told = None
            try:
                told = json.loads(json.dumps(work()))
            finally:
                self.store.set(key, json.dumps(told))
            return told
        _wait(self.store, [key], PREPARE_TIMEOUT)
        return json.loads(self.store.get(key))

    def machine_barrier(self) -> None:
        """Wait for all ranks of this machine, which may take hours, as in `run_local_first`."""
        if self.size == 1 or self.store is None:
            self.barrier()
            return
        key, first = f"here/{next(self._turns)}", self.rank - self.local_rank
        self.store.set(f"{key}/{self.rank}", "")
        local = range(first, first + self.local_size)
        _wait(self.store, [f"{key}/{rank}" for rank in local], PREPARE_TIMEOUT)

    def _local_first_by_barrier(self, work: Callable[[], Any]) -> Any:
        result = work() if self.local_rank == 0 else None
        self.barrier()
        return result if self.local_rank == 0 else work()

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        if self.group is not None:
            self.traffic.record_start("barrier")
            with self.traffic.waiting():
                dist.barrier(group=self.group)

    def close(self) -> None:
        """Leave the world: barrier, then destroy the group, else gloo may abort at exit (X1)."""
        heirs = [w for w in _worlds if w is not self and w.group is self.group is not None]
        if self.owns_group and heirs:  # another run of this process goes on with the group
            heirs[0].owns_group, heirs[0].store = True, self.store
        elif self.group is not None and self.owns_group:
            dist.barrier(group=self.group)
            _destroy_group()
        self.group = self.store = None


def start_world(environ: Mapping[str, str] | None = None) -> World:
    """Join the processes started with this one; the module lists how rank and size are found.

    Raises a ClusterError when peers do not join within two minutes, with the number of missing
    peers. Source: environment contracts of torchrun and Slurm; restart race and guard, pytorch
    elastic.
    """
    open_closed_streams()
    if dist.is_initialized():
        place = ProcessInfo(
            dist.get_rank(),
            dist.get_world_size(),
            int(os.environ.get("LOCAL_RANK", "0")),
            int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            "an existing process group",
        )
        atexit.register(_drop_group_references)
        store = clone_default_store(f"shoal/{next(_worlds_made)}")
        return World(place, device_of_group(), dist.group.WORLD, store=store)
    place = read_process_info(os.environ if environ is None else environ)
    device = select_local_device(place.local_rank, place.local_size, place.started_by == "Slurm")
    if place.size == 1:
        return World(place, device, None)
    if place.host in ("127.0.0.1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
    try:
        store = _get_job_store(place)
        # Each attempt, and each world of one process, has its own names: a stock restart may read
        # a dead peer's address.
        named = dist.PrefixStore(f"attempt-{place.attempt}/{next(_worlds_made)}", store)
        key = derive_group_key(place.token, _wait_for_all_ranks(named, place))
        dist.init_process_group(
            process_group_backend(device),
            store=named,
            rank=place.rank,
            world_size=place.size,
            timeout=COLLECTIVE_TIMEOUT,
        )
        authenticate_peers(dist.group.WORLD, range(place.size), key)
    except (RuntimeError, dist.DistError) as failure:
        raise ClusterError(
            f"rank {place.rank} of {place.size} ({place.started_by}): the processes did not meet "
            f"at {place.rendezvous_text} within {JOIN_TIMEOUT.seconds} s: {failure}"
        ) from failure
    atexit.register(_leave_at_exit)
    world = World(place, device, dist.group.WORLD, owns_group=True, store=named)
    world.key = key
    return world


def _wait_for_all_ranks(store: dist.Store, place: ProcessInfo) -> bytes:
    """Wait for all ranks and name the missing ones: torch would wait as long as for a collective.

    Returns:
        a random word, the same on all ranks.

    Raises:
        ClusterError: ranks did not join; the message names them.
    """
    keys = [f"here/{rank}" for rank in range(place.size)]
    store.set(keys[place.rank], "")
    if store.add("here", 1) == place.size:  # wait for one key: all keys on all ranks are ranks²
        store.set("all here", secrets.token_hex(16))
    until_s = time.monotonic() + JOIN_TIMEOUT.total_seconds()
    while True:
        left_s = until_s - time.monotonic()
        try:
            _wait(store, ["all here"], timedelta(seconds=max(0.001, min(TELL_AFTER_S, left_s))))
            return bytes(store.get("all here"))
        except RuntimeError:
            away = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        if not away and left_s > 0:
            continue  # the last rank is about to set the key
        who = f"rank{'s' * (len(away) > 1)} {', '.join(away)}"
        if not away:
            raise ClusterError(
                f"all ranks came to {place.rendezvous_text}, and were not counted so: somebody "
                "else "
                "writes to the store there"
            )
        if left_s <= TELL_AFTER_S:
            raise ClusterError(
                f"{who} of {place.size} did not come to {place.rendezvous_text} within "
                f"{JOIN_TIMEOUT.total_seconds():g} s ({place.started_by}); look at what they print"
            )
        if place.local_rank == 0:
            logging.getLogger("shoal").warning("shoal: rank %d waits for %s", place.rank, who)


def _wait(store: dist.Store, keys: list[str], timeout: timedelta) -> None:
    """Wait for keys in a store; raise a RuntimeError after the timeout.

    torch's FileStore polls every 10 ms, but a peer is often less than 1 ms late.
    """
    pause_s, until_s = 0.0002, time.monotonic() + 0.05
    while time.monotonic() < until_s:
        if store.check(keys):
            return
        time.sleep(pause_s)
        pause_s *= 1.5
    store.wait(keys, timeout)


_worlds_made = itertools.count()
_stores: dict[str, dist.Store] = {}


def _get_job_store(place: ProcessInfo) -> dist.Store:
    """Return this job's store, opened once per process: its port cannot be bound a second time."""
    at = place.rendezvous_text
    if at not in _stores and place.file:
        _stores[at] = dist.FileStore(place.file)
        _stores[at].set_timeout(JOIN_TIMEOUT)
    elif at not in _stores:
        from shoal.fabric.rendezvous.rendezvous_store import (
            open_store,  # one machine's ranks need none of it
        )

        _stores[at] = open_store(place, JOIN_TIMEOUT, TELL_AFTER_S)
    return _stores[at]


def _leave_at_exit() -> None:
    """Destroy the process group at exit, for scripts that never call `close` or that raise.

    gloo's threads must end here. There is no barrier, since peers may be gone; peers that still
    wait for this rank fail at once.
    """
    if dist.is_initialized():
        _destroy_group()


def _destroy_group() -> None:
    """Destroy the process group and drop references to it, which keep gloo's threads alive."""
    wait_for_idle_threads()
    _drop_group_references()
    dist.destroy_process_group()


def _drop_group_references() -> None:
    """Drop every reference to process groups, also from worlds that await garbage collection.

    After a script destroys its group, gloo's threads live until the last reference to it. If that
    reference ends while the interpreter shuts down, the process aborts. Meshes and sharded modules
    hold groups too, and DTensor's caches hold meshes for ever.
    """
    for world in _worlds:
        for mesh in world.meshes.values():
            drop_mesh_groups(mesh)
        world.meshes.clear()
        world.group = world.store = None
    for owner, forget in list(_holders.items()):
        forget(owner)
    _holders.clear()


def clone_default_store(prefix: str = "meeting") -> dist.Store | None:
    """Return the default group's store over a connection of its own; None without a group.

    A second thread must not wait behind the main thread, which may wait at the store for hours.
    """
    try:
        return dist.PrefixStore(prefix, clone_store_connection(get_default_store()))
    except (RuntimeError, NotImplementedError, ValueError):  # none, or no store that can
        return None


LOOK_S, LIMIT_S = 0.012, 5.0
"""Seconds of rest, longer than two of those 5 ms intervals · most seconds to wait."""
RUNLOOP = "gloo_runloop"


def wait_for_idle_threads(tasks: Path = Path("/proc/self/task")) -> None:
    """Wait until gloo's threads are idle, with Python's lock (GIL) released.

    Only then is it safe to drop the last reference to a group. A gloo thread that has finished a
    transfer frees the sent tensor, for which it needs the GIL. The owner of the last reference
    waits for that thread. A C++ owner (DistributedDataParallel's reducer, for one) holds the GIL
    meanwhile, and both wait for ever: 2 of 80 worlds whose model outlived the group.

    The kernel shows which threads are idle: a thread in a wait without limit has no context
    switches, a thread that waits for the GIL wakes every 5 ms, and a thread without a core is not
    asleep. Linux only; other systems wait for a fixed time.

    Source: docs/lab-log.md, "A world that did not end"
    """
    until_s = time.monotonic() + LIMIT_S
    before = _count_context_switches(tasks)
    while before:
        time.sleep(LOOK_S)
        now = _count_context_switches(tasks)
        if (now == before and None not in now.values()) or time.monotonic() > until_s:
            return
        before = now


def _count_context_switches(tasks: Path) -> dict[str, str | None]:
    """Return the context switches of each of gloo's workers; None for one that is not asleep."""
    found: dict[str, str | None] = {}
    for task in tasks.glob("*"):
        try:
            if RUNLOOP not in (task / "comm").read_text(encoding="utf-8"):
                continue
            lines = dict(
                line.split(":\t", 1)
                for line in (task / "status").read_text(encoding="utf-8").splitlines()
            )
        except (OSError, ValueError):  # it has ended meanwhile
            continue
        asleep = lines["State"].startswith("S")
        found[task.name] = lines["voluntary_ctxt_switches"] if asleep else None
    return found
