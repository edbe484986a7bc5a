"""FSDP step by step: gather a unit's weights, compute, free them; reduce-scatter gradients.

Every rank keeps 1/n of each unit's weights, gradients and optimizer state. A unit's weights are
gathered just before their use, the next unit's while this one computes, so at most two units are
whole at any time. Per micro-batch each rank sends

    (n−1)/n · (2·W + G)        weights twice (forward, backward), gradients once

for W bytes of weights and G of gradients: 1.5 times what DDP's all-reduce sends where W = G.
Source: Zhao et al. 2023 (PyTorch FSDP); Rajbhandari et al. 2020 (ZeRO), stage 3.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.base.plans.timeline import MemorySample, Timeline, TimelineSpan
from shoal.base.text.units import bytes_text, seconds_text
from shoal.teach.walks.shards_walk import first_weights, gradient, make_samples, summed_gradient
from shoal.teach.walks.walk import StepThrough, TableCell, WalkStep, check_equal, check_ranks
from shoal.teach.walks.walk_messages import ALPHA_S, BYTES_PER_S

UNITS = 4
UNIT_PARAMETERS = 25_000_000
"""Parameters of each unit, in this drawing."""

GATHERED_BYTES, SENT_GRADIENT_BYTES = 2, 2
"""Bytes per parameter: bf16 weights are gathered, bf16 gradients sent."""

SHARD_BYTES, GRADIENT_SHARD_BYTES = 12, 4
"""Bytes per parameter of a shard: fp32 weight with two Adam moments; its fp32 gradient."""

ACTIVATION_BYTES = 40 * 2**20
"""Bytes that each unit's forward keeps until its backward."""

FORWARD_S, BACKWARD_S, UPDATE_S = 3e-3, 6e-3, 1e-3


@dataclass
class _RankState:
    """Tensors and sent bytes of one rank; all ranks do the same at the same time.

    Attributes:
        whole: units whose weights are gathered, with the numbers.
        full: units whose whole gradient is there, not yet scattered.
        shards: unit → this rank's part of the summed gradient.
    """

    number: int
    own: list[int]
    whole: dict[int, list[int]] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)
    full: dict[int, list[int]] = field(default_factory=dict)
    shards: dict[int, int] = field(default_factory=dict)
    upstream: int = 1


class _FsdpSimulation:
    """Simulation of n synchronous ranks: a compute lane, a link lane, and a clock for each.

    Attributes:
        kept: units whose activations wait for their backward.
    """

    def __init__(self, ranks: int, forward_s: float, backward_s: float) -> None:
        self.weights = first_weights(UNITS, ranks)
        self.ranks = [_RankState(r, [unit[r] for unit in self.weights]) for r in range(ranks)]
        self.forward_s, self.backward_s = forward_s, backward_s
        self.compute_s = self.link_s = 0.0
        self.ready_s: dict[int, float] = {}
        self.sent_bytes = 0.0
        self.kept: set[int] = set()
        self.spans: list[TimelineSpan] = []
        self.changes: list[tuple[float, str, float]] = []
        self.steps: list[WalkStep] = []
        shard_bytes = UNITS * UNIT_PARAMETERS * SHARD_BYTES / ranks
        self.record_memory(0.0, "shards", shard_bytes)

    def record_memory(self, time_s: float, what: str, n_bytes: float) -> None:
        """Record that from this moment a rank holds so many bytes more (or fewer)."""
        self.changes.append((time_s, what, n_bytes))

    def _collective(self, kind: str, unit: int, from_s: float, whole_bytes: float) -> float:
        """Run a ring over all ranks once data and link are ready; return its end."""
        n = len(self.ranks)
        start_s = max(from_s, self.link_s)
        share_bytes = (n - 1) / n * whole_bytes
        self.link_s = start_s + (n - 1) * ALPHA_S + share_bytes / BYTES_PER_S
        self.sent_bytes += share_bytes
        self._span(kind, unit, start_s, self.link_s, "link")
        return start_s

    def _span(self, kind: str, unit: int, start_s: float, end_s: float, lane: str) -> None:
        name = f"u{unit}" if unit >= 0 else ""
        for rank in range(len(self.ranks)):
            self.spans.append(TimelineSpan(rank, start_s, end_s, kind, name, lane))

    def gather(self, unit: int, from_s: float) -> None:
        """All-gather the unit's weights from the parts of all ranks."""
        if unit in self.ranks[0].whole:
            return
        whole_bytes = UNIT_PARAMETERS * GATHERED_BYTES
        start_s = self._collective("all-gather", unit, from_s, whole_bytes)
        self.ready_s[unit] = self.link_s
        self.record_memory(start_s, "gathered", whole_bytes)
        for rank in self.ranks:
            rank.whole[unit] = [peer.own[unit] for peer in self.ranks]

    def free(self, unit: int) -> None:
        """Free the gathered weights: each rank keeps its own part."""
        self.record_memory(self.compute_s, "gathered", -UNIT_PARAMETERS * GATHERED_BYTES)
        for rank in self.ranks:
            del rank.whole[unit]

    def forward(self, unit: int) -> None:
        """Compute a unit on every rank's sample, gathering the next one meanwhile."""
        start_s = max(self.compute_s, self.ready_s[unit])
        if unit + 1 < UNITS:
            self.gather(unit + 1, start_s)
        self.compute_s = start_s + self.forward_s
        self._span("forward", unit, start_s, self.compute_s, "compute")
        self.record_memory(start_s, "activations", ACTIVATION_BYTES)
        self.kept.add(unit)
        for rank in self.ranks:
            rank.inputs[unit + 1] = rank.inputs[unit] * sum(rank.whole[unit])
        self._record_step(f"forward of u{unit}", unit, unit + 1 if unit + 1 < UNITS else None)
        self.free(unit)

    def backward(self, unit: int) -> None:
        """Compute a unit's gradients on every rank, gathering the one before it meanwhile."""
        start_s = max(self.compute_s, self.ready_s[unit])
        if unit:
            self.gather(unit - 1, start_s)
        self.compute_s = start_s + self.backward_s
        self._span("backward", unit, start_s, self.compute_s, "compute")
        self.record_memory(start_s, "full gradients", UNIT_PARAMETERS * SENT_GRADIENT_BYTES)
        n = len(self.ranks)
        for rank in self.ranks:
            rank.full[unit] = [rank.upstream * rank.inputs[unit]] * n
            rank.upstream *= sum(rank.whole[unit])
        self._record_step(f"backward of u{unit}", unit, unit - 1 if unit else None)
        self.record_memory(self.compute_s, "activations", -ACTIVATION_BYTES)
        self.kept.remove(unit)
        self.free(unit)
        self._scatter(unit)

    def _scatter(self, unit: int) -> None:
        """Reduce-scatter a unit's gradient: every rank gets the sum of its own part."""
        whole_bytes = UNIT_PARAMETERS * SENT_GRADIENT_BYTES
        self._collective("reduce-scatter", unit, self.compute_s, whole_bytes)
        self.record_memory(self.link_s, "full gradients", -whole_bytes)
        first_time = unit not in self.ranks[0].shards
        if first_time:
            kept = UNIT_PARAMETERS * GRADIENT_SHARD_BYTES / len(self.ranks)
            self.record_memory(self.link_s, "gradient shards", kept)
        for rank in self.ranks:
            total = sum(peer.full[unit][rank.number] for peer in self.ranks)
            rank.shards[unit] = rank.shards.get(unit, 0) + total
        for rank in self.ranks:
            del rank.full[unit]

    def update(self) -> None:
        """Update each rank's own part of the weights."""
        start_s = max(self.compute_s, self.link_s)
        self.compute_s = start_s + UPDATE_S
        self._span("update", -1, start_s, self.compute_s, "compute")
        self._record_step("update", None, None)

    def _record_step(self, title: str, busy: int | None, coming: int | None) -> None:
        """Record the table of one rank: every rank's looks the same."""
        rank = self.ranks[0]
        happens = [f"compute with u{busy}, then free it" if busy is not None else "own parts only"]
        if coming is not None:
            happens.append(f"gather u{coming} meanwhile")
        weights, gradients, kept = [], [], []
        for unit in range(UNITS):
            look = "whole" if unit in rank.whole else "own"
            text = "all" if look == "whole" else "1/n"
            weights.append(TableCell(text, "busy" if unit == coming else look))
            if unit in rank.full:
                gradients.append(TableCell("all", "whole"))
            elif unit in rank.shards:
                gradients.append(TableCell("1/n", "own"))
            else:
                gradients.append(TableCell("", "none"))
            kept.append(TableCell("x", "own") if unit in self.kept else TableCell("", "none"))
        when = seconds_text(self.compute_s)
        note = f"until {when} · sent so far {bytes_text(self.sent_bytes)}"
        cells = (tuple(weights), tuple(gradients), tuple(kept))
        self.steps.append(WalkStep(title, tuple(happens), cells, note))

    def memory(self) -> tuple[MemorySample, ...]:
        """Return a rank's held memory after every change, by kind; the same on all ranks."""
        now: dict[str, float] = {}
        held: dict[float, dict[str, float]] = {}
        for time_s, what, n_bytes in sorted(self.changes, key=lambda change: change[0]):
            now[what] = now.get(what, 0.0) + n_bytes
            held[time_s] = {name: size for name, size in now.items() if size > 0}
        return tuple(
            MemorySample(rank, time_s, sum(parts.values()), parts)
            for rank in range(len(self.ranks))
            for time_s, parts in held.items()
        )


def fsdp(
    ranks: int,
    micro_batches: int = 1,
    forward_s: float = FORWARD_S,
    backward_s: float = BACKWARD_S,
) -> StepThrough:
    """Show one optimizer step of four units on `ranks` ranks, micro-batch after micro-batch.

    Args:
        forward_s, backward_s: of one unit.

    Raises:
        PlanError: a number of ranks that cannot be shown.

    >>> walk = fsdp(4)
    >>> walk.facts["each rank sends"].split(" = ")[1], walk.facts["gathered at most"]
    ('(n−1)/n·(2W + G)', '2 units')
    """
    check_ranks("FSDP", ranks)
    world, batch = _FsdpSimulation(ranks, forward_s, backward_s), make_samples(ranks, micro_batches)
    for turn in batch:
        for rank, sample in zip(world.ranks, turn, strict=True):
            rank.inputs, rank.upstream = {0: sample}, 1
        world.gather(0, world.compute_s)
        for unit in range(UNITS):
            world.forward(unit)
        world.gather(UNITS - 1, world.compute_s)
        for unit in reversed(range(UNITS)):
            world.backward(unit)
    world.update()
    return _check_and_finish(world, batch)


def _check_and_finish(world: _FsdpSimulation, batch: list[list[int]]) -> StepThrough:
    """Compare gradients, bytes and gathered units with the expected values."""
    ranks, turns = len(world.ranks), len(batch)
    right = summed_gradient(world.weights, batch)
    for rank in world.ranks:
        check_equal(
            f"gradients of rank {rank.number}", [rank.shards[u] for u in range(UNITS)], right
        )
    W = UNITS * UNIT_PARAMETERS * GATHERED_BYTES
    G = UNITS * UNIT_PARAMETERS * SENT_GRADIENT_BYTES
    formula_bytes = turns * (ranks - 1) / ranks * (2 * W + G)
    check_equal("bytes sent", round(world.sent_bytes), round(formula_bytes))
    memory = world.memory()
    most = max(held.parts.get("gathered", 0.0) for held in memory)
    peak = max(held.held_bytes for held in memory)
    whole_bytes = UNITS * (
        UNIT_PARAMETERS * (SHARD_BYTES + GRADIENT_SHARD_BYTES) + ACTIVATION_BYTES
    )
    times = "" if turns == 1 else f"{turns}·"
    facts = {
        "each rank sends": f"{bytes_text(world.sent_bytes)} = {times}(n−1)/n·(2W + G)",
        "gathered at most": f"{most / (UNIT_PARAMETERS * GATHERED_BYTES):.0f} units",
        "most held": f"{bytes_text(peak)} (whole on every rank: {bytes_text(whole_bytes)})",
        "step": seconds_text(world.compute_s),
    }
    title = f"FSDP, {ranks} ranks, {UNITS} units"
    title += f", {turns} micro-batches" if turns > 1 else ""
    one = gradient(world.weights, batch[0][0])
    return StepThrough(
        title=title,
        story=(
            "Every rank trains on its own sample but keeps only 1/n of each unit (a block of "
            "layers). Before a unit computes, its weights are gathered from all ranks; afterwards "
            "they are dropped again. The next unit is gathered while this one computes.",
            "In the backward the gradient of a unit is summed over ranks and cut at once "
            "(reduce-scatter): a rank keeps the sum of its own part and updates only that.",
        ),
        rows=("weights", "gradients", "activations"),
        columns=tuple(f"u{unit}" for unit in range(UNITS)),
        steps=tuple(world.steps),
        checked=f"the summed gradients of all ranks are those of one process: {right} per unit "
        f"(rank 0's own sample alone: {one}); bytes counted equal the formula",
        looks={"own": "a rank's own part", "whole": "gathered, whole", "busy": "being gathered"},
        timeline=Timeline(title, ranks, tuple(world.spans), memory, facts=facts),
        facts=facts,
    )
