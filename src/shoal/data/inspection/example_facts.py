"""Facts of fine-tuning rows that only their dataset knows: exact counts, padding, notable rows.

example   t0 t1 t2 | t3 t4 t5     sequence = 3, loss from t3 on
row       inputs t0 t1 t2         the last target t3 is learnt, t4 and t5 are cut
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.data.text.finetuning_samples import ExampleRows


def example_facts(train: ExampleRows) -> dict[str, Any]:
    """Return the counts of a dataset of examples, over all its rows."""
    seen = np.concatenate(([0], np.cumsum(train.is_answer)))
    uncut = train.starts + train.lengths
    tokens = int((train.stops - train.starts - 1).sum())
    return {
        "examples": train.examples,
        "tokens": tokens,
        "targets": tokens,
        "learnt_tokens": int((seen[train.stops] - seen[train.starts + 1]).sum()),
        "room": len(train) * train.sequence,
        "cut": train.cut,
        "cut_learnt": int((seen[uncut] - seen[train.stops]).sum()),
        "left_out": train.left_out,
        "lengths": train.lengths,
        "lengths_of": "examples",
    }


def row_ends(train: ExampleRows, index: int) -> dict[str, Any]:
    """Return a row's padding and tokens lost to cuts, and the last target of each example."""
    numbers = train.examples_of(index)
    kept = [int(train.stops[n] - train.starts[n]) for n in numbers]
    return {
        "padding": train.sequence - sum(kept) + len(kept),
        "cut": sum(int(train.lengths[n]) for n in numbers) - sum(kept),
        "pad": int(train.pad),
        "last_ids": [int(train.ids[train.stops[n] - 1]) for n in numbers],
    }


def add_last_targets(tokens: list[dict[str, Any]], ends: Mapping[str, Any]) -> bool:
    """Add each example's last target to the tokens of its row, where it has no loss.

    A last target is an input of no row, so the tokens of the inputs lack it.

    Args:
        tokens: of `mark_tokens`; changed in place.
        ends: of `row_ends`.

    Returns:
        False, and no change, if the row is not the dataset's: a collate function made another.
    """
    padding, lasts = ends["padding"], ends["last_ids"]
    inputs = [token for token in tokens if token["position"] is not None]
    text, rest = inputs[: len(inputs) - padding], inputs[len(inputs) - padding :]
    if any(token["learnt"] or token["id"] != ends["pad"] for token in rest) or not text:
        return False
    if text[-1]["document"] + 1 != len(lasts):
        return False
    known = {token["document"] for token in tokens if token["position"] is None}
    for document, number in enumerate(lasts):
        if document in known:
            continue
        at = 1 + max(
            n for n, t in enumerate(tokens[: len(tokens) - padding]) if t["document"] == document
        )
        last = {"id": number, "learnt": False, "document": document}
        tokens.insert(at, {**last, "position": None, "label": None})
    return True


def find_notable_rows(train: ExampleRows) -> dict[int, str]:
    """Return the row of the longest example, and one of an example with several answers.

    Returns:
        Index of the row → its note; {} if all examples are of one length and one answer.
    """
    found: dict[int, str] = {}
    if train.lengths.max() > train.lengths.min():
        longest = int(train.lengths.argmax())
        size = int(train.lengths[longest])
        found[_row_of(train, longest)] = f"the longest example, {size:,} tokens"
    answers = count_answers(train)
    if (most := int(answers.max(initial=0))) > 1:
        row = _row_of(train, int(answers.argmax()))
        found[row] = f"{found[row]}, {most} answers" if row in found else f"{most} answers"
    return found


def count_answers(train: ExampleRows) -> npt.NDArray[np.int64]:
    """Return how many answers begin in each example, before its cut."""
    learnt = np.asarray(train.is_answer)
    rises = learnt & ~np.concatenate(([False], learnt[:-1]))
    seen = np.concatenate(([0], np.cumsum(rises)))
    return seen[train.stops] - seen[train.starts]


def _row_of(train: ExampleRows, number: int) -> int:
    """Return the row that holds an example."""
    place = int(np.flatnonzero(train.order == number)[0])
    return int(np.searchsorted(train.row_ends, place, side="right"))
