"""Prove two small steps of the layout against one process, before training on several processes.

    until it ended      the run's folder records the proof's begin and end (proof.json). The next
                        attempt repeats a proof that was killed or hung, `MOST_BEGUN` times; a run
                        that resumes from a checkpoint had its proof
    once                per model (its code, names, shapes), loss, layout, processes and versions,
                        Shoal's own source among them; "equal" is kept in the cache folder
    in the workers      which are connected already; no process is started
    refuses             on a proven difference only; a run that cannot be proven goes on, with a
    line

Source: design §5; nobody else ships it, so the cost must stay at seconds: `BUDGET_S` bounds it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.base.errors import ShoalError, TrainingError
from shoal.base.plans.plan import Plan
from shoal.base.runlog.atomic_files import write_atomically
from shoal.base.runlog.damaged_lines import read_object
from shoal.base.text.units import seconds_text
from shoal.checkpoint.format.listing import list_checkpoints
from shoal.config.sections import Config
from shoal.data.files.tokenizer_cache import content_key
from shoal.data.sources import Source
from shoal.fabric import World
from shoal.planning.settle import Words
from shoal.proof.battery import OPTIMIZERS, SGD, Battery, Report
from shoal.proof.diagnosis.clue import PROVE_CONFIG, PROVE_SCRIPT, SCRIPT
from shoal.proof.proof_case import ProofCase, make_case
from shoal.proof.reference_limits import failure_reason, find_collective
from shoal.proof.reference_seconds import expected_seconds
from shoal.trace.isolation.collective_ban import ForbiddenCollective, forbid_collectives
from shoal.trainer.known_proofs import keep_proof, proof_key, read_known_proofs
from shoal.trainer.parallelize import build_module
from shoal.wire.phases import phase

BUDGET_S = 30.0
"""Seconds for the one process; a longer proof is for `shoal prove`, not before each run."""

STEPS = 2
NAME = "proof.json"

RESTARTS = ("SHOAL_ATTEMPT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
MOST_BEGUN = 2
"""Attempts at a proof: if none of them ends, a line reports it and training begins."""


def prove_run(
    config: Config, source: Source, world: World, folder: Path, plan: Plan, said: Words | None
) -> str:
    """Prove that a run's layout computes the same as one process, if `train.prove` asks for it.

    Every rank calls it, before the run begins.

    Args:
        plan, said: as `start_run` takes them.
        folder: the run's own: keeps proof.json; with a checkpoint in it nothing is proven.

    Returns:
        A line for the user, also if it could not be proven; "" if no proof ran.

    Raises:
        TrainingError: the two differ.
    """
    if config.train.prove == "off" or world.size == 1:
        return ""
    return prove_layout(make_case(config, source, plan, said), world, folder)


@phase("proof")
def prove_layout(
    case: ProofCase, world: World, folder: Path, environ: Mapping[str, str] = os.environ
) -> str:
    """Prove a layout on two small steps, unless that is known; every rank calls it.

    Args:
        folder: the run's own folder: with a checkpoint in it there is nothing fresh to prove.

    Returns:
        The line for the user; empty if no proof ran.

    Raises:
        TrainingError: the two differ; with the first difference and its likely cause.
    """
    if world.size == 1:
        return ""
    attempts = ProofAttempts(folder, content_key(_text(folder / "run.toml"), world.size))
    restarted = any(environ.get(name, "0") not in ("", "0") for name in RESTARTS)
    begun = _agree_on_attempts(attempts, restarted, world)
    if begun is None:
        return ""
    if isinstance(case.data, Iterator):
        return "proof: not proven: the data can be read once only; training goes on"
    if begun >= MOST_BEGUN:
        return (
            f"proof: not proven: begun {begun} times and ended neither time (the run was killed, "
            f"hung or broke off); training goes on"
        )
    return prove_case(
        case,
        world,
        folder,
        alone=f"shoal prove --quick {folder / 'run.toml'}",
        record=lambda *done: attempts.write(begun + 1, *done),
    )


def prove_case(
    case: ProofCase,
    world: World,
    folder: Path | None,
    *,
    alone: str,
    off: str = "train.prove=off",
    key: str = "",
    record: Callable[..., None] = lambda *done: None,
) -> str:
    """Prove a case on two small steps, unless the cache knows it; every rank calls it.

    Args:
        folder: for tensors that exceed memory; None: the system's for temporary files.
        alone: the command that proves it without a limit of time.
        off: the setting that leaves the proof out.
        key: on rank 0, under which "equal" is kept; "": found here.
        record: called on rank 0 with the verdict and the line of a refusal.

    Returns:
        The line for the user; empty if no proof ran.

    Raises:
        TrainingError: the two differ.
    """
    known: Any = None
    expected_s, failed = 0.0, ""
    if world.is_first:
        try:
            key, known, expected_s = _inspect_case(case, world, key)
        except Exception as failure:  # of the user's model or data, while the other ranks wait
            failed = str(failure) if isinstance(failure, ShoalError) else failure_reason(failure)
        record(known["verdict"] if known else "")
    known, expected_s, failed = world.broadcast_json([known, expected_s, failed])
    if failed:
        return f"proof: not proven: {failed}; training goes on"
    if known is not None:
        return ""
    if expected_s > BUDGET_S:
        if world.is_first:
            record("not proven")
        return format_too_long(expected_s, alone)
    battery = quick_battery(case, world.size, folder, BUDGET_S)
    with mute_notices():
        report = battery.prove(world, case.layout, case.policies)
    refused = format_refusal(report, off, alone) if report["verdict"] == "different" else ""
    if world.is_first:
        record(report["verdict"], refused)
    if refused:
        raise TrainingError(refused)
    if key and report["verdict"] == "equal":
        kept = {k: report[k] for k in ("verdict", "reason", "layout", "processes", "seconds")}
        keep_proof(key, kept)
    return format_line(report)


@contextmanager
def mute_notices() -> Iterator[None]:
    """Drop what this thread's runs print: the run that follows a proof prints it about itself."""
    logger, thread = logging.getLogger("shoal"), threading.get_ident()

    def is_of_another_thread(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(is_of_another_thread)
    try:
        yield
    finally:
        logger.removeFilter(is_of_another_thread)


def _agree_on_attempts(attempts: ProofAttempts, restarted: bool, world: World) -> int | None:
    """Broadcast rank 0's `count_unfinished` to all ranks.

    Raises:
        TrainingError: an attempt before this restart found a difference: an automatic restart must
            not get past it.
    """
    told = (
        [attempts.count_unfinished(restarted), attempts.read_refusal(restarted)]
        if world.is_first
        else None
    )
    begun, refused = world.broadcast_json(told)
    if refused:
        raise TrainingError(refused)
    return begun


@dataclass(frozen=True)
class ProofAttempts:
    """A run's attempts at its proof, kept in its folder. Rank 0 alone reads and writes.

    Format   <run>/proof.json: {"of": the configuration and the processes, "begun": attempts,
             "verdict": of the one that ended, "" before, "refused": its line where they differ}
    """

    folder: Path
    of: str

    def count_unfinished(self, restarted: bool) -> int | None:
        """Return how many attempts began and have no verdict; None: no proof is needed.

        Args:
            restarted: a launcher restarted the run with the same code, so earlier attempts count;
                False: the code may have changed, and they do not.

        Returns:
            None if the folder has a checkpoint, or an attempt has a verdict.
        """
        if list_checkpoints(self.folder / "checkpoints"):
            return None
        told = self._read_attempt(restarted)
        try:
            return None if told.get("verdict") else int(told.get("begun", 0))
        except (ValueError, TypeError):
            return 0

    def read_refusal(self, restarted: bool) -> str:
        """Return the error line of an attempt before this restart; "" if it found no difference."""
        return str(self._read_attempt(restarted).get("refused", ""))

    def _read_attempt(self, restarted: bool) -> dict[str, Any]:
        """Return the record of an attempt with the same configuration."""
        told = read_object(self.folder / NAME) if restarted else {}
        return told if told.get("of") == self.of else {}

    def write(self, begun: int, verdict: str, refused: str = "") -> None:
        """Record the proof's state; on a full disk the next attempt proves again."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            told = {"of": self.of, "begun": begun, "verdict": verdict, "refused": refused}
            write_atomically(self.folder / NAME, json.dumps(told))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _inspect_case(case: ProofCase, world: World, key: str) -> tuple[str, Any, float]:
    """Return (key of this proof, its kept verdict, seconds that one process would take).

    The key is empty if one process alone cannot build the model.
    """
    module = _build_structure(case)
    if module is None:
        return "", None, 0.0
    how = {"loss": case.loss, "collate": case.collate, "layout": case.layout, "plan": case.plan}
    key = key or proof_key(module, **how, world=world)
    known = read_known_proofs().get(key)
    if known is not None and known["verdict"] == "equal":
        return key, known, 0.0
    small, expected_s = case.shrink(world.size), 0.0
    with contextlib.suppress(ForbiddenCollective), forbid_collectives():
        expected_s = expected_seconds(module, small, world.device)
    return key, None, expected_s


def _build_structure(case: ProofCase) -> nn.Module | None:
    """Return the module; one of Shoal's own is built without numbers, which do not matter here.

    None if one process alone cannot build the model.
    """
    try:
        with forbid_collectives(), torch.device("meta") if case.ours else nullcontext():
            return build_module(case.build, case.plan.seed)
    except (ForbiddenCollective, ShoalError) as failure:
        if find_collective(failure) is None:  # a builder's exception arrives as the user's error
            raise
        return None


def format_too_long(expected_s: float, alone: str) -> str:
    """Return the line for a reference that would take longer than its budget.

    Args:
        alone: the command that proves it without a limit of time.
    """
    return (
        f"proof: not proven: time: {STEPS} steps in one process would take about "
        f"{seconds_text(expected_s)}, {seconds_text(BUDGET_S)} are allowed; training goes on; "
        f"alone it is proven by: {alone}"
    )


def quick_battery(
    case: ProofCase, processes: int, folder: Path | None, budget_s: float | None = None
) -> Battery:
    """Return a battery of two steps of SGD on small micro-batches, the second step a short one.

    Args:
        processes: of the layout.
        folder: for tensors that exceed memory.
        budget_s: for the one process; None if the user asked for the proof alone.
    """
    return Battery(
        case.shrink(processes).trial(),
        optimizers={SGD: OPTIMIZERS[SGD]},
        steps=STEPS,
        seed=case.plan.seed,
        budget_s=budget_s,
        folder=folder,
    )


def format_line(report: Report) -> str:
    """Return the line on a proof before a run."""
    if report["verdict"] == "not proven":
        return f"proof: not proven: {report['reason']}; training goes on"
    (trajectory,) = report["trajectories"]
    return (
        f"proof: {report['layout']} computes what one process computes: "
        f"{len(trajectory['parameters'])} parameters, {report['steps']} steps in float64, largest "
        f"difference {trajectory['largest']['gradient']:.0e} ({report['seconds']:.1f} s; once per "
        f"model, layout and versions){format_changes(report)}"
    )


def format_changes(report: Report) -> str:
    """Return the changes of the model for the proof, as the end of a line."""
    return "".join(f"; {text}" for text in report["said"])


def format_refusal(report: Report, off: str, alone: str = "") -> str:
    """Return the reason of a refusal: layout, first difference, likely cause, remedy.

    Args:
        report: of the proof.
        off: the setting that leaves the proof out.
        alone: the command that proves it without a limit of time.
    """
    cause = report["cause"]["text"]
    if SCRIPT in alone:  # a loop of the user's own has no run.toml
        cause = cause.replace(PROVE_CONFIG, PROVE_SCRIPT)
    command = alone if SCRIPT in alone else "shoal prove"
    return (
        f"proof: {report['layout']} on {report['processes']} processes does not compute what one "
        f"process computes: {cause}{format_changes(report)}. `{command}` shows every parameter; "
        f"{off} trains all the same"
    )
