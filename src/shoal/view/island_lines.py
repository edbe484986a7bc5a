"""Merged rounds of islands, from a run's events, compared with the prediction.

Every round ends with an event on each island, `round_committed` or `round_discarded`:

    round          from 0 · steps  inner steps that this island took
    seconds        of the round, of which compute_s in inner steps and exposed_s in waiting for
                   others · exchange_s  of its fragments, from the message to the vote, summed up
    sent_bytes     encoded, by all processes of this island · tokens  trained on by this island
    refused        island → reason why its change did not count
    spread         distance between the merged weights, relative to their norm, just before the
                   merge; only of methods whose islands keep different weights

so that sums over rounds are sums over time. Predictions are named as in
`planner.islands.IslandsCost`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.base.text.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from shoal.forecast.time.island_costs import IslandsCost

Record = dict[str, Any]
DISCARDED = "round_discarded"
_SUMMED = ("steps", "seconds", "compute_s", "exposed_s", "exchange_s", "sent_bytes", "tokens")


@dataclass(frozen=True)
class RoundTotals:
    """Totals over a run's committed rounds; `discarded` counts the others.

    Attributes:
        refused: island → how many of its changes did not count.
        steps, seconds, compute_s, exposed_s, exchange_s, sent_bytes, tokens: summed over rounds.
        peak_bytes_per_s: mean rate of the fastest exchange.
        spread: the newest reported value.
    """

    rounds: int
    discarded: int
    refused: dict[str, int]
    steps: float
    seconds: float
    compute_s: float
    exposed_s: float
    exchange_s: float
    sent_bytes: float
    tokens: float
    peak_bytes_per_s: float
    spread: float | None = None

    def figures(self) -> dict[str, float]:
        """Return the measured counterparts of a prediction; unknown ones are left out."""
        found = {
            "utilisation": _share(self.compute_s, self.seconds),
            "round_s": _share(self.seconds, self.rounds),
            "waited_s": _share(self.seconds - self.compute_s, self.rounds),
            "exposed_s": _share(self.exposed_s, self.rounds),
            "exchange_s": _share(self.exchange_s, self.rounds),
            "bytes_per_token": _share(self.sent_bytes, self.tokens),
            "mean_bytes_per_s": _share(self.sent_bytes, self.seconds),
            "peak_bytes_per_s": self.peak_bytes_per_s or math.nan,
        }
        return {name: value for name, value in found.items() if math.isfinite(value)}


def sum_rounds(events: Iterable[Record]) -> RoundTotals | None:
    """Return the totals over the rounds of one island; None if none has ended.

    >>> one = {
    ...     "event": "round_committed",
    ...     "round": 0,
    ...     "seconds": 10.0,
    ...     "compute_s": 9.0,
    ...     "exchange_s": 2.0,
    ...     "sent_bytes": 100,
    ...     "tokens": 50,
    ...     "refused": {},
    ... }
    >>> found = sum_rounds([one, {**one, "round": 1}])
    >>> found.rounds, found.figures()["utilisation"], found.figures()["bytes_per_token"]
    (2, 0.9, 2.0)
    """
    ended = [event for event in events if event.get("event") in ("round_committed", DISCARDED)]
    if not ended:
        return None
    rounds = [event for event in ended if event.get("event") != DISCARDED]
    refused = Counter(island for event in ended for island in _refused_islands(event))
    rates = [
        _number(event, "sent_bytes") / seconds
        for event in rounds
        if (seconds := _number(event, "exchange_s")) > 0
    ]
    sums = {key: sum(_number(event, key) for event in rounds) for key in _SUMMED}
    return RoundTotals(
        rounds=len(rounds),
        discarded=len(ended) - len(rounds),
        refused=dict(sorted(refused.items())),
        peak_bytes_per_s=max(rates, default=0.0),
        spread=next((_number(e, "spread") for e in reversed(rounds) if "spread" in e), None),
        **sums,
    )


def islands_summary_line(
    events: Sequence[Record], predicted: Mapping[str, Any] | None = None, unit: str = "token"
) -> str:
    """Return one line for the summary at a run's end; "" for a run without rounds.

    Args:
        unit: what the rounds count: a token of text, a target of other data.

    >>> one = {
    ...     "event": "round_committed",
    ...     "round": 0,
    ...     "seconds": 10.0,
    ...     "compute_s": 9.0,
    ...     "exchange_s": 2.0,
    ...     "sent_bytes": 1e6,
    ...     "tokens": 5000,
    ... }
    >>> islands_summary_line([one], {"utilisation": 0.95})
    '1 round, 90.0% used (foreseen 95.0%), 200 B per token and island'
    """
    found = sum_rounds(events)
    if found is None:
        return ""
    figures, said = found.figures(), _finite_figures(predicted)
    parts = [f"{found.rounds} round{'s' if found.rounds != 1 else ''}"]
    if found.discarded:
        parts.append(f"{found.discarded} discarded")
    if "utilisation" in figures:
        beside = f" (foreseen {said['utilisation']:.1%})" if "utilisation" in said else ""
        parts.append(f"{figures['utilisation']:.1%} used{beside}")
    if "bytes_per_token" in figures:
        parts.append(f"{bytes_text(figures['bytes_per_token'])} per {unit} and island")
    if found.spread is not None:
        parts.append(f"weights {found.spread:.2%} apart")
    return ", ".join(parts)


def link_lines(costs: Sequence[tuple[float, IslandsCost]]) -> list[str]:
    """Format the predicted cost of islands on each of several links: a table, a head and lines.

    Args:
        costs: (bytes/s of an island's link, predicted cost of a round on it) of every line.

    Returns:
        the table's lines, at most 80 columns wide.
    """
    lines = [
        f"{'on a link of':<16}{'utilisation':>12}{'a round':>14}{'waited':>14}{'mean rate':>16}"
    ]
    for bytes_per_s, cost in costs:
        mean = f"{cost.mean_bytes_per_s * 8e-6:.1f} Mbit/s"
        lines.append(
            f"  {f'{bytes_per_s * 8e-6:g} Mbit/s':<14}{cost.utilisation:>12.1%}"
            f"{seconds_text(cost.round_s):>14}{seconds_text(cost.waited_s):>14}{mean:>16}"
        )
    return lines


def _refused_islands(event: Record) -> list[str]:
    refused = event.get("refused")
    return [str(island) for island in refused] if isinstance(refused, dict | list) else []


def _number(event: Record, key: str) -> float:
    value = event.get(key)
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else 0.0  # type: ignore[arg-type]


def _finite_figures(predicted: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the finite numbers of a prediction."""
    return {
        name: float(value)
        for name, value in (predicted or {}).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
