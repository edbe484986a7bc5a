"""Comparison of the calls of a run that every rank must make, by the ranks' pages.

These are `run.step`, `run.save`, or a forward pass of a model whose weights are sharded. A rank
that makes another call than the others waits for them, and they for it. Ranks write the names of
their last calls into their pages (wire/watch_page.py), each under its number in the run. In a
correct run no call number has two names once all ranks stand still, however slow it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from shoal.launch.watch.page_reader import PageReader, PageSnapshot
from shoal.wire.phases import OF_SHAPES

Answers = Mapping[int, Mapping[str, Any] | None]
"""By rank, its reply to the request for its position; None without a reply."""


def compare_calls(pages: Mapping[int, PageReader]) -> dict[int, str]:
    """Return the first call in which ranks of a run differ.

    Returns:
        By rank, the calls of one rank of the smallest group and of another one; {} without a
        difference.
    """
    runs: dict[int, dict[int, dict[int, str]]] = {}
    for rank, page in pages.items():
        for key, names in page.names().items():
            runs.setdefault(key, {})[rank] = names
    for ranks in runs.values():
        for number in sorted({number for names in ranks.values() for number in names}):
            found = {rank: names[number] for rank, names in ranks.items() if number in names}
            often = Counter(found.values())
            if len(often) > 1:
                rare = min(found, key=lambda rank: (often[found[rank]], rank))
                other = next(rank for rank in found if found[rank] != found[rare])
                return {rare: found[rare], other: found[other]}
    return {}


def has_fewer_calls(page: PageReader, other: PageReader) -> bool:
    """Return whether a rank has begun fewer calls of a run than another one; maybe none yet."""
    own = page.names()
    return any(max(own.get(key, {0: ""})) < max(calls) for key, calls in other.names().items())


def detect_caught_error(told: Mapping[int, PageSnapshot], answers: Answers) -> tuple[int, str]:
    """Return (rank, line) for a rank that caught an error of a call in which another rank waits.

    (0, "") without one. While the other rank is still busy in the call, it may fail there too.
    """
    for rank, answer in answers.items():
        if not (why := (answer or {}).get("caught")):
            continue
        for other, one in told.items():
            theirs = answers.get(other) or {}
            waits = one.inside and (one.waits or theirs.get("collective"))
            if waits and not theirs.get("caught"):
                return rank, (
                    f"rank {rank} caught an error of {why} and goes on{format_place(answer)}, "
                    "while "
                    f"rank {other} waits in {one.inside}{format_place(theirs)}; try: let the error "
                    f"end the process, or catch it on every rank"
                )
    return 0, ""


def format_waiting_line(
    told: Mapping[int, PageSnapshot], answers: Answers, silence_s: float
) -> str:
    """Return a line about a rank that waits in a call for a rank in none; "" without one."""
    inside = [rank for rank, one in told.items() if one.inside]
    away = [rank for rank, one in told.items() if one.live and not one.inside]
    if not inside or not away:
        return ""
    here, there = inside[0], away[0]
    return (
        f"rank {here} has waited {silence_s:.0f} s in {told[here].inside}"
        f"{format_place(answers.get(here))} for rank {there}, which is elsewhere"
        f"{format_place(answers.get(there))}"
    )


def format_call_mismatch(calls: Mapping[int, str], answers: Answers, *, met: bool = False) -> str:
    """Return the line that names ranks' different calls.

    Args:
        met: a rank died of the difference, so none waits.

    >>> format_call_mismatch({1: "run.step", 0: "run.save"}, {0: {"place": "train.py:7"}})
    'ranks wait for each other: rank 0 called run.save (train.py:7), rank 1 called run.step; try: \
make the same calls on every rank, in the same order and equally often'
    """
    said = ", ".join(
        f"rank {rank} called {calls[rank]}{format_place(answers.get(rank))}"
        for rank in sorted(calls)
    )
    one_call = len({call.partition(OF_SHAPES)[0] for call in calls.values()}) == 1
    cure = (
        "a batch of equal shapes on every rank, since these ranks share its samples"
        if one_call
        else "call the model on every rank, since each holds a part of the weights, or use "
        "run.evaluate(data, metrics)"
        if any(call.startswith("run.model") for call in calls.values())
        else "make the same calls on every rank, in the same order and equally often"
    )
    what = "ranks made different calls" if met else "ranks wait for each other"
    return f"{what}: {said}; try: {cure}"


def format_place(answer: Mapping[str, Any] | None) -> str:
    """Return the user's line of an answer in brackets, after a blank; "" without one."""
    place = (answer or {}).get("place")
    return f" ({place})" if place else ""
