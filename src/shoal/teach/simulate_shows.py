"""Make, write and print the contents of `shoal simulate`; loaded only when something is shown.

The record that `--json` prints is described in docs/how-it-works/simulate.md.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from shoal.base.errors import ConfigError, PlanError
from shoal.base.plans.timeline import Timeline
from shoal.teach.simulate_table import SimulateRequest
from shoal.teach.walks.walk import StepThrough

WIDTH = 100


@dataclass(frozen=True)
class SimulateContents:
    """Contents of one `shoal simulate` screen: any of a step-through, timelines and text.

    Attributes:
        timelines: drawn on one scale.
        lines: lines of text, below them.
        data: further keys of the record that `--json` prints.
    """

    walk: StepThrough | None = None
    timelines: tuple[Timeline, ...] = ()
    lines: tuple[str, ...] = ()
    data: dict[str, Any] | None = None


def collective(asked: SimulateRequest) -> SimulateContents:
    """Make ring, halving, tree, broadcast, all-gather, reduce-scatter."""
    from shoal.teach.walks import collectives_walk

    make = getattr(collectives_walk, asked.what.replace("-", "_"))
    message_bytes = asked.options.get("--bytes", collectives_walk.MESSAGE_BYTES)
    return SimulateContents(walk=make(asked.number("--ranks", 4), message_bytes))


def fsdp(asked: SimulateRequest) -> SimulateContents:
    """Make FSDP's gather, compute, free."""
    from shoal.teach.walks import fsdp_walk as made

    walk = made.fsdp(
        asked.number("--ranks", 4),
        asked.number("--micro-batches", 1),
        asked.options.get("--forward", made.FORWARD_S),
        asked.options.get("--backward", made.BACKWARD_S),
    )
    return SimulateContents(walk=walk)


def ddp(asked: SimulateRequest) -> SimulateContents:
    """Make DDP's buckets, all-reduced during the backward pass."""
    from shoal.teach.walks import ddp_walk as made

    walk = made.ddp(
        asked.number("--ranks", 4),
        asked.options.get("--forward", made.FORWARD_S),
        asked.options.get("--backward", made.BACKWARD_S),
        asked.options.get("--bytes", made.GRADIENT_BYTES),
    )
    return SimulateContents(walk=walk)


def walk(asked: SimulateRequest) -> SimulateContents:
    """Make tp, cp, ep, local-steps: walks that read a number of ranks alone."""
    name = asked.what.replace("-", "_")
    module = importlib.import_module(f"shoal.teach.walks.{name}_walk")
    return SimulateContents(walk=getattr(module, name)(asked.number("--ranks", 4)))


def zero(asked: SimulateRequest) -> SimulateContents:
    """Make ZeRO's stages."""
    from shoal.teach.walks.zero_walk import zero as made

    return SimulateContents(walk=made(asked.number("--ranks", 4)))


def pipeline(asked: SimulateRequest) -> SimulateContents:
    """Make the timeline of one pipeline schedule."""
    from shoal.teach.walks.pipelines_walk import pipeline as made

    with _rewrite_option_errors():
        return SimulateContents(timelines=(made(asked.what, _pipeline_case(asked)),))


def afab(asked: SimulateRequest) -> SimulateContents:
    """Make all-forward-all-backward beside 1F1B."""
    from shoal.teach.walks.pipelines_walk import compare_afab_1f1b

    with _rewrite_option_errors():
        timelines, lines = compare_afab_1f1b(_pipeline_case(asked))
    return SimulateContents(timelines=timelines, lines=lines)


@contextmanager
def _rewrite_option_errors() -> Iterator[None]:
    """Rewrite errors about keys of run.toml to the options that the user typed."""
    try:
        yield
    except PlanError as failure:
        text = str(failure).replace("layout.schedule = ", "shoal simulate ")
        text = text.replace("layout.schedule=", "shoal simulate ")
        text = text.replace("layout.pp = ", "--ranks ").replace("layout.pp=", "--ranks ")
        # the number of micro-batches has no name there: run.toml has no key for it
        text = re.sub(r"(--ranks \d+) and (\d+)", r"\1 and --micro-batches \2", text)
        text = re.sub(
            r"(--ranks \d+), got (\d+); try: ",
            r"\1, got --micro-batches \2; try: --micro-batches ",
            text,
        )
        raise PlanError(text) from None


def _pipeline_case(asked: SimulateRequest) -> Any:
    from shoal.teach.walks.pipelines_walk import PipelineCase

    return PipelineCase(
        asked.number("--ranks", 4),
        asked.number("--micro-batches", 8),
        asked.number("--chunks", 2),
        asked.options.get("--forward", 1.0),
        asked.options.get("--backward", 1.0),
        asked.options.get("--weight", 1.0),
    )


def puzzle(asked: SimulateRequest) -> SimulateContents:
    """Make one puzzle: the author's program and Shoal's, on one scale."""
    from shoal.teach.puzzles import PUZZLES, puzzle_timeline

    last = len(PUZZLES) - 1
    if len(asked.words) != 1 or not asked.words[0].isdigit():
        got = " ".join(asked.words) or "nothing"
        raise ConfigError(
            f"shoal simulate puzzle: one number from 0 to {last} is wanted, got {got}"
        )
    number = int(asked.words[0])
    if asked.program:
        from shoal.teach.puzzles import get_puzzle
        from shoal.teach.puzzles.user_program import run_user_program

        timeline, lines = run_user_program(get_puzzle(number), asked.program)
        timeline = dataclasses.replace(timeline, held_unit="numbers")
        return SimulateContents(timelines=(timeline,), lines=tuple(lines))
    names = {"reference": "the author's program", "ours": "ours"}
    shown = []
    for which, name in names.items():
        line = puzzle_timeline(number, which)
        title = f"puzzle {number}, {PUZZLES[number].title}: {name}"
        shown.append(dataclasses.replace(line, title=title, held_unit="numbers"))
    target = PUZZLES[number].target
    said = f"The target is {target[0]:g} steps and {target[1]:,.0f} numbers in memory. The number "
    said += "in a box is a layer. Memory is looked at where an event starts; a score's time is the "
    said += "start of the last event."
    return SimulateContents(timelines=tuple(shown), lines=(said,))


def exercise(asked: SimulateRequest) -> SimulateContents:
    """Make the list of exercises, a question, its hints, or the answer to an answer."""
    from shoal.teach.exercises.answers import exercise_lines

    return SimulateContents(lines=tuple(exercise_lines(asked.words)))


def puzzles(asked: SimulateRequest) -> SimulateContents:
    """Make the table of all eight puzzles."""
    from shoal.teach.puzzles import PUZZLES, score

    head = f"{'':<3}{'puzzle':<30}{'ranks':>5}  {'target':>16}  {'author':>16}  {'ours':>16}"
    lines = ["LLM-Training-Puzzles: steps / most numbers held by a rank", "", head]
    rows = []
    for one in PUZZLES:
        author, ours = score(one.reference()), score(one.run_ours())
        texts = [f"{steps:g} / {held:,.0f}" for steps, held in (one.target, author, ours)]
        lines.append(
            f"{one.number:<3}{one.title:<30}{one.ranks:>5}  "
            + "  ".join(text.rjust(16) for text in texts)
        )
        rows.append(
            {
                "number": one.number,
                "title": one.title,
                "ranks": one.ranks,
                "target": one.target,
                "author": author,
                "ours": ours,
            }
        )
    lines += ["", "Source: github.com/srush/LLM-Training-Puzzles. One of them as a drawing:",
              "shoal simulate puzzle 6"]  # fmt: skip
    return SimulateContents(lines=tuple(lines), data={"puzzles": rows})


def all_timelines(shown: SimulateContents) -> list[Timeline]:
    """Return the step-through's own timeline, then the others."""
    own = [shown.walk.timeline] if shown.walk and shown.walk.timeline else []
    return [*own, *shown.timelines]


def write_files(
    shown: SimulateContents, what: str, svg: Path | None, trace: Path | None
) -> list[tuple[Path, str]]:
    """Write the requested files; return each with a hint on how to open it.

    Raises:
        ConfigError: there is nothing to draw.
        OSError: a file cannot be written.
    """
    kept: list[tuple[Path, str]] = []
    timelines = all_timelines(shown)
    if svg is not None:
        from shoal.teach.drawings.timeline_svg import timeline_svg
        from shoal.teach.drawings.walk_svg import walk_svg

        if shown.walk is None and not timelines:
            raise ConfigError(f"--svg: shoal simulate {what} is a table, not a drawing")
        text = walk_svg(shown.walk) if shown.walk else timeline_svg(timelines)
        svg.write_text(text, encoding="utf-8")
        kept.append((svg, ""))
    if trace is not None:
        from shoal.teach.drawings.timeline_trace import trace_text

        if not timelines:
            raise ConfigError(f"--trace: shoal simulate {what} has no timeline")
        trace.write_text(trace_text(timelines), encoding="utf-8")
        kept.append((trace, " (open it at https://ui.perfetto.dev)"))
    return kept


def print_contents(shown: SimulateContents, stream: TextIO) -> None:
    """Print everything, in colours only on a terminal."""
    from shoal.teach.drawings.timeline_text import print_timelines
    from shoal.teach.drawings.walk_text import print_walk

    if shown.walk is not None:
        print_walk(shown.walk, stream)
        stream.write("\n")
    timelines = all_timelines(shown)
    if timelines:
        print_timelines(timelines, stream)
    for line in shown.lines:
        whole = len(line) <= WIDTH
        stream.write((line if whole else "\n".join(textwrap.wrap(line, WIDTH))) + "\n")


def contents_record(shown: SimulateContents, what: str) -> dict[str, Any]:
    """Return everything as plain data."""
    walk = None
    if shown.walk is not None:
        walk = dataclasses.asdict(dataclasses.replace(shown.walk, timeline=None))
        del walk["timeline"]
    return {
        "what": what,
        "walk": walk,
        "timelines": [dataclasses.asdict(line) for line in all_timelines(shown)],
        "lines": list(shown.lines),
        **(shown.data or {}),
    }
