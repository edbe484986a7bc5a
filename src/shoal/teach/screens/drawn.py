"""Screens of simulated runs beside their closed forms: failures with spare nodes, stragglers.

Every function takes options with units in their names and returns a `Screen`; the simulation is in
`teach/failure_timeline.py` and `teach/calculators/stragglers.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.base.errors import PlanError
from shoal.teach import failure_timeline as drawn
from shoal.teach.calculators import stragglers as slow
from shoal.teach.calculators.goodput import HOUR, best_interval_s
from shoal.teach.drawings.plot import Chart, PlotAxis, Series
from shoal.teach.drawings.screen import Formula, Screen
from shoal.teach.screens.words import duration_text, number_text, percent_text, powers_of_two

MOST_DRAWN = 300_000
MOST_NODES = 10_000
"""Most nodes on standby or away in the mean: more than any run has."""
DRAWN_STEPS = 2000
"""Most steps behind each dot of the plot of stragglers."""


def failures_screen(
    gpus: int = 16384,
    mtbf_hours: float = 3.1,
    days: float = 54.0,
    stall_s: float = 60.0,
    restart_s: float = 600.0,
    interval_s: float = 0.0,
    write_s: float = 0.0,
    spares: int = 12,
    repair_hours: float = 24.0,
    node_share: float = 0.78,
    shape: float = 1.0,
    runs: int = 20,
    seed: int = 0,
) -> Screen:
    """Simulate a long run many times with failures, restarts and spares, beside the closed form."""
    mean_s, whole_s = mtbf_hours * HOUR, days * 86400
    if runs * whole_s / mean_s > MOST_DRAWN:
        fewer = int(MOST_DRAWN * mean_s / whole_s)
        least_days = MOST_DRAWN * mean_s / runs / 86400
        raise PlanError(
            f"runs = {runs}, days = {days:g}: more than {number_text(MOST_DRAWN)} failures to "
            "draw; "
            f"try: " + (f"runs={fewer}" if fewer else f"days={least_days:.0f}")
        )
    _check_nodes(spares, node_share, repair_hours, mtbf_hours)
    tau = interval_s or best_interval_s(stall_s, restart_s, mean_s, write_s)
    case = drawn.FailureCase(
        gpus, mean_s * gpus, tau, stall_s, restart_s, write_s, spares, repair_hours * HOUR,
        node_share, shape,
    )  # fmt: skip
    outcomes = [drawn.simulate_failures(case, whole_s, seed + k) for k in range(runs)]
    shares = [one.goodput for one in outcomes]
    mean = sum(shares) / runs
    deviation = (sum((share - mean) ** 2 for share in shares) / max(1, runs - 1)) ** 0.5
    stops, enough = sum(one.failures for one in outcomes) / runs, drawn.least_spares(case)
    both = (mean, deviation, drawn.expected_goodput(case))
    burst = "" if shape == 1 else " The closed form is for shape = 1; bursts differ from it."
    bars = _mean_time_shares(outcomes)
    named = zip(("drawn", "deviation", "closed_form"), both, strict=True)
    return Screen(
        title=f"{number_text(gpus)} GPUs for {number_text(days)} days, a failure every "
        f"{duration_text(mean_s)}, "
        f"{spares} spare nodes: {runs} drawn runs",
        formulas=_failure_formulas(case, whole_s, stops, both, runs),
        results={**dict(named), "failures": stops, "spares_for_1_percent": enough, "parts": bars}
        | {"interval_s": tau, "waiting": drawn.waiting_share(case)},
        meaning=f"{enough} spare nodes keep waiting below 1 % of the time. Line: closed form, "
        f"exact for failures at random; dots: one drawn run each.{burst}",
        source="Daly 2006; Erlang 1917; Llama-3 405B: 419 stops in 54 days, 78 % of them hardware",
        chart=_spares_chart(case, enough, whole_s, seed),
        bars=bars,
        letters="t length of the run, M between failures, T repair of a node",
        following="shoal simulate stragglers   (when nothing fails but one is slow)",
    )


def _check_nodes(spares: int, node_share: float, repair_hours: float, mtbf_hours: float) -> None:
    """Refuse more nodes, on standby or away, than any run has."""
    if spares > MOST_NODES:
        raise PlanError(f"spares = {spares}: at most {MOST_NODES}; try: spares={MOST_NODES}")
    if node_share * repair_hours > MOST_NODES * mtbf_hours:
        raise PlanError(
            f"repair_hours = {repair_hours:g}: more than {MOST_NODES} nodes would be away; "
            f"try: repair_hours={MOST_NODES * mtbf_hours / node_share:g}"
        )


def _failure_formulas(
    case: drawn.FailureCase,
    whole_s: float,
    stops: float,
    both: tuple[float, float, float],
    runs: int,
) -> tuple[Formula, ...]:
    mean, deviation, expected = both
    waiting = drawn.waiting_share(case)
    load = case.node_share * case.repair_s / case.mean_s
    away = (
        f"{number_text(case.node_share)} · {duration_text(case.repair_s)} / "
        f"{duration_text(case.mean_s)}"
    )
    return (
        Formula(
            "failures",
            f"t/M = {duration_text(whole_s)} / {duration_text(case.mean_s)}",
            number_text(whole_s / case.mean_s),
        ),
        Formula("failures, drawn", f"mean of {runs} runs; none while standing", number_text(stops)),
        Formula("nodes in repair", f"share · T/M = {away}, if never short", number_text(load)),
        Formula(
            "short of nodes",
            f"Erlang B: {case.spares + 1} away at once, {number_text(load)} on average",
            percent_text(waiting),
        ),
        Formula(
            "goodput, closed",
            f"exact goodput · (1 − {percent_text(waiting)})",
            percent_text(expected),
        ),
        Formula(
            "goodput, drawn",
            f"mean of {runs} runs ± deviation between them",
            f"{percent_text(mean)} ± {percent_text(deviation)}",
        ),
    )


def _mean_time_shares(outcomes: Sequence[drawn.FailureOutcome]) -> dict[str, float]:
    """Return the time of all simulated runs by use, as shares."""
    total_s = sum(one.duration_s for one in outcomes)
    return {
        "work": sum(one.work_s for one in outcomes) / total_s,
        "checkpoints": sum(one.checkpoint_s for one in outcomes) / total_s,
        "restarts": sum(one.restart_s for one in outcomes) / total_s,
        "work done again": sum(one.repeated_s for one in outcomes) / total_s,
        "waiting for a node": sum(one.waiting_s for one in outcomes) / total_s,
    }


def _spares_chart(case: drawn.FailureCase, enough: int, duration_s: float, seed: int) -> Chart:
    """Plot goodput by spare nodes: the closed form as a line, one simulated run each as dots."""
    most = max(8, 2 * enough, case.spares + 2)
    cases = {k: replace(case, spares=k) for k in range(0, most + 1, max(1, most // 40))}
    line = tuple((k, 100 * drawn.expected_goodput(one)) for k, one in cases.items())
    dots = tuple(
        (k, 100 * drawn.simulate_failures(one, duration_s, seed).goodput)
        for k, one in cases.items()
    )
    return Chart(
        PlotAxis("spare nodes"),
        PlotAxis("goodput, %", low=0.0, high=100.0),
        (Series("drawn", dots, dots=True), Series("closed form", line)),
        ((case.spares, "yours"),),
    )


def stragglers_screen(
    gpus: int = 16384,
    step_s: float = 1.0,
    spread: float = 0.03,
    distribution: str = "normal",
    every: int = 1,
    slow_share: float = 0.0001,
    steps: int = 2000,
    seed: int = 0,
) -> Screen:
    """Show the time lost because every step waits for the slowest of n devices."""
    one = slow.StepTimes(step_s, spread, distribution)
    largest_s, share = slow.largest_mean_s(one, gpus), slow.waiting_share(one, gpus, every)
    mean_s, _, late_s = slow.simulate_steps(one, gpus, steps, seed)
    chance, rare = slow.chance_of_slow(gpus, slow_share), slow.waiting_share(one, gpus, 100)
    meeting = "every step" if every == 1 else f"every {every} steps"
    each = f"{duration_text(step_s)} ± {percent_text(spread)}"
    summed = "" if every == 1 else f": a normal of spread {percent_text(spread)}/√{every}"
    return Screen(
        title=f"Stragglers: {number_text(gpus)} GPUs wait for the slowest at {meeting}",
        formulas=(
            Formula(
                "mean step", f"∫ Q(u^(1/n)) du, {distribution}, {each}", duration_text(largest_s)
            ),
            Formula(
                "the same, drawn",
                f"{number_text(steps)} steps Q(U^(1/n))",
                duration_text(mean_s),
            ),
            Formula("1 step of 100", "takes longer than", duration_text(late_s)),
            Formula(
                "lost to waiting", f"1 − own mean / mean, at {meeting}{summed}", percent_text(share)
            ),
            Formula(
                "one bad device",
                f"1 − (1 − q)ⁿ = 1 − (1 − {number_text(slow_share)})^{gpus}",
                percent_text(chance),
            ),
        ),
        results={"mean_step_s": largest_s, "drawn_mean_s": mean_s, "drawn_p99_s": late_s}
        | {"waiting_share": share, "waiting_share_every_100": rare, "chance_of_slow": chance},
        meaning=f"{percent_text(share)} of the time is waiting. Meeting every 100 steps would "
        "leave "
        f"{percent_text(rare)}, if slowness is new in each step. A device that is always slow "
        "costs the "
        "same however rarely one meets: find it and replace it.",
        source="Order statistics (David and Nagaraja 2003). Seen: 9 % at 64 000 GPUs (PRISM)",
        chart=_waiting_chart(one, gpus, every, steps, seed),
        letters="Q one device's quantile function, u and U shares from 0 to 1, n devices",
        following="shoal simulate islands   (groups that meet rarely)",
    )


def _waiting_chart(one: slow.StepTimes, gpus: int, every: int, steps: int, seed: int) -> Chart:
    """Plot waiting by number of devices, for three tails of equal spread, with simulated dots."""
    counts = powers_of_two(1, max(2, gpus * 8))

    def share(name: str, count: int) -> float:
        return 100 * slow.waiting_share(replace(one, distribution=name), count, every)

    lines = [
        Series(name, tuple((c, share(name, c)) for c in counts)) for name in slow.DISTRIBUTIONS
    ]
    if every > 1:
        lines = [Series(f"sums of {every} steps", lines[0].points)]
    else:
        few = min(steps, DRAWN_STEPS)
        drawn_s = {c: slow.simulate_steps(one, c, few, seed)[0] for c in counts[::3]}
        dots = tuple(
            (c, 100 * max(0.0, 1 - one.mean_s / seconds)) for c, seconds in drawn_s.items()
        )
        lines.insert(0, Series(f"drawn, {one.distribution}", dots, dots=True))
    return Chart(
        PlotAxis("devices", log=True, base=2),
        PlotAxis("time lost to waiting, %", low=0.0),
        tuple(lines),
        ((gpus, "yours"),),
    )
