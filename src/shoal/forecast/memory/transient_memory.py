"""Temporary bytes of a step besides activations: gathered weights, buckets, loss, pools.

    sharded   zero 3 gathers the next block ahead and keeps embedding and head from forward to
              backward; other frameworks than Shoal keep all in a pipeline; gradients are summed in
              fp32 beside narrow originals
    loss      full: 12 bytes per token and word in bf16 · chunked: a chunk of logits, gradients of
              hidden states and of the head's weight (made in the forward pass), under tp of a
              rank's own words; on devices the backward makes both again, scaled · parallel: ÷ tp
    traced    the trace of a traced loss has its bytes, gradients included
    pools     torch's allocator has a pool per stream: flat gathered weights, and blocks that the
              loss's forward freed, stay reserved and other streams cannot use them

Source: torch FSDP2, c10/cuda/CUDACachingAllocator; shoal.models.loss; of others:
`framework_memory`.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.base.estimates.estimate import PlanningCase, UnitFacts
from shoal.base.layouts import resharding
from shoal.forecast.memory.activations import (
    activation_shares,
    boundary_bytes,
    head_elements,
    waiting_head_bytes,
)
from shoal.forecast.memory.framework_memory import FrameworkMemory
from shoal.forecast.memory.model_states import (
    WIDTHS,
    ParameterElements,
    gathers_once_per_step,
    rank_elements,
    shard_counts,
)
from shoal.planning.pipeline_stages import StageUnits, is_block, root_share

CHUNK_BYTES = {"cpu": 8 * 2**20, "gpu": 512 * 2**20}
"""Logits budget in fp32 of Shoal's chunked loss (`shoal.models.loss.default_chunk_rows`)."""


SEGMENT_BYTES = 20 * 2**20
"""Segment of torch's allocator for blocks of 1 to 10 MiB (c10: kLargeBuffer)."""


HEAP_HOLES = {0: 0.65, 1: 0.65, 2: 0.9, 3: 0.9}
"""Memory that glibc's heap keeps in holes, as a share of a step's temporary bytes, by ZeRO stage.

Measured: benchmarks/peaks.py (docs/proof/planner-memory.md). torch aligns blocks, and glibc then
asks for size + alignment, which the hole of a freed block of that size lacks.
"""


class ShardedBytes(NamedTuple):
    """Bytes of gathered and flat weights, and of gradients in flight: block, head, root.

    Attributes:
        stays: part of `gathered` that stays from forward to backward.
        last: the last block during the loss, if the framework keeps it.
    """

    gathered: float = 0.0
    flat: float = 0.0
    block: float = 0.0
    head: float = 0.0
    root: float = 0.0
    stays: float = 0.0
    last: float = 0.0


def sum_rank_elements(
    case: PlanningCase, units: list[tuple[UnitFacts, float]], tied: float = 0.0
) -> ParameterElements:
    """Return the elements of several units on one rank; tied: of a table copy on the rank."""
    dense = experts = 0.0
    expert_tp = case.expert_tp_degree
    for unit, count in units:
        one = rank_elements(unit, case.layout, case.layout.ep, expert_tp)
        dense += one.dense * count
        experts += one.experts * count
    return ParameterElements(dense + tied / case.layout.tp, experts)


def frozen_bytes(case: PlanningCase, stage: StageUnits) -> float:
    """Return the bytes of frozen weights on this rank; 0 for frameworks other than Shoal.

    Frozen weights have no narrow copy; zero 3 shards them with the rest.
    """
    if case.framework != "shoal" or (case.plan.offloads_parameters and case.layout.processes > 1):
        return 0.0
    elements = sum(unit.frozen_parameters * count for unit, count in stage.units) / case.layout.tp
    shards = shard_counts(case)[0] if case.layout.zero == 3 else 1
    return elements / shards * max(4, WIDTHS[case.plan.compute])


def wide_elements(case: PlanningCase, stage: StageUnits) -> float:
    """Return the elements without a narrow copy in Shoal: lookup tables, norms of wide residuals.

    No product of its own unit reads a lookup table; a head tied to one reads it in its own width.
    """
    if case.framework != "shoal":
        return 0.0
    found = stage.tied / case.layout.tp
    for unit, count in stage.units:
        one = rank_elements(unit, case.layout, case.layout.ep, case.expert_tp_degree)
        table = not unit.forward_flops and not unit.loss_bytes
        narrow = case.plan.residual == "bf16" and is_block(unit) and unit.block != "-"
        found += count * (one.dense if table else 0 if narrow else unit.plain_parameters)
    return found


def local_elements(case: PlanningCase, elements: ParameterElements) -> float:
    """Return the elements whose optimizer state this rank holds."""
    dense, experts = shard_counts(case)
    return elements.dense / dense + elements.experts / experts


def update_bytes(case: PlanningCase, habits: FrameworkMemory, elements: ParameterElements) -> float:
    """Return the temporary bytes of the optimizer's step.

    In the steps that `train.statistics` records, a rank copies the weights that it steps; where
    parameters are offloaded, the copy lies beside them on the host.
    """
    copied = case.plan.statistics and not case.plan.offloads_parameters
    copy = max(4, WIDTHS[case.plan.compute]) if copied else 0
    return (habits.update_bytes + copy) * local_elements(case, elements)


def block_share(case: PlanningCase, stage: StageUnits, elements: ParameterElements) -> float:
    """Return one block's share of the rank's elements."""
    sizes = [sum(sum_rank_elements(case, [(unit, 1.0)])) for unit, _ in stage.blocks]
    return max(sizes, default=0.0) / max(1.0, sum(elements))


def head_share(case: PlanningCase, stage: StageUnits, elements: ParameterElements) -> float:
    """Return the head matrix's share of the rank's elements."""
    return head_elements(case, stage) / max(1.0, sum(elements))


def sharded_bytes(case: PlanningCase, stage: StageUnits) -> ShardedBytes:
    """Return the bytes that zero 3 holds beside the shards."""
    if case.layout.zero < 3:
        return ShardedBytes()
    width = WIDTHS[case.plan.compute]
    scatter = width + max(4, case.reduce_bytes)
    sizes, root = gathered_elements(case, stage)
    largest = max(sizes, default=0.0)
    rooted = width  # bytes per element of the root
    if case.framework == "shoal":  # Shoal gathers the root in its own width
        rooted = max(4, width)
    ahead = min(2, len(sizes)) * largest  # the next block is gathered ahead
    over = reshard_degree(case)
    stays = rooted * root
    if over < shard_counts(case)[0]:
        stays += width * sum(sizes) / over
    kept = stays + (width * ahead if over > 1 else 0.0)
    if gathers_once_per_step(case):  # otherwise every micro-batch would gather again
        stays = kept = width * sum(sum_rank_elements(case, stage.units, stage.tied))
    return ShardedBytes(
        gathered=kept,
        flat=max(rooted * root, width * ahead),
        block=scatter * largest,
        head=rooted * head_elements(case, stage),  # waits for the rest of the root
        root=(scatter - width + rooted) * root,
        stays=stays,
        last=0.0 if kept == stays else width * sizes[-1],
    )


def reshard_degree(case: PlanningCase) -> int:
    """Return over how many ranks a block is sharded between its passes (`fsdp.reshard`)."""
    layout = case.layout
    apart = layout.cp * layout.tp
    shards = shard_counts(case)[0]
    return resharding.ranks_after_reshard(case.plan.reshard, shards, case.cluster.per_node, apart)


def gathered_elements(case: PlanningCase, stage: StageUnits) -> tuple[list[float], float]:
    """Return the elements that fsdp gathers on one rank: of each block in order, and of the root.

    Units of one larger block are gathered together; frozen ones are gathered too.
    """
    ones = [_elements_of_one(case, unit) for unit, _ in stage.units]
    root = stage.tied / case.layout.tp
    for (unit, count), one in zip(stage.units, ones, strict=True):
        root += root_share(unit) * one * count
    apart = gather_groups(case, stage)
    shares_left = [1 - root_share(unit) for unit, _ in stage.units]
    blocks = [sum(shares_left[k] * ones[k] * n for k, n in group) for group in apart]
    if resharding.gathers_all_blocks(len(blocks), sum(blocks), case.plan.names_blocks):
        return [], root + sum(blocks)
    return blocks, root


def gather_groups(case: PlanningCase, stage: StageUnits) -> list[list[tuple[int, float]]]:
    """Return fsdp's gathers in order: each a list of (index of a unit, count)."""
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


def _elements_of_one(case: PlanningCase, unit: UnitFacts) -> float:
    return sum(sum_rank_elements(case, [(unit, 1.0)])) + unit.frozen_parameters / case.layout.tp


def idle_bytes(
    case: PlanningCase, habits: FrameworkMemory, stage: StageUnits, when: str, sharded: ShardedBytes
) -> float:
    """Predict the bytes that the CUDA allocator has reserved at the peak and no tensor uses.

    Args:
        habits: measured memory constants of the framework.
        stage: the units of this pipeline stage.
        when: moment of the peak: "loss", "backward" or "update"; at the loss, freed logits blocks
            count too.
        sharded: its flat weights lie in pools of other streams.

    Returns:
        bytes; 0.0 on CPUs.
    """
    if case.cluster.device.kind == "cpu":
        return 0.0
    idle = sharded.flat
    if stage.head is not None and case.loss != "chunked" and when == "loss":
        words = stage.head.loss_bytes / 12
        idle += habits.idle_word_bytes * words * case.micro_batch / _loss_split(case, habits)
    return idle


def heap_hole_bytes(
    case: PlanningCase, counted: float, most: float, gradients: float, kept: float = 0.0
) -> float:
    """Predict the bytes in holes of the C heap at the peak; 0.0 on devices.

    The heap grows to the most temporary bytes of any moment, the holes between them, and the
    gradients, which do not fit into the holes. It keeps all of that to the run's end.

    Args:
        counted: temporary bytes and gradients that the peak counts already.
        most: most temporary bytes at any moment of the step.
        gradients: bytes of all gradients that this rank keeps.
        kept: part of `most` that is never freed, and leaves no holes.
    """
    if case.cluster.device.kind != "cpu" or case.framework != "shoal":
        return 0.0
    holes = HEAP_HOLES[case.layout.zero] * (most - kept)
    return max(0.0, most + holes + gradients - counted)


def segment_bytes(case: PlanningCase) -> float:
    """Return the most bytes that segments hold unused: one partly used segment per stream."""
    if case.cluster.device.kind == "cpu":
        return 0.0
    return SEGMENT_BYTES * (3 if case.layout.zero == 3 else 1)  # gathers, sums: own streams


def _loss_split(case: PlanningCase, habits: FrameworkMemory) -> float:
    layout = case.layout
    split = habits.splits_loss or case.loss == "parallel"
    return layout.cp * (layout.tp if split else 1)


def loss_bytes(case: PlanningCase, habits: FrameworkMemory, stage: StageUnits) -> float:
    """Return the bytes of the loss at its peak, on the stage that has it."""
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
        # The loss receives the head's weight beside the hidden states, and makes one gradient of
        # it, for any number of samples.
        hidden = stage.units[-2][0].input_bytes if len(stage.units) > 1 else 0.0
        per_sample = head.loss_bytes - max(0.0, head.input_bytes - hidden)
        chunk = max(0.0, per_sample - hidden) / case.layout.tp * samples  # tp splits the vocabulary
        rows = min(hidden, per_sample) * samples
    else:
        width = WIDTHS[case.plan.compute]
        budget = CHUNK_BYTES.get(case.cluster.device.kind, CHUNK_BYTES["gpu"])
        chunk = min(full / case.layout.tp, budget * (2 if width < 4 else 1))
        rows = head.input_bytes * samples
    made = rows + waiting
    # The backward scales the forward's gradients; on a CPU only if the scale is not 1.
    return made + (chunk if case.cluster.device.kind == "cpu" else max(chunk, made))


def workspace_bytes(case: PlanningCase, habits: FrameworkMemory) -> float:
    """Return the bytes that matrix-product libraries hold through torch's allocator."""
    return 0.0 if case.cluster.device.kind == "cpu" else habits.workspace_bytes


def persistent_bytes(case: PlanningCase, habits: FrameworkMemory) -> float:
    """Return bytes alive between forward and backward: workspaces, messages, gathered inputs."""
    by = activation_shares(case)
    boundary = boundary_bytes(case.model)
    total = workspace_bytes(case, habits)
    if case.layout.pp > 1:
        total += 2 * boundary * by.plain
    if habits.gathers_again and by.tp > 1 and case.plan.sequence_parallel != "off":
        total += boundary * by.whole
    return total
