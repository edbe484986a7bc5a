"""ZeRO's four stages side by side: weights, gradients and optimizer state of each rank.

n ranks train the same toy model for two steps under each stage; every stage must end with the
weights of one process. With P parameters in bf16 (2 bytes weight, 2 bytes gradient) and 12 bytes of
optimizer state (fp32 weight and two Adam moments), a rank holds and sends per step

    stage   holds                sharded over ranks              sends (elements)
    0       16·P                 nothing (DDP)                   2(n−1)/n · P
    1       4·P + 12·P/n         optimizer state                 2(n−1)/n · P
    2       2·P + 14·P/n         gradients too                   2(n−1)/n · P
    3       16·P/n               weights too (FSDP)              3(n−1)/n · P

Stage 3 holds one gathered unit more while it computes. Source: Rajbhandari et al. 2020, §5 and §7.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.base.text.units import bytes_text, count_text
from shoal.teach.walks.shards_walk import first_weights, gradient, make_samples, summed_gradient
from shoal.teach.walks.walk import StepThrough, TableCell, WalkStep, check_equal, check_ranks

PARAMETERS = 7_000_000_000
WEIGHT_BYTES, GRADIENT_BYTES, STATE_BYTES = 2, 2, 12
UNITS, STEPS = 3, 2
KINDS = ("weights", "gradients", "optimizer")

ABOUT = {
    0: (
        "stage 0: nothing is cut (DDP)",
        ("all-reduce gradients", "every rank updates everything"),
    ),
    1: (
        "stage 1: the optimizer state is cut",
        ("reduce-scatter gradients", "each rank updates its part", "all-gather weights"),
    ),
    2: (
        "stage 2: the gradients are cut too",
        ("as stage 1", "but only the own part of a gradient stays after its reduce-scatter"),
    ),
    3: (
        "stage 3: the weights are cut too (FSDP)",
        ("all-gather weights before forward and before backward", "drop them after each"),
    ),
}


@dataclass
class _RankShards:
    """Shards of a rank between steps: [unit][part] → number, by kind."""

    weights: dict[tuple[int, int], int] = field(default_factory=dict)
    gradients: dict[tuple[int, int], int] = field(default_factory=dict)
    optimizer: dict[tuple[int, int], int] = field(default_factory=dict)


class _StageTraining:
    """Training under one stage: momentum SGD, m ← m + g, w ← w + m, in integers.

    Updates are added to the weights, so that they stay positive and grow: nothing converges here.
    """

    def __init__(self, stage: int, ranks: int) -> None:
        self.stage, self.n = stage, ranks
        self.sent_parts = 0.0
        self.ranks = [_RankShards() for _ in range(ranks)]
        for unit, row in enumerate(first_weights(UNITS, ranks)):
            for part, number in enumerate(row):
                for rank in range(ranks):
                    if stage < 3 or rank == part:
                        self.ranks[rank].weights[unit, part] = number
                    if stage < 1 or rank == part:
                        self.ranks[rank].optimizer[unit, part] = 0

    def weights(self, rank: int) -> list[list[int]]:
        """Return the whole weights; stage 3 gathers the missing shards, and counts them."""
        held = self.ranks[rank].weights
        pairs = [(unit, part) for unit in range(UNITS) for part in range(self.n)]
        missing = [pair for pair in pairs if pair not in held]
        if rank == 0:
            self.sent_parts += len(missing)
        found = {pair: held.get(pair, self.ranks[pair[1]].weights[pair]) for pair in pairs}
        return [[found[unit, part] for part in range(self.n)] for unit in range(UNITS)]

    def step(self, batch: list[int]) -> None:
        """Train one step: forward and backward of one sample per rank, sum over ranks, update."""
        own: list[list[int]] = []
        for rank, sample in enumerate(batch):
            self.weights(rank)  # forward; stage 3 drops them again and gathers for the backward
            own.append(gradient(self.weights(rank), sample))
        share = UNITS * (self.n - 1)
        self.sent_parts += share if self.stage else 2 * share
        for rank, mine in enumerate(self.ranks):
            for unit in range(UNITS):
                for part in range(self.n):
                    if self.stage == 0 or part == rank:
                        mine.gradients[unit, part] = sum(each[unit] for each in own)
                    elif self.stage == 1:
                        mine.gradients[unit, part] = own[rank][unit]
        self._update()

    def _update(self) -> None:
        for mine in self.ranks:
            for pair in mine.optimizer:
                mine.optimizer[pair] += mine.gradients[pair]
                mine.weights[pair] += mine.optimizer[pair]
        if self.stage in (1, 2):
            self.sent_parts += UNITS * (self.n - 1)
            for mine in self.ranks:
                for unit, part in mine.weights:
                    mine.weights[unit, part] = self.ranks[part].weights[unit, part]

    def held_bytes(self, rank: int, kind: str) -> float:
        """Return a rank's bytes of one kind for PARAMETERS parameters, from its real shards."""
        each = {"weights": WEIGHT_BYTES, "gradients": GRADIENT_BYTES, "optimizer": STATE_BYTES}
        numbers = len(getattr(self.ranks[rank], kind))
        return numbers / (UNITS * self.n) * PARAMETERS * each[kind]

    def parts(self, rank: int, kind: str) -> str:
        """Return the parts of a unit that a rank holds, by their numbers: `0123`, `·1··`."""
        held = {part for _, part in getattr(self.ranks[rank], kind)}
        return "".join(f"{part:x}" if part in held else "·" for part in range(self.n))


def _train_one_process(ranks: int) -> list[list[int]]:
    """Return the weights after all steps on one process that sees every sample."""
    weights = first_weights(UNITS, ranks)
    momentum = [0] * UNITS
    for batch in make_samples(ranks, STEPS):
        for unit, total in enumerate(summed_gradient(weights, [batch])):
            momentum[unit] += total
        weights = [[w + m for w in row] for row, m in zip(weights, momentum, strict=True)]
    return weights


def formula_bytes(stage: int, ranks: int, parameters: float) -> float:
    """Return the state bytes of a rank by the paper's formula.

    >>> [formula_bytes(stage, 8, 7e9) / 1e9 for stage in range(4)]
    [112.0, 38.5, 26.25, 14.0]
    """
    cut = {0: 0, 1: 12, 2: 14, 3: 16}[stage]
    return (16 - cut) * parameters + cut * parameters / ranks


def zero(ranks: int) -> StepThrough:
    """Show all four stages, each as one step of the walk.

    Raises:
        PlanError: a number of ranks that cannot be shown.

    >>> walk = zero(8)
    >>> [cell.text for cell in walk.steps[2].cells[1]]
    ['01234567', '·1······', '·1······', '24.4 GiB']
    """
    check_ranks("ZeRO", ranks)
    steps = []
    right = _train_one_process(ranks)
    for stage, (title, happens) in ABOUT.items():
        world = _StageTraining(stage, ranks)
        for batch in make_samples(ranks, STEPS):
            world.step(batch)
        sent = world.sent_parts / STEPS / (UNITS * ranks)
        for rank in range(ranks):
            check_equal(f"stage {stage}: weights of rank {rank}", world.weights(rank), right)
            held = sum(world.held_bytes(rank, kind) for kind in KINDS)
            wanted = formula_bytes(stage, ranks, PARAMETERS)
            check_equal(f"stage {stage}: bytes", round(held), round(wanted))
        times = 3 if stage == 3 else 2
        check_equal("elements sent", round(sent, 9), round(times * (ranks - 1) / ranks, 9))
        sent_bytes = sent * PARAMETERS * GRADIENT_BYTES
        note = (
            f"sent per rank and step: {times}(n−1)/n·P = {count_text(sent * PARAMETERS)} elements, "
            f"{bytes_text(sent_bytes)}; states per rank: {_formula(stage)}"
        )
        steps.append(WalkStep(title, happens, _cells(world), note))
    return StepThrough(
        title=f"ZeRO stages 0 to 3 on {ranks} ranks, {count_text(PARAMETERS)} parameters",
        story=(
            "All ranks train the same model on different samples. Stage by stage, less is kept "
            f"whole: the digits are the parts (of {ranks}) that a rank holds between steps.",
        ),
        rows=tuple(f"rank {rank}" for rank in range(ranks)),
        columns=(*KINDS, "held"),
        steps=tuple(steps),
        checked=f"after {STEPS} steps of momentum SGD all four stages hold the weights of one "
        "process; bytes held and elements sent are counted and equal the formulas",
        looks={"own": "a part", "whole": "all parts"},
    )


def _formula(stage: int) -> str:
    return {0: "16·P", 1: "4·P + 12·P/n", 2: "2·P + 14·P/n", 3: "16·P/n"}[stage]


def _cells(world: _StageTraining) -> tuple[tuple[TableCell, ...], ...]:
    table = []
    for rank in range(world.n):
        row = []
        for kind in KINDS:
            text = world.parts(rank, kind)
            row.append(TableCell(text, "own" if "·" in text else "whole"))
        total = sum(world.held_bytes(rank, kind) for kind in KINDS)
        table.append((*row, TableCell(bytes_text(total), "own")))
    return tuple(table)
