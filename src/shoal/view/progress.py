"""Progress of a run: the last steps as numbers, as one dense line, and as `key=value`.

Loss, gradient norm and learning rate are the last step's own; rates, waits and the time left are
means of the last twenty steps, as a single step is noisy.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence

from shoal.base.runlog.damaged_lines import Record, is_number
from shoal.base.text.units import bytes_text, rate_text, seconds_text

WINDOW_STEPS = 20
CURVE_WIDTH, CURVE_STEPS = 8, 512
"""Columns of the loss curve in the step line, and the values that it is drawn from at most."""
BLOCKS = "▁▂▃▄▅▆▇█"
LEAST_SHARE = 0.005
"""Share of the matrix rate below which a model is too small for the figure to mean anything."""


class RunProgress:
    """The state of a run, fed with records of `metrics.jsonl`.

    Attributes:
        plan: plan.json, once it exists.
        losses: of all steps that were added, each a mean over as many of them.
    """

    def __init__(self, total_steps: int | None) -> None:
        self.total_steps = total_steps
        self.plan: Record = {}
        self.recent: deque[Record] = deque(maxlen=WINDOW_STEPS)
        self.validations: list[float] = []
        self.losses: list[float] = []
        self._newest: list[float] = []
        self._stride = 1

    def add(self, records: list[Record], cut_back: bool) -> None:
        """Add new steps; after a cut, drop the steps that were rolled back."""
        if cut_back:
            self.recent.clear()
            self.losses, self._newest, self._stride = [], [], 1
        self.recent.extend(record for record in records if "step" in record)
        for record in records:
            if is_number(record.get("loss")):
                self._add_loss(record["loss"])

    def _add_loss(self, loss: float) -> None:
        self._newest.append(loss)
        if len(self._newest) < self._stride:
            return
        self.losses.append(math.fsum(self._newest) / self._stride)
        self._newest.clear()
        if len(self.losses) == CURVE_STEPS:
            pairs = zip(self.losses[::2], self.losses[1::2], strict=True)
            self.losses = [(one + other) / 2 for one, other in pairs]
            self._stride *= 2

    def add_validation(self, loss: object) -> None:
        """Add the loss of a validation."""
        if is_number(loss):
            self.validations.append(loss)

    @property
    def last(self) -> Record | None:
        """Return the newest step, None before the first."""
        return self.recent[-1] if self.recent else None

    @property
    def fraction(self) -> float | None:
        """Return the completed share of the run, None if its length is unknown, or shorter."""
        if not self.total_steps or self.last is None or self.last["step"] > self.total_steps:
            return None
        return float(self.last["step"] / self.total_steps)

    def mean(self, key: str) -> float | None:
        """Return the mean of a field over the recent steps that have it."""
        values = [record[key] for record in self.recent if is_number(record.get(key))]
        return sum(values) / len(values) if values else None

    def rate(self) -> float | None:
        """Return tokens or samples per second of the recent steps; else the steps' own figure."""
        unit = count_unit(self.plan)
        counts = [(step_amount(r, unit), r.get("step_s")) for r in self.recent]
        known = [(count, step_s) for count, step_s in counts if count is not None and step_s]
        seconds = sum(step_s for _, step_s in known)
        if seconds > 0:
            return float(sum(count for count, _ in known) / seconds)
        return self.mean("tokens_per_s") if unit != "samples" else None

    def left_s(self) -> float | None:
        """Return the seconds to the end at the present pace; None if there is no known end."""
        step_s = self.mean("step_s")
        if step_s is None or not self.total_steps or self.last is None:
            return None
        if self.last["step"] > self.total_steps:
            return None
        return float((self.total_steps - self.last["step"]) * step_s)

    def fields(self) -> list[tuple[str, str]]:
        """Return (name, text) of each known figure of the last step; unknown ones are left out."""
        last = self.last
        if last is None:
            return []
        total = f"/{self.total_steps}" if self.total_steps else ""
        rate, mfu, left_s = self.rate(), self.mean("mfu"), self.left_s()
        memory, gpu = last.get("peak_memory_bytes"), self.mean("gpu_utilisation")
        comm_s, wait_s = self.mean("comm_exposed_s"), self.mean("data_wait_s")
        if not last.get("comm_bytes", 1):
            comm_s = None  # one process: no communication
        if mfu is not None and mfu < LEAST_SHARE:
            mfu = None
        found = [
            ("step", f"{last['step']}{total}"),
            ("loss", field_text(last, "loss", ".4f")),
            ("grad_norm", field_text(last, "grad_norm", ".3f")),
            ("validation", f"{self.validations[-1]:.4f}" if self.validations else None),
            ("lr", field_text(last, "lr", ".1e")),
            (
                f"{count_unit(self.plan)}_per_s",
                None if rate is None else rate_text(rate, exact=True),
            ),
            ("matmul" if is_cpu_plan(self.plan) else "mfu", None if mfu is None else f"{mfu:.1%}"),
            ("gpu", None if gpu is None else f"{gpu:.0%}"),
            ("memory", None if memory is None else bytes_text(memory)),
            ("comm", None if comm_s is None else seconds_text(comm_s)),
            ("data_wait", None if wait_s is None else seconds_text(wait_s)),
            ("left", None if left_s is None else remaining_time_text(left_s)),
        ]
        return [(name, text) for name, text in found if text is not None]

    def key_values(self) -> str:
        """Return one line for a pipe: `step=40/300 loss=5.1230 …`, values without blanks."""
        return " ".join(f"{name}={text.replace(' ', '')}" for name, text in self.fields())

    def terminal_line(self, width: int) -> str:
        """Return one line for a terminal, as much as fits, the most informative first."""
        found, unit = dict(self.fields()), count_unit(self.plan)
        rate = self.rate()
        words = [
            ("step", "step {}"),
            ("loss", f"loss {{}}{self._curve()}"),
            ("validation", self.validation_form()),
            ("grad_norm", "grad {}"),
            (f"{unit}_per_s", f"{rate_text(rate or 0)} {unit}/s"),
            ("mfu", "MFU {}"),
            ("matmul", "{} of matmul rate"),
            ("memory", "{}/rank"),
            ("gpu", "GPU {}"),
            ("lr", "lr {}"),
        ]
        return fit_words([form.format(found[name]) for name, form in words if name in found], width)

    def _curve(self) -> str:
        """Return the losses as a small curve with a blank before it; "" for too few steps."""
        curve = draw_sparkline(self.losses, CURVE_WIDTH)
        return f" {curve}" if len(curve) == CURVE_WIDTH else ""

    def validation_form(self) -> str:
        """Return the format of the newest validation, with the best one if that is older."""
        best = min(self.validations, default=0.0)
        is_best = not self.validations or self.validations[-1] <= best
        return "val {}" if is_best else f"val {{}} (best {best:.4f})"

    def waits(self) -> list[str]:
        """Return the texts beside the bar: time left first, then the waits."""
        found = dict(self.fields())
        words = [("left", "{} left"), ("comm", "comm {}"), ("data_wait", "data {}")]
        return [form.format(found[name]) for name, form in words if name in found]


def no_steps_text(step: int, steps: int) -> str:
    """Return why a session trains no step, with what would train some.

    Args:
        step: of the checkpoint that it resumes from.
        steps: train.steps.

    >>> no_steps_text(261, 140)
    '0 steps: step 261 is not below train.steps = 140; try: train.steps=401'
    """
    near = step + max(1, steps)
    return f"0 steps: step {step} is not below train.steps = {steps}; try: train.steps={near}"


def draw_sparkline(values: Sequence[float], width: int) -> str:
    """Return the values as blocks of eight heights, averaged into at most `width` of them.

    >>> draw_sparkline([8, 7, 5, 3, 2, 1], 6), draw_sparkline([1.0, 1.0], 4)
    ('█▇▅▃▂▁', '▁▁')
    """
    finite = [value for value in values if math.isfinite(value)]
    count = min(width, len(finite))
    if count < 2:
        return ""
    edges = [len(finite) * place // count for place in range(count + 1)]
    means = [
        math.fsum(finite[first:last]) / (last - first)
        for first, last in zip(edges, edges[1:], strict=False)
    ]
    low, high = min(means), max(means)
    if high == low:
        return BLOCKS[0] * count
    return "".join(BLOCKS[min(7, int((mean - low) / (high - low) * 8))] for mean in means)


def count_unit(plan: Record) -> str:
    """Return the unit of a run: tokens, samples, or targets, which the loss of an own loop counts.

    >>> count_unit({"steps": 5}), count_unit({"unit": "samples"}), count_unit({})
    ('tokens', 'samples', 'targets')
    """
    if not plan:
        return "targets"  # own loops of older versions wrote no plan
    unit = plan.get("unit")
    return unit if unit in ("samples", "targets") else "tokens"


def short_unit(unit: str) -> str:
    """Return the unit as tables have it.

    >>> short_unit("tokens"), short_unit("samples"), short_unit("targets")
    ('tok', 'sam', 'tgt')
    """
    return "tgt" if unit == "targets" else unit[:3]


def step_amount(record: Record, unit: str) -> float | None:
    """Return the tokens, targets or samples of one step; None if its record has none.

    >>> (
    ...     step_amount({"tokens": 64, "samples": [32, 40]}, "samples"),
    ...     step_amount({"tokens": 64}, "tokens"),
    ... )
    (8, 64)
    """
    if unit != "samples":
        return record["tokens"] if is_number(record.get("tokens")) else None
    span = record.get("samples")
    known = isinstance(span, list) and len(span) == 2 and all(map(is_number, span))
    return span[1] - span[0] if known and span is not None else None


def is_cpu_plan(plan: Record) -> bool:
    """Return whether the peak rate is a CPU's own, measured by a short test."""
    return plan.get("device") == "cpu"


def mfu_text(mfu: float, plan: Record) -> str:
    """Format the share of the machine's matrix rate; a CPU has no published peak.

    >>> mfu_text(0.4, {}), mfu_text(0.4, {"device": "cpu"}), mfu_text(0.0001, {})
    ('MFU 40.0%', "40.0% of machine's matmul rate", '')
    """
    if mfu < LEAST_SHARE:
        return ""
    return f"{mfu:.1%} of machine's matmul rate" if is_cpu_plan(plan) else f"MFU {mfu:.1%}"


def field_text(record: Record, key: str, form: str) -> str | None:
    """Format a field of one step; null, as JSON has no NaN, becomes "nan".

    >>> field_text({"loss": None}, "loss", ".4f"), field_text({}, "loss", ".4f")
    ('nan', None)
    """
    if key not in record:
        return None
    return "nan" if record[key] is None else f"{record[key]:{form}}"


def remaining_time_text(seconds: float) -> str:
    """Format a remaining duration without tenths.

    >>> remaining_time_text(21.4), remaining_time_text(0), remaining_time_text(95)
    ('21 s', '0 s', '1 min 35 s')
    """
    return f"{seconds:.0f} s" if seconds < 59.5 else seconds_text(seconds)


def local_time_text(time_s: float, form: str) -> str:
    """Format a time, seconds since 1970, in local time; "" if the calendar has no such time.

    >>> local_time_text(1e300, "%H:%M")
    ''
    """
    try:
        return time.strftime(form, time.localtime(time_s))
    except (OverflowError, ValueError, OSError):
        return ""


def fit_words(words: list[str], width: int, gap: str = "  ") -> str:
    """Return as many words as fit into `width` columns, in order.

    >>> fit_words(["step 1", "loss 2", "grad 3"], 15)
    'step 1  loss 2'
    """
    line = ""
    for word in words:
        longer = f"{line}{gap}{word}" if line else word
        if len(longer) > width:
            break
        line = longer
    return line
