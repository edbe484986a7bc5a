"""Layout of a parameter server: serving ranks, working ranks, and the servers' update rule.

The last ranks are servers: each updates a part of every gradient bucket and runs no micro-batch.
The others are workers, which hold no optimizer state. This is zero1 with shares on some ranks only.
Alternatively servers hold embedding tables alone (`serves`), and the rest is ddp between the
workers.

    synchronous     a step is the sum over all workers: what ddp computes
    bounded-stale   a step is one worker's gradient; from the moment a worker read the weights to
                    the moment its gradient is applied, others apply at most `staleness` steps
    asynchronous    the same without a bound

Source: Li et al. 2014 (parameter server); Ho et al. 2013 (bounded staleness; there in each worker's
own clock, here in steps of the weights, which is what a stale gradient is late by)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.base.errors import ConfigError, PlanError, check_choice
from shoal.base.layouts.layout import Layout
from shoal.base.layouts.policies import Policies

SERVES = ("weights", "embeddings")
"""Weights on servers: all, or the tables that only lookups read; or tables by name."""
UPDATES = ("synchronous", "bounded-stale", "asynchronous")
"""Update rules of servers, the strictest first."""
OTHER_WORDS = {
    **dict.fromkeys(("sync", "bsp"), "synchronous"),
    **dict.fromkeys(("bounded", "stale", "ssp"), "bounded-stale"),
    **dict.fromkeys(("async", "asp", "hogwild"), "asynchronous"),
}
"""Other projects' words for the update rules."""


def updates_asynchronously(layout: Layout) -> bool:
    """Return whether servers update by one worker's gradient, without waiting for the others."""
    return layout.updates not in ("", "synchronous")


def count_workers(layout: Layout) -> int:
    """Count the data-parallel ranks that run micro-batches."""
    return layout.dp_replicate * layout.dp_shard - layout.servers


def expendable_ranks(layout: Layout) -> range:
    """Return the ranks whose death the others survive: workers that no step waits for."""
    return range(count_workers(layout) if layout.servers and updates_asynchronously(layout) else 0)


def server_layout_keys(layout: Layout) -> dict[str, Any]:
    """Return a server's layout as keys of [layout], as `settle.words_of` does."""
    keys = ("servers", "updates", "staleness", "serves")
    said = {key: getattr(layout, key) for key in keys if getattr(layout, key)}
    return {"strategy": "parameter-server", **said}


def make_server_layout(
    processes: int, servers: int = 0, updates: str = "", staleness: int = 0, serves: str = ""
) -> Layout:
    """Create the layout of `processes` ranks of which the last `servers` are parameter servers.

    Args:
        servers: 0: one.
        updates: "": synchronous.
        staleness: 0: twice the workers under bounded-stale.
        serves: "", weights: all; embeddings, or names of tables: those alone.

    Raises:
        PlanError: too few processes, an unknown word, or an impossible bound.

    >>> make_server_layout(4).text()
    'parameter-server (workers = 3, servers = 1)'
    >>> make_server_layout(4, 2, "bounded-stale").staleness
    4
    >>> make_server_layout(3, serves="embeddings").text()
    'parameter-server (workers = 2, servers = 1, serves = embeddings)'
    """
    servers = servers or 1
    if servers < 0:
        raise PlanError(f"layout.servers = {servers}: at least 1; try: layout.servers=1")
    if processes <= servers:
        fewer = f", or layout.servers={processes - 1}" if processes > 1 else ""
        raise PlanError(
            f"layout.servers = {servers}: leaves none of {processes} processes to compute "
            f"gradients; try: launch.processes={servers + 1}{fewer}"
        )
    updates = updates or UPDATES[0]
    check_choice("layout.updates", updates, UPDATES, OTHER_WORDS, kind=PlanError)
    workers = processes - servers
    if updates != "bounded-stale" and staleness:
        raise PlanError(
            f"layout.staleness = {staleness}: bounds layout.updates=bounded-stale, and {updates} "
            f"has no such bound; try: layout.updates=bounded-stale"
        )
    if updates == "bounded-stale":
        staleness = staleness or 2 * workers
        if staleness < workers - 1:
            raise PlanError(
                f"layout.staleness = {staleness}: where {workers} workers read the same weights, "
                f"the last one's gradient lacks the {workers - 1} steps of the others; try: "
                f"layout.staleness={workers - 1}, or layout.updates=synchronous"
            )
    if serves in ("", SERVES[0]):
        split = Layout(dp_shard=processes, zero=1, servers=servers, updates=updates)
        return replace(split, staleness=staleness)
    if updates != UPDATES[0]:
        raise PlanError(
            f"layout.updates = {updates}: layout.serves = {serves} leaves the rest of the model to "
            f"the workers, which step it together; try: layout.updates=synchronous, or "
            f"layout.serves=weights"
        )
    return Layout(dp_replicate=processes, servers=servers, updates=updates, serves=serves)


def check_server_keys(strategy: str, degrees: Mapping[str, int], served: Mapping[str, Any]) -> None:
    """Refuse parameter-server keys under another strategy, and axis degrees under that one.

    Args:
        strategy: value of `layout.strategy`.
        degrees: axis → degree that the user set, as dp_shard → 4.
        served: servers, updates, staleness and serves of [layout] → the user's value; an empty
            value counts as unset.

    Raises:
        PlanError: a key is refused; with the nearest legal choice.
    """
    if strategy != "parameter-server" and any(served.values()):
        said = {key: value for key, value in served.items() if value}
        key, value = next(iter(said.items()))
        without = " ".join(f"layout.{key}={type(value)()}" for key, value in said.items())
        raise PlanError(
            f"layout.{key} = {value}: is of layout.strategy=parameter-server, and {strategy} has "
            f"no servers; try: layout.strategy=parameter-server, or without: {without}"
        )
    if strategy == "parameter-server" and degrees:
        axis, degree = next(iter(degrees.items()))
        raise PlanError(
            f"layout.{axis} = {degree}: layout.strategy = parameter-server divides its ranks by "
            f"layout.servers alone, and each worker computes on the whole model; try: leave "
            f"layout.{axis} out, or layout.strategy out"
        )


def own_batches_error(layout: Layout) -> ConfigError:
    """Return the error for ranks that bring their own batches, which a server does not use."""
    return ConfigError(
        f"run.step: layout {layout.text()} has ranks that run no sample, and each rank brings a "
        f"batch of its own; try: run.loader(dataset), which deals to the others"
    )


def check_server_policies(plan: Policies, layout: Layout) -> None:
    """Refuse policies that a parameter server does not support.

    Raises:
        PlanError: a policy is refused; names the key and the layouts that support it.
    """
    named = "layout.strategy = parameter-server does not go with"
    if plan.compress != "none":
        raise PlanError(
            f"layout.compress = {plan.compress}: {named} it: codes are summed between ranks, and "
            f"servers sum gradients themselves; try: layout.compress=none, or "
            f"layout.strategy=ddp"
        )
    if plan.offload != "none":
        raise PlanError(
            f"memory.offload = {plan.offload}: {named} it: optimizer states are on servers "
            f"already; try: memory.offload=none, or layout.strategy=zero1"
        )
    if updates_asynchronously(layout) and plan.spikes == "rewind":
        raise PlanError(
            f"train.spikes = rewind: layout.updates = {layout.updates} has gradients under way, "
            f"which no rank takes back; try: train.spikes=skip"
        )
    if updates_asynchronously(layout) and plan.statistics:
        raise PlanError(
            f"train.statistics = {plan.statistics}: layout.updates = {layout.updates} has no step "
            f"that all ranks share; try: train.statistics=0"
        )
    if updates_asynchronously(layout) and plan.compute == "fp16":
        raise PlanError(
            f"precision.compute = fp16: layout.updates = {layout.updates} has no step that all "
            f"ranks share, by which a loss scale is found; try: precision.compute=bf16"
        )


@dataclass
class StalenessGate:
    """Order in which workers' gradients are applied, so that none exceeds the staleness bound.

    If a worker read the weights at step v, its gradient must be applied at step v + bound at the
    latest. A gradient is applied now if all gradients in flight can still meet their bound
    afterwards, the earliest first; else it waits for them. With a bound of workers − 1 or more this
    is always possible, and the most urgent gradient never waits: no deadlock.

    Attributes:
        step: step of the weights: number of applied gradients.
        bound: None: gradients are applied in order of arrival.
        read_at: by worker in flight, the step of the weights that it read.
        came: workers whose gradient has arrived, in order of arrival.
        counts: number of applied gradients by staleness.
    """

    bound: int | None
    step: int = 0
    read_at: dict[int, int] = field(default_factory=dict)
    came: list[int] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)

    def read(self, worker: int) -> None:
        """Record that a worker reads the weights; it is in flight from here on."""
        self.read_at[worker] = self.step

    def record_gradient(self, worker: int) -> None:
        """Record that a worker's gradient has arrived."""
        self.came.append(worker)

    def lost(self, worker: int) -> None:
        """Remove a lost worker and drop its gradient."""
        self.read_at.pop(worker, None)
        self.came = [one for one in self.came if one != worker]

    def next_worker(self) -> int | None:
        """Return the worker whose gradient is applied now; None: wait for another gradient."""
        return next((worker for worker in self.came if self._may(worker)), None)

    def record_applied(self, worker: int) -> int:
        """Record that a gradient was applied or skipped; return its staleness in steps."""
        self.came.remove(worker)
        staleness = self.step - self.read_at.pop(worker)
        self.counts[staleness] = self.counts.get(staleness, 0) + 1
        self.step += 1
        return staleness

    def _may(self, worker: int) -> bool:
        if self.bound is None:
            return True
        others = sorted(step for one, step in self.read_at.items() if one != worker)
        turns = range(self.step + 1, self.step + 1 + len(others))
        return all(turn - step <= self.bound for turn, step in zip(turns, others, strict=True))
