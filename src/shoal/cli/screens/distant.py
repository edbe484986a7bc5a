"""Screens about slow links: what DiLoCo sends, and what islands cost by bandwidth and period.

Every function takes options with units in their names and gives a `Screen`; the formulas are in
`planner/calculators/diloco.py` and `planner/islands.py`.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.base.units import bytes_text, count_text
from shoal.cli.screens.words import lasting, number, percent, rate, steps_of
from shoal.planner.calculators import diloco
from shoal.planner.islands import (
    IslandsCase,
    islands_cost,
    needed_bytes_per_s,
    smallest_period,
    utilisation_table,
)
from shoal.view.plot import Axis, Chart, Series
from shoal.view.screen import Formula, Screen

MBIT = 1e6 / 8
RATES_MBIT = (10, 50, 100, 200, 500, 1000, 10_000)
PERIODS = (1, 10, 30, 100, 300, 500, 1000)


def diloco_screen(
    parameters: float = 10e9,
    islands: int = 2,
    bits: float = 4.0,
    period: int = 100,
    step_s: float = 0.8,
    mbit_per_s: float = 1000.0,
    compared_bits: float = 16.0,
) -> Screen:
    """Bytes and seconds of averaging weights every H steps, against gradients every step."""
    w = mbit_per_s * MBIT
    outer = diloco.bytes_per_outer_step(parameters, islands, bits)
    each = diloco.bytes_per_step(parameters, islands, bits, period)
    seconds = diloco.outer_step_s(parameters, islands, bits, w)
    used = diloco.utilisation(period * step_s, seconds)
    less = diloco.less_traffic(period, bits, compared_bits)

    def gbit_per_s(wire: float, every: float) -> float:
        sent = diloco.bytes_per_outer_step(parameters, islands, wire)
        return sent * 8 / 1e9 / (every * step_s)

    curves = tuple(
        Series(f"{wire} bits", tuple((h, gbit_per_s(wire, h)) for h in steps_of(1, 1000, 40)))
        for wire in (32, 16, 8, 4)
    )
    ring, p = number(2 * (islands - 1) / islands), count_text(parameters)
    return Screen(
        title=f"DiLoCo: {islands} islands of {p} parameters meet every {period} steps",
        formulas=(
            Formula(
                "sent per round",
                f"2(R−1)/R·β·P = {ring} · {number(bits / 8)} B · {p}",
                bytes_text(outer),
            ),
            Formula("sent per step", f"… / H = {bytes_text(outer)} / {period}", bytes_text(each)),
            Formula("a round's sum", f"{bytes_text(outer)} / {rate(w)}", lasting(seconds)),
            Formula(
                "utilisation",
                f"H·t / (H·t + sum) = {number(period * step_s)} s / "
                f"{number(period * step_s + seconds)} s",
                percent(used),
            ),
            Formula(
                "less traffic",
                f"H · {number(compared_bits)} bits / {number(bits)} bits, against every step",
                f"{number(less)}×",
            ),
            Formula(
                "extra memory",
                "momentum 4·P + last weights 4·P, on the CPU if need be",
                bytes_text(diloco.OUTER_STATE_BYTES * parameters),
            ),
        ),
        results={"bytes_per_round": outer, "bytes_per_step": each, "seconds_per_round": seconds}
        | {"utilisation": used, "less_traffic": less},
        meaning="A factor of traffic means nothing without what it is compared with: here "
        f"{number(compared_bits)}-bit gradients every step. The price of a longer H is paid in "
        "quality per token, which no formula gives: at H = 30–500 papers report a few percent.",
        source="DiLoCo 2023, Streaming DiLoCo 2025, INTELLECT-1 2024",
        chart=Chart(
            Axis("period H, inner steps", log=True),
            Axis("mean rate per island, Gbit/s", log=True),
            curves,
            ((period, "yours"),),
        ),
        letters="R islands, P parameters, β bytes of each sent, H inner steps of t s, W link",
        following="shoal simulate islands   (fragments, overlap, the table by bandwidth)",
    )


def islands_screen(
    islands: int = 4,
    parameters: float = 1e9,
    step_s: float = 1.0,
    mbit_per_s: float = 200.0,
    period: int = 100,
    bits: float = 8.0,
    fragments: int = 1,
    overlap_steps: int = 0,
    latency_ms: float = 50.0,
    outer_s: float = 0.0,
    target: float = 0.95,
) -> Screen:
    """Time per outer step of islands on slow links, and the table of utilisation by link and H."""
    case = IslandsCase(
        islands,
        parameters,
        step_s,
        mbit_per_s * MBIT,
        period,
        bits,
        fragments,
        overlap_steps,
        latency_ms * 1e-3,
        outer_s,
    )
    cost, least = islands_cost(case), smallest_period(case, target)
    needed = needed_bytes_per_s(case, target)
    rates = sorted({*RATES_MBIT, mbit_per_s})
    periods = sorted({*PERIODS, period})
    shares = utilisation_table(case, [r * MBIT for r in rates], periods)
    head = ("a link of", *(f"H {h}" for h in periods))
    rows = [
        (rate(r * MBIT) + (" ←" if r == mbit_per_s else ""), *(percent(u) for u in row))
        for r, row in zip(rates, shares, strict=True)
    ]
    return Screen(
        title=f"{islands} islands of {count_text(parameters)} parameters on links of "
        f"{rate(case.bytes_per_s)}, steps of {lasting(step_s)}",
        formulas=_islands_formulas(case, cost.utilisation, least, needed, target),
        results={
            **vars(cost),
            "utilisation": cost.utilisation,
            "smallest_period": least,
            "needed_bytes_per_s": needed,
            "rates_mbit": rates,
            "periods": periods,
            "table": shares,
        },
        meaning=f"{percent(1 - cost.utilisation)} of the time goes to the link. For "
        f"{percent(target)} meet every {number(least)} steps, or have {rate(needed)}; fewer bits, "
        "overlap (overlap_steps=) and fragments (fragments=) do the same without waiting longer.",
        source="DiLoCo 2023, Streaming DiLoCo 2025; one fragment in flight as in torchft",
        chart=_islands_chart(case),
        table=(head, *rows),
        letters="R islands, P parameters, F fragments of t_f s, W link, ε latency, H steps of t s, "
        "τ steps beside which a fragment travels",
    )


def _islands_formulas(
    case: IslandsCase, used: float, least: int, needed: float, target: float
) -> tuple[Formula, ...]:
    cost = islands_cost(case)
    ring, p = number(2 * (case.islands - 1) / case.islands), count_text(case.parameters)
    hidden_s = case.overlap_steps * case.step_s
    return (
        Formula(
            "sent per round",
            f"S = 2(R−1)/R·P·bits/8 = {ring} · {p} · {number(case.wire_bits)}/8",
            bytes_text(cost.sent_bytes),
        ),
        Formula(
            f"1 of {case.fragments} fragments" if case.fragments > 1 else "on the link",
            f"S/F/W + 2(R−1)·ε = {bytes_text(cost.sent_bytes / case.fragments)} / "
            f"{rate(case.bytes_per_s)} + {2 * (case.islands - 1)} · {lasting(case.latency_s)}",
            lasting(cost.sending_s / case.fragments),
        ),
        Formula(
            "outer step",
            f"H·t + F·max(0, t_f − τ·t) + outer = {case.period} · {lasting(case.step_s)} + "
            f"{case.fragments} · max(0, {lasting(cost.sending_s / case.fragments)} − "
            f"{lasting(hidden_s)}) + {lasting(case.outer_s)}",
            lasting(cost.round_s),
        ),
        Formula("utilisation", f"H·t / outer step = {lasting(cost.compute_s)} / …", percent(used)),
        Formula(
            "rate of a link",
            f"mean {rate(cost.mean_bytes_per_s)}, while sending",
            rate(cost.peak_bytes_per_s),
        ),
        Formula(
            f"H for {percent(target)}",
            f"or a link of {rate(needed)} at H = {case.period}",
            number(least),
        ),
    )


def _islands_chart(case: IslandsCase) -> Chart:
    """Utilisation by period, for links around the one given."""
    low = max(1, case.fragments * max(1, case.overlap_steps))
    places = sorted(
        {max(low, round(h)) for h in steps_of(low, max(1000, 10 * low, 2 * case.period), 60)}
    )
    curves = []
    for factor in (10, 1, 0.1):
        link = replace(case, bytes_per_s=case.bytes_per_s * factor)
        points = tuple((h, 100 * islands_cost(replace(link, period=h)).utilisation) for h in places)
        curves.append(Series(rate(link.bytes_per_s), points))
    return Chart(
        Axis("period H, inner steps", log=True),
        Axis("utilisation, %", low=0.0, high=100.0),
        tuple(curves),
        ((case.period, "yours"),),
    )
