"""Figures of a watched run as texts: predicted and measured, waits, the time left.

All of them, the rate and the table of ranks are means of the same newest steps. So they agree.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from shoal.base.runlog.damaged_lines import Record, is_number
from shoal.base.runlog.rank_records import PARTS
from shoal.base.text.forecast_text import forecast_text
from shoal.base.text.units import bytes_text, seconds_text
from shoal.view.progress import RunProgress, local_time_text, remaining_time_text
from shoal.view.script_lines import LOOP_SHARE, WAITS
from shoal.view.watch.rank_table import LATE_SHARE, LETTERS, step_parts_s
from shoal.view.watch.watch_state import RankState, StepPoint

PACE_POINTS, PACE_BLOCKS, LEAST_POINTS = 256, 8, 40
"""Newest points of the curve for the pace · blocks of them · fewest points for a range."""
VARIES = 1.25
"""Slow over fast pace from which the time left is a range."""
CLOCK_S = 600.0
"""Seconds left from which the end has a clock time."""
DAY_S = 86_400.0


def forecast_texts(progress: RunProgress, peaks: Sequence[float]) -> list[str]:
    """Return the planner's figures and the measured ones.

    Args:
        peaks: of each rank, in bytes; () if unknown.
    """
    said = progress.plan.get("predicted")
    if not isinstance(said, dict) or progress.last is None:
        return []
    memory = max(peaks) if peaks else progress.last.get("peak_memory_bytes")
    rows = (
        ("step", said.get("step_s"), progress.mean("step_s"), seconds_text),
        ("memory", said.get("peak_memory_bytes"), memory, bytes_text),
        ("sent", said.get("sent_bytes"), progress.mean("comm_bytes"), bytes_text),
    )
    return [
        f"{word} {forecast_text(foreseen, measured, text)}"
        for word, foreseen, measured, text in rows
        if is_number(foreseen) and foreseen > 0 and measured is not None and is_number(measured)
    ]


def wait_texts(progress: RunProgress, ranks: Sequence[RankState]) -> list[str]:
    """Return rank 0's waits in a step, and for which rank it waits, if that one is late."""
    step_s = progress.mean("step_s")
    if not step_s:
        return []
    texts = [
        f"{word} {seconds_text(value)} ({value / step_s:.0%})"
        for key, word in WAITS
        if (value := progress.mean(key)) is not None
        and not (key[:4] == "comm" and len(ranks) == 1)
        and (key != "loop_s" or value > LOOP_SHARE * step_s)
    ]
    if texts and (late := latest_rank(ranks)) is not None and late is not ranks[0]:
        texts[0] += f", for rank {late.name}: {_latest_part(late, ranks)}"
    return texts


def latest_rank(ranks: Sequence[RankState]) -> RankState | None:
    """Return the rank that the others wait for longest, if that is a tenth of its step."""
    late = max(ranks, key=lambda rank: rank.late_s, default=None)
    return late if late is not None and late.late_s > LATE_SHARE * (late.step_s or 1) else None


def _latest_part(late: RankState, ranks: Sequence[RankState]) -> str:
    """Return the part of a step in which a rank takes longest beyond the others."""
    others = [step_parts_s(rank) for rank in ranks if rank is not late]
    own = step_parts_s(late)
    usual = {part: statistics.median(one[part] for one in others) for part in own} if others else {}
    busy = [part for part in own if part != PARTS[-1]]
    part = max(busy, key=lambda name: own[name] - usual.get(name, 0.0))
    return LETTERS[part][1]


def left_texts(
    progress: RunProgress, points: Sequence[StepPoint], events: Sequence[Record], now_s: float
) -> tuple[str, str]:
    """Return the time until the end, a range if the pace varies, and when that is.

    Each is "" if unknown; the second one also if the end is near.

    Args:
        points: of the curves, by step.
        events: of the run, oldest first.
        now_s: the time, seconds since 1970.
    """
    left_s = progress.left_s()
    if left_s is None or progress.last is None:
        return "", ""
    mean_s = progress.mean("step_s") or 0.0
    pause_s = _validations_left(progress, events)
    # Nobody has timed the first validation yet: it is named, and not counted.
    more = ", then a validation" if not pause_s and left_s and _will_validate(events) else ""
    fast_s, slow_s = _pace_range(points) or (mean_s, mean_s)
    steps = left_s / mean_s if mean_s else 0.0
    from_s, until_s = steps * fast_s + pause_s, steps * slow_s + pause_s
    if steps and until_s > VARIES * from_s:
        return f"{_range_text(from_s, until_s)} left", _done_text(from_s, until_s, now_s, more)
    whole_s = left_s + pause_s
    return f"{remaining_time_text(whole_s)} left", _done_text(whole_s, whole_s, now_s, more)


def _done_text(from_s: float, until_s: float, now_s: float, more: str) -> str:
    """Return the clock time, or two, at which a run will be done; "" if that is soon."""
    if until_s < CLOCK_S:
        return ""
    first, last = _clock(now_s + from_s, now_s), _clock(now_s + until_s, now_s)
    return f"steps done {first}{'' if first == last else f' to {last}'}{more}"


def _will_validate(events: Sequence[Record]) -> bool:
    """Return whether the run announced validations."""
    texts = (str(one.get("text")) for one in events if one.get("event") == "notice")
    return any(text.startswith("validation ") for text in texts)


def _pace_range(points: Sequence[StepPoint]) -> tuple[float, float] | None:
    """Return seconds of a step in the fast and in the slow eighths; None for too few points."""
    known = [one.step_s for one in points[-PACE_POINTS:] if math.isfinite(one.step_s)]
    if len(known) < LEAST_POINTS:
        return None
    size = len(known) / PACE_BLOCKS
    means = sorted(
        statistics.fmean(known[round(at * size) : round((at + 1) * size)])
        for at in range(PACE_BLOCKS)
    )
    return means[1], means[-2]


def _validations_left(progress: RunProgress, events: Sequence[Record]) -> float:
    """Return the seconds of the validations to come, from those that were made."""
    found = [
        (float(one["step"]), float(one["seconds"]))
        for one in events
        if one.get("event") == "validated"
        and is_number(one.get("step"))
        and is_number(one.get("seconds"))
    ]
    if not found or progress.last is None or not progress.total_steps:
        return 0.0
    left = max(0.0, progress.total_steps - float(progress.last["step"]))
    every = found[-1][0] - found[-2][0] if len(found) > 1 else 0.0
    count = left // every if every > 0 else 1.0 * (left > 0)
    return max(1.0 * (left > 0), min(count, left)) * max(0.0, found[-1][1])


def _range_text(from_s: float, until_s: float) -> str:
    """Return two durations in the unit of the longer one.

    >>> _range_text(72_000.0, 122_400.0), _range_text(20.0, 41.0), _range_text(3e5, 9e5)
    ('20–34 h', '20–41 s', '3.5–10 days')
    """
    units = (("days", DAY_S, 2 * DAY_S), ("h", 3600.0, 5400.0), ("min", 60.0, 90.0))
    name, size = next(((n, s) for n, s, least in units if until_s >= least), ("s", 1.0))
    low, high = from_s / size, until_s / size
    digits = 1 if low < 4 and name != "s" else 0
    return f"{f'{low:.{digits}f}'.removesuffix('.0')}–{high:.0f} {name}"


def _clock(time_s: float, now_s: float) -> str:
    """Return a clock time, with the day if it is another one."""
    day = "%d %b "
    is_today = local_time_text(time_s, day) == local_time_text(now_s, day)
    return local_time_text(time_s, "%H:%M" if is_today else f"{day}%H:%M").strip()
