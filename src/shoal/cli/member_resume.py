"""Resume of an island that others may have joined: which islands it looks for, and where."""

from __future__ import annotations

from pathlib import Path

from shoal.base.errors import CheckpointError
from shoal.base.layouts.changing_members import complete_known_islands, complete_lone_island
from shoal.base.layouts.island_options import IslandsPolicy
from shoal.checkpoint.format.listing import list_checkpoints, read_manifest


def complete_islands(overrides: list[str], kept: IslandsPolicy, folder: Path) -> list[str]:
    """Return the overrides of a resume, with what they and the folder say of the other islands.

    Args:
        overrides: `section.key=value`, of the command line.
        kept: of the run folder.

    Raises:
        ConfigError: other islands may train on, and their addresses are not known.
    """
    completed = complete_lone_island(overrides, kept)
    if not (kept.changes_members and kept.at):
        return completed
    from shoal.islands.changing.island_addresses import list_last_islands, read_addresses

    known, resume = read_addresses(folder), f"shoal train --resume {folder}"
    # Without a checkpoint, and so without a turn, all islands that it knew may train on.
    names = list_last_islands(folder, _read_newest_record(folder)) or tuple(sorted(known))
    return complete_known_islands(completed, kept, names, known, resume)


def describe_completed(before: list[str], after: list[str]) -> list[str]:
    """Return a line on islands that a resume looks for; none if nothing was completed.

    >>> describe_completed([], ["islands.count=2", "islands.at=a:1,b:1"])[0].partition(";")[0]
    'islands of the last round: looks for them, by islands.count=2 islands.at=a:1,b:1'
    """
    added = [one for one in after if one not in before]
    if not added or "islands.count=1" in after:
        return []
    return [
        f"islands of the last round: looks for them, by {' '.join(added)}; without them: the same "
        f"command with islands.count=1"
    ]


def _read_newest_record(folder: Path) -> dict[str, object]:
    """Return the record of the newest checkpoint that can be read."""
    for found in list_checkpoints(folder / "checkpoints"):
        try:
            return read_manifest(found.path).record
        except CheckpointError:
            continue  # the code that restores the checkpoint reports the damage
    return {}
