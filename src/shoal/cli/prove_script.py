"""`shoal prove -- train.py`: prove a whole script, the loop and all that it does, without a change.

    each layout    the script runs in a copy of its folder on the layout's processes, for K steps;
                   each rank's micro-batches, gradients, weights and optimizer numbers are recorded
    one process    the same script runs alone on the recorded micro-batches of all ranks; layouts
                   that computed on the same micro-batches share this run
    comparison     in order of time; the report names the first difference

If a layout differs, both runs are repeated with the script's own casts to float32 lifted, and the
one process with its weights changed in their last bits. A difference of that size is rounding.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.base.errors import check_choice
from shoal.base.layouts.layout import STRATEGIES
from shoal.base.plans.script_side import ScriptSide
from shoal.base.runlog.events import EventLog
from shoal.cli.script_copy import copy_script_folder

FIRST_S, PATIENCE_S = 300.0, 180.0
"""As in `shoal prove` of a configuration."""
DEFAULT_PROCESSES = {"hsdp": 4, "3d": 8}
"""Processes of a layout if the user names none; 2 for the others."""
UNPROVEN = ("single", "dp")
"""Strategies of one process."""
LOG = re.compile("(; before the first step, so it is not tried again)?; traceback: [^ ]+")
"""Part of a failure's line that names a log, which is removed with its folder."""
DTYPE_ERRORS = ("dtype", "scalar type", "Double", "Float")
"""Words of an error by torch about two formats in one operation."""
ROUNDINGS = 16
"""Factor of a difference over that of changed last bits, up to which it is rounding."""


@dataclass
class LayoutProof:
    """Proof of a script under one layout.

    Attributes:
        layout: its name; "": the script's own.
        record: folder of its record.
        alone: folder of the one process's record.
        report: of the comparison, or {"verdict": "not proven" or "refused", "reason": …}.
        notes: lines about it, such as lifted casts.
    """

    layout: str
    record: Path
    report: dict[str, Any] = field(default_factory=dict)
    alone: str = ""
    notes: list[str] = field(default_factory=list)


def prove_script(
    script: Path, words: Sequence[str], names: Sequence[str], steps: int, processes: int
) -> list[dict[str, Any]]:
    """Prove a script under some layouts; return a report for each.

    Args:
        script: from `script_path.find_script`.
        words: its own arguments.
        names: of layouts, from `parse_script_layouts`.
        steps: optimizer steps.
        processes: of every layout; 0: as many as its name says.
    """
    with tempfile.TemporaryDirectory(prefix="shoal-prove-") as folder:
        proof = _ScriptProof(script, tuple(words), steps, processes, Path(folder))
        return proof.prove(names)


def parse_script_layouts(text: str) -> list[str]:
    """Return the names of `--layouts`, data-parallel ones first; [""] for the script's own.

    >>> parse_script_layouts("tp, ddp"), parse_script_layouts("")
    (['ddp', 'tp'], [''])
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    allowed = [name for name in STRATEGIES if name not in UNPROVEN]
    for name in names:
        check_choice("--layouts", name, allowed)
    whole = ("ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp")
    return sorted(dict.fromkeys(names), key=lambda name: name not in whole) or [""]


@dataclass
class _ScriptProof:
    """Runs of one script, and their comparisons.

    Attributes:
        script: the user's.
        words: its arguments.
        steps: optimizer steps.
        processes: as in `prove_script`.
        folder: of all copies and records.
        sample: record of the first layout that ran, whose first micro-batch can be a sample.
        lifted: the script's own casts to narrower formats are lifted.
        count: runs so far.
    """

    script: Path
    words: tuple[str, ...]
    steps: int
    processes: int
    folder: Path
    sample: str = ""
    lifted: bool = False
    count: int = 0

    def prove(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Prove the script under each layout."""
        proofs = [self._record_layout(name) for name in names]
        groups: dict[str, list[LayoutProof]] = {}
        for one in proofs:
            if not one.report:
                groups.setdefault(digest_batches(one.record), []).append(one)
        for group in groups.values():
            self._compare(group)
        for one in proofs:
            if one.report["verdict"] == "different":
                self._exclude_rounding(one)
        return [{"asked": one.layout, "notes": one.notes, **one.report} for one in proofs]

    def _count_processes(self, layout: str) -> int:
        return self.processes or DEFAULT_PROCESSES.get(layout, 2)

    def _record_layout(self, layout: str) -> LayoutProof:
        """Run the script under a layout."""
        count = self._count_processes(layout)
        side = self._make_side(layout=layout, processes=count, sample=self.sample)
        proof = LayoutProof(layout, Path(side.record))
        failure, outcome = self._run(side, count)
        if outcome.get("needs_sample") and not self.sample:
            self.sample = self._record_sample()
            return self._record_layout(layout)
        if failure and not self.lifted and is_dtype_error(failure["reason"]):
            self.lifted = True
            return self._record_layout(layout)
        proof.report = failure or self._reason(outcome)
        proof.notes += _format_writes(outcome)
        if casts := outcome.get("casts"):
            proof.notes.append(f"the script's own casts to narrower formats lifted: {_join(casts)}")
        if not proof.report and not self.sample:
            self.sample = side.record
        return proof

    def _record_sample(self) -> str:
        """Run the script in one process for a step; return the record of its micro-batch."""
        side = self._make_side(layout="single", processes=1, steps=1)
        self._run(side, 1)
        return side.record

    def _compare(self, group: Sequence[LayoutProof]) -> None:
        """Run the script alone on the micro-batches of some layouts, and compare them."""
        side = self._make_side(
            processes=self._count_processes(group[0].layout),
            batches=str(group[0].record),
            compared=tuple(str(one.record) for one in group),
        )
        failure, outcome = self._run(side, 1)
        problem = failure or self._reason(outcome)
        for number, one in enumerate(group):
            one.alone = side.record
            if problem:
                reason = f"alone, on the recorded micro-batches: {problem['reason']}"
                one.report = {"verdict": "not proven", "reason": reason}
            else:
                path = Path(side.record) / f"report-{number}.json"
                one.report = json.loads(path.read_text(encoding="utf-8"))

    def _exclude_rounding(self, proof: LayoutProof) -> None:
        """Replace the report of a layout whose difference is only rounding."""
        was, self.lifted = self.lifted, True
        try:
            if not was:
                lifted = self._record_layout(proof.layout)
                casts = _read_outcome(lifted.record).get("casts", [])
                if casts and not lifted.report:
                    self._compare([lifted])
                    if "differences" in lifted.report:
                        proof.report, proof.record = lifted.report, lifted.record
                        proof.alone, proof.notes = lifted.alone, lifted.notes
                else:
                    self.lifted = False
            if proof.report["verdict"] == "different":
                self._compare_with_changed_bits(proof)
        finally:
            self.lifted = was

    def _compare_with_changed_bits(self, proof: LayoutProof) -> None:
        """Run the script alone with weights changed in their last bits; compare the distances."""
        side = self._make_side(
            processes=self._count_processes(proof.layout),
            batches=str(proof.record),
            compared=(proof.alone,),
            jitter=True,
        )
        failure, outcome = self._run(side, 1)
        if failure or outcome.get("reason"):
            return
        path = Path(side.record) / "report-0.json"
        if is_rounding(proof.report, json.loads(path.read_text(encoding="utf-8"))):
            proof.report = {
                "verdict": "not proven",
                "reason": "the script amplifies rounding: one process whose weights differ in "
                "their last bits ends as far from one process as the layout does; try: a smaller "
                "learning rate",
            }

    def _make_side(self, **values: Any) -> ScriptSide:
        """Copy the script's folder for another run, and return the run's settings."""
        self.count += 1
        home = self.folder / str(self.count)
        (home / "record").mkdir(parents=True)
        (home / "copy").mkdir()
        script, cwd = copy_script_folder(self.script, Path.cwd(), home / "copy")
        return ScriptSide(
            str(script),
            str(cwd),
            str(home / "record"),
            self.words,
            writable=(str(home),),
            **{"steps": self.steps, "lifted": self.lifted, **values},
        )

    def _run(self, side: ScriptSide, processes: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start the processes of a run; return (report of a failure or {}, the outcome)."""
        from shoal.cli.workers.prove_worker import SCRIPT_IMPORTS
        from shoal.cli.workers.worker import worker_environment
        from shoal.launch import supervise
        from shoal.launch.processes import LOOPBACK, free_port

        home = Path(side.record).parent
        side.write(home / "side.json")
        (home / "tmp").mkdir()
        environ = {
            **worker_environment(),
            "TMPDIR": str(home / "tmp"),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(free_port()),
        }
        outcome = supervise(
            [sys.executable, "-m", "shoal.cli.workers.prove_worker", str(home), "--script"],
            processes=processes,
            folder=home,
            restarts=0,
            emit=EventLog(home / "events.jsonl", None).emit,
            first_s=FIRST_S,
            patience_s=PATIENCE_S,
            environ=environ,
            imports=SCRIPT_IMPORTS,
        )
        found = _read_outcome(Path(side.record))
        if not outcome.exit_code:
            return {}, found
        if found.get("writes"):
            reason = f"{found['writes'][0]}, outside of the script's folder; try: a path below it"
            return {"verdict": "not proven", "reason": reason}, {}
        verdict = "refused" if outcome.exit_code in (2, 3) else "not proven"
        text = LOG.sub("", outcome.message.replace(str(Path(side.cwd)) + os.sep, ""))
        return {"verdict": verdict, "reason": text, "exit_code": outcome.exit_code}, {}

    def _reason(self, outcome: dict[str, Any]) -> dict[str, Any]:
        """Return the report of a script that cannot be proven; {} for one that can."""
        reason = outcome.get("reason", "")
        return {"verdict": "not proven", "reason": reason} if reason else {}


def is_dtype_error(line: str) -> bool:
    """Return whether a failure is about two number formats, as a float32 teacher has in float64.

    >>> is_dtype_error("train.py:4: RuntimeError: expected m1 and m2 to have the same dtype")
    True
    """
    return "RuntimeError" in line and any(word in line for word in DTYPE_ERRORS)


def digest_batches(record: Path) -> str:
    """Return a digest of all micro-batches of a record: equal ones need one process only once."""
    steps: dict[str, list[Any]] = {}
    for path in record.glob("*-batch-*.keys"):
        step = path.name.partition("-batch-")[0]
        steps.setdefault(step, []).extend(json.loads(path.read_text(encoding="utf-8")))
    text = json.dumps({step: sorted(keys) for step, keys in sorted(steps.items())})
    return hashlib.sha256(text.encode()).hexdigest()


def is_rounding(report: dict[str, Any], rounding: dict[str, Any]) -> bool:
    """Return whether changed last bits move the one process about as far as a layout is away.

    >>> far = {"differences": [{"size": 1e-9}], "largest": {"gradient": 1e-9}}
    >>> is_rounding(far, {"differences": [{"size": 2e-10}], "largest": {"gradient": 2e-10}})
    True
    >>> is_rounding(far, {"differences": [], "largest": {"gradient": 1e-14}})
    False
    """
    sizes = [one["size"] for one in report["differences"]]
    if None in sizes or not sizes:
        return False
    moved = [one["size"] for one in rounding["differences"]] + [*rounding["largest"].values()]
    return max(sizes) <= ROUNDINGS * max(one or 0.0 for one in moved)


def _read_outcome(record: Path) -> dict[str, Any]:
    """Return the outcome of rank 0, with the refused writes of all ranks."""
    found: dict[str, Any] = {}
    for path in sorted(record.glob("outcome-*.json")):
        one = json.loads(path.read_text(encoding="utf-8"))
        writes = dict.fromkeys([*found.get("writes", ()), *one["writes"]])
        found = {**one, **found, "writes": list(writes)}
    return found


def _join(lines: Sequence[str]) -> str:
    return ", ".join(lines[:2]) + ", …" * (len(lines) > 2)


def _format_writes(outcome: dict[str, Any]) -> list[str]:
    return [f"refused: {line}" for line in outcome.get("writes", ())]
