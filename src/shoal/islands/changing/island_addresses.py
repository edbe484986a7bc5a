"""Other islands, as the run folder of an island knows them while the island does not run.

turn.json       the newest turn whose weights are those of the newest checkpoint, as the turns after
                it merged nothing
addresses.json  where the other islands listen: an island that joined later is not in run.toml
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from shoal.base.runlog.damaged_lines import read_object
from shoal.islands.membership.committed_turn import CommittedTurn
from shoal.islands.membership.message_json import decode_message

TURN, ADDRESSES = "turn.json", "addresses.json"


def read_later_turn(folder: Path) -> CommittedTurn | None:
    """Return the turn of a run folder's turn.json; None without one that can be read."""
    return _decode_turn(read_object(folder / TURN).get("turn"))


def list_last_islands(folder: Path, record: dict[str, Any]) -> tuple[int, ...]:
    """Return the islands that decide what follows the last turn in a run folder.

    Args:
        record: of the folder's newest checkpoint; empty without one.
    """
    kept = record.get("islands")
    turns = [_decode_turn(kept.get("members") if isinstance(kept, dict) else None)]
    turns.append(read_later_turn(folder))
    found = [one for one in turns if one is not None]
    return max(found, key=lambda one: one[:2]).trainers() if found else ()


def read_addresses(folder: Path) -> dict[int, str]:
    """Return the addresses of the other islands, by number; empty in folders without them."""
    found = read_object(folder / ADDRESSES).get("at")
    if not isinstance(found, dict):
        return {}
    return {int(name): str(at) for name, at in found.items() if str(name).isdecimal()}


def _decode_turn(found: Any) -> CommittedTurn | None:
    """Return a turn from its JSON; None if it is none."""
    with contextlib.suppress(ValueError, TypeError, LookupError):
        turn = decode_message(found)
        return turn if isinstance(turn, CommittedTurn) else None
    return None
