"""Prometheus' text format: samples by metric, with HELP and TYPE lines and escaped labels.

    # HELP shoal_run_loss Loss of the newest step.
    # TYPE shoal_run_loss gauge
    shoal_run_loss{run="ddp"} 1.25

All samples of a metric stand together, as the format demands. A pair of metric and labels appears
once: a scraper refuses a page with two.

References:
    https://prometheus.io/docs/instrumenting/exposition_formats/ (version 0.0.4)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.base.runlog.damaged_lines import is_number
from shoal.base.text.event_sentences import strip_control_characters

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LONGEST_LABEL = 200
"""Characters of a label's value."""


@dataclass(frozen=True)
class MetricFamily:
    """A metric: its name, its type and its help text.

    Attributes:
        name: with the unit at its end, and `_total` for a counter.
        kind: gauge or counter.
        text: the HELP line.
    """

    name: str
    kind: str
    text: str


class SamplePage:
    """Samples of metrics, in the order of `families`.

    Args:
        families: the metrics that the page may have.
    """

    def __init__(self, families: tuple[MetricFamily, ...]) -> None:
        self._families = families
        self._values: dict[str, dict[str, float]] = {family.name: {} for family in families}

    def add(self, name: str, value: object, **labels: str) -> None:
        """Add a sample, unless its value is not a finite number or its labels have one already.

        Raises:
            KeyError: no family has this name.
        """
        if is_number(value):
            self._values[name].setdefault(label_text(labels), value)

    def text(self) -> str:
        """Return the page; metrics without a sample are left out."""
        lines: list[str] = []
        for family in self._families:
            if samples := self._values[family.name]:
                lines.append(f"# HELP {family.name} {family.text}")
                lines.append(f"# TYPE {family.name} {family.kind}")
                lines += [f"{family.name}{at} {value_text(v)}" for at, v in samples.items()]
        return "".join(f"{line}\n" for line in lines)


def label_text(labels: Mapping[str, str]) -> str:
    r"""Return labels in braces, their values escaped; "" for none.

    >>> print(label_text({"run": 'a"b\n\\c'}))
    {run="a\"b\n\\c"}
    """
    pairs = [f'{name}="{_escape(value)}"' for name, value in labels.items()]
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def label_value(text: str) -> str:
    r"""Return a text as a label's value: one line, printable, 200 characters at most.

    >>> label_value("a\x1b[31m\nb"), label_value("\udcff"), len(label_value("x" * 5000))
    ('a·[31m·b', '·', 200)
    """
    plain = strip_control_characters(text[: LONGEST_LABEL * 2]).replace("\n", "·")
    return plain if len(plain) <= LONGEST_LABEL else f"{plain[: LONGEST_LABEL - 1]}…"


def value_text(value: float) -> str:
    """Return a number as the format writes it: integers without a point.

    >>> value_text(3.0), value_text(0.1), value_text(True)
    ('3', '0.1', '1')
    """
    whole = math.floor(value)
    return str(whole) if whole == value and abs(whole) < 2**53 else repr(float(value))
