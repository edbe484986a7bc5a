"""Records of some steps alone: tokens by expert, and when a pipeline's actions ran.

    experts.jsonl    step 1 and every 20th   expert_counts.py
    pipeline.jsonl   steps 1, 2, 4, 8, …     {"step": 8, "schedule": "1f1b", "timed_by": "host",
                                              "ranks": [{"began_s": 0.0, "actions":
                                                [["F0@0", 0.0, 0.0001, 0.0123], …]}, …]}

An action is kind, micro-batch @ stage (base/plans/pipeline_actions.py) with three times: the start
of its wait for inputs, the start of its work, its end. Seconds count from the rank's own `began_s`,
which counts from that of the first rank to begin, by the clocks of the hosts. A line holds the
pipeline of rank 0. The ranks' times travel through the rendezvous store, so no step has a further
collective for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

from shoal.base.runlog.events import append_line
from shoal.base.runlog.thin_lines import thin_lines
from shoal.parallel.program import Program
from shoal.trainer.metrics_recorder import MetricsRecorder
from shoal.trainer.step.expert_counts import count_experts

MOST_BYTES = 16 << 20
"""Size of a file above which its older lines are thinned out."""


class SampledRecord(Protocol):
    """Record of some steps.

    Attributes:
        file: its name in the run folder.
    """

    file: str

    def begin_step(self, step: int) -> None:
        """Start to record if the step is sampled."""

    def end_step(self) -> dict[str, Any]:
        """Return the record of the step; {} without one. Every rank calls it."""


class PipelineTimes:
    """Times of a pipeline's actions, in steps that are a power of two."""

    file = "pipeline.jsonl"

    def __init__(self, program: Program) -> None:
        self.world, self.times = program.world, program.action_times
        self.schedule = program.plan.layout.schedule
        self._is_drawn = 0 in program.pipe.ranks
        self._is_sampled = False

    def begin_step(self, step: int) -> None:
        """Start to record if the step is sampled."""
        self._is_sampled = step & (step - 1) == 0
        if self._is_sampled and self._is_drawn:
            self.times.request_step()

    def end_step(self) -> dict[str, Any]:
        """Return the record of the pipeline on ranks that write; else {}. Every rank calls it."""
        if not self._is_sampled:
            return {}
        self._is_sampled = False
        own = self.times.pop_step() if self._is_drawn else None
        all_ranks = self.world.collect_json(own, here=self.world.writes_files)
        ranks = [one for one in all_ranks or () if one is not None]
        if not ranks or not all(ranks):
            return {}
        first_s = min(one["began_s"] for one in ranks)
        rows = [
            {"began_s": round(one["began_s"] - first_s, 6), "actions": one["actions"]}
            for one in ranks
        ]
        return {"schedule": self.schedule, "timed_by": ranks[0]["timed_by"], "ranks": rows}


class SampledSteps:
    """Writer of the records of sampled steps into the run folder."""

    def __init__(self, records: Sequence[SampledRecord]) -> None:
        self.records, self._step = tuple(records), 0

    def begin_step(self, step: int) -> None:
        """Start to record what is sampled in this step."""
        self._step = step
        for one in self.records:
            one.begin_step(step)

    def end_step(self, recorder: MetricsRecorder) -> None:
        """Write the records of the step, on ranks that write files; every rank calls it."""
        for one in self.records:
            if record := one.end_step():
                append_record(recorder, one.file, {"step": self._step, **record})


def append_record(recorder: MetricsRecorder, name: str, record: dict[str, Any]) -> None:
    """Append a line to a file of the run folder; a full disk must not stop the run."""
    recorder.apply_rewind()
    if recorder.folder is None or not recorder.world.writes_files:
        return
    folder = recorder.owner.current_path() if recorder.owner is not None else recorder.folder
    with contextlib.suppress(OSError):
        append_line(folder / name, record)
        thin_lines(folder / name, MOST_BYTES)


def sample_steps(program: Program) -> tuple[SampledSteps | None, Program]:
    """Return the records of a program's steps, None without any, and the program that counts."""
    experts, program = count_experts(program)
    found: list[SampledRecord] = [experts] if experts is not None else []
    if program.action_times is not None:
        found.append(PipelineTimes(program))
    return (SampledSteps(found) if found else None), program
