"""Where a run stands: the last steps as numbers, as one dense line, and as `key=value`.

Loss, gradient norm and learning rate are the last step's own; rates, waits and the time left are
means of the last twenty steps, as one step is noise.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, TypeGuard

from shoal.base.units import bytes_text, count_text, seconds_text

Record = dict[str, Any]
WINDOW_STEPS = 20


class Progress:
    """The state of a run, fed with records of `metrics.jsonl`."""

    def __init__(self, total_steps: int | None) -> None:
        self.total_steps = total_steps
        self.recent: deque[Record] = deque(maxlen=WINDOW_STEPS)

    def add(self, records: list[Record], cut_back: bool) -> None:
        """Take new steps; after a cut, forget those that were taken back."""
        if cut_back:
            self.recent.clear()
        self.recent.extend(record for record in records if "step" in record)

    @property
    def last(self) -> Record | None:
        """The newest step, None before the first."""
        return self.recent[-1] if self.recent else None

    @property
    def fraction(self) -> float | None:
        """Done share of the run, None if its length is not known."""
        if not self.total_steps or self.last is None:
            return None
        return min(1.0, self.last["step"] / self.total_steps)

    def mean(self, key: str) -> float | None:
        """Mean of a field over the recent steps that have it."""
        values = [record[key] for record in self.recent if is_number(record.get(key))]
        return sum(values) / len(values) if values else None

    def tokens_per_s(self) -> float | None:
        """Tokens of the recent steps by their seconds; else the steps' own figure."""
        steps = [r for r in self.recent if is_number(r.get("tokens")) and r.get("step_s")]
        seconds = sum(record["step_s"] for record in steps)
        if seconds > 0:
            return float(sum(record["tokens"] for record in steps) / seconds)
        return self.mean("tokens_per_s")

    def left_s(self) -> float | None:
        """Seconds to the end at the present pace."""
        step_s = self.mean("step_s")
        if step_s is None or not self.total_steps or self.last is None:
            return None
        return float(max(0, self.total_steps - self.last["step"]) * step_s)

    def fields(self) -> list[tuple[str, str]]:
        """(name, text) of everything known about the last step; the unknown is left out."""
        last = self.last
        if last is None:
            return []
        total = f"/{self.total_steps}" if self.total_steps else ""
        rate, mfu, left_s = self.tokens_per_s(), self.mean("mfu"), self.left_s()
        memory, gpu = last.get("peak_memory_bytes"), self.mean("gpu_utilisation")
        comm_s, wait_s = self.mean("comm_exposed_s"), self.mean("data_wait_s")
        found = [
            ("step", f"{last['step']}{total}"),
            ("loss", own_text(last, "loss", ".4f")),
            ("grad_norm", own_text(last, "grad_norm", ".3f")),
            ("lr", own_text(last, "lr", ".1e")),
            ("tokens_per_s", None if rate is None else f"{rate:.0f}"),
            ("mfu", None if mfu is None else f"{mfu:.1%}"),
            ("gpu", None if gpu is None else f"{gpu:.0%}"),
            ("memory", None if memory is None else bytes_text(memory)),
            ("comm", None if comm_s is None else seconds_text(comm_s)),
            ("data_wait", None if wait_s is None else seconds_text(wait_s)),
            ("left", None if left_s is None else coarse_text(left_s)),
        ]
        return [(name, text) for name, text in found if text is not None]

    def key_values(self) -> str:
        """One line for a pipe: `step=40/300 loss=5.1230 …`, values without blanks."""
        return " ".join(f"{name}={text.replace(' ', '')}" for name, text in self.fields())

    def dense(self, width: int) -> str:
        """One line for a terminal: what fits of it, the more telling first."""
        found = dict(self.fields())
        rate = self.tokens_per_s()
        words = [
            ("step", "step {}"),
            ("loss", "loss {}"),
            ("grad_norm", "grad {}"),
            ("tokens_per_s", f"{count_text(rate or 0)} tokens/s"),
            ("mfu", "MFU {}"),
            ("memory", "{}/rank"),
            ("gpu", "GPU {}"),
            ("lr", "lr {}"),
        ]
        return fit([form.format(found[name]) for name, form in words if name in found], width)

    def waits(self) -> list[str]:
        """What the second line says beside the bar: time left first, then the waits."""
        found = dict(self.fields())
        words = [("left", "{} left"), ("comm", "comm {}"), ("data_wait", "data {}")]
        return [form.format(found[name]) for name, form in words if name in found]


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a field holds a finite number."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def own_text(record: Record, key: str, form: str) -> str | None:
    """A field of one step; JSON has no NaN, so a step that was not finite holds null there.

    >>> own_text({"loss": None}, "loss", ".4f"), own_text({}, "loss", ".4f")
    ('nan', None)
    """
    if key not in record:
        return None
    return "nan" if record[key] is None else f"{record[key]:{form}}"


def coarse_text(seconds: float) -> str:
    """A duration to come: a forecast has no tenths.

    >>> coarse_text(21.4), coarse_text(0), coarse_text(95)
    ('21 s', '0 s', '1 min 35 s')
    """
    return f"{seconds:.0f} s" if seconds < 59.5 else seconds_text(seconds)


def fit(words: list[str], width: int, gap: str = "  ") -> str:
    """As many words as fit into `width` columns, in order.

    >>> fit(["step 1", "loss 2", "grad 3"], 15)
    'step 1  loss 2'
    """
    line = ""
    for word in words:
        longer = f"{line}{gap}{word}" if line else word
        if len(longer) > width:
            break
        line = longer
    return line
