"""Bytes that come and go in a step beside activations: gathered weights, buckets, loss, pools.

    sharded   zero 3 gathers the next block ahead, keeps embedding and head from forward to
              backward, others than Shoal in a pipeline everything; gradients travel in fp32 beside
              narrow originals
    loss      full: 12 bytes per token and word in bf16 · chunked: a chunk of logits, gradients of
              hidden states and of the head's weight (made in the forward pass), of a rank's own
              words under tp; on devices the backward makes both anew, scaled · parallel: ÷ tp
    traced    a loss that was traced says itself what it holds, gradients included
    pools     torch's allocator keeps memory per stream: flat gathered weights, and blocks that the
              loss's forward left, are reserved and of no use to others

Source: torch FSDP2, c10/cuda/CUDACachingAllocator; shoal.models.loss; of peers: `frameworks`.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.base.estimates.estimate import Case, UnitFacts
from shoal.base.layouts import resharding
from shoal.forecast.memory.activations import (
    boundary_bytes,
    head_elements,
    shares,
    waiting_head_bytes,
)
from shoal.forecast.memory.framework_memory import Framework
from shoal.forecast.memory.model_states import (
    WIDTHS,
    Elements,
    keeps_gathered,
    rank_elements,
    shard_counts,
)
from shoal.planning.pipeline_stages import Stage, root_share

CHUNK_BYTES = {"cpu": 8 * 2**20, "gpu": 512 * 2**20}
"""Budget of Shoal's chunked loss in wide logits (`shoal.models.loss.default_chunk_rows`)."""


SEGMENT_BYTES = 20 * 2**20
"""What torch's allocator takes at a time for blocks of 1 to 10 MiB (c10: kLargeBuffer)."""


class Sharded(NamedTuple):
    """Weights gathered at a time, and flat; gradients of a block, the head, the root on the way.

    Attributes:
        stays: of what is gathered: from forward to backward.
        last: the last block, while the loss is made, where a framework keeps it.
    """

    gathered: float = 0.0
    flat: float = 0.0
    block: float = 0.0
    head: float = 0.0
    root: float = 0.0
    stays: float = 0.0
    last: float = 0.0


def rank_sum(case: Case, units: list[tuple[UnitFacts, float]], tied: float = 0.0) -> Elements:
    """Elements of several units on one rank; tied: of a table that it holds a copy of."""
    dense = experts = 0.0
    expert_tp = case.one_expert
    for unit, count in units:
        one = rank_elements(unit, case.layout, case.layout.ep, expert_tp)
        dense += one.dense * count
        experts += one.experts * count
    return Elements(dense + tied / case.layout.tp, experts)


def frozen_bytes(case: Case, stage: Stage) -> float:
    """Bytes of weights that do not train, as this rank keeps them; of peers they are not known.

    No narrow copy is made of them; zero 3 shards them with the rest.
    """
    if case.framework != "shoal" or (case.plan.parks_parameters and case.layout.processes > 1):
        return 0.0
    elements = sum(unit.frozen_parameters * count for unit, count in stage.units) / case.layout.tp
    shards = shard_counts(case)[0] if case.layout.zero == 3 else 1
    return elements / shards * max(4, WIDTHS[case.plan.compute])


def wide_elements(case: Case, stage: Stage) -> float:
    """Elements of which Shoal makes no narrow copy: tables that are looked up, norms.

    A table is what no product of its unit reads; a head that is tied to one reads it as it is.
    """
    if case.framework != "shoal":
        return 0.0
    found = stage.tied / case.layout.tp
    for unit, count in stage.units:
        one = rank_elements(unit, case.layout, case.layout.ep, case.one_expert)
        table = not unit.forward_flops and not unit.loss_bytes
        found += count * (one.dense if table else unit.plain_parameters)
    return found


def local_elements(case: Case, elements: Elements) -> float:
    """Elements whose optimizer state this rank holds."""
    dense, experts = shard_counts(case)
    return elements.dense / dense + elements.experts / experts


def block_share(case: Case, stage: Stage, elements: Elements) -> float:
    """Share of the rank's elements that one block has."""
    sizes = [sum(rank_sum(case, [(unit, 1.0)])) for unit, _ in stage.blocks]
    return max(sizes, default=0.0) / max(1.0, sum(elements))


def head_share(case: Case, stage: Stage, elements: Elements) -> float:
    """Share of the rank's elements that the head multiplies by."""
    return head_elements(case, stage) / max(1.0, sum(elements))


def sharded_bytes(case: Case, stage: Stage) -> Sharded:
    """What splitting the parameters themselves (zero 3) holds beside the shards."""
    if case.layout.zero < 3:
        return Sharded()
    width = WIDTHS[case.plan.compute]
    scatter = width + max(4, case.reduce_bytes)
    sizes, root = gathered_elements(case, stage)
    largest = max(sizes, default=0.0)
    rooted = width  # of an element of the root
    if case.framework == "shoal":  # whose root is gathered as it is kept
        rooted = max(4, width)
    ahead = min(2, len(sizes)) * largest  # the next block is gathered ahead
    over = kept_over(case)
    stays = rooted * root
    if over < shard_counts(case)[0]:
        stays += width * sum(sizes) / over
    kept = stays + (width * ahead if over > 1 else 0.0)
    if keeps_gathered(case):  # else every micro-batch would gather again
        stays = kept = width * sum(rank_sum(case, stage.units, stage.tied))
    return Sharded(
        gathered=kept,
        flat=max(rooted * root, width * ahead),
        block=scatter * largest,
        head=rooted * head_elements(case, stage),  # waits for the rest of the root
        root=(scatter - width + rooted) * root,
        stays=stays,
        last=0.0 if kept == stays else width * sizes[-1],
    )


def kept_over(case: Case) -> int:
    """Returns the ranks that hold a block between its passes (`fsdp.reshard`); 1: whole."""
    layout = case.layout
    apart = layout.cp * layout.tp
    shards = shard_counts(case)[0]
    return resharding.kept_over(case.plan.reshard, shards, case.cluster.per_node, apart)


def gathered_elements(case: Case, stage: Stage) -> tuple[list[float], float]:
    """Returns elements of what fsdp gathers on one rank: of each block, in order, and of the root.

    Units that are parts of one larger block are gathered with it; frozen ones are gathered too.
    """
    ones = [_elements_of_one(case, unit) for unit, _ in stage.units]
    root = stage.tied / case.layout.tp
    for (unit, count), one in zip(stage.units, ones, strict=True):
        root += root_share(unit) * one * count
    apart = gathered_apart(case, stage)
    shares_left = [1 - root_share(unit) for unit, _ in stage.units]
    blocks = [sum(shares_left[k] * ones[k] * n for k, n in group) for group in apart]
    if resharding.gathered_together(len(blocks), sum(blocks), case.plan.names_blocks):
        return [], root + sum(blocks)
    return blocks, root


def gathered_apart(case: Case, stage: Stage) -> list[list[tuple[int, float]]]:
    """Returns what fsdp gathers one after another: places among the stage's units, and how many."""
    found: list[list[tuple[int, float]]] = []
    around = ""
    for place, (unit, count) in enumerate(stage.units):
        if not (1 - root_share(unit)) * _elements_of_one(case, unit):
            continue
        if unit.block and unit.block != "-" and unit.block == around:
            found[-1].append((place, count))
        elif unit.block and unit.block != "-":
            found.append([(place, count)])
        else:
            found += [[(place, 1.0)]] * round(count)
        around = unit.block
    return found


def _elements_of_one(case: Case, unit: UnitFacts) -> float:
    return sum(rank_sum(case, [(unit, 1.0)])) + unit.frozen_parameters / case.layout.tp


def idle_bytes(case: Case, habits: Framework, stage: Stage, when: str, sharded: Sharded) -> float:
    """Reserved but unused at the peak: pools of other streams, blocks that the loss left."""
    if case.cluster.device.kind == "cpu":
        return 0.0
    idle = sharded.flat
    if stage.head is not None and case.loss != "chunked" and when == "loss":
        words = stage.head.loss_bytes / 12
        idle += habits.idle_word_bytes * words * case.micro_batch / _loss_split(case, habits)
    return idle


def segment_bytes(case: Case) -> float:
    """Most that segments hold beside what was asked for: one that is begun, on every stream."""
    if case.cluster.device.kind == "cpu":
        return 0.0
    return SEGMENT_BYTES * (3 if case.layout.zero == 3 else 1)  # gathers and sums have their own


def _loss_split(case: Case, habits: Framework) -> float:
    layout = case.layout
    split = habits.splits_loss or case.loss == "parallel"
    return layout.cp * (layout.tp if split else 1)


def loss_bytes(case: Case, habits: Framework, stage: Stage) -> float:
    """Bytes of the loss at its peak, on the stage that has it."""
    head = stage.head
    if head is None:
        return 0.0
    full = head.loss_bytes * case.micro_batch / _loss_split(case, habits)
    if case.loss != "chunked":
        if case.model.element_bytes > 2:
            return full
        split = _loss_split(case, habits) > case.layout.cp
        word = habits.split_loss_word_bytes if split else habits.loss_word_bytes
        compiled = habits.compiled_loss_word_bytes if case.plan.compile != "none" else 0.0
        return full * (compiled or word) / 12
    waiting = waiting_head_bytes(case, stage)
    samples = case.micro_batch / case.layout.cp
    if case.model.source.startswith("traced"):
        # It was given the head's weight beside the hidden states, and made a gradient of it once,
        # however many samples there are.
        hidden = stage.units[-2][0].input_bytes if len(stage.units) > 1 else 0.0
        per_sample = head.loss_bytes - max(0.0, head.input_bytes - hidden)
        chunk = max(0.0, per_sample - hidden) / case.layout.tp * samples  # each has its own words
        rows = min(hidden, per_sample) * samples
    else:
        width = WIDTHS[case.plan.compute]
        budget = CHUNK_BYTES.get(case.cluster.device.kind, CHUNK_BYTES["gpu"])
        chunk = min(full / case.layout.tp, budget * (2 if width < 4 else 1))
        rows = head.input_bytes * samples
    made = rows + waiting
    # The backward scales what the forward made; on a CPU it looks whether there is need to.
    return made + (chunk if case.cluster.device.kind == "cpu" else max(chunk, made))


def workspace_bytes(case: Case, habits: Framework) -> float:
    """What libraries of matrix products hold through torch's allocator."""
    return 0.0 if case.cluster.device.kind == "cpu" else habits.workspace_bytes


def carried_bytes(case: Case, habits: Framework) -> float:
    """Alive at any instant between forward and backward: workspaces, messages, gathered inputs."""
    by = shares(case)
    boundary = boundary_bytes(case.model)
    total = workspace_bytes(case, habits)
    if case.layout.pp > 1:
        total += 2 * boundary * by.plain
    if habits.gathers_again and by.tp > 1 and case.plan.sequence_parallel != "off":
        total += boundary * by.whole
    return total
