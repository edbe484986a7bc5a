"""Screens about slow links: DiLoCo's traffic, and the cost of islands by bandwidth and period.

Every function takes options with units in their names and returns a `Screen`; the formulas are in
`teach/calculators/diloco.py` and `forecast/time/island_costs.py`. Keys of `[islands]` are those of
run.toml.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.base.errors import PlanError
from shoal.base.layouts.island_options import IslandsPolicy
from shoal.base.text.units import bytes_text, count_text
from shoal.forecast.models.families import FAMILIES
from shoal.forecast.models.model_facts import count_model_parameters as parameters_of
from shoal.forecast.models.published_models import published_shape
from shoal.forecast.models.transformer_costs import transformer_facts
from shoal.forecast.search.island_choice import (
    RATES_BYTES_PER_S,
    costs_by_link,
    needed_bytes_per_s,
    propose_settings,
    smallest_period,
)
from shoal.forecast.time.codec_costs import CODINGS
from shoal.forecast.time.island_costs import IslandsCost, IslandsFacts, islands_cost
from shoal.teach.calculators import diloco
from shoal.teach.drawings.plot import Chart, PlotAxis, Series
from shoal.teach.drawings.screen import Formula, Screen
from shoal.teach.screens.words import (
    duration_text,
    geometric_range,
    link_rate_text,
    number_text,
    percent_text,
)

MBIT = 1e6 / 8
USUAL_PARAMETERS = 1e9
USUAL_ISLANDS = IslandsPolicy("diloco", count=4)


def diloco_screen(
    parameters: float = 10e9,
    islands: int = 2,
    bits: float = 4.0,
    period: int = 100,
    step_s: float = 0.8,
    mbit_per_s: float = 1000.0,
    compared_bits: float = 16.0,
) -> Screen:
    """Compare bytes and seconds of averaging weights every H steps with gradients every step."""
    w = mbit_per_s * MBIT
    outer = diloco.bytes_per_outer_step(parameters, islands, bits)
    each = diloco.bytes_per_step(parameters, islands, bits, period)
    seconds = diloco.outer_step_s(parameters, islands, bits, w)
    used = diloco.utilisation(period * step_s, seconds)
    less = diloco.traffic_reduction(period, bits, compared_bits)

    def gbit_per_s(wire: float, every: float) -> float:
        sent = diloco.bytes_per_outer_step(parameters, islands, wire)
        return sent * 8 / 1e9 / (every * step_s)

    curves = tuple(
        Series(
            f"{wire} bits", tuple((h, gbit_per_s(wire, h)) for h in geometric_range(1, 1000, 40))
        )
        for wire in (32, 16, 8, 4)
    )
    ring, p = number_text(2 * (islands - 1) / islands), count_text(parameters)
    return Screen(
        title=f"DiLoCo: {islands} islands of {p} parameters meet every {period} steps",
        formulas=(
            Formula(
                "sent per round",
                f"2(R−1)/R·β·P = {ring} · {number_text(bits / 8)} B · {p}",
                bytes_text(outer),
            ),
            Formula("sent per step", f"… / H = {bytes_text(outer)} / {period}", bytes_text(each)),
            Formula(
                "a round's sum",
                f"{bytes_text(outer)} / {link_rate_text(w)}",
                duration_text(seconds),
            ),
            Formula(
                "utilisation",
                f"H·t / (H·t + sum) = {number_text(period * step_s)} s / "
                f"{number_text(period * step_s + seconds)} s",
                percent_text(used),
            ),
            Formula(
                "less traffic",
                f"H · {number_text(compared_bits)} bits / {number_text(bits)} bits, against "
                "every step",
                f"{number_text(less)}×",
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
        f"{number_text(compared_bits)}-bit gradients every step. The price of a longer H is "
        "paid in "
        "quality per token, which no formula gives: at H = 30–500 papers report a few percent.",
        source="DiLoCo 2023, Streaming DiLoCo 2025, INTELLECT-1 2024",
        chart=Chart(
            PlotAxis("period H, inner steps", log=True),
            PlotAxis("mean rate per island, Gbit/s", log=True),
            curves,
            ((period, "yours"),),
        ),
        letters="R islands, P parameters, β bytes of each sent, H inner steps of t s, W link",
        following="shoal simulate islands   (fragments, overlap, the table by bandwidth)",
    )


def islands_screen(
    islands: IslandsPolicy = USUAL_ISLANDS,
    parameters: float = USUAL_PARAMETERS,
    model: str = "",
    step_s: float = 1.0,
    mbit_per_s: float = 200.0,
    latency_ms: float = 50.0,
    processes: int = 8,
    tokens_per_step: float = 65536.0,
    slowest: float = 1.0,
    near_mbit_per_s: float = 1000.0,
    target: float = 0.95,
) -> Screen:
    """Show the cost of a run with these `[islands]` on a link, and on links of other rates.

    Args:
        model: name of a published size, in place of `parameters`.
        processes: of one island.
        slowest: speed of the slowest island, the others' being 1.
        tokens_per_step: of one island.
        near_mbit_per_s: inside a region (islands.regions).
    """
    policy = islands.resolved()
    facts = IslandsFacts(
        parameters=_parameters(model, parameters),
        step_s=step_s,
        bytes_per_s=mbit_per_s * MBIT,
        latency_s=latency_ms * 1e-3,
        near_bytes_per_s=near_mbit_per_s * MBIT,
        speeds=_island_speeds(policy.count, slowest),
        tokens=tokens_per_step,
        ranks=processes,
    )
    cost, least = islands_cost(policy, facts), smallest_period(policy, facts, target)
    needed, better = (
        needed_bytes_per_s(policy, facts, target),
        propose_settings(policy, facts, target),
    )
    rates = sorted({*RATES_BYTES_PER_S, facts.bytes_per_s})
    costs = costs_by_link(policy, facts, rates)
    return Screen(
        title=f"{policy.count} islands of {count_text(facts.parameters)} parameters: "
        f"{policy.method}, codec {policy.codec}, {policy.period} steps of "
        f"{duration_text(step_s)}, on "
        f"{link_rate_text(facts.bytes_per_s)}",
        formulas=_islands_formulas(policy, facts, cost),
        results={
            "settled": vars(policy),
            **cost.record(),
            "smallest_period": least,
            "needed_bytes_per_s": needed,
            "ways": [{"typed": way.command_text, "utilisation": way.utilisation} for way in better],
            "links": [
                {"mbit_per_s": link / MBIT, **one.record()}
                for link, one in zip(rates, costs, strict=True)
            ],
        },
        meaning=f"{percent_text(1 - cost.utilisation)} of the time is waited. For "
        f"{percent_text(target)}: "
        + _advice(
            least,
            needed,
            [f"{way.command_text} ({percent_text(way.utilisation)})" for way in better],
        )
        + " What period and codec cost in quality no formula gives.",
        source="DiLoCo 2023, Streaming DiLoCo 2025; a core as fast as those Shoal is tested on",
        chart=_islands_chart(policy, facts),
        table=_islands_table(policy, facts, rates, costs, target),
        letters="R islands, n parameters, β coded bytes of each, P fragments exchanged in x s, W "
        "link, ε latency, H steps of t s, τ of them while a fragment is on its way",
    )


def _parameters(model: str, parameters: float) -> float:
    """Return the parameters of a model by name, or the given number.

    Raises:
        ConfigError: an unknown name.
        PlanError: both a name and a number are given.
    """
    if not model:
        return parameters
    if parameters != USUAL_PARAMETERS:
        raise PlanError(
            f"parameters = {parameters:g} and model = {model}: one of them says how many; try: "
            f"model={model}"
        )
    if model in FAMILIES:
        return float(parameters_of(model) or 0)
    return float(transformer_facts(published_shape(model), 1024, 2).trainable)


def _island_speeds(count: int, slowest: float) -> tuple[float, ...]:
    if slowest > 1:
        raise PlanError(
            f"slowest = {slowest:g}: a share of the other islands' speed; try: slowest=1"
        )
    return (*(1.0,) * (count - 1), slowest)


def _advice(least: int | None, needed: float, better: list[str]) -> str:
    """Return a sentence with the mildest change and the one that suffices."""
    if not better:
        return "nothing to do."
    found = [" or ".join(dict.fromkeys((better[0], better[-1])))]
    if needed < float("inf"):
        found.append(f"a link of {link_rate_text(needed)}")
    if least is not None and "period" not in better[-1]:
        found.append(f"islands.period={least}")
    return "; or ".join(found) + "."


def _islands_formulas(
    policy: IslandsPolicy, facts: IslandsFacts, cost: IslandsCost
) -> tuple[Formula, ...]:
    """Return the formulas of traffic, transfer time, remaining compute and memory."""
    share = "(R−1)" if CODINGS[policy.codec].gathers else "2(R−1)/R"
    each = CODINGS[policy.codec].bytes_each or facts.element_bytes
    meets = " in pairs" if policy.method == "noloco" else ""
    if policy.regions > 1:
        meets = f", all islands every {policy.far_period} rounds"
    return (
        Formula(
            "sent per round",
            f"{share}·β·n, β = {number_text(each)} B, R = {policy.count}{meets}",
            bytes_text(cost.sent_bytes),
        ),
        Formula(
            "per token",
            f"… / (H·tokens) = … / ({policy.period} · {number_text(facts.tokens)}), of one island",
            f"{number_text(cost.bytes_per_token)} B",
        ),
        *_round_formulas(policy, facts, cost),
        Formula(
            "utilisation",
            f"{duration_text(cost.compute_s)} of steps / {duration_text(cost.round_s)}",
            percent_text(cost.utilisation),
        ),
        Formula("mean rate", "sent per round / a round", link_rate_text(cost.mean_bytes_per_s)),
        Formula(
            "while sending", _overlap_text(policy, cost), link_rate_text(cost.peak_bytes_per_s)
        ),
        Formula(
            "memory",
            f"merged weights and outer state, per process of {facts.ranks}, on the CPU",
            bytes_text(cost.memory_bytes),
        ),
    )


def _round_formulas(
    policy: IslandsPolicy, facts: IslandsFacts, cost: IslandsCost
) -> tuple[Formula, Formula]:
    fragments, t = policy.fragments, facts.step_s
    one_s, own_s = cost.exchange_s / fragments, (cost.waited_s - cost.exposed_s) / fragments
    travel = f"{bytes_text(cost.sent_bytes / fragments)} / {link_rate_text(facts.bytes_per_s)}"
    if min(cost.steps) == policy.period and policy.regions == 1:
        text = (
            f"H·t + P·(own + max(0, x − τ·t)) = {policy.period} · {duration_text(t)} + "
            f"{fragments} · "
            f"({duration_text(own_s)} + max(0, {duration_text(one_s)} − "
            f"{duration_text(policy.overlap * t)}))"
        )
    else:
        text = f"{min(cost.steps)} to {max(cost.steps)} steps by speed, and what is waited"
    return (
        Formula(
            "exchange" if fragments == 1 else f"1 of {fragments} fragments",
            f"x = max(sent/P/W, coding) + 6·ε + outer step, with {travel}",
            duration_text(one_s),
        ),
        Formula("a round", text, duration_text(cost.round_s)),
    )


def _overlap_text(policy: IslandsPolicy, cost: IslandsCost) -> str:
    if cost.hiding_bytes_per_s < float("inf"):
        return f"to hide all: {link_rate_text(cost.hiding_bytes_per_s)}"
    if policy.overlap:
        return f"islands.overlap={policy.overlap} is too short to hide all on any link"
    return "islands.overlap=0 hides nothing"


def _islands_table(
    policy: IslandsPolicy,
    facts: IslandsFacts,
    rates: list[float],
    costs: list[IslandsCost],
    target: float,
) -> tuple[tuple[str, ...], ...]:
    head = ("a link of", "utilisation", "a round", "waited", "mean", "sending")
    rows = []
    for link, cost in zip(rates, costs, strict=True):
        least = smallest_period(policy, replace(facts, bytes_per_s=link), target)
        rows.append(
            (
                link_rate_text(link) + (" ←" if link == facts.bytes_per_s else ""),
                percent_text(cost.utilisation),
                duration_text(cost.round_s),
                duration_text(cost.waited_s),
                link_rate_text(cost.mean_bytes_per_s),
                link_rate_text(cost.peak_bytes_per_s),
                "none" if least is None else number_text(least),
            )
        )
    return ((*head, f"H for {percent_text(target)}"), *rows)


def _islands_chart(policy: IslandsPolicy, facts: IslandsFacts) -> Chart:
    """Plot utilisation by period, for rates around the link's."""
    low = policy.fragments * (policy.overlap + 1)
    high = max(1000, 10 * low, 2 * policy.period)
    periods = sorted({max(low, round(h)) for h in geometric_range(low, high, 60)})
    curves = []
    for factor in (10, 1, 0.1):
        link = replace(facts, bytes_per_s=facts.bytes_per_s * factor)
        points = tuple(
            (h, 100 * islands_cost(replace(policy, period=h), link).utilisation) for h in periods
        )
        curves.append(Series(link_rate_text(link.bytes_per_s), points))
    return Chart(
        PlotAxis("period H, inner steps", log=True),
        PlotAxis("utilisation, %", low=0.0, high=100.0),
        tuple(curves),
        ((policy.period, "yours"),),
    )
