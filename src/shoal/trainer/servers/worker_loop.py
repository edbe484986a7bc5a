"""Main job under an asynchronous parameter server: each worker and each server has its own loop.

    worker   read weights → one step's samples → gradient → send it → read …
    server   receive gradients as they come → choose the next (base/layouts/parameter_servers.py) →
             one update → send that worker new weights, and the stream's next samples

Each step is an optimizer step of `train.batch` samples, which one worker computes. The servers are
an ordinary run among themselves (single, or zero1 over several), whose gradients arrive as
messages. Checkpoints, validation, clipping, skips and learning rates are those of any run, and
another layout can resume from its checkpoints. Before a save the servers deal no samples until all
gradients have returned, so that a checkpoint is of whole steps: no sample is lost or read twice.

A dead worker is dropped: its samples go to the next one, and no rank waits for it. The death of a
server ends the attempt; all ranks start again from the last checkpoint, also dropped workers.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shoal.base.errors import ClusterError, ConfigError, PlanError
from shoal.base.layouts.layout import Layout
from shoal.base.plans.plan import Plan
from shoal.config.sections import Config
from shoal.data.loading.loader import Loader
from shoal.data.sources import Source
from shoal.fabric import World
from shoal.fabric.axis_worlds import partition_world
from shoal.fabric.exchanges.point_to_point import PointToPoint
from shoal.machine.process_memory import peak_memory_bytes
from shoal.parallel._torch import BatchNorm
from shoal.trainer.jobs.configured_run import import_object, open_run
from shoal.trainer.jobs.run_forecast import read_resident_bytes
from shoal.trainer.process.stop_signals import install_stop_handlers
from shoal.trainer.run import Run
from shoal.trainer.run_folder.hub_files import write_hub_tokenizer
from shoal.trainer.run_folder.start_files import write_rank_list
from shoal.trainer.servers import gradient_messages
from shoal.trainer.servers.gradient_messages import (
    Arrival,
    FlatTensors,
    GradientMessage,
    ServerOrders,
    WorkerChannel,
    WorkOrder,
)
from shoal.trainer.servers.server_loop import ParameterServer
from shoal.trainer.step.optimizer_step import forward_backward, reducer_of
from shoal.trainer.step.rank_share import RankShare, count_unreadable, list_own_micro_batches
from shoal.wire.phases import phase


def train_with_servers(
    config: Config, source: Source, folder: Path, world: World, plan: Plan, proven: str = ""
) -> int:
    """Train with asynchronous parameter servers; return the exit code. Every rank calls it.

    Args:
        plan: settled, with its servers.
        proven: a line for the user, if there is one.

    Raises:
        PlanError, ConfigError: a model or data that asynchronous servers do not support.
        ClusterError: on a server without workers, and on a worker whose server is gone.
    """
    layout = plan.layout
    ranks = range(world.size)
    workers, servers = ranks[: -layout.servers], ranks[-layout.servers :]
    own = partition_world(world, [tuple(servers)])
    own.local_rank, own.local_size = own.rank, own.size
    own.store = torch.distributed.PrefixStore("servers", world.store) if world.store else None
    serves = world.rank in servers
    inner = Layout(dp_shard=own.size, zero=1) if own.size > 1 else Layout()
    passes = max(1, plan.batch // (plan.micro_batch * own.size))
    alone = replace(plan, layout=inner, accumulate=passes, drift="off" if serves else plan.drift)
    held_bytes = read_resident_bytes()  # before the model, which the forecast counts itself
    with phase("set up"):
        run = open_run(config, source, own, alone, folder=folder if serves else None)
    write_rank_list(folder, world, writes=serves and own.writes_files)
    _check_supported(run, source)
    names = len(run.program.names)
    spans = world.gather_json(gradient_messages.list_own_spans(run.program) if serves else [])
    parcels = {server: FlatTensors(spans[server]) for server in servers}
    pairs = PointToPoint(gradient_messages.make_host_world(world))
    if not serves:
        install_stop_handlers(lambda: None)  # the servers decide when all end
        return _Worker(run, source, pairs, parcels).work()
    install_stop_handlers(run.request_stop)
    for path in config.train.on:
        hook = import_object("train.on", path)
        run.add_callback(hook(folder) if isinstance(hook, type) else hook)
    run.recorder.events.rank = world.rank
    run.extra_record["configuration"] = (folder / "run.toml").read_text(encoding="utf-8")
    run.extra_record.pop("settings", None)  # run.toml contains them
    if source.tokenizer is not None and run.world.writes_files:
        write_hub_tokenizer(source.tokenizer, config.data.tokenizer, folder)
    if proven and run.world.writes_files:
        run.recorder.events.emit("notice", text=proven, opening=4)
    inbox: queue.Queue[Arrival] = queue.Queue()
    told, hearing = gradient_messages.make_arrival_handler(pairs, servers, inbox)
    lines = {
        worker: WorkerChannel(pairs, worker, parcels[world.rank], names, told) for worker in workers
    }
    known = {key: getattr(run.plan, key) for key in ("compute", "parameters", "placements")}
    server = ParameterServer(
        run, source, config, replace(plan, **known, buckets=run.plan.buckets), lines
    )
    server.orders, server.inbox = ServerOrders(pairs, servers, hearing), inbox
    server.open(folder, world, held_bytes)
    return server.lead() if own.rank == 0 else server.follow_orders()


def _check_supported(run: Run, source: Source) -> None:
    """Raise PlanError or ConfigError for a model or data that async servers do not support."""
    if any(isinstance(part, BatchNorm) for part in run.model.modules()):
        raise PlanError(
            "layout.updates: the model has BatchNorm, whose running statistics every worker would "
            "have of its own; try: layout.updates=synchronous, or GroupNorm"
        )
    if not isinstance(run.loader(source.train, collate=source.collate), Loader):
        raise ConfigError(
            "data.source: servers deal samples by their number, and an iterable has none; try: "
            "a dataset with __getitem__ and __len__, or layout.updates=synchronous"
        )


class _Worker:
    """Worker that reads weights, computes and sends gradients until the servers end the run."""

    def __init__(
        self,
        run: Run,
        source: Source,
        pairs: PointToPoint,
        parcels: Mapping[int, FlatTensors],
    ) -> None:
        self.run, self.pairs, self.parcels = run, pairs, parcels
        self.loader: Any = run.loader(source.train, collate=source.collate)
        self.rooms = {server: parcel.allocate() for server, parcel in parcels.items()}

    def work(self) -> int:
        """Exchange weights and gradients with the servers; return the exit code."""
        try:
            while (reading := self._receive_weights()).what == gradient_messages.WORK:
                self._send_gradient(self._compute_gradient(reading))
        except RuntimeError as failure:
            raise ClusterError(f"a server is gone: {str(failure).splitlines()[0]}") from failure
        self._close_program()
        return reading.number

    def _receive_weights(self) -> WorkOrder:
        """Receive the next order, and weights from all servers."""
        for server, parcel in self.parcels.items():
            head = self.pairs.receive((4,), torch.int64, server).wait()
            reading = WorkOrder(*map(int, head.tolist()))  # the same of all
            if reading.what == gradient_messages.WORK:
                room = self.rooms[server]
                coming = [
                    self.pairs.receive(tuple(t.shape), t.dtype, server) for t in room.values()
                ]
                arrived = dict(zip(room, [one.wait() for one in coming], strict=True))
                parcel.unpack(arrived, self._weights())
        reducer_of(self.run.program).publish()  # update the low-precision copies, if there are any
        return reading

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: one.parameter for name, one in self.run.program.local.items()}

    def _compute_gradient(self, reading: WorkOrder) -> GradientMessage:
        run, program = self.run, self.run.program
        batch = next(iter(self.loader.over([(reading.start, reading.stop)])))
        micro_batches = list_own_micro_batches(batch, 0, program.data)
        tally = forward_backward(
            program,
            RankShare(micro_batches),
            run.loss,
            step=reading.number,
            call=run.plan.call,
            flags=run.collect_flags,
        )
        return GradientMessage(
            tally.loss_sum,
            tally.count,
            tally.norm,
            tally.broken,
            tally.loss_broken,
            tally.moved,
            len(micro_batches),
            peak_memory_bytes(program.world.device, fresh=False),
            int(count_unreadable(batch)),
            tally.used,
        )

    def _send_gradient(self, brought: GradientMessage) -> None:
        """Send the gradient, to the first server last: it orders the others to apply it."""
        head = brought.to_tensor().to(self.pairs.world.device)
        gradients = {name: one.parameter.grad for name, one in self.run.program.local.items()}
        for server, parcel in reversed(list(self.parcels.items())):
            parcel.pack(gradients, self.rooms[server])
            under_way = [self.pairs.send(head, server)]
            under_way += [self.pairs.send(one, server) for one in self.rooms[server].values()]
            for one in under_way:
                one.wait()

    def _close_program(self) -> None:
        for undo in self.run.program.on_close:
            undo()
