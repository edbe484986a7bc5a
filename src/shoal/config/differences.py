"""Differences between a run and its checkpoint, one line each.

what changes the result    model, data, optimizer, batch, seed, code …: a resume stops, `--force`
                           continues with the present values
what does not              layout, processes, save interval …: reported, and the run continues
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.base.errors import shorten
from shoal.base.runlog.environment import find_changed_code, library_versions
from shoal.config.save import MICRO_BATCH
from shoal.config.sections import Config

PLACES = {
    *("run.folder", "run.name", "data.owners"),
    *(f"islands.{key}" for key in ("at", "index", "key", "keys")),
}
"""Keys for the location of a run, not its content: never reported."""
FREE_SECTIONS = {"layout", "launch", "checkpoint", "memory", "fsdp"}
FREE = {
    *(f"train.{key}" for key in ("steps", "epochs", "accumulate", "validate_every")),
    *(f"train.{key}" for key in ("validate_samples", "compile", "defer_sync", "deterministic")),
    *(f"train.{key}" for key in ("prove", "on", "trace", "statistics", "skip_limit")),
    *(
        f"islands.{key}"
        for key in ("count", "connections", "wait_s", "bound", "cosine", "refusals")
    ),
    "data.workers",
}
"""Keys, and sections, that change how and how long a run is computed, but not its result."""
BINDING = {"layout.compress"}
"""Keys of those sections that change numbers all the same."""
UNLIKE = {"train.micro_batch", "precision.compute", "precision.residual"}
"""Keys in which islands that come and go may differ, and so the checkpoint that one takes over."""
OPENED_SECTIONS, OPENED = {"model", "data", "tune"}, {"optimizer.name", "precision.compute"}
"""Keys that workers compare once data and model are open, and that no start refuses before.

The number of samples, and the names, shapes and formats of tensors must stay.
"""
ABSENT = "not given"


@dataclass(frozen=True)
class Difference:
    """A difference between a checkpoint and the present run: its name, old value, new value.

    Attributes:
        changes: whether it changes the result of the run.
    """

    key: str
    then: Any
    now: Any
    changes: bool = True

    @property
    def line(self) -> str:
        """Return the difference as one line for a person.

        >>> Difference("optimizer.lr", 0.001, 0.5).line
        'optimizer.lr: 0.001 → 0.5'
        """
        return f"{self.key}: {shorten(str(self.then))} → {shorten(str(self.now))}"


def changes_result(key: str) -> bool:
    """Return whether another value of a key of run.toml changes the result.

    >>> changes_result("optimizer.lr"), changes_result("launch.processes")
    (True, False)
    """
    free = key in FREE or key.partition(".")[0] in FREE_SECTIONS
    return key in BINDING or not free


def compare_configurations(then: str, now: str) -> list[Difference]:
    """Compare two run.toml texts, key by key; return [] if one of them cannot be parsed.

    A key that only one of them has (another version of Shoal wrote the other) counts with its
    default.
    """
    try:
        before, after = tomllib.loads(then), tomllib.loads(now)
    except tomllib.TOMLDecodeError:
        return []
    may_differ = all(_comes_and_goes(one.get("islands")) for one in (before, after))
    found = []
    for section in dict.fromkeys((*before, *after)):
        old, new = before.get(section, {}), after.get(section, {})
        if not isinstance(old, dict) or not isinstance(new, dict):
            continue
        for name in dict.fromkeys((*old, *new)):
            key = f"{section}.{name}"
            usual = _default_value(section, name)
            was, is_now = old.get(name, usual), new.get(name, usual)
            if key == "train.validate_samples" and "auto" in (was, is_now):
                continue  # Shoal chose the number, at one of the two starts
            if was != is_now and key not in PLACES:
                changes = changes_result(key) and not (key in UNLIKE and may_differ)
                changes &= not (
                    key == MICRO_BATCH
                    and _is_micro_batch_chosen(then)
                    and _is_micro_batch_chosen(now)
                )
                found.append(Difference(key, was, is_now, changes))
    if any(one.key == "islands.method" for one in found):  # the other keys follow from it
        found = [one for one in found if not one.key.startswith("islands.") or _is_named(one)]
    return found


def _comes_and_goes(islands: Any) -> bool:
    return isinstance(islands, dict) and bool(islands.get("least"))


def _is_micro_batch_chosen(text: str) -> bool:
    """Return whether Shoal chose the micro-batch of a run.toml: then it follows the layout."""
    lines = (line for line in text.splitlines() if line.startswith("micro_batch = "))
    return next(lines, "").endswith("# derived")


def compare_environments(
    record: Mapping[str, Any], code: Mapping[str, list[str]] | None = None
) -> list[Difference]:
    """Compare versions and the user's own source with the record of a checkpoint.

    Args:
        code: `find_user_code()`; None: nothing is imported, and the files are read in their old
        places.
    """
    before = record.get("versions")
    before = before if isinstance(before, dict) else {}
    after = library_versions(before)
    found = [
        Difference(f"version of {name}", was, after.get(name, ABSENT), changes=False)
        for name, was in before.items()
        if was != after.get(name, ABSENT)
    ]
    told = record.get("code")
    told = told if isinstance(told, dict) else {}
    known = {name: one for name, one in told.items() if _is_source(one)}
    return found + [
        Difference(f"code of {path}", "as it was", "changed")
        for path in find_changed_code(known, code)
    ]


def may_fail_when_opened(found: Sequence[Difference]) -> bool:
    """Return whether the changes may make a resume impossible, forced or not.

    >>> may_fail_when_opened([Difference("data.sequence", 8, 9)])
    True
    >>> may_fail_when_opened([Difference("optimizer.lr", 0.1, 0.2)])
    False
    """
    keys = [one.key for one in found if one.changes]
    return any(key in OPENED or key.partition(".")[0] in OPENED_SECTIONS for key in keys)


def format_refusal(where: str, step: int, found: Sequence[Difference]) -> str:
    """Return the line with which a resume stops; "" if nothing changes the result.

    Args:
        where: how the user named the run, `--resume runs/a`.
    """
    stops = [one.line for one in found if one.changes]
    if not stops:
        return ""
    return (
        f"{where}: not what step {step} was trained with (then → now): {'; '.join(stops)}; put "
        f"that back, or say --force to go on with what is now"
    )


def _is_source(one: object) -> bool:
    return isinstance(one, list) and len(one) == 2 and all(isinstance(part, str) for part in one)


def _is_named(one: Difference) -> bool:
    return one.key in ("islands.method", "islands.count")


def _default_value(section: str, name: str) -> Any:
    value = getattr(getattr(Config(), section, None), name, ABSENT)
    return list(value) if isinstance(value, tuple) else value
