"""Layout: the degree of each axis of a run; a strategy is a name for one.

Axes, outermost (slowest link) first: islands · pp · dp_replicate · dp_shard · cp · tp. The product
of the degrees is the number of processes. `ep` reuses data-parallel ranks: it divides the experts
of a mixture among them. strategies.py expands a strategy name to degrees, so that later code uses
degrees only; degrees.py checks degrees that a user gives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shoal.base.layouts.schedule_names import model_copies, stages_per_rank

AXES = ("islands", "pp", "dp_replicate", "dp_shard", "cp", "tp")

STRATEGIES = {
    "single": "one process",
    "dp": "one process, several threads or devices, each with a replica (for comparison)",
    "ddp": "every process holds the whole model; gradients are summed",
    "zero1": "ddp, with the optimizer's state split over the processes",
    "zero2": "zero1, with the summed gradients split as well",
    "zero3": "zero2, with the parameters split as well; the same as fsdp",
    "fsdp": "zero3",
    "hsdp": "groups of processes that hold one copy in shards, several copies",
    "tp": "every layer is split over all processes",
    "pp": "the layers are dealt to the processes, in the order 1f1b",
    "gpipe": "pp: all forward passes, then all backward passes",
    "afab": "gpipe",
    "1f1b": "pp: one forward pass, one backward pass",
    "interleaved": "pp: 1f1b with several stages per process",
    "zero-bubble": "pp: 1f1b with the backward pass cut in two",
    "zbv": "pp: zero-bubble with two stages per process, in a V",
    "dualpipe": "pp: two copies of the layers, fed from both ends at once",
    "cp": "every sequence is split over all processes",
    "ep": "ddp, with the experts of a mixture dealt to all processes",
    "3d": "tp × pp × dp: 2 × 2 × the rest",
    "parameter-server": "workers compute gradients; servers hold the weights and step them",
}
"""Strategies that this version builds."""

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3, "hsdp": 3}
"""ZeRO stage of dp_shard, by strategy."""

PIPELINES = ("pp", "gpipe", "afab", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipe")
"""Strategies that are a pipeline; all but `pp` are the names of its schedule too."""


@dataclass(frozen=True)
class Layout:
    """Degrees of all axes: the number of parts into which each splits the work; all 1: one process.

    The product of `islands` … `tp`, outermost first, is the number of processes.

    Attributes:
        islands: groups of ranks that train alone and merge now and then.
        pp: ranks of a pipeline.
        dp_replicate: replicas of the weights.
        dp_shard: ranks that shard the states of one replica.
        cp: parts of a sequence.
        tp: parts of a layer.
        ep: data-parallel ranks that share the experts; not a factor of the number of processes.
        zero: ZeRO stage over `dp_shard`: 0 nothing is split, 1 optimizer state, 2 gradients too, 3
            parameters too.
        threads: replicas within one process (`dp`); no axis of the mesh.
        schedule: pipeline schedule; "" without a pipeline, or if not yet chosen.
        chunks: stages per rank under `interleaved`.
        servers, updates, staleness: those of a parameter server (parameter_servers.py); servers are
            the last ranks of dp_shard.
        serves: embedding tables that the servers hold, if not all weights. The servers are then the
            last ranks of dp_replicate.
    """

    islands: int = 1
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    zero: int = 0
    threads: int = 1
    schedule: str = ""
    chunks: int = 1
    servers: int = 0
    updates: str = ""
    staleness: int = 0
    serves: str = ""

    @staticmethod
    def of(degrees: Mapping[str, int]) -> Layout:
        """Return the layout with these degrees and no other.

        Args:
            degrees: axis, or another field of a layout → its value.

        >>> Layout.of({"tp": 2, "dp_replicate": 2}).processes
        4
        """
        given: dict[str, Any] = dict(degrees)
        return Layout(**given)

    @property
    def degrees(self) -> dict[str, int]:
        """Degree of every axis of the mesh, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def processes(self) -> int:
        """World size: the product of all degrees.

        >>> Layout(dp_replicate=4).processes
        4
        """
        return math.prod(self.degrees.values())

    @property
    def data_degree(self) -> int:
        """Number of ranks that draw different micro-batches of a step."""
        each = self.updates in ("", "synchronous")  # else a step is one worker's
        return self.dp_replicate * self.dp_shard - self.servers if each else 1

    @property
    def is_derived(self) -> bool:
        """True if the layout is derived from a trace of the model: tp, pp, cp or ep above 1."""
        return max(self.tp, self.pp, self.cp, self.ep) > 1

    def can_share_experts(self, ep: int) -> bool:
        """Return whether data-parallel ranks can share experts among `ep` of them: whole shards.

        Args:
            ep: ranks that share one copy of the experts.

        >>> layout = Layout(dp_replicate=2, dp_shard=4)
        >>> [ep for ep in range(1, 9) if layout.can_share_experts(ep)]
        [1, 2, 4, 8]
        """
        nested = self.dp_shard % ep == 0 or ep % self.dp_shard == 0
        return self.data_degree % ep == 0 and nested

    @property
    def expert_replicate(self) -> int:
        """Ranks that replicate the same experts; `expert_shard` ranks share one copy of them.

        >>> Layout(dp_replicate=2, dp_shard=4, zero=3, ep=2).expert_degrees
        {'islands': 1, 'pp': 1, 'expert_replicate': 2, 'expert_shard': 2, 'ep': 2, 'cp': 1, 'tp': 1}
        """
        return self.dp_replicate * self.dp_shard // self.ep // self.expert_shard

    @property
    def expert_shard(self) -> int:
        """Ranks that share one copy of the experts: first within shards, then among replicas."""
        return max(1, self.dp_shard // self.ep)

    @property
    def expert_degrees(self) -> dict[str, int]:
        """Degree of every axis for the experts' parameters; neighbouring ranks exchange tokens."""
        own = ("expert_replicate", "expert_shard", "ep")
        axes = (*AXES[: AXES.index("dp_replicate")], *own, *AXES[AXES.index("dp_shard") + 1 :])
        return {axis: getattr(self, axis) for axis in axes}

    def at(self, rank: int) -> dict[str, int]:
        """Return a rank's index along every axis, experts' included; tp neighbours are consecutive.

        Args:
            rank: a rank of the run, from 0.

        >>> {axis: n for axis, n in Layout(pp=2, dp_replicate=2, tp=2).at(5).items() if n}
        {'tp': 1, 'pp': 1}
        """
        found: dict[str, int] = {}
        for degrees in (self.degrees, self.expert_degrees):
            left = rank
            for axis in reversed(list(degrees)):
                left, found[axis] = divmod(left, degrees[axis])
        if self.serves:  # tables are on other ranks than the rest, as stages of a pipeline are
            place = rank - (self.processes - self.servers)
            found |= {"pp": int(place >= 0), "servers": max(0, place)}
        return found

    @property
    def stages(self) -> int:
        """Stages into which a pipeline cuts the model.

        >>> Layout(pp=2, schedule="interleaved", chunks=4).stages, Layout(tp=2).stages
        (8, 1)
        >>> Layout(pp=2, schedule="zbv").stages, Layout(pp=2, schedule="dualpipe").stages
        (4, 2)
        """
        return self.pp * stages_per_rank(self.schedule, self.chunks) // model_copies(self.schedule)

    @property
    def without_schedule(self) -> Layout:
        """The same layout without a pipeline schedule.

        >>> Layout(pp=2, schedule="interleaved", chunks=4).without_schedule == Layout(pp=2)
        True
        """
        return replace(self, schedule="", chunks=1)

    @property
    def strategy(self) -> str:
        """The strategy name of this layout.

        >>> Layout(dp_shard=4, zero=3).strategy, Layout(dp_replicate=2, dp_shard=2, zero=3).strategy
        ('fsdp', 'hsdp')
        >>> Layout(pp=4, dp_replicate=2, tp=8).strategy, Layout(dp_shard=4, zero=3, tp=2).strategy
        ('3d', 'fsdp + tp')
        >>> Layout(dp_replicate=2, ep=2).strategy, Layout(dp_shard=2, zero=3, ep=2).strategy
        ('ep', 'fsdp + ep')
        """
        if self.processes == 1:
            return "dp" if self.threads > 1 else "single"
        names = [axis for axis in ("pp", "cp", "tp") if self.degrees[axis] > 1]
        if self.ep > 1:
            if not names and self.data_strategy == "ddp":
                return "ep"
            names.append("ep")
        if not names:
            return self.data_strategy
        if names == ["pp", "tp"]:
            return "3d"
        return " + ".join(([self.data_strategy] if self.data_degree > 1 else []) + names)

    @property
    def data_strategy(self) -> str:
        """The strategy name of the data-parallel axes, whatever else is split.

        >>> Layout(pp=2, dp_shard=2, zero=1, tp=2).data_strategy, Layout(tp=2).data_strategy
        ('zero1', 'ddp')
        """
        if self.servers:
            return "parameter-server"
        if self.dp_shard == 1:
            return "ddp"
        if self.zero < 3:
            return f"zero{self.zero}"
        return "fsdp" if self.dp_replicate == 1 else "hsdp"

    def text(self) -> str:
        """Format the layout for people: strategy, then the degrees above 1, then a schedule.

        >>> Layout(dp_replicate=2).text(), Layout(threads=2).text()
        ('ddp (dp_replicate = 2)', 'dp (threads = 2)')
        >>> Layout(pp=2, schedule="1f1b").text(), Layout(pp=2, dp_replicate=2, tp=2).text()
        ('pp (pp = 2, schedule = 1f1b)', '3d (pp = 2, dp_replicate = 2, tp = 2)')
        """
        if self.servers:
            return self._served_text()
        shown = {**self.degrees, "ep": self.ep, "threads": self.threads}
        if self.strategy == "3d" and self.zero:
            shown["zero"] = self.zero
        words = [f"{k} = {v}" for k, v in shown.items() if v != 1]
        if self.schedule:
            words.append(f"schedule = {self.schedule}")
        if self.chunks > 1:
            words.append(f"chunks = {self.chunks}")
        return f"{self.strategy} ({', '.join(words)})" if words else self.strategy

    def _served_text(self) -> str:
        """Format the layout of a parameter server.

        >>> Layout(dp_shard=4, servers=1, updates="bounded-stale", staleness=6).text()
        'parameter-server (workers = 3, servers = 1, updates = bounded-stale, staleness = 6)'
        """
        workers = self.dp_replicate * self.dp_shard - self.servers
        shown: dict[str, int | str] = {"workers": workers, "servers": self.servers}
        shown |= {"updates": self.updates} if self.updates not in ("", "synchronous") else {}
        shown |= {"staleness": self.staleness} if self.staleness else {}
        shown |= {"serves": self.serves} if self.serves else {}
        return f"parameter-server ({', '.join(f'{key} = {value}' for key, value in shown.items())})"
