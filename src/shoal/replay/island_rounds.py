"""Rounds of an island as its run folder records them: steps, members, and whether they counted.

    events.jsonl            round_committed or round_discarded, at the end of each round
    checkpoints/step-N      the island's own state at the end of a committed round, with the samples
                            that the next round deals to it

An island's steps between two merges depend on nothing but that state, so one island alone repeats
them. A step after a merge of the same round needs what the others sent, which is not recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shoal.base.errors import ConfigError
from shoal.base.runlog.damaged_lines import is_number, iter_newest_lines, parse_event
from shoal.checkpoint.format.listing import CheckpointEntry, list_checkpoints

ENDS = ("round_committed", "round_discarded")


@dataclass(frozen=True)
class RoundRecord:
    """A round of an island that took a step.

    Attributes:
        number: of the round, from 0; −1: it had not ended.
        first_step: its first step; last_step: its last one, 0 if it had not ended.
        members: islands whose changes were merged; () if it was discarded or had not ended.
    """

    number: int
    first_step: int
    last_step: int = 0
    members: tuple[int, ...] = ()


def read_round(folder: Path, step: int) -> RoundRecord:
    """Return the round in which an island took a step; for a step that ran twice, the last."""
    later = RoundRecord(-1, 1)
    for line in iter_newest_lines(folder / "events.jsonl"):
        event = parse_event(line)
        if event is None or event.get("event") not in ENDS:
            continue
        if not all(is_number(event.get(key)) for key in ("step", "round", "steps")):
            continue
        last = int(event["step"])
        if last < step:
            # The round of the step began here, and is the one that was read before.
            first = last + 1
            return RoundRecord(later.number, first, later.last_step, later.members)
        if later.last_step and last >= later.first_step:
            continue  # of a start that was broken off, and whose steps ran again
        members = event.get("admitted") if event["event"] == "round_committed" else ()
        later = RoundRecord(
            int(event["round"]), last - int(event["steps"]) + 1, last, tuple(members or ())
        )
    return later


def find_round_start(folder: Path, step: int) -> list[CheckpointEntry]:
    """Return the checkpoint with which the round of a step began; []: it is the first round.

    Raises:
        ConfigError: it was deleted; names the steps that can be repeated.
    """
    one = read_round(folder, step)
    if one.first_step == 1:
        return []
    found = list_checkpoints(folder / "checkpoints")
    start = next((entry for entry in found if entry.step == one.first_step - 1), None)
    if start is not None:
        return [start]
    whole = f"steps {one.first_step:,} to {one.last_step:,}" if one.last_step else "its last steps"
    near = next((f"; try: --step {entry.step + 1}" for entry in found), "")
    raise ConfigError(
        f"--step {step}: is in a round of islands ({whole}) whose first state is deleted, and the "
        f"rounds before it need what the other islands sent; checkpoint.keep of a run decides what "
        f"is kept{near}"
    )
