"""Screens about speed: Amdahl's law, a step with communication, model FLOP utilisation.

Every function takes options with units in their names and returns a `Screen`; the formulas are in
`teach/calculators/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from shoal.base.errors import PlanError
from shoal.base.text.units import bytes_text, count_text, flops_text
from shoal.forecast.time.server_costs import ServerPace, simulate_pace
from shoal.teach.calculators import scaling, utilisation
from shoal.teach.drawings.plot import Chart, PlotAxis, Series
from shoal.teach.drawings.screen import Formula, Screen
from shoal.teach.screens.words import (
    duration_text,
    factor_text,
    geometric_range,
    number_text,
    percent_text,
    powers_of_two,
)


def amdahl_screen(gpus: int = 64, serial: float = 0.05, speedup: float = 0.0) -> Screen:
    """Show the speed-up for a serial share of the step; the share from a measured speed-up."""
    formulas = []
    if speedup:
        serial = scaling.serial_share(speedup, gpus)
        text = f"q = (N/S − 1)/(N − 1) = ({gpus}/{number_text(speedup)} − 1)/{gpus - 1}"
        formulas.append(Formula("serial share", text, percent_text(serial)))
        if not 0 <= serial <= 1:
            raise PlanError(
                f"speedup = {speedup:g}: {gpus} devices are 1 to {gpus} times as fast under "
                f"Amdahl's law; try: speedup={min(gpus, max(1.0, speedup)):g}"
            )
    reached, limit = scaling.amdahl_speedup(serial, gpus), scaling.amdahl_limit(serial)
    put_in = f"1/({number_text(serial)} + {number_text(1 - serial)}/{gpus})"
    formulas += [
        Formula(
            f"speed-up on {number_text(gpus)}",
            f"S = 1/(q + (1 − q)/N) = {put_in}",
            factor_text(reached),
        ),
        Formula("efficiency", f"S/N = {number_text(reached)}/{gpus}", percent_text(reached / gpus)),
        Formula(
            "on endless devices",
            f"1/q = 1/{number_text(serial)}",
            f"{number_text(limit)}×",
        ),
    ]
    shares = {
        "ideal": 0.0,
        f"q = {percent_text(serial / 2)}": serial / 2,
        f"q = {percent_text(serial)}": serial,
    }
    counts = powers_of_two(1, max(2, gpus * 4))
    curves = tuple(
        Series(label, tuple((n, scaling.amdahl_speedup(q, n)) for n in counts))
        for label, q in shares.items()
    )
    half = (1 - serial) / serial if serial else float("inf")
    return Screen(
        title=f"Amdahl's law: a share q = {percent_text(serial)} of the step stays serial",
        formulas=tuple(formulas),
        results={"serial": serial, "speedup": reached, "limit": limit},
        meaning=f"{number_text(gpus)} devices do the work of {number_text(reached)}. From "
        f"{number_text(half)} "
        f"devices on the serial part takes longer than all the rest.",
        source="Amdahl 1967. Communication grows with N and is no part of this law.",
        chart=Chart(
            PlotAxis("devices", log=True, base=2),
            PlotAxis("speed-up", log=True),
            curves,
            ((gpus, "yours"),),
        ),
        letters="N devices, q the serial share",
        following="shoal simulate scaling   (with communication)",
    )


def scaling_screen(
    single_s: float = 1.0,
    parameters: float = 1.2e9,
    grad_bytes: int = 2,
    alpha_us: float = 20.0,
    gb_per_s: float = 25.0,
    overlap: float = 0.0,
    gpus: Sequence[int] = (2, 4, 8, 16),
) -> Screen:
    """Show step time and speed-up with communication, beside the widely copied table."""
    message, alpha_s, beta = parameters * grad_bytes, alpha_us * 1e-6, 1e-9 / gb_per_s
    rows = scaling.speedup_table(gpus, single_s, message, alpha_s, beta, overlap=overlap)
    counts = powers_of_two(1, max(2, *gpus))
    drawn = scaling.speedup_table(counts, single_s, message, alpha_s, beta, overlap=overlap)
    curves = (
        Series("ideal", tuple((r.devices, r.devices) for r in drawn)),
        Series("T₁/N + α + βM", tuple((r.devices, r.folk) for r in drawn)),
        Series("ring, ddp", tuple((r.devices, r.ring) for r in drawn)),
        Series("ring, fsdp", tuple((r.devices, r.sharded) for r in drawn)),
    )
    n, last, one = rows[-1].devices, rows[-1], duration_text(single_s)
    sent = f"{bytes_text(message)} / {number_text(gb_per_s)} GB/s"
    hidden = f" − {number_text(overlap)} · T₁/N" if overlap else ""
    factor = number_text(2 * (n - 1) / n)
    return Screen(
        title=f"Speed-up of a step of {one} on one device, gradients of {bytes_text(message)}",
        formulas=(
            Formula(
                f"as written, N = {n}",
                f"T₁/N + α + β·M = {one}/{n} + {duration_text(alpha_s)} + {sent}",
                duration_text(last.folk_s),
            ),
            Formula(
                "with a ring (ddp)",
                f"T₁/N + 2(N−1)·α + 2(N−1)/N·β·M{hidden} = {one}/{n} + {2 * (n - 1)} · "
                f"{duration_text(alpha_s)} + {factor} · {sent}{hidden and ' − hidden'}",
                duration_text(last.ring_s),
            ),
            Formula("fsdp", "the same with 1.5 times the bytes", duration_text(last.sharded_s)),
        ),
        results={"rows": [vars(row) for row in rows], "passed_on": scaling.FOLK_SPEEDUPS},
        meaning="The form as written counts M once; a ring sends nearly 2·M. The figures that are "
        "passed on come without model or machine, and the serial share q behind them changes "
        "along each row, so no one machine gave them. Measure yours.",
        source="Patarasuk and Yuan 2009 (ring); ZeRO 2020 (fsdp sends 1.5 times ddp's bytes)",
        chart=Chart(PlotAxis("devices", log=True, base=2), PlotAxis("speed-up", log=True), curves),
        table=_speedup_cells(rows),
        letters="T₁ one device's step, N devices, M bytes to add up, α s per message, β s per byte",
        following="shoal compare   (measures this table on this machine)",
    )


def _speedup_cells(rows: Sequence[scaling.SpeedupRow]) -> tuple[tuple[str, ...], ...]:
    """Return the computed speed-ups, and the copied ones with their implied serial share."""
    shares = scaling.copied_serial_shares()
    head = ("gpus", "as written", "ddp", "fsdp", "q of ddp")
    cells = [(*head, *(f"passed on: {name}" for name in shares))]
    for row in rows:
        # slower than one device: no serial share explains that
        serial = "—" if row.ring_serial is None or row.ring < 1 else percent_text(row.ring_serial)
        passed = [""] * len(shares)
        if row.devices in scaling.FOLK_GPUS:
            place = scaling.FOLK_GPUS.index(row.devices)
            passed = [
                f"{factor_text(scaling.FOLK_SPEEDUPS[name][place])} q "
                f"{percent_text(shares[name][place])}"
                for name in shares
            ]
        own = (factor_text(row.folk), factor_text(row.ring), factor_text(row.sharded), serial)
        cells.append((number_text(row.devices), *own, *passed))
    return tuple(cells)


def mfu_screen(
    tokens_per_s: float = 46_096.0,
    parameters: float = 8.03e9,
    layers: int = 32,
    hidden: int = 4096,
    sequence: int = 8192,
    gpus: int = 8,
    peak_tflops: float = 989.0,
    recompute: str = "none",
) -> Screen:
    """Show the share of the devices' peak that a training run uses, with and without recompute."""
    matrices = 6 * parameters
    needed = utilisation.flops_per_token(parameters, layers, hidden, sequence)
    used = utilisation.mfu(tokens_per_s, needed, gpus, peak_tflops * 1e12)
    again = utilisation.recompute_factor(recompute, matrices, needed - matrices)
    per_gpu = flops_text(tokens_per_s * needed / gpus)
    lengths = geometric_range(512, max(131072, 2 * sequence), 60)
    curves = (
        Series("all", tuple((s, (matrices + 12 * layers * hidden * s) / 1e9) for s in lengths)),
        Series("matrices, 6·N", tuple((s, matrices / 1e9) for s in lengths)),
    )
    note = (
        "More than 100 %: the peak, a count or the clock is wrong."
        if used * again > 1
        else "Published large runs: 26–64 %, most 38–52 %; below, look for waits and small kernels."
    )
    shape = f"12 · {layers} · {hidden} · {sequence}"
    share = 1 - matrices / needed
    return Screen(
        title=f"Model FLOP utilisation of {number_text(gpus)} devices of "
        f"{number_text(peak_tflops)} TFLOP/s",
        formulas=(
            Formula(
                "FLOP per token",
                f"6·N + 12·L·h·s = 6 · {count_text(parameters)} + {shape}",
                f"{needed / 1e9:.1f} GFLOP",
            ),
            Formula(
                "per device",
                f"tokens/s · FLOP / devices = {number_text(tokens_per_s)} · "
                f"{number_text(needed)} / {gpus}",
                per_gpu,
            ),
            Formula("MFU", f"{per_gpu} / {number_text(peak_tflops)} TFLOP/s", percent_text(used)),
            Formula(
                "HFU",
                f"MFU · {number_text(again)}, recompute {recompute}",
                percent_text(used * again),
            ),
        ),
        results={"flops_per_token": needed, "mfu": used, "hfu": used * again, "attention": share},
        meaning=f"Attention is {percent_text(share)} of the arithmetic at this sequence. {note}",
        source="PaLM 2022, appendix B; torchtitan. The dense peak (H100 SXM bf16: 989, not 1979).",
        chart=Chart(
            PlotAxis("sequence, tokens", log=True, base=2),
            PlotAxis("GFLOP per token, forward and backward", log=True),
            curves,
            ((sequence, "yours"),),
        ),
        letters="N parameters, L layers, h hidden, s sequence",
    )


def servers_screen(
    workers: int = 4,
    worker_s: float = 1.0,
    slow: float = 4.0,
    staleness: int = 8,
    apply_ms: float = 10.0,
    steps: int = 2000,
) -> Screen:
    """Compare waiting and staleness for a parameter server with one slow worker."""
    if not 1 <= workers <= 64 or slow < 1:
        raise PlanError(
            f"workers = {workers}, slow = {slow:g}: 1 to 64 workers, of which one takes at least "
            f"as long as the others; try: workers=4 slow=4"
        )
    each = [worker_s * slow, *[worker_s] * (workers - 1)]
    apply_s = apply_ms / 1000
    waits = simulate_pace(each, synchronous=True, apply_s=apply_s, steps=steps)
    bounded = simulate_pace(each, bound=staleness, apply_s=apply_s, steps=steps)
    free = simulate_pace(each, apply_s=apply_s, steps=steps)
    named = {
        "synchronous, ddp": waits,
        f"bounded-stale, {staleness}": bounded,
        "asynchronous": free,
    }
    gain = bounded.steps_per_s / waits.steps_per_s
    better = (
        f"{factor_text(gain)} the steps of ddp, each on weights that lack "
        f"{bounded.staleness:.1f} steps "
        "in the mean: it wins where a worker is slow for good and such steps learn nearly as much."
        if gain > 1.1
        else "No more steps than ddp makes, and stale ones: ddp is better here."
    )
    curve = partial(_paces_by_slowness, each, slow, apply_s, min(steps, 400))
    return Screen(
        title=f"Parameter server: {workers} workers, one takes {number_text(slow)} times as long",
        formulas=(
            Formula("ddp", "1/(t_slowest/W + a)", f"{number_text(waits.steps_per_s)} steps/s"),
            Formula(
                f"staleness ≤ {staleness}", "min(Σ 1/t, (s + 1)/t_slowest), played through",
                f"{number_text(bounded.steps_per_s)} steps/s",
            ),
            Formula("no bound", "min(Σ 1/t, 1/a), played through",
                    f"{number_text(free.steps_per_s)} steps/s"),
        ),
        results={
            "synchronous_steps_per_s": waits.steps_per_s,
            "bounded_steps_per_s": bounded.steps_per_s,
            "asynchronous_steps_per_s": free.steps_per_s,
            "bounded_staleness": bounded.staleness,
            "asynchronous_staleness": free.staleness,
            "asynchronous_largest": free.largest,
        },
        meaning=better,
        source="Li et al. 2014 (parameter server), Ho et al. 2013 (bounded staleness)",
        chart=Chart(
            PlotAxis("times as slow", log=True, base=2),
            PlotAxis("steps/s"),
            (
                Series("ddp", curve(None, synchronous=True)),
                Series(f"staleness ≤ {staleness}", curve(staleness)),
                Series("asynchronous", curve(None)),
            ),
            ((slow, "yours"),),
        ),
        table=_paces_table(named, waits.steps_per_s),
        letters="t a worker's time for all samples of a step, W workers, s the bound, a an update",
        following="shoal train layout.strategy=parameter-server   "
        "(docs/how-it-works/parameter-server.md)",
    )  # fmt: skip


def _paces_table(
    named: Mapping[str, ServerPace], ddp_steps_per_s: float
) -> tuple[tuple[str, ...], ...]:
    rows = [("updates", "steps/s", "against ddp", "staleness: mean", "most", "waiting")]
    for name, one in named.items():
        gain = factor_text(one.steps_per_s / ddp_steps_per_s)
        late = f"{one.staleness:.1f}", str(one.largest)
        rows.append((name, number_text(one.steps_per_s), gain, *late, percent_text(one.held_share)))
    return tuple(rows)


def _paces_by_slowness(
    each: Sequence[float],
    slow: float,
    apply_s: float,
    steps: int,
    bound: int | None,
    synchronous: bool = False,
) -> tuple[tuple[float, float], ...]:
    """Return steps per second by slowdown of the first worker, up to beyond its present one."""
    found = []
    for slower in powers_of_two(1, max(2, round(slow * 4))):
        one = [each[0] / slow * slower, *each[1:]]
        told = simulate_pace(
            one, bound=bound, synchronous=synchronous, apply_s=apply_s, steps=steps
        )
        found.append((slower, told.steps_per_s))
    return tuple(found)
