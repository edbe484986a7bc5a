"""Flower's ClientApp, whose training is a run of Shoal on several processes.

    from shoal.neighbours.flower import ClientApp              in place of flwr.clientapp
    from shoal.neighbours.flower import train as train_fn      in place of the app's own loop

    message ──> ClientApp forks ranks 1 … n−1 ──> each runs the same handler ──> train: one run
                rank 0 is Flower's own process, and its reply is the one that is sent

`train` has the arguments and the numbers of the loop in Flower's PyTorch quickstart: SGD with
momentum 0.9, cross-entropy, the batches of the app's own loader, of which each rank takes its rows.
`shoal-processes` and `shoal-layout` in the app's configuration (`[tool.flwr.app.config]`) choose
processes and layout; without them they are 2, where there are 2 cores, and "auto".

Ranks are forked, so that model, data and the generators' states are the same on all of them. After
CUDA has begun in Flower's process that is impossible; a line says so.

Source: flwr 1.42 (`flwr.clientapp`)
"""

from __future__ import annotations

import copy
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader

from shoal.base.errors import ClusterError, ConfigError
from shoal.base.estimates.facts import usable_cores
from shoal.fabric import World, start_world
from shoal.launch.processes import free_port
from shoal.parallel.build.full_state import gather_weights
from shoal.trainer.parallelize import parallelize

LAYOUTS = ("auto", "single", "ddp", "zero1", "zero2", "fsdp", "hsdp")
"""Layouts whose ranks each take a part of a batch."""
PROCESSES, LAYOUT = "shoal-processes", "shoal-layout"
"""Keys of the app's configuration."""
COPIED = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator"),
    *("multiprocessing_context", "prefetch_factor", "persistent_workers"),
)
"""Settings of a DataLoader that its copy with other batches keeps."""
END_S = 60.0
"""Seconds that a rank may take to end after rank 0 has its reply."""
_layout = ["auto"]
"""Layout of the message that this process handles."""


def __getattr__(name: str) -> Any:
    """Return `ClientApp`, which needs Flower; the rest of the module does not."""
    if name == "ClientApp":
        return _make_client_app()
    raise AttributeError(f"module {__name__} has no attribute {name}")


@cache
def _make_client_app() -> type:
    base: Any = importlib.import_module("flwr.clientapp").ClientApp

    class ClientApp(base):
        """Flower's ClientApp, whose train functions run on several processes."""

        def train(self, *named: Any, **options: Any) -> Any:
            """Register a train function; see Flower's own."""
            register = super().train(*named, **options)
            return lambda handler: register(run_in_ranks(handler))

    return ClientApp


def run_in_ranks(handler: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a handler of messages that all ranks run; the reply of rank 0 is returned.

    Args:
        handler: handler(message, context) → reply, of a Flower app.
    """

    @wraps(handler)
    def handle(message: Any, context: Any) -> Any:
        processes, layout = read_settings(context.run_config)
        _layout[0] = layout
        with fork_ranks(processes, lambda: handler(message, context)):
            return handler(message, context)

    return handle


def read_settings(config: Mapping[str, Any]) -> tuple[int, str]:
    """Return the processes and the layout of an app's configuration.

    Raises:
        ConfigError: another layout, or fewer than one process.

    >>> read_settings({"shoal-processes": 4, "shoal-layout": "zero1"})
    (4, 'zero1')
    """
    processes = int(config.get(PROCESSES, 0)) or max(1, min(2, usable_cores()))
    layout = str(config.get(LAYOUT, "auto"))
    if processes < 1:
        raise ConfigError(f"{PROCESSES} = {processes}: at least 1; try: {PROCESSES} = 2")
    if layout not in LAYOUTS:
        raise ConfigError(
            f"{LAYOUT} = {layout}: each rank takes a part of every batch; try: {', '.join(LAYOUTS)}"
        )
    return processes, layout


def fork_ranks(processes: int, work: Callable[[], Any]) -> AbstractContextManager[None]:
    """Return a context in which this process is rank 0, and its forks run `work` as the others.

    Raises:
        ConfigError: CUDA has begun in this process.
        ClusterError: a fork failed; its own error is on standard error.
    """
    if processes == 1:
        return nullcontext()
    if torch.cuda.is_initialized():
        raise ConfigError(
            f"{PROCESSES} = {processes}: CUDA has begun in Flower's process, and forks cannot use "
            f"it; try: {PROCESSES} = 1, or a process for each message (flwr-clientapp)"
        )
    return _forked_ranks(processes, work)


@contextmanager
def _forked_ranks(processes: int, work: Callable[[], Any]) -> Iterator[None]:
    before = dict(os.environ)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    sizes = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, usable_cores() // processes))
    sys.stdout.flush()
    children = []
    try:
        for rank in range(1, processes):
            child = os.fork()
            place = {**address, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            if not child:
                _work_as_fork(place, work)
            children.append(child)
        os.environ |= {**address, **sizes, "RANK": "0", "LOCAL_RANK": "0"}
        yield
        _wait_for_ranks(children)
    finally:
        for child in children:  # those that ended are reaped already
            _kill(child)
        os.environ.clear()
        os.environ |= before
        torch.set_num_threads(threads)


def _work_as_fork(place: Mapping[str, str], work: Callable[[], Any]) -> None:
    """Run a rank in a fork, which never returns; its reply is dropped."""
    status = 1
    try:
        os.environ |= place
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)  # each line comes from rank 0 alone
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _wait_for_ranks(children: list[int]) -> None:
    """Wait until all forks have ended well."""
    until_s = time.monotonic() + END_S
    for rank, child in enumerate(list(children), 1):
        found, state = os.waitpid(child, os.WNOHANG)
        while not found and time.monotonic() < until_s:
            time.sleep(0.01)
            found, state = os.waitpid(child, os.WNOHANG)
        if found:
            children.remove(child)
        if not found or state:
            how = f"exit status {os.waitstatus_to_exitcode(state)}" if found else "no end"
            raise ClusterError(f"rank {rank} of this client: {how}; its error is above")


def _kill(child: int) -> None:
    try:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def train(
    net: nn.Module,
    trainloader: Iterable[Any],
    epochs: int,
    lr: float,
    device: Any = None,
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    loss: Any = None,
    layout: Any = None,
) -> float:
    """Train a model on the app's own batches, as one run of Shoal over all ranks of this client.

    Args:
        net: its weights are the trained ones, whole, on every rank afterwards.
        trainloader: batches of (inputs, targets), or dicts with one tensor of labels, the same on
            all ranks.
        epochs: passes over the loader.
        lr: learning rate of the quickstart's optimizer, SGD with momentum 0.9.
        device: unused: Shoal chooses each rank's. It is an argument of the quickstart's own loop.
        optimizer: parameters → another optimizer.
        loss: as of `shoal.parallelize`; default: cross-entropy.
        layout: default: `shoal-layout` of the app's configuration.

    Returns:
        The mean of the steps' losses, as of the quickstart's own loop.

    Raises:
        ConfigError: a batch of another form, or no batch at all.
    """
    del device
    world = start_world()
    chosen = (layout or _layout[0]) if world.size > 1 else "single"
    build = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9))
    run = parallelize(copy.deepcopy(net), build, loss, chosen, world=world, prove="off")
    total, steps = 0.0, 0
    own = deal_rows(trainloader, world)
    for _ in range(epochs):
        for batch in own:
            total, steps = total + run.step(read_batch(batch)).loss, steps + 1
    if not steps:
        raise ConfigError("trainloader: has no batch; try: an epoch of at least one")
    net.load_state_dict(gather_weights(run.program))
    run.close()
    return total / steps


def read_batch(batch: Any) -> tuple[Tensor, Tensor]:
    """Return (inputs, targets) of a batch of Flower's examples.

    Raises:
        ConfigError: neither two tensors nor a dict of two.
    """
    values = list(batch.values()) if isinstance(batch, Mapping) else batch
    tensors = [one for one in values if isinstance(one, Tensor)]
    if len(tensors) != 2 or len(tensors[0]) != len(tensors[1]):
        raise ConfigError(
            f"trainloader: a batch of {type(batch).__name__} with {len(tensors)} tensors; try: "
            "(inputs, targets), or a dict of these two"
        )
    inputs, targets = sorted(
        tensors, key=lambda one: one.dim() == 1 and not one.is_floating_point()
    )
    return inputs, targets


class RankRows:
    """Batch sampler of one rank: its part of each batch of the app's own sampler, in its order."""

    def __init__(self, batches: Iterable[Sequence[int]], world: World) -> None:
        self.batches, self.world = batches, world

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches:
            yield list(batch)[_own_rows(len(batch), self.world)]


def deal_rows(trainloader: Iterable[Any], world: World) -> Iterable[Any]:
    """Return an iterable of this rank's part of each batch; a DataLoader reads no other samples."""
    if world.size == 1:
        return trainloader
    if type(trainloader) is DataLoader and isinstance(trainloader.batch_sampler, BatchSampler):
        named = {name: getattr(trainloader, name) for name in COPIED}
        rows: Any = RankRows(trainloader.batch_sampler, world)
        return DataLoader(trainloader.dataset, batch_sampler=rows, **named)
    return _CutBatches(trainloader, world)


class _CutBatches:
    """Batches of another iterable than a DataLoader, of which each rank takes its rows."""

    def __init__(self, batches: Iterable[Any], world: World) -> None:
        self.batches, self.world = batches, world

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.batches:
            inputs, targets = read_batch(batch)
            rows = _own_rows(len(inputs), self.world)
            yield inputs[rows], targets[rows]


def _own_rows(count: int, world: World) -> slice:
    """Return this rank's rows of a batch, in the order of the ranks.

    Raises:
        ConfigError: a rank would have none.
    """
    if count < world.size:
        raise ConfigError(
            f"trainloader: a batch of {count} for {world.size} ranks; try: drop_last=True, or "
            f"{PROCESSES} = {max(1, count)}"
        )
    return slice(count * world.rank // world.size, count * (world.rank + 1) // world.size)
