"""Refuse a restore by tag or by step that no checkpoint has: the line lists those that exist.

A restore from a folder that does not exist is refused too: its name is likely misspelt. The run's
own folder, and folders inside of it, may be missing, since a first start finds nothing there. A
loop that ignores `False` would train from step 0, or evaluate other weights than it should.
Imported only if a restore finds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal.base.errors import CheckpointError, nearest_word
from shoal.checkpoint.format.listing import list_checkpoints
from shoal.fabric import World

LISTED = 8
"""Largest number of steps, or of tags, that the line lists."""


def refuse_missing(
    folder: Path, tag: str, step: int | None, own: Path | None, world: World
) -> None:
    """Raise for a restore that found nothing, unless a first start may find nothing there.

    Every rank calls it.

    Args:
        folder: the run folder of the restore.
        tag: the tag of the restore; "": none.
        step: the step of the restore; None: any.
        own: the run's own folder; None: it has none.

    Raises:
        CheckpointError: the same on all ranks; for a tag or a step that no checkpoint has, with
            what is there and the nearest; for a folder that does not exist, with the nearest beside
            it.
    """
    if not (tag or step is not None):
        is_inside = own is not None and folder.resolve().is_relative_to(own.resolve())
        if not is_inside and world.all_true(not folder.exists()):
            raise CheckpointError(world.broadcast_json(format_missing_folder(folder)))
        return
    here = _list_by_tag(folder) if world.writes_files else {}
    found: dict[str, set[int]] = {}
    for listed in world.gather_json(here):
        for name, steps in listed.items():
            found.setdefault(name, set()).update(steps)
    raise CheckpointError(format_missing_checkpoint(f"folder = {folder}", tag, step, found))


def format_missing_folder(folder: Path) -> str:
    """Return the line for a folder that does not exist, with the nearest name that does."""
    parent = next(path for path in folder.parents if path.is_dir() or not path.name)
    lost = folder.relative_to(parent).parts[0]
    try:
        names = sorted(one.name for one in parent.iterdir() if one.is_dir())
    except OSError:
        names = []
    line = f"run.restore: folder = {folder}: does not exist"
    if close := nearest_word(lost, names):
        return f'{line}; try: run.restore("{parent / close}")'
    return (
        f'{line}; try: a folder that holds a run, or for a first start folder="{folder}" of '
        f"shoal.parallelize and run.restore()"
    )


def _list_by_tag(folder: Path) -> dict[str, list[int]]:
    """Return the steps of the checkpoints of each tag, under "" those without a tag."""
    tags = folder / "tags"
    folders = {"": folder, **{one.name: one for one in (tags.iterdir() if tags.is_dir() else ())}}
    listed = {
        name: [one.step for one in list_checkpoints(path / "checkpoints")]
        for name, path in folders.items()
    }
    return {name: steps for name, steps in listed.items() if steps}


def format_missing_checkpoint(
    where: str, tag: str, step: int | None, found: dict[str, set[int]]
) -> str:
    """Return the line for a tag or a step without a checkpoint.

    Args:
        where: the start of the line.
        tag: the tag of the restore; "": none.
        step: the step of the restore; None: any.
        found: tag → steps of its checkpoints, those without a tag under "".

    >>> format_missing_checkpoint("folder = a", "bset", None, {"": {4, 8}, "best": {4}})
    "folder = a: no checkpoint with tag='bset'; tags: best; steps: 4, 8; try: tag='best'"
    >>> format_missing_checkpoint("folder = a", "", 7, {"": {4, 8}})
    'folder = a: no checkpoint with step=7; steps: 4, 8; try: step=8'
    >>> format_missing_checkpoint("folder = a", "best", None, {})
    "folder = a: no checkpoint with tag='best'; it holds no checkpoint at all"
    """
    keys = [f"tag={tag!r}"] * bool(tag) + [f"step={step}"] * (step is not None)
    line = f"{where}: no checkpoint with {', '.join(keys)}"
    if not found:
        return f"{line}; it holds no checkpoint at all"
    if tag in found and step is not None:
        steps = sorted(found[tag])
        near = min(reversed(steps), key=lambda one: abs(one - step))
        of_tag = f"tag={tag!r}, " if tag else ""
        return f"{line}; steps: {_list_some(steps)}; try: {of_tag}step={near}"
    tags = sorted(name for name in found if name)
    lists = [f"tags: {_list_some(tags)}"] if tags else ["no checkpoint has a tag"]
    lists += [f"steps: {_list_some(sorted(found['']))}"] if "" in found else []
    close = nearest_word(tag, tags) or (tags[0] if len(tags) == 1 else None)
    if tag and close:
        hint = f"tag={close!r}"
    elif "" in found:
        hint = f"step={max(found[''])}"
    else:
        hint = f"tag={tags[0]!r}"
    return f"{line}; {'; '.join(lists)}; try: {hint}"


def _list_some(values: Sequence[object]) -> str:
    """Return values as a list; of many, the last ones, and how many come before."""
    shown = ", ".join(map(str, values[-LISTED:]))
    return f"{len(values) - LISTED} others, {shown}" if len(values) > LISTED else shown
