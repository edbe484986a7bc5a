"""Names of modules, classes, functions and methods are the field's, not everyday words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from source_facts import FILES, ROOT, Definition, read_contents

SOURCE = ROOT / "src" / "shoal"
WORDS = frozenset(
    [
        "told",
        "said",
        "brought",
        "carried",
        "kept",
        "owed",
        "lent",
        "passed",
        "asked",
        "given",
        "look",
        "take",
        "place",
        "begin",
        "leave",
        "apart",
        "alike",
        "beside",
        "elsewhere",
        "far",
        "hear",
        "tell",
    ]
)
"""Words of language.md that say nothing of what a thing is or does, as whole tokens of a name."""

OF_THE_FIELD = {
    "in_place_error": "an operation in place, as torch calls it",
    "is_in_place": "the same",
    "_sync_in_place_changes": "the same",
    "_draw_in_place": "a live region of a terminal",
    "look_up": "rows of an embedding",
    "place": "what `base/plans/placement.py` describes: technique by technique, and a place in code",
    "format_place": "a file and its line",
    "hear": "deprecated alias; goes in 0.3",
}
LEFT = frozenset(
    [
        "_begin",
        "begin",
        "begin_call",
        "begin_step",
        "begin_batch",
        "begin_passes",
        "_leave_at_exit",
        "leave",
        "tell",
        "_iterate_beside",
        "layers_beside_blocks",
        "_next_kept_position",
        "_take_unreadable",
        "_end_when_told",
        "report_given_up",
        "_far",
    ]
)
"""What is still to be renamed; the list only shrinks."""
SAME_CLASS = frozenset(["LocalSGD", "Block"])
"""Public classes of one name in two files: one of Accelerate's beside a method, blocks of models."""


def definitions() -> Iterator[tuple[str, Definition]]:
    """Yield (file, definition) for all of the source."""
    for path in FILES:
        for one in read_contents(path).definitions:
            yield str(path.relative_to(SOURCE)), one


def tokens(name: str) -> set[str]:
    """Split a name into its words.

    >>> sorted(tokens("_FirstStepCheck")), sorted(tokens("take_away"))
    (['check', 'first', 'step'], ['away', 'take'])
    """
    return {one.lower() for one in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}


def test_no_everyday_word_is_a_name() -> None:
    found = {one.name for _, one in definitions() if tokens(one.name) & WORDS}
    assert found - set(OF_THE_FIELD) - LEFT == set(), "a word of the field is wanted: language.md"
    assert (LEFT | set(OF_THE_FIELD)) - found == set(), "renamed: take it off the list"


def test_a_public_class_is_one_thing() -> None:
    homes = Counter(one.name for _, one in definitions() if one.is_public_class)
    assert {name for name, count in homes.items() if count > 1} == SAME_CLASS


def test_docstrings_say_what_a_thing_does() -> None:
    """Not "What …", "Whether …": a first line is an imperative or names a thing."""
    questions = re.compile(r"(What|Whether|Who|Whose|Where|When|How|Which|Why|Errors|Gives)\b")
    found = [
        f"{file}: {one.first_line}"
        for file, one in definitions()
        if questions.match(one.first_line)
    ]
    assert found == []
