"""Screens about waiting for other ranks: all-reduces by algorithm, and the bubble of a pipeline.

Every function takes options with units in their names and returns a `Screen`; the formulas are in
`teach/calculators/` and `planning/pipeline_bubble.py`.
"""

from __future__ import annotations

from shoal.base.errors import PlanError
from shoal.base.layouts.schedule_names import SCHEDULES
from shoal.base.text.units import bytes_text
from shoal.teach.calculators import collectives_costs as costs
from shoal.teach.calculators.pipeline import bubble_of_step, least_micro_batches, micro_batches_for
from shoal.teach.drawings.plot import Chart, PlotAxis, Series
from shoal.teach.drawings.screen import Formula, Screen
from shoal.teach.screens.words import (
    duration_text,
    geometric_range,
    number_text,
    percent_text,
    powers_of_two,
)


def collectives_screen(
    ranks: int = 64,
    mib: float = 64.0,
    alpha_us: float = 14.0,
    gb_per_s: float = 25.0,
    per_node: int = 8,
    inside_alpha_us: float = 3.4,
    inside_gb_per_s: float = 300.0,
) -> Screen:
    """Show the time of an all-reduce by ring, tree, halving-doubling and in two levels."""
    per_node = min(ranks, per_node)
    if ranks % per_node:
        near = max(per_node, round(ranks / per_node) * per_node)
        raise PlanError(f"ranks = {ranks}: no multiple of per_node = {per_node}; try: ranks={near}")
    alpha_s, beta = alpha_us * 1e-6, 1e-9 / gb_per_s
    inside = (inside_alpha_us * 1e-6, 1e-9 / inside_gb_per_s)
    message, nodes = mib * 2**20, ranks // per_node

    def all_s(size: float) -> dict[str, float]:
        seconds = {n: f(ranks, size, alpha_s, beta) for n, f in costs.ALL_REDUCES.items()}
        seconds["two levels"] = costs.hierarchical_all_reduce_s(
            per_node, nodes, size, *inside, alpha_s, beta
        )
        return seconds

    seconds = all_s(message)
    sizes = {size: all_s(size) for size in geometric_range(2.0**10, 2.0**33, 47)}
    curves = tuple(
        Series(name, tuple((size / 2**20, one[name] * 1e3) for size, one in sizes.items()))
        for name in seconds
    )
    table = [("all-reduce", "time", "busbw, GB/s")]
    for name, one in seconds.items():
        busy = costs.bus_bytes_per_s(ranks, message, one) / 1e9 if one else 0.0
        table.append((name, duration_text(one), number_text(busy)))
    best = min(seconds, key=lambda key: seconds[key])
    m, a, rounds = bytes_text(message), duration_text(alpha_s), costs.broadcast_rounds(ranks)
    share, b = number_text(2 * (ranks - 1) / ranks), f"{m}/{number_text(gb_per_s)} GB/s"
    gather_s = costs.ring_all_gather_s(per_node, message, *inside)
    fold = " (and 2(α + M·β) to fold)" if ranks & (ranks - 1) else ""
    texts = {
        "ring": f"2(n−1)·α + 2(n−1)/n·M·β = {2 * (ranks - 1)} · {a} + {share} · {b}",
        "tree": f"2·log2(n)·α + 2·M·β = {2 * rounds} · {a} + 2 · {b}",
        "halving-doubling": f"2·log2(n)·α + 2(n−1)/n·M·β{fold}",
        "two levels": f"2·gather(g, M) + ring(G, M/g) = 2 · {duration_text(gather_s)} + "
        f"{duration_text(seconds['two levels'] - 2 * gather_s)}",
    }
    return Screen(
        title=f"An all-reduce of {m} on n = {number_text(ranks)} ranks: "
        f"G = {number_text(nodes)} nodes of g = {per_node}",
        formulas=tuple(
            Formula(name, texts[name], duration_text(one)) for name, one in seconds.items()
        ),
        results={"seconds": seconds, "fastest": best},
        meaning=f"Fastest here: {best}. Small messages pay rounds (α), large ones bytes (β). A "
        f"ring has the fewest bytes and the most rounds; two levels send M/{per_node} over the "
        f"slow link. Measured α and β differ from printed ones by factors: measure.",
        source="Thakur et al. 2005; Patarasuk and Yuan 2009; α defaults: NCCL's tuning constants",
        chart=Chart(
            PlotAxis("message, MiB", log=True),
            PlotAxis("time, ms", log=True),
            curves,
            ((mib, "yours"),),
        ),
        table=tuple(table),
        letters="M bytes, n ranks, α s per message, β s per byte; G nodes of g ranks",
        following="shoal simulate ring --ranks 4   (chunk by chunk)",
    )


def bubble_screen(
    ranks: int = 8,
    micro_batches: int = 32,
    chunks: int = 2,
    forward_ms: float = 10.0,
    backward_ms: float = 20.0,
    share: float = 0.05,
) -> Screen:
    """Show the bubble share of a pipeline's step by schedule, and micro-batches that shrink it."""
    names = [name for name in SCHEDULES if name != "dualpipe" or ranks % 2 == 0]
    work_s = micro_batches * (forward_ms + backward_ms) * 1e-3

    def part(name: str, count: int) -> float:
        inner = chunks if name == "interleaved" else 1
        return bubble_of_step(name, ranks, count, forward_ms, backward_ms, inner)

    table = [("schedule", "bubble", "of the step", f"micro-batches for {percent_text(share)}")]
    shares: dict[str, float | None] = {}
    curves = []
    counts = powers_of_two(1, max(2, micro_batches * 8))
    for name in names:
        inner, least = chunks if name == "interleaved" else 1, least_micro_batches(name, ranks)
        enough = micro_batches_for(name, ranks, share, forward_ms, backward_ms, inner)
        label = f"interleaved, {chunks} chunks" if name == "interleaved" else name
        cells = (f"no formula below {least}", "")
        shares[name] = None
        if micro_batches >= least:
            reached = shares[name] = part(name, micro_batches)
            cells = (duration_text(work_s * reached / (1 - reached)), percent_text(reached))
        table.append((label, *cells, number_text(enough)))
        if name not in ("gpipe", "dualpipe"):
            points = tuple((c, 100 * part(name, c)) for c in counts if c >= least)
            curves.append(Series("gpipe, 1f1b" if name == "1f1b" else label, points))
    return Screen(
        title=f"Pipeline bubble: p = {ranks} ranks, m = {micro_batches} micro-batches",
        formulas=_bubble_formulas(ranks, micro_batches, chunks, forward_ms, backward_ms),
        results={"share_of_step": shares, "work_s": work_s},
        meaning="More micro-batches make every bubble smaller. Chunks and split backwards make it "
        "smaller at the same number, for more messages or memory. Schedules that split B are "
        "given half of it for the weights' gradients.",
        source="GPipe 2019, Megatron 2021, Zero Bubble 2023, ZB-V 2024, DeepSeek-V3 2024",
        chart=Chart(
            PlotAxis("micro-batches per step", log=True, base=2),
            PlotAxis("bubble, % of the step", low=0.0),
            tuple(curves),
            ((micro_batches, "yours"),),
        ),
        table=tuple(table),
        letters="F forward, B backward of one micro-batch on one rank, v chunks per rank",
        following="shoal simulate 1f1b   (draws the schedule)",
    )


def _bubble_formulas(
    p: int, m: int, chunks: int, forward_ms: float, backward_ms: float
) -> tuple[Formula, ...]:
    both = f"({number_text(forward_ms)} + {number_text(backward_ms)}) ms"
    each_s = (forward_ms + backward_ms) * 1e-3
    plain_s, of_step = (p - 1) * each_s, (p - 1) / (m + p - 1)
    return (
        Formula("work per rank", f"m·(F + B) = {m} · {both}", duration_text(m * each_s)),
        Formula("gpipe, 1f1b", f"(p − 1)(F + B) = {p - 1} · {both}", duration_text(plain_s)),
        Formula("of the step", f"(p − 1)/(m + p − 1) = {p - 1}/{m + p - 1}", percent_text(of_step)),
        Formula(
            f"{chunks} chunks",
            f"(p − 1)(F + B)/v = {p - 1} · {both}/{chunks}",
            duration_text(plain_s / chunks),
        ),
    )
