"""Timeline of a pipeline's step: its schedule at equal costs, and as it ran.

As planned, a backward takes twice a forward, and all stages take as long: the run's own action
lists (planning/pipeline_schedules.py), executed. As run, each action stands where it ran in the
newest sampled step (recorded_actions.py). A run that recorded none gets its action lists at the
mean seconds of its stages in `rank_steps/`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.base.layouts.layout import Layout
from shoal.base.plans.pipeline_actions import PipelineSchedule
from shoal.base.runlog.damaged_lines import is_number
from shoal.base.runlog.rank_records import PARTS
from shoal.base.text.units import seconds_text
from shoal.planning.pipeline_schedules import make_schedule
from shoal.report.markup import Child, Markup, tag
from shoal.report.run_contents import RunContents, iter_records
from shoal.report.schedule_times import TimedAction, time_schedule
from shoal.report.sections.recorded_actions import read_recorded_step
from shoal.report.svg_charts import HEIGHT, WIDTH, chart_frame, number_label, spread_marks

MOST_RANKS, MOST_ACTIONS = 64, 4_096
PIPELINE_FILE = "pipeline.jsonl"
LOOKS = {"F": "s0", "B": "s1", "I": "s1", "W": "s4"}
WORDS = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weights"}


def pipeline_section(run: RunContents) -> Markup:
    """Return the timelines of a pipeline's step; nothing for another layout."""
    record = run.plan.get("layout")
    layout = Layout(**record) if isinstance(record, dict) else Layout()
    count = _micro_batches(run, layout)
    if layout.pp < 2 or layout.serves or not count:
        return Markup("")
    parts: list[Child] = [tag("h2", "Pipeline")]
    if layout.pp > MOST_RANKS or layout.pp * count * layout.chunks > MOST_ACTIONS:
        text = f"{layout.pp} stages × {count} micro-batches: too many for a drawing."
        return tag("section", [*parts, tag("p", text)], id="pipeline")
    schedule = make_schedule(layout.schedule, layout.pp, count, layout.chunks)
    planned = time_schedule(schedule, lambda rank, kind: 2.0 if kind == "B" else 1.0)
    name = f"{schedule.name}, {layout.pp} ranks, {count} micro-batches"
    parts.append(_timeline_figure(f"as planned: {name}, units of a forward", planned, layout.pp))
    parts += _as_run(run, layout, schedule, count)
    return tag("section", parts, id="pipeline")


def _as_run(
    run: RunContents, layout: Layout, schedule: PipelineSchedule, count: int
) -> list[Child]:
    """Return the timeline of the newest sampled step, else of the mean seconds of the stages."""
    path = run.folder / PIPELINE_FILE
    records = iter_records(path) if path.exists() else ()
    found = read_recorded_step(records, layout.pp, MOST_ACTIONS)
    if found is not None:
        title = f"as run: step {found.step:,}, {layout.pp} ranks, ms"
        note = (
            f"Step {found.step:,} by the {found.timed_by}'s clock, in the pipeline of rank 0. "
            f"A gap is a wait for another stage or for the processor. Recorded are steps that are "
            f"a power of two."
        )
        drawn = _timeline_figure(title, found.actions, layout.pp, scale=1e3)
        return [drawn, tag("p", note, class_="note")]
    costs = _measured_costs(run, layout, count)
    if costs is None:
        return [tag("p", "As run: no times by rank were recorded.", class_="note")]
    name = f"{schedule.name}, {layout.pp} ranks, {count} micro-batches"
    timed = time_schedule(schedule, costs)
    note = "This run recorded no actions: each one takes the mean seconds of its stage."
    drawn = _timeline_figure(f"as run: {name}, ms", timed, layout.pp, scale=1e3)
    return [drawn, tag("p", note, class_="note")]


def _micro_batches(run: RunContents, layout: Layout) -> int:
    """Return the micro-batches of a step on one data rank; 0 if unknown."""
    count = run.plan.get("accumulate")
    if is_number(count) and count > 0:
        return int(count)
    batch, micro_batch = run.plan.get("batch"), run.plan.get("micro_batch")
    if is_number(batch) and is_number(micro_batch) and micro_batch > 0:
        return int(batch // (layout.data_degree * micro_batch))
    return 0


def _measured_costs(
    run: RunContents, layout: Layout, count: int
) -> Callable[[int, str], float] | None:
    """Return (pipeline rank, kind) → seconds of a micro-batch, all the rank's stages together."""
    times = run.rank_times
    if times is None:
        return None
    passes, backward = PARTS.index("passes"), PARTS.index("backward")
    sums = {stage: [0.0, 0.0, 0] for stage in range(layout.pp)}
    for rank, means in zip(times.ranks, times.mean_s, strict=True):
        stage = sums[layout.at(rank)["pp"] % layout.pp]
        stage[0] += float(means[passes])
        stage[1] += float(means[backward])
        stage[2] += 1
    if not all(one[2] for one in sums.values()) or not sum(one[0] for one in sums.values()):
        return None
    recorded = any(one[1] for one in sums.values())

    def costs(rank: int, kind: str) -> float:
        ahead, back, ranks = sums[rank]
        if not recorded:  # one number for both passes: a backward takes two thirds
            ahead, back = ahead / 3, ahead * 2 / 3
        whole = {"F": ahead, "B": back, "I": back / 2, "W": back / 2}[kind]
        return whole / ranks / count

    return costs


def _timeline_figure(
    title: str, timed: Sequence[TimedAction], ranks: int, scale: float = 1.0
) -> Markup:
    end_s = max((one.end_s for one in timed), default=0.0) or 1.0
    high = HEIGHT / ranks
    tall = f"{high * 0.86:.1f}"
    boxes = [
        tag("rect", class_="lane", x="0", y=f"{rank * high:.1f}", width=str(WIDTH), height=tall)
        for rank in range(ranks)
    ]
    for one in timed:
        action = one.action
        told = (
            f"{WORDS[action.kind]} of micro-batch {action.micro_batch}, stage {action.stage}: "
            f"{one.start_s * scale:.4g} to {one.end_s * scale:.4g}"
        )
        if one.wait_s > 0:
            told += f", after a wait of {one.wait_s * scale:.4g}"
        boxes.append(
            tag(
                "rect",
                tag("title", told),
                class_=f"box {LOOKS[action.kind]}",
                x=f"{one.start_s / end_s * WIDTH:.1f}",
                y=f"{one.rank * high:.1f}",
                width=f"{(one.end_s - one.start_s) / end_s * WIDTH:.1f}",
                height=tall,
            )
        )
    work_s = [sum(o.end_s - o.start_s for o in timed if o.rank == rank) for rank in range(ranks)]
    idle = 1 - sum(work_s) / ranks / end_s
    whole = seconds_text(end_s) if scale != 1.0 else f"{end_s:g} units"
    kinds = [kind for kind in "FBIW" if any(one.action.kind == kind for one in timed)]
    legend = [tag("span", tag("i", class_=f"key {LOOKS[k]}"), WORDS[k]) for k in kinds]
    drawn = tag(
        "svg", boxes, viewBox=f"0 0 {WIDTH} {HEIGHT}", preserveAspectRatio="none", role="img",
        aria_label=title,
    )  # fmt: skip
    marks = [(at, number_label(value)) for at, value in spread_marks(0.0, end_s * scale)]
    every = -(-ranks // 12)
    names = [((rank + 0.43) / ranks, f"{rank}") for rank in range(0, ranks, every)]
    return chart_frame(
        title,
        drawn,
        names,
        marks,
        x_title="time",
        legend=legend,
        size="mid" if ranks <= 4 else "tall" if ranks <= 12 else "high",
        note=f"{whole}, of which a rank idles {idle:.0%} in the mean.",
    )
