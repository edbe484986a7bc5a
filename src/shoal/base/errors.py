"""Error classes of Shoal, sorted by who must act.

    ShoalError
    ├── UserError          the person at the keyboard: exit 2, one line
    │   ├── ConfigError    a key, a value or a file in run.toml or on the command line
    │   └── PlanError      a layout that cannot be built, or not for this model
    ├── ClusterError       the machines: a rank died, hangs, or cannot be reached
    ├── CheckpointError    files on disk: damaged, incomplete, or of another run
    ├── TrainingError      the numbers: exit 3, never restarted
    └── BugError           Shoal itself

A message has, in this order: where (key, file, tensor, rank) · what (value and allowed values, with
units) · why, if not plain · what to do. Present tense, no apology, the names that the user typed.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping

UNSAVED_CODE = 4
"""Exit status of a worker that ended or stopped, and could not save; the run's status is 1."""


class ShoalError(Exception):
    """Base of every failure that Shoal explains itself: one line, no traceback.

    `exit_code` is the exit status of a command that ends by it: 1, or that of a subclass (2 or 3).
    """

    exit_code = 1


class UserError(ShoalError):
    """A ShoalError that the user can mend by one change of their input; exit status 2."""

    exit_code = 2


class ConfigError(UserError):
    """A UserError: a key, a value or a path is not legal; exit status 2."""


class PlanError(UserError):
    """A UserError: a layout that processes, model or other settings rule out; exit status 2."""


class ClusterError(ShoalError):
    """A ShoalError: a process, a link or a disk failed, and a restart may help; exit status 1.

    Attributes:
        here: True if this rank caused the failure, False if other ranks did.
    """

    here: bool = False


class CheckpointError(ShoalError):
    """A ShoalError: a checkpoint missing, damaged, incomplete or of another run; exit status 2."""

    exit_code = 2


class TrainingError(ShoalError):
    """A ShoalError: the numbers are at fault, so a restart would not help; exit status 3."""

    exit_code = 3


class BugError(ShoalError):
    """A ShoalError: Shoal broke one of its own promises, no user's mistake; exit status 1."""


def nearest_word(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate most similar to `word`; None if none has similarity 0.6 (difflib).

    >>> nearest_word("micro_bach", ["batch", "micro_batch", "steps"])
    'micro_batch'
    >>> nearest_word("zzz", ["batch"]) is None
    True
    """
    found = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return found[0] if found else None


LONGEST = 80
"""Characters of a value that a message repeats."""


def shorten(text: str) -> str:
    """Truncate a text of over 100 characters to 80 and a note of its length.

    >>> shorten("bf16"), shorten("x" * 5000)[-24:]
    ('bf16', 'xxxxx… (5000 characters)')
    """
    return (
        text
        if len(text) <= LONGEST + len("… (5000 characters)") + 1
        else f"{text[:LONGEST]}… ({len(text)} characters)"
    )


def format_choice_error(
    where: str, got: object, allowed: Iterable[str], others: Mapping[str, str] | None = None
) -> str:
    """Format the line for a value outside a list: the value, all legal values, the nearest.

    Args:
        others: other projects' words, in lower case → the legal value that is meant; they take
            precedence over spelling. Without a near value the line ends with the list.

    >>> format_choice_error("precision.compute", "fp23", ["fp64", "fp32", "bf16"])
    'precision.compute = fp23: not one of fp64, fp32, bf16; try: fp32'
    """
    names = list(allowed)
    word = str(got)
    close = (others or {}).get(word.lower()) or nearest_word(word, names)
    hint = f"; try: {close}" if close else ""
    return f"{where} = {shorten(word)}: not one of {', '.join(names)}{hint}"


def check_choice(
    where: str,
    got: object,
    allowed: Collection[str],
    others: Mapping[str, str] | None = None,
    *,
    kind: type[ShoalError] = ConfigError,
) -> None:
    """Raise an error for a value outside a list, with the line of `format_choice_error`.

    Args:
        where, got, allowed, others: as for `format_choice_error`.
        kind: class of the error.

    Raises:
        ConfigError: `got` is not in `allowed`; or `kind`.
    """
    if got not in allowed:
        raise kind(format_choice_error(where, got, allowed, others))


def check_positive(nearest: str = "1", **values: float) -> None:
    """Raise PlanError for the first value, by name, that is not more than 0.

    >>> check_positive(step_s=0.5)
    """
    for name, value in values.items():
        if not value > 0:
            raise PlanError(f"{name} = {value:g}: must be more than 0; try: {name}={nearest}")


def check_not_negative(**values: float) -> None:
    """Raise PlanError for the first value, by name, that is below 0."""
    for name, value in values.items():
        if not value >= 0:
            raise PlanError(f"{name} = {value:g}: must be 0 or more; try: {name}=0")
