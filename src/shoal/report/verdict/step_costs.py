"""Avoidable costs of a step, each with its evidence, its remedy, and the steps without it.

    slow_rank      a part in which few ranks take longer than the others, who wait at the sum; or
                   lateness that changes between ranks: the machine is busy
    stage_costs.py    passes of one pipeline stage that take longer than those of the others
    input          data that all ranks wait for
    communication  the least that every rank waits
    callbacks      callbacks of all ranks after each step
    device_costs.py   compute, small kernels, memory, micro-batch

Each cost is what the others do not explain: the excess of a late rank is no input of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.base.text.units import seconds_text
from shoal.report.order_statistics import median, percentile
from shoal.report.verdict.run_facts import RunFacts
from shoal.report.verdict.step_replay import (
    LATE_SHARE,
    StepReplay,
    find_late_ranks,
    replace_late_part,
)
from shoal.report.verdict.step_seconds import BACKWARD, DATA, HOOKS, PASSES, UPDATE
from shoal.view.script_lines import LOOP_CURE, loader_cure

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

PART_NAMES = {
    DATA: "data", PASSES: "forward and backward", BACKWARD: "backward pass",
    UPDATE: "optimizer update", HOOKS: "callbacks",
}  # fmt: skip
COMPUTED = [PASSES, BACKWARD, UPDATE]
"""Parts that a busy machine makes longer; data and callbacks have causes of their own."""
FETCH_S = 0.001
"""Seconds per step in which a rank takes a batch from its loader's processes."""
MOST_WORKERS = 16
SHOWN_RANKS = 4
STEADY = 25.0
"""Percentile of a part or of waiting in steady steps: a busy machine makes some of them longer."""
LEAST_COMMUNICATION = 0.12
"""Share of a step from which waiting of all ranks is reported: small messages always wait a bit."""
LEAST_INPUT = 0.06
"""Share of a step from which data are reported: a busy machine takes some time in every part."""
FLIP_SHARE, FLIP_STEPS = 0.1, 0.1
"""Lateness of a step that counts, as a share of it · share of the steps in which each of at least
two ranks is late by that."""


@dataclass(frozen=True)
class StepCost:
    """One avoidable cost of a step.

    Attributes:
        kind: as of a verdict.
        cause: in a few words.
        without_s: [steps] seconds of each step without it.
        evidence: sentences with the measurements.
        command: the cure.
        least_share: share of a step from which it is reported.
        now_s: [steps] seconds of each step with it; None: as measured, without pauses.
    """

    kind: str
    cause: str
    without_s: Array
    evidence: tuple[str, ...]
    command: str
    least_share: float = 0.0
    now_s: Array | None = None


def list_step_costs(replay: StepReplay, facts: RunFacts) -> Iterator[StepCost]:
    """Yield the costs that the ranks' parts and waiting show."""
    staged = facts.stages > 1
    parts = (DATA, HOOKS) if staged else (DATA, PASSES, BACKWARD, UPDATE, HOOKS)
    late = {part: find_late_ranks(replay, part) for part in parts}
    yield from _slow_rank_costs(replay, facts, late)
    if not staged:
        yield from _communication_costs(replay, facts)
        if not any(one.any() for one in late.values()):
            yield from _flip_costs(replay)
    yield _input_cost(replay, facts, late[DATA])
    has_loop = facts.is_script and facts.is_loop_timed
    hooks_s = replay.own_s[:, ~late[HOOKS], HOOKS]
    if late[HOOKS].any():
        own_s = _subtract_part(replay, HOOKS, median(hooks_s, axis=1))
    else:
        own_s = replay.own_s.copy()
        own_s[:, :, HOOKS] = 0.0
    share = _share_text(replay, hooks_s.mean(axis=1))
    yield StepCost(
        "callbacks",
        "all ranks' own code between two steps, or callbacks" if has_loop else
        "callbacks of all ranks",
        replay.without(own_s),
        (f"{'They' if has_loop else 'Callbacks after each step'} take {share} on every rank.",),
        "less work in train.on, or every n-th step" if not facts.is_script else
        LOOP_CURE if has_loop else "less work in the callbacks, or every n-th step",
    )  # fmt: skip


def _share_text(replay: StepReplay, part_s: Array) -> str:
    each_s, step_s = replay.mean_s(part_s), replay.mean_s(replay.step_s)
    return f"{seconds_text(each_s)} of {seconds_text(step_s)}"


def _subtract_part(replay: StepReplay, part: int, common_s: Array) -> Array:
    import numpy as np

    own_s = replay.own_s.copy()
    own_s[:, :, part] = np.maximum(own_s[:, :, part] - common_s[:, None], 0.0)
    return own_s


# ---- ranks


def _ranks_text(replay: StepReplay, mask: Array) -> str:
    ranks = [replay.ranks[at] for at in mask.nonzero()[0]]
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:SHOWN_RANKS]))
    return f"ranks {shown}{' …' if len(ranks) > SHOWN_RANKS else ''}"


def _slow_rank_costs(
    replay: StepReplay, facts: RunFacts, late: Mapping[int, Array]
) -> Iterator[StepCost]:
    """Yield the cost of each part in which ranks are late, and of all parts of the same ranks."""
    parts_of: dict[bytes, list[int]] = {}
    for part, mask in late.items():
        if mask.any():
            parts_of.setdefault(mask.tobytes(), []).append(part)
            yield _slow_rank_cost(replay, facts, mask, [part])
    for parts in parts_of.values():
        mask = late[parts[0]]
        excess_s = {part: _late_and_usual(replay, mask, part) for part in parts}
        most_s = max(late_s - usual_s for late_s, usual_s in excess_s.values())
        large = [p for p, (late_s, usual_s) in excess_s.items() if late_s - usual_s > most_s / 3]
        if len(large) > 1:
            yield _slow_rank_cost(replay, facts, mask, large)


def _late_and_usual(replay: StepReplay, late: Array, part: int) -> tuple[float, float]:
    """Return seconds per step of the late ranks, and of the others, in a part."""
    late_s = replay.mean_s(replay.own_s[:, late, part].mean(axis=1))
    return late_s, replay.mean_s(median(replay.own_s[:, ~late, part], axis=1))


def _slow_rank_cost(
    replay: StepReplay, facts: RunFacts, late: Array, parts: Sequence[int]
) -> StepCost:

    who, names, evidence = _ranks_text(replay, late), [], []
    for part in parts:
        name = "forward pass" if part == PASSES and replay.has_backward else PART_NAMES[part]
        if part == HOOKS and facts.is_script and facts.is_loop_timed:
            name = "own code between two steps, or callbacks"
        late_s, usual_s = _late_and_usual(replay, late, part)
        names.append(name)
        evidence.append(
            f"{who}: {seconds_text(late_s)} a step in its {name}; "
            f"the others: {seconds_text(usual_s)}."
        )
    waits_s = replay.mean_s(median(replay.wait_s[:, ~late], axis=1))
    least_s = replay.mean_s(replay.wait_s[:, late].mean(axis=1))
    evidence.append(
        f"The others wait {seconds_text(waits_s)} a step, {who} {seconds_text(least_s)}."
    )
    command = "shoal doctor on its host"
    if list(parts) == [DATA]:
        command = input_cure(facts, late_s, replay.mean_s(replay.step_s))[0]
    elif list(parts) == [HOOKS]:
        command = "the same callbacks on all ranks, or less work in them"
        if facts.is_script and facts.is_loop_timed:
            command = LOOP_CURE
    own_s = replay.own_s
    for part in parts:
        own_s = replace_late_part(own_s, late, part)
    cause = f"{who}'s {' and '.join(names)}"
    return StepCost("slow_rank", cause, replay.without(own_s), tuple(evidence), command)


def _flip_costs(replay: StepReplay) -> Iterator[StepCost]:
    """Yield the cost of lateness that changes between ranks, step by step.

    A busy machine makes passes late. If only data or callbacks are, their costs say so.
    """
    import numpy as np

    own_s = replay.own_s[:, :, COMPUTED].sum(axis=2)
    count = own_s.shape[1]
    if count < 2:
        return
    usual_s = np.sort(own_s, axis=1)[:, (count - 1) // 2]
    lateness_s = own_s.max(axis=1) - usual_s
    late = lateness_s > FLIP_SHARE * median(replay.step_s)
    shares = np.bincount(own_s.argmax(axis=1)[late], minlength=count) / len(late)
    often = shares >= FLIP_STEPS / (count / 2)
    if often.sum() < 2 or late.mean() < 2 * FLIP_STEPS:
        return
    text = f"One rank is late in {late.mean():.0%} of the steps, by "
    text += f"{seconds_text(float(median(lateness_s[late])))}, and not always the same one."
    yield StepCost(
        "slow_rank",
        "the machine is busy: ranks are late by turns",
        replay.without(_subtract_lateness(replay.own_s)),
        (text, f"Late most often: {_ranks_text(replay, often)}."),
        "ps -eo pid,psr,pcpu,comm --sort=-pcpu | head",
        FLIP_STEPS,
    )


def _subtract_lateness(own_s: Array) -> Array:
    """Return own times whose passes take each rank at most the usual seconds of each step."""
    import numpy as np

    whole_s = own_s[:, :, COMPUTED].sum(axis=2)
    usual_s = np.sort(whole_s, axis=1)[:, [(whole_s.shape[1] - 1) // 2]]
    found_s = own_s.copy()
    found_s[:, :, COMPUTED] *= np.minimum(1.0, usual_s / np.maximum(whole_s, 1e-9))[:, :, None]
    return found_s


# ---- all ranks


def input_cure(facts: RunFacts, data_s: float, step_s: float) -> tuple[str, float]:
    """Return the remedy for slow data, and the seconds per step that its loader then needs."""
    if facts.is_script:
        return loader_cure(is_loop_timed=facts.is_loop_timed), 0.0
    if facts.workers:
        return f"data.workers={2 * facts.workers}", step_s / 2
    rest_s, workers = step_s - data_s, 2
    while workers < MOST_WORKERS and data_s / workers > rest_s / 2:
        workers *= 2
    return f"data.workers={workers}", data_s / workers


def _input_cost(replay: StepReplay, facts: RunFacts, late: Array) -> StepCost:
    """Return the cost of data that all ranks wait for, without the excess of a late rank."""
    import numpy as np

    common_s = median(replay.own_s[:, ~late, DATA], axis=1)
    mean_s = replay.own_s[:, ~late, DATA].mean(axis=1)
    each_s, step_s = replay.mean_s(mean_s), replay.mean_s(replay.step_s)
    command, loader_s = input_cure(facts, each_s, step_s)
    if late.any():
        own_s = _subtract_part(replay, DATA, np.maximum(common_s - FETCH_S, 0.0))
    else:
        own_s, data_s = replay.own_s.copy(), replay.own_s[:, :, DATA]
        stays_s = np.minimum(data_s, FETCH_S)
        gain_s = _tail_gain_s(replay, COMPUTED)
        if gain_s > max(LATE_SHARE * step_s, _tail_gain_s(replay, [DATA])):
            # Long waits in some steps, and passes alike: the machine is busy, not the data.
            stays_s += np.maximum(data_s - percentile(data_s, STEADY), 0.0)
        own_s[:, :, DATA] = np.minimum(stays_s, data_s)
    without_s = np.maximum(replay.without(own_s), loader_s)
    evidence = [f"All ranks wait for data: {_share_text(replay, mean_s)}."]
    long = common_s > 2 * median(common_s) + 0.1 * step_s
    if median(replay.wait_s.max(axis=1)) > 0.5 * each_s and not late.any():
        evidence.append(
            "Not in the same steps: a rank that has its data waits for one that has not."
        )
    elif 0 < long.mean() < 0.4 and common_s[long].sum() > 0.5 * common_s.sum():
        evidence.append(
            f"Most of it is in {long.mean():.0%} of the steps: "
            f"{seconds_text(float(median(common_s[long])))} in each of them."
        )
    if facts.utilisation is not None:
        evidence.append(f"The devices are busy for {facts.utilisation:.0%} of the time.")
    what = "data"
    if facts.is_script and not facts.is_loop_timed:
        what = "data, or the loop's own code between two steps"
    cause = f"all ranks wait for {what}"
    return StepCost("input", cause, without_s, tuple(evidence), command, LEAST_INPUT)


def _tail_gain_s(replay: StepReplay, parts: Sequence[int]) -> float:
    """Return by how much steps were shorter if no part took longer than in steady steps."""
    import numpy as np

    own_s = replay.own_s.copy()
    steady_s = percentile(own_s[:, :, parts].reshape(-1, len(parts)), STEADY, axis=0)
    own_s[:, :, parts] = np.minimum(own_s[:, :, parts], steady_s)
    return replay.mean_s(replay.step_s) - replay.mean_s(replay.without(own_s))


def _communication_costs(replay: StepReplay, facts: RunFacts) -> Iterator[StepCost]:
    """Yield the cost of communication that computation does not hide: the least of all waits."""
    import numpy as np

    least_s = replay.wait_s.min(axis=1)
    steady_s = float(median(replay.block_values(least_s, lambda b: percentile(b, STEADY))))
    # A foreseen part that is small beside it stays; else the link is as slow as foreseen.
    stays_s = facts.sent_s if facts.sent_s < 0.2 * steady_s else 0.0
    if len(replay.ranks) < 2 and replay.by_rank:
        return
    who = "Every rank waits at least" if replay.by_rank else "Rank 0 waits at least"
    evidence = [
        f"{who} {seconds_text(steady_s)} of {seconds_text(replay.mean_s(replay.step_s))} for sums "
        f"and gathers."
    ]
    cause = "communication that computation does not hide"
    if not replay.by_rank:
        evidence.append("The other ranks' steps are not recorded: it may wait for a slow one.")
        cause = "communication, or a slow rank"
    if facts.sent_s:
        evidence.append(f"Foreseen for this layout and link: {seconds_text(facts.sent_s)}.")
    yield StepCost(
        "communication",
        cause,
        np.maximum(replay.step_s - np.minimum(least_s, steady_s - stays_s), 0.0),
        tuple(evidence),
        f"train.accumulate={2 * facts.accumulate}, or a layout that sends less "
        f"(shoal plan --top 5)" if not facts.is_script else
        "more samples a step, or a layout that sends less",
        LEAST_COMMUNICATION,
    )  # fmt: skip
