"""Avoidable costs of all ranks' passes: small kernels, small micro-batches, recompute, precision.

The parts of a step say how long passes take, not why. The why comes from what the planner foresaw
(plan.json: seconds of arithmetic, and of launching operations), and from the devices' utilisation:

    arithmetic   a small share of the passes, and many micro-batches: each has a fixed cost
    launching    most of what was foreseen, and the passes take about that long: small kernels
    recompute    the forward pass runs again in the backward pass, though memory is free
    precision    a busy device that multiplies in fp32
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shoal.base.text.units import bytes_text, seconds_text
from shoal.report.order_statistics import median
from shoal.report.verdict.run_facts import RunFacts
from shoal.report.verdict.step_costs import StepCost
from shoal.report.verdict.step_replay import StepReplay
from shoal.report.verdict.step_seconds import BACKWARD, PASSES

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

SMALL = 0.15
"""Share of the passes below which arithmetic does not explain them."""
LAUNCHES = 0.4, 0.5
"""Share of the measured passes, and of the foreseen ones, from which launching explains them."""
IDLE, BUSY = 0.3, 0.85
"""Share of the passes in which a device idles for its host · utilisation of one that does not."""
STORED = 20
"""Activations without recompute over those with it, at most (34 of 2 bytes per element)."""
LEAST_SHARE = 0.1


def list_device_costs(replay: StepReplay, facts: RunFacts) -> Iterator[StepCost]:
    """Yield the costs of the passes that all ranks have alike."""
    import numpy as np

    if not replay.by_rank:
        return
    passes_s = median(replay.own_s[:, :, PASSES] + replay.own_s[:, :, BACKWARD], axis=1)
    yield from _memory_costs(replay, facts)
    overhead_s, why = _overhead(replay, facts, passes_s)
    if overhead_s is None:
        yield from _compute_costs(replay, facts, passes_s)
    elif _has_larger_micro_batch(facts):
        yield _micro_batch_cost(replay, facts, overhead_s, why)
    elif _is_launching(replay, facts, passes_s):
        yield StepCost(
            "small_kernels",
            "small kernels: launching operations",
            np.maximum(replay.step_s - overhead_s, 0.0),
            (why,),
            "train.compile=blocks, fewer and larger operations, or a larger micro-batch",
            LEAST_SHARE,
        )


def _overhead(replay: StepReplay, facts: RunFacts, passes_s: Array) -> tuple[Array | None, str]:
    """Return seconds of the passes that are no arithmetic, and why; None if they are arithmetic."""
    import numpy as np

    each_s = replay.mean_s(passes_s)
    if facts.utilisation is not None:
        # Busy seconds are those of the whole step: passes that wait for nothing have them all.
        idle_s = np.maximum(passes_s - facts.utilisation * replay.step_s, 0.0)
        if replay.mean_s(idle_s) < IDLE * each_s:
            return None, ""
        why = f"The devices are busy for {facts.utilisation:.0%} of the time; passes take "
        return idle_s, f"{why}{seconds_text(each_s)}."
    if facts.device != "cpu" or not 0 < facts.arithmetic_s < SMALL * each_s:
        return None, ""
    why = (
        f"Passes take {seconds_text(each_s)}, of which {seconds_text(facts.arithmetic_s)} are "
        f"arithmetic as foreseen, and {seconds_text(facts.launch_s)} launching."
    )
    return np.maximum(passes_s - facts.arithmetic_s, 0.0), why


def _has_larger_micro_batch(facts: RunFacts) -> bool:
    """Return whether all samples of a rank's step would fit; a pipeline needs several."""
    more_bytes = facts.activation_bytes * (facts.accumulate - 1)
    return facts.accumulate > 1 and facts.stages == 1 and facts.has_room(more_bytes)


def _is_launching(replay: StepReplay, facts: RunFacts, passes_s: Array) -> bool:
    if facts.utilisation is not None:
        return True
    foreseen_s = facts.launch_s + facts.arithmetic_s
    of_measured, of_foreseen = LAUNCHES
    return (
        facts.launch_s > of_measured * replay.mean_s(passes_s)
        and facts.launch_s > of_foreseen * foreseen_s
    )


def _micro_batch_cost(replay: StepReplay, facts: RunFacts, overhead_s: Array, why: str) -> StepCost:
    """Return the cost of micro-batches whose fixed cost exceeds their arithmetic."""
    import numpy as np

    count, size = facts.accumulate, facts.micro_batch
    each_s = replay.mean_s(overhead_s) / count
    return StepCost(
        "micro_batch",
        f"{count} micro-batches of {size} sample{'s' * (size != 1)}",
        np.maximum(replay.step_s - overhead_s * (1 - 1 / count), 0.0),
        (
            why,
            f"Each micro-batch has a fixed cost of about {seconds_text(each_s)}.",
            f"Memory is free: {bytes_text(facts.peak_bytes)} of {bytes_text(facts.memory_bytes)}.",
        ),
        f"train.micro_batch={count * size}",
        LEAST_SHARE,
    )


def _memory_costs(replay: StepReplay, facts: RunFacts) -> Iterator[StepCost]:
    """Yield the cost of recompute and of offload, if memory would hold the activations."""
    import numpy as np

    if not facts.has_room(STORED * facts.activation_bytes):
        return
    room = f"Memory is free: {bytes_text(facts.peak_bytes)} of {bytes_text(facts.memory_bytes)}."
    if facts.recompute != "none" and replay.has_backward:
        share = _recomputed_share(facts)
        forward_s = median(replay.own_s[:, :, PASSES], axis=1)
        each_s = replay.mean_s(forward_s)
        yield StepCost(
            "memory",
            f"recompute ({facts.recompute}) without need",
            np.maximum(replay.step_s - share * forward_s, 0.0),
            (
                f"The backward pass runs {share:.0%} of the forward pass again: "
                f"{seconds_text(share * each_s)} a step.",
                room,
            ),
            "memory.recompute=none",
        )
    moved_s = facts.foreseen_s.get("offload", 0.0)
    if facts.offload != "none" and moved_s:
        yield StepCost(
            "memory",
            f"offload ({facts.offload}) without need",
            np.maximum(replay.step_s - moved_s, 0.0),
            (f"Foreseen for moving tensors: {seconds_text(moved_s)} a step.", room),
            "memory.offload=none",
        )


def _recomputed_share(facts: RunFacts) -> float:
    """Return the predicted share of the forward pass that runs again; 1 for full recompute."""
    again_s, once_s = facts.foreseen_s.get("recompute", 0.0), facts.arithmetic_s / 3
    known = facts.recompute == "selective" and again_s > 0 and once_s > 0
    return min(1.0, again_s / once_s) if known else 1.0


def _compute_costs(replay: StepReplay, facts: RunFacts, passes_s: Array) -> Iterator[StepCost]:
    """Yield the cost of fp32 matrix products on a busy device."""
    import numpy as np

    if facts.compute != "fp32" or facts.device in ("", "cpu") or (facts.utilisation or 0) < BUSY:
        return
    share = facts.foreseen_s.get("matrix", 0.0) / facts.arithmetic_s if facts.arithmetic_s else 0.5
    yield StepCost(
        "compute",
        "products in fp32",
        np.maximum(replay.step_s - 0.5 * share * passes_s, 0.0),
        (
            f"The devices are busy for {facts.utilisation:.0%} of the time, with products in fp32.",
            "Products in bf16 are taken to run at least twice as fast.",
        ),
        "precision.compute=bf16",
        LEAST_SHARE,
    )
