"""Screens about checkpoints: the best interval, and the share of a run that is progress.

Every function takes options with units in their names and returns a `Screen`; the formulas are in
`teach/calculators/goodput.py`.
"""

from __future__ import annotations

from shoal.teach.calculators import goodput as save
from shoal.teach.drawings.plot import Chart, PlotAxis, Series
from shoal.teach.drawings.screen import Formula, Screen
from shoal.teach.screens.words import (
    duration_text,
    geometric_range,
    number_text,
    percent_text,
    powers_of_two,
)

EXACT = "τ/M / ((1 − e^−a)·e^b)"
LETTERS = (
    "M between failures, τ between saves, C stall, R restart, D until safe; a=(τ+C)/M, b=a+(R+D)/M"
)

CURES = {
    "checkpoints": "shorter stalls (save in the background)",
    "restarts": "faster detection and restart",
    "work done again": "more frequent, cheaper checkpoints",
}


def checkpoints_screen(
    gpus: int = 16384,
    mtbf_hours: float = 3.1,
    stall_s: float = 60.0,
    restart_s: float = 600.0,
    write_s: float = 0.0,
) -> Screen:
    """Show the checkpoint interval by Young, Daly and the exact optimum for a run's MTBF."""
    mean_s = mtbf_hours * save.HOUR
    young, daly = save.young_interval_s(stall_s, mean_s), save.daly_interval_s(stall_s, mean_s)
    best = save.best_interval_s(stall_s, restart_s, mean_s, write_s)
    good = save.goodput(best, stall_s, restart_s, mean_s, write_s)
    low, high = max(write_s, best / 12), best * 12
    places = geometric_range(low, high, 80)

    def lost(tau: float) -> float:
        return 1 - save.goodput(max(write_s, tau), stall_s, restart_s, mean_s, write_s)

    losses = Series("all losses", tuple((t / 60, 100 * lost(t)) for t in places))
    stalls = Series("stalls alone", tuple((t / 60, 100 * stall_s / (t + stall_s)) for t in places))
    half, twice = 1 - lost(best / 2), 1 - lost(2 * best)
    put_in = f"√(2 · {number_text(stall_s)} s · {number_text(mean_s)} s)"
    return Screen(
        title=f"How often to save: {number_text(gpus)} GPUs, a failure every "
        f"{duration_text(mean_s)}, "
        f"{duration_text(stall_s)} of stall",
        formulas=(
            Formula("Young", f"τ = √(2·C·M) = {put_in}", duration_text(young)),
            Formula(
                "Daly",
                "τ = √(2·C·M)·[1 + ⅓√(C/2M) + (C/2M)/9] − C, with C/2M = "
                f"{number_text(stall_s / (2 * mean_s))}",
                duration_text(daly),
            ),
            Formula("exact optimum", f"the τ with the largest {EXACT}", duration_text(best)),
            Formula("lost at it", "1 − goodput, failures and stalls", percent_text(1 - good)),
        ),
        results={
            "young_s": young,
            "daly_s": daly,
            "best_interval_s": best,
            "goodput": good,
            "saves_per_day": 86400 * good / best,
        },
        meaning=f"Save every {duration_text(best)}: {percent_text(good)} of the time is "
        "progress. The optimum "
        f"is flat: half as long gives {percent_text(half)}, twice as long "
        f"{percent_text(twice)}. C is what "
        f"the run stands still for a save, not how long the disk writes.",
        source="Young 1974; Daly 2006; exact: teach/calculators/goodput.py",
        chart=Chart(
            PlotAxis("work between checkpoints, min", log=True),
            PlotAxis("time lost, %", low=0.0, high=min(100.0, 4 * 100 * (1 - good))),
            (losses, stalls),
            ((best / 60, "best"),),
        ),
        letters=LETTERS,
        following="shoal simulate goodput   (where the time goes)",
    )


def goodput_screen(
    gpus: int = 16384,
    mtbf_hours: float = 3.1,
    stall_s: float = 60.0,
    restart_s: float = 600.0,
    interval_s: float = 0.0,
    write_s: float = 0.0,
) -> Screen:
    """Show the goodput of a run, the uses of the remaining time, and its fall with size."""
    mean_s = mtbf_hours * save.HOUR
    device_s = mean_s * gpus
    tau = interval_s or save.best_interval_s(stall_s, restart_s, mean_s, write_s)
    good = save.goodput(tau, stall_s, restart_s, mean_s, write_s)
    first = save.first_order_goodput(tau, stall_s, restart_s, mean_s)
    counts = powers_of_two(max(1, gpus // 16), gpus * 16)

    def at(count: int, stall: float, restart: float) -> float:
        mean = save.mtbf_s(count, device_s)
        best = save.best_interval_s(stall, restart, mean, write_s)
        return 100 * save.goodput(best, stall, restart, mean, write_s)

    faster = f"and restart {duration_text(restart_s / 5)}"
    cases = {
        "as given": (stall_s, restart_s),
        f"stall {duration_text(stall_s / 10)}": (stall_s / 10, restart_s),
        faster: (stall_s / 10, restart_s / 5),
    }
    curves = tuple(
        Series(label, tuple((c, at(c, *case)) for c in counts)) for label, case in cases.items()
    )
    parts = save.time_shares(tau, stall_s, restart_s, mean_s, write_s)
    worst = max((name for name in parts if name != "work"), key=lambda name: parts[name])
    c, r, t, m = (number_text(value) for value in (stall_s, restart_s, tau, mean_s))
    a, b = (tau + stall_s) / mean_s, (tau + stall_s + restart_s + write_s) / mean_s
    put_in = f"{number_text(tau / mean_s)} / ((1 − e^−{number_text(a)})·e^{number_text(b)})"
    return Screen(
        title=f"Goodput of {number_text(gpus)} GPUs: a failure every {duration_text(mean_s)}, "
        f"{duration_text(stall_s)} stall, {duration_text(restart_s)} restart",
        formulas=(
            Formula(
                "of one GPU",
                f"M·n = {duration_text(mean_s)} · {number_text(gpus)}",
                f"{device_s / 31557600:.1f} years",
            ),
            Formula("interval", "given" if interval_s else "the best τ", duration_text(tau)),
            Formula(
                "to first order",
                f"1 − C/τ − (τ/2 + R)/M = 1 − {c}/{t} − ({number_text(tau / 2)} + {r})/{m}",
                percent_text(first),
            ),
            Formula("exactly", f"{EXACT} = {put_in}", percent_text(good)),
        ),
        results={"goodput": good, "first_order": first, "interval_s": tau, "parts": parts},
        meaning=f"Of a GPU-hour, {60 * good:.0f} minutes are progress. The largest loss is "
        f"{worst}: {CURES[worst]} helps most. At larger sizes failures come in proportion.",
        source="Young 1974; Daly 2006. Llama-3 405B: 16 384 H100, a stop per 3.1 h, > 90 %",
        chart=Chart(
            PlotAxis("GPUs, each as reliable as now", log=True, base=2),
            PlotAxis("goodput at the best interval, %", low=0.0, high=100.0),
            curves,
            ((gpus, "yours"),),
        ),
        bars=parts,
        letters=LETTERS,
        following="shoal simulate failures   (draws such runs, with spare nodes)",
    )
