"""Loop of one asynchronous parameter server: an ordinary run whose gradients arrive as messages.

The first server decides which gradient is applied next (base/layouts/parameter_servers.py), and
when to save; the others follow its orders, so that all are at the same step. See `worker_loop.py`.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from shoal.base.errors import UNSAVED_CODE, ClusterError, ConfigError
from shoal.base.layouts.parameter_servers import StalenessGate
from shoal.base.plans.batches import step_end
from shoal.base.plans.plan import Plan
from shoal.config.sections import Config
from shoal.data.loading.step_samples import StepBatch
from shoal.data.sources import Source
from shoal.fabric import World
from shoal.machine.process_memory import peak_memory_bytes
from shoal.parallel.program import IdleReducer, Program
from shoal.trainer.jobs.configured_run import count_total_steps
from shoal.trainer.jobs.opening_lines import write_opening
from shoal.trainer.jobs.run_end import emit_run_end
from shoal.trainer.jobs.run_forecast import (
    collect_model_facts,
    describe_local_cluster,
    forecast_run,
)
from shoal.trainer.jobs.validation import make_validator
from shoal.trainer.passes.free_passes import FreePasses
from shoal.trainer.run import Run
from shoal.trainer.servers import gradient_messages
from shoal.trainer.servers.gradient_messages import (
    Arrival,
    FlatTensors,
    GradientMessage,
    ServerOrders,
    WorkerChannel,
    WorkOrder,
)
from shoal.trainer.step.optimizer_step import StepTotals, reducer_of
from shoal.trainer.step.step_vector import Invariant, StepNumbers, StepVector

STOPPED = 143
"""Exit code of a run that stopped on request and saved: not finished, resume it."""
LOOK_S = 0.2
"""Seconds between two checks for a stop while a server waits for gradients."""


class _ServerReducer(IdleReducer):
    """Reducer of a server, which runs no passes: its gradients are those of a worker's message.

    Attributes:
        between: the module's other weights, which other servers update, may be of an earlier step.
    """

    def __init__(self, program: Program) -> None:
        self.whole = reducer_of(program)
        self.local = program.local
        self.gradients = {n: torch.empty_like(one.parameter) for n, one in self.local.items()}
        self.between = False

    def load_gradients(self, parcel: FlatTensors, arrived: Mapping[str, torch.Tensor]) -> None:
        """Copy an arrived gradient into the gradients that the optimizer reads."""
        for name, one in self.local.items():
            gradient = self.gradients[name]
            gradient.copy_(parcel.part(arrived, name).view(gradient.shape))
            one.parameter.grad = gradient

    def used_parameters(self) -> list[bool]:
        """Return []: a server runs no passes."""
        return []

    def local_norms(self) -> list[torch.Tensor]:
        """Return []: a server runs no passes."""
        return []

    def sums(self) -> list[torch.Tensor]:
        """Return this server's parts of the worker's gradient."""
        return [self.gradients[name] for name in self.local]

    def summed_names(self) -> list[str]:
        """Return the names of the gradients in `sums`."""
        return list(self.local)

    def publish(self) -> None:
        """Send this server's parts to the other servers, unless another step follows at once."""
        if not self.between:
            self.whole.publish()


class _WorkerPasses(FreePasses):
    """Passes of a step in the servers' run: a worker has already made them."""

    def __init__(self, tally: StepTotals) -> None:
        self.said = tally

    def finish(self) -> StepTotals:
        """Return the worker's tally."""
        return self.said


class ParameterServer:
    """One parameter server; the first of them leads.

    Args:
        plan: with its servers.
        lines: to the living workers.
    """

    orders: ServerOrders
    inbox: queue.Queue[Arrival]

    def __init__(
        self, run: Run, source: Source, config: Config, plan: Plan, lines: dict[int, WorkerChannel]
    ) -> None:
        self.run, self.source, self.config, self.plan, self.lines = run, source, config, plan, lines
        self.serving = _ServerReducer(run.program)
        run.program = replace(run.program, reducer=self.serving)
        self.loader: Any = run.loader(source.train, collate=source.collate)
        if not run.restore():
            run.recorder.cut(0)
        self.total = count_total_steps(config, source, plan.batch)
        run.rate.length.total_steps = self.total
        self.first_step, self.began_s = run.step_count, time.perf_counter()
        self.dealt, self.position = run.step_count, self.loader.position
        self.under_way: dict[int, WorkOrder] = {}
        self.returned: list[WorkOrder] = []
        self.idle: set[int] = set()
        self.here: dict[int, Arrival] = {}
        self.parcel = next(iter(lines.values())).parcel
        bound = plan.layout.staleness if plan.layout.updates == "bounded-stale" else None
        self.turns = StalenessGate(bound, run.step_count)
        self.made: dict[int, int] = dict.fromkeys(lines, 0)
        self.peaks: dict[int, int] = {}
        run.recorder.peaks_logged = True  # the first server reports those of the workers
        self.draining = False
        self.validate = make_validator(run, source, config)

    def send_weights(self, worker: int, reading: WorkOrder) -> None:
        """Send weights and samples to a worker."""
        self.under_way[worker] = reading
        weights = self.parcel.allocate()
        for name, one in self.run.program.local.items():
            self.parcel.part(weights, name).copy_(one.parameter.detach().reshape(-1))
        self.lines[worker].send(reading, weights)

    def apply(self, worker: int, staleness: int) -> None:
        """Make one optimizer step with the gradient of a worker."""
        run, reading = self.run, self.under_way.pop(worker)
        arrived = self.here.pop(worker)
        head = arrived.head
        if head is None:
            raise ClusterError(f"rank {worker} is gone, and its gradient was to be applied")
        if head.moved:
            raise ConfigError(
                "layout.updates: a forward pass changed a buffer of the model, of which every "
                "worker has its own; try: layout.updates=synchronous"
            )
        self.loader.position = self.position
        total = -(-(reading.stop - reading.start) // run.plan.micro_batch)
        batch = StepBatch(
            (), reading.start, reading.stop, total, reading.start // self.loader.samples, (),
            after=self.loader.state(), stream=id(self.loader),
        )  # fmt: skip
        run.begin_step(batch, is_own=False)
        run.step_state.data_wait_s = 0.0  # the worker's wait for data is unknown here
        self.serving.load_gradients(self.parcel, arrived.gradients)
        run.world.traffic.add_sent("send", arrived.sent_bytes, "servers")
        run.step_state.written = _WorkerPasses(self._tally(worker, head, batch))
        run.step_state.values = {"staleness": staleness, "worker": worker}  # into the step's row
        self.serving.between = True
        run.update()
        self.serving.between = False
        self.made[worker] += 1

    def _tally(self, worker: int, head: GradientMessage, batch: StepBatch) -> StepTotals:
        run = self.run
        flags = run.collect_flags()
        alike = {name: [0.0] * len(values) for name, values in flags.sums.items()}
        sums = {**alike, "unreadable": [float(head.lost)]}
        self.peaks[worker] = head.peak_memory_bytes
        return StepTotals(
            loss_sum=head.loss_sum,
            count=head.count,
            norm=head.norm,
            broken=head.broken,
            loss_broken=head.loss_broken,
            stop=False,
            save=False,
            moved=False,
            save_failed=False,
            used=list(head.used),
            micro_batches=head.ran,
            uneven=True,  # one worker made them all
            numbers=_make_equal_numbers(flags.invariants, sums, run.world),
            measured=[],
            unnamed=False,
            broken_ranks=lambda: [worker],
        )

    def drop_worker(self, worker: int, why: str = "") -> None:
        """Remove a dead worker; the next one gets its samples."""
        reading = self.under_way.pop(worker, None)
        self.here.pop(worker, None)
        self.lines.pop(worker).close()
        if reading is not None:
            self.returned.append(reading)
        if self.run.world.is_first:
            self.run.recorder.events.emit(
                "worker_left_out",
                step=self.run.step_count,
                rank=worker,
                left=sorted(self.lines),
                samples=[reading.start, reading.stop] if reading else None,
                why=why,
            )

    def save(self, wait: bool) -> bool:
        """Write a checkpoint; return whether it is on disk, if it was waited for."""
        self._gather_weights()
        return self.run.save(wait=wait) is not None

    def _gather_weights(self) -> None:
        """Gather the other servers' parts on every server, for code that reads the whole model."""
        self.serving.publish()
        self.run.guards.writes.after(self.run.step_count + 1)

    def end(self, code: int) -> None:
        """Send the end to all workers, and wait until they have received it."""
        for line in self.lines.values():
            line.send(WorkOrder(gradient_messages.END, code), {})
        for line in self.lines.values():
            line.close()

    def open(self, folder: Path, world: World, held_bytes: int) -> None:
        """Write plan.json and the lines before the first step; every server calls it.

        Args:
            held_bytes: resident memory of this process before its model was built.
        """
        run, config = self.run, self.config
        told: dict[str, Any] = {}
        if run.world.writes_files:
            facts = cache(partial(collect_model_facts, config, self.source))
            cluster = describe_local_cluster(world.size, world.device, held_bytes)
            told = {
                "model": config.model.build or config.model.name,
                "chosen": False,
                "predicted": forecast_run(config, facts, self.plan, cluster),
            }
        write_opening(run, self.plan, self.source, self.total, folder, told)

    def follow_orders(self) -> int:
        """Follow the orders of the first server; return the exit code."""
        while True:
            what, numbers = self.orders.receive()
            worker = numbers[0]
            if what == gradient_messages.GIVE:
                reading = WorkOrder(gradient_messages.WORK, *numbers[1:4])
                self.position = max(self.position, reading.stop)
                self.send_weights(worker, reading)
            elif what == gradient_messages.APPLY:
                while worker not in self.here:
                    self._store_arrival(self.inbox.get())
                self.apply(worker, numbers[1])
            elif what == gradient_messages.LOST:
                self.drop_worker(worker)
            elif what == gradient_messages.SAVE:
                self.save(wait=bool(numbers[0]))
            elif what == gradient_messages.VALIDATE:
                self._gather_weights()
                self.validate()
            else:
                self.end(numbers[0])
                gradient_messages.send_report(self.orders.pairs, self.orders.servers[0], -1, True)
                self.run.close()
                return numbers[0]

    def _store_arrival(self, arrived: Arrival) -> None:
        if arrived.head is not None:
            self.here[arrived.worker] = arrived

    # the first server

    def lead(self) -> int:
        """Order the gradients to the end of the run, or a stop; return the exit code."""
        run, config = self.run, self.config
        every = config.checkpoint.every or max(1, self.total // 5)
        acks: dict[int, int] = {}
        due = False  # a save
        run.recorder.restart_clock()
        for worker in list(self.lines):
            self._deal_samples(worker)
        while run.step_count < self.total:
            flags = run.collect_flags()
            stop = flags.stop
            self.draining = due or stop or flags.save
            if self.draining and not self.under_way and not self.returned:
                if stop:
                    break
                run.recorder.wanted.discard("save")
                self.orders.send(gradient_messages.SAVE, 0)
                self.save(wait=False)
                due = self.draining = False
                for worker in sorted(self.idle):
                    self._deal_samples(worker)
            try:
                arrived = self.inbox.get(timeout=LOOK_S)
            except queue.Empty:
                continue
            self._handle_arrival(arrived, acks)
            while (turn := self.turns.next_worker()) is not None:
                staleness = self.turns.record_applied(turn)
                self.orders.send(gradient_messages.APPLY, turn, staleness)
                self.apply(turn, staleness)
                step = run.step_count
                due = due or (step % every == 0 and step < self.total)
                if config.train.validate_every and step % config.train.validate_every == 0:
                    self.orders.send(gradient_messages.VALIDATE)
                    self._gather_weights()
                    self.validate()
                self.draining = due or self.draining
                self._deal_samples(turn)
        return self._finish_run(stopped=run.step_count < self.total)

    def _handle_arrival(self, arrived: Arrival, acks: dict[int, int]) -> None:
        """Process a message of the first server's inbox: a gradient has arrived, or a worker died.

        Args:
            arrived: worker, and its gradient here or the note of another server; `why`: it died.
            acks: worker → number of servers that have its gradient, updated in place. Once all
                have it, the gradient may be applied.

        Raises:
            ClusterError: another server failed, or no worker is left.
        """
        worker = arrived.worker
        if worker < 0:
            raise ClusterError(arrived.why)
        if worker not in self.lines:
            return
        if arrived.why:
            acks.pop(worker, None)
            self.turns.lost(worker)
            self.orders.send(gradient_messages.LOST, worker)
            self.idle.discard(worker)
            self.drop_worker(worker, arrived.why)
            if not self.lines:
                raise ClusterError("no worker of the parameter server is left")
            for idle in sorted(self.idle):  # an idle worker gets its samples
                self._deal_samples(idle)
            return
        self._store_arrival(arrived)
        acks[worker] = acks.get(worker, 0) + 1
        if acks[worker] == self.run.world.size:
            acks.pop(worker)
            self.turns.record_gradient(worker)

    def _deal_samples(self, worker: int) -> None:
        """Send the stream's next samples to a worker, or let it wait if none may be given."""
        self.idle.add(worker)
        if self.returned:
            reading = self.returned.pop(0)
        elif self.draining or self.dealt >= self.total:
            return
        else:
            stop = step_end(self.position, self.loader.samples, self.plan.batch)
            reading = WorkOrder(gradient_messages.WORK, self.dealt, self.position, stop)
            self.position, self.dealt = stop, self.dealt + 1
        self.idle.discard(worker)
        self.turns.read(worker)
        self.orders.send(
            gradient_messages.GIVE, worker, reading.number, reading.start, reading.stop
        )
        self.send_weights(worker, reading)

    def _finish_run(self, *, stopped: bool) -> int:
        """Save, validate, and end all servers and workers; return the exit code."""
        run = self.run
        self.orders.send(gradient_messages.SAVE, 1)
        saved = self.save(wait=True)
        values = None
        if not stopped:
            run.skips.check_moved(self.first_step, run.step_count)
            self.orders.send(gradient_messages.VALIDATE)
            self._gather_weights()
            values = self.validate()
        code = (STOPPED if stopped else 0) if saved else UNSAVED_CODE
        run.recorder.events.emit("staleness", step=run.step_count, **self._staleness_counts())
        run.recorder.notice(self._staleness_text())
        if stopped:
            how = "stopped on request" if saved else "stopped on request; the last save failed"
            run.recorder.events.emit("run_finished", step=run.step_count, how=how)
        else:
            wall_s, steps = time.perf_counter() - self.began_s, run.step_count - self.first_step
            how = "completed" if saved else "completed; the last checkpoint could not be written"
            workers = self.plan.layout.processes - self.plan.layout.servers
            peaks = [self.peaks.get(rank, 0) for rank in range(workers)]
            peaks.append(peak_memory_bytes(run.world.device))  # this server's
            run.recorder.events.emit("memory_peaks", peak_memory_bytes_by_rank=peaks)
            emit_run_end(run, self.source, values, steps=steps, wall_s=wall_s, how=how)
        self.orders.send(gradient_messages.FINISH, code)
        self.end(code)
        for hearing in self.orders.hearing:
            hearing.join()
        run.close()
        return code

    def _staleness_counts(self) -> dict[str, Any]:
        counts = self.turns.counts
        total = sum(counts.values())
        return {
            "bound": self.turns.bound,
            "largest": max(counts, default=0),
            "mean": sum(late * often for late, often in counts.items()) / max(1, total),
            "counts": {str(late): often for late, often in sorted(counts.items())},
            "by_worker": {str(worker): made for worker, made in self.made.items()},
        }

    def _staleness_text(self) -> str:
        told = self._staleness_counts()
        bound = "no bound" if self.turns.bound is None else f"bound {self.turns.bound}"
        each = ", ".join(f"rank {worker} {made}" for worker, made in self.made.items())
        return (
            f"staleness: {told['mean']:.2f} steps in the mean, {told['largest']} at most "
            f"({bound}); gradients by {each}"
        )


def _make_equal_numbers(
    invariants: Sequence[Invariant], sums: Mapping[str, Sequence[float]], world: World
) -> StepNumbers:
    """Return a step's numbers for ranks that all hold the same values, without communication.

    Args:
        invariants: values that ranks have in common.
        sums: entries that are sums over ranks already.
        world: the ranks.
    """
    vector = StepVector()
    for name, values in sums.items():
        vector.add(name, values)
    vector.add_invariants((), 0, world)
    return vector.name_sums(vector.values, invariants, world)
