"""Forecast and measurement, as all commands print them: the ratio is measured ÷ predicted.

So 29.1 s → 1.6 s (0.055 ×) reads: foreseen were 29.1 s, measured 1.6 s.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.base.runlog.damaged_lines import Record, is_number

FAR = 3.0
"""Ratio from which a forecast is far off, in either direction."""

OFF = "forecast far off"


def ratio_text(foreseen: float, measured: float) -> str:
    """Return measured ÷ predicted as text.

    >>> ratio_text(29.1, 1.6), ratio_text(0.2, 0.25), ratio_text(0.0045, 0.15)
    ('0.055 ×', '1.25 ×', '33 ×')
    """
    ratio = measured / foreseen
    if ratio < 0.1:
        return f"{ratio:.2g} ×"
    return f"{ratio:.0f} ×" if ratio >= 10 else f"{ratio:.2f} ×"


def forecast_text(foreseen: float, measured: float, text: Callable[[float], str]) -> str:
    """Return a predicted and a measured figure, and their ratio, as text.

    Args:
        text: formats one of them with its unit.

    >>> forecast_text(0.2, 0.25, lambda seconds: f"{seconds * 1000:.0f} ms")
    '200 ms → 250 ms (1.25 ×)'
    """
    return f"{text(foreseen)} → {text(measured)} ({ratio_text(foreseen, measured)})"


def plan_comment(plan: Record, measured_s: float | None) -> str:
    """Return `forecast_comment` on the step time of a plan.json; "" without a forecast."""
    said = plan.get("predicted")
    foreseen_s = said.get("step_s") if isinstance(said, dict) else None
    if not is_number(foreseen_s) or foreseen_s <= 0 or not measured_s:
        return ""
    return forecast_comment(foreseen_s, measured_s)


def forecast_comment(foreseen_s: float, measured_s: float) -> str:
    """Return the likely reason why a forecast of step time is far off; "" if it is not.

    >>> forecast_comment(29.1, 1.6)
    'forecast far off: the machine was busy when it was measured; try: shoal doctor'
    >>> forecast_comment(1.0, 1.2)
    ''
    """
    ratio = measured_s / foreseen_s
    if ratio * FAR <= 1:
        return f"{OFF}: the machine was busy when it was measured; try: shoal doctor"
    if ratio >= FAR:
        return f"{OFF}: the machine is slower now than measured; try: shoal doctor"
    return ""
