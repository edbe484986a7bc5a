"""Compare a layout's record of a script with that of a single process, in order of time.

The first point in time at which a number differs is the finding. Later ones are its consequences.
Bounds are those of the proof of a model (equality_bounds.py): shares of the whole gradient's norm,
and of the whole weights' norm.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from shoal.base.runlog.damaged_lines import replace_non_finite
from shoal.proof.distances import difference_norm, norm_over, number_distance, share_of_norm
from shoal.proof.equality_bounds import EqualityBounds, bounds_for

LATER_GRADIENT = 1e-7
"""Bound on gradients after the first step of optimizers other than SGD: their weights agree to
1e-10 of the whole, and no model of the proofs amplifies that a thousand times."""

Event = dict[str, Any]
Boxes = Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True)
class SideDifference:
    """One number or tensor that differs at the first point in time at which any does.

    Attributes:
        what: "steps", "targets", "used", "gradient", "optimizer", "optimizer state",
            "weights", "buffer", "loss",
            "gradient norm", "skipped", "own parameter", "state dict", "replicas".
        name: the tensor or the optimizer's number.
        size: as a share of the whole; None: not a size.
        bound: largest size that is equal.
        ranks: that differ from the one process, or hold the part that does.
        values: for numbers: (in the one process, under the layout).
    """

    what: str
    name: str = ""
    size: float | None = None
    bound: float = 0.0
    ranks: list[int] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)


@dataclass
class LargestDifferences:
    """Largest differences over all events up to the first that is too large."""

    gradient: float = 0.0
    optimizer_state: float = 0.0
    weights: float = 0.0
    loss: float = 0.0


class SideRecord:
    """Record of one side, read from its folder.

    Attributes:
        runs: entries of runs.json.
        events: all but totals, in order of time.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / "runs.json"
        self.runs: list[dict[str, Any]] = (
            json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        )
        lines = folder / "events.jsonl"
        text = lines.read_text(encoding="utf-8") if lines.exists() else ""
        events: list[Event] = [json.loads(line) for line in text.splitlines()]
        self.events = [one for one in events if one["event"] != "total"]
        self.state_files: dict[int, Path] = {}

    def path_of(self, event: Event, kind: str) -> Path:
        """Return the path of an event's tensors."""
        return self.folder / f"{event['run']}-{event['step']}-{kind}.safetensors"

    def note(self, event: Event) -> None:
        """Note which file has the newest state of the event's run."""
        if event["event"] == "update" or event["changed"]:
            kind = "update" if event["event"] == "update" else "state"
            self.state_files[event["run"]] = self.path_of(event, kind)


def compare_sides(expected: Path, got: Path) -> dict[str, Any]:
    """Compare the records of a single process and of a layout; return the report as JSON.

    Args:
        expected: folder of the one process's record.
        got: folder of the layout's.
    """
    ours, theirs = SideRecord(expected), SideRecord(got)
    largest = LargestDifferences()
    bounds = _bounds_of(ours)
    found: list[SideDifference] = []
    at: Event = {}
    its: Event = {}
    before: Event = {}
    for one, other in zip(ours.events, theirs.events, strict=False):
        at, its = one, other
        if any(one[key] != other[key] for key in ("event", "run", "step")):
            values = [_event_text(one), _event_text(other)]
            found = [SideDifference("steps", values=values)]
            break
        ours.note(one)
        theirs.note(other)
        compare = _compare_state if one["event"] == "state" else _compare_update
        found = list(compare(ours, theirs, one, other, bounds, largest))
        if found:
            break
        before = one
    if not found and len(ours.events) != len(theirs.events):
        counts = [sum(e["event"] == "update" for e in side.events) for side in (ours, theirs)]
        found = [SideDifference("steps", values=counts)]
    first = theirs.runs[0] if theirs.runs else {"layout": "", "processes": 0}
    return {
        "verdict": "different" if found else "equal",
        "layout": first["layout"],
        "processes": first["processes"],
        "runs": len(theirs.runs),
        "steps": sum(e["event"] == "update" for e in theirs.events),
        "parameters": sum(len(run["names"]) for run in theirs.runs),
        "largest": replace_non_finite(asdict(largest)),
        "differences": [{**asdict(one), "size": replace_non_finite(one.size)} for one in found],
        "step": at.get("step", 0) if found else 0,
        "run": _run_name(ours, at) if found else "",
        "actions": _list_actions(at, its, before) if found else [],
    }


def _bounds_of(record: SideRecord) -> EqualityBounds:
    """Return the bounds of a script: of SGD if all its runs have SGD."""
    is_sgd = all(run["is_sgd"] for run in record.runs)
    bounds = bounds_for("fp64", "sgd" if is_sgd else "other")
    later = bounds.later if math.isfinite(bounds.later) else LATER_GRADIENT
    return EqualityBounds(bounds.first, later, bounds.weights, bounds.buffers)


def _compare_state(
    ours: SideRecord,
    theirs: SideRecord,
    one: Event,
    other: Event,
    bounds: EqualityBounds,
    largest: LargestDifferences,
) -> Iterator[SideDifference]:
    """Yield the differences before a step: parameters outside of any run, weights, buffers."""
    for name in one["own"]:
        right = _read(ours.path_of(one, "own-0"), name)
        sizes = {
            rank: _share(right, _read(theirs.path_of(other, f"own-{rank}"), name))
            for rank in range(theirs.runs[0]["processes"])
        }
        ranks = [rank for rank, size in sizes.items() if size > bounds.weights]
        if ranks:
            size = max(sizes.values())
            yield SideDifference("own parameter", name, size, bounds.weights, ranks)
    if one["changed"] or other["changed"]:
        yield from _compare_tensors(ours, theirs, one, bounds, largest)


def _compare_update(
    ours: SideRecord,
    theirs: SideRecord,
    one: Event,
    other: Event,
    bounds: EqualityBounds,
    largest: LargestDifferences,
) -> Iterator[SideDifference]:
    """Yield the differences of an update, causes before consequences."""
    bound = bounds.of_step(one["step"])
    path, its = ours.path_of(one, "update"), theirs.path_of(other, "update")
    gradients, others = _names(path, "gradient/"), _names(its, "gradient/")
    whole = norm_over(_read(path, f"gradient/{name}") for name in gradients)
    for name in dict.fromkeys([*gradients, *others]):
        if (name in gradients) != (name in others):
            yield SideDifference("used", name, None, 0.0, [], [name in gradients, name in others])
    shared = [name for name in gradients if name in others]
    yield from _compare_each("gradient", shared, path, its, whole, bound, theirs, one, largest)
    yield from _compare_groups(one, other)
    for key in ("targets", "skipped"):
        if one[key] != other[key]:
            yield SideDifference(key, values=[one[key], other[key]])
    for key, what in (("grad_norm", "gradient norm"), ("loss", "loss")):
        size = number_distance(one[key], other[key], whole)
        largest.loss = max(largest.loss, size)
        if size > bound:
            yield SideDifference(what, "", size, bound, [], [one[key], other[key]])
    yield from _compare_optimizer(ours, theirs, one, other, bound, largest)
    yield from _compare_tensors(ours, theirs, one, bounds, largest)
    for key, what in (("state_dict_ranks", "state dict"), ("replica_ranks", "replicas")):
        for name, groups in other[key].items():
            yield SideDifference(what, name, None, 0.0, groups[-1], groups)


def _compare_tensors(
    ours: SideRecord,
    theirs: SideRecord,
    event: Event,
    bounds: EqualityBounds,
    largest: LargestDifferences,
) -> Iterator[SideDifference]:
    """Yield the differences of weights and buffers."""
    path, its = ours.state_files[event["run"]], theirs.state_files[event["run"]]
    prefixes = tuple("state/" if p.stem.endswith("update") else "" for p in (path, its))
    names, others = _names(path, prefixes[0]), set(_names(its, prefixes[1]))
    weights = set(ours.runs[event["run"]]["weights"])
    floating = [name for name in names if name in weights]
    whole = norm_over(_read(path, prefixes[0] + name) for name in floating)
    found = []
    for name in names:
        if name not in others and prefixes[0] != prefixes[1]:
            continue  # the second name of a tied weight, which only one kind of file has
        right = _read(path, prefixes[0] + name)
        left = _read(its, prefixes[1] + name) if name in others else None
        is_weight = name in weights
        size = difference_norm(right, left)
        size = share_of_norm(size, whole if is_weight else max(1.0, norm_over([right])))
        bound = bounds.weights if is_weight else bounds.buffers
        if is_weight:
            largest.weights = max(largest.weights, size)
        if size > bound:
            ranks = _holders(theirs, event, name, right, left, bound * whole)
            what = "weights" if is_weight else "buffer"
            found.append((size, SideDifference(what, name, size, bound, ranks)))
    yield from (difference for _, difference in sorted(found, key=lambda pair: -pair[0]))


def _compare_each(
    what: str,
    names: Sequence[str],
    path: Path,
    its: Path,
    whole: float,
    bound: float,
    theirs: SideRecord,
    event: Event,
    largest: LargestDifferences,
) -> Iterator[SideDifference]:
    """Yield the differences of tensors that both sides have, the largest first."""
    found = []
    for name in names:
        right, left = _read(path, f"{what}/{name}"), _read(its, f"{what}/{name}")
        size = share_of_norm(difference_norm(right, left), whole)
        largest.gradient = max(largest.gradient, size)
        if size > bound:
            ranks = _holders(theirs, event, name, right, left, bound * whole)
            found.append((size, SideDifference(what, name, size, bound, ranks)))
    yield from (difference for _, difference in sorted(found, key=lambda pair: -pair[0]))


def _compare_optimizer(
    ours: SideRecord,
    theirs: SideRecord,
    one: Event,
    other: Event,
    bound: float,
    largest: LargestDifferences,
) -> Iterator[SideDifference]:
    """Yield the differences of the optimizer's state after an update, as shares of each key's norm.

    The moments of a step are made of its gradients, so they have the gradients' bound.
    """
    path, its = ours.path_of(one, "update"), theirs.path_of(other, "update")
    sides = [dict.fromkeys(_names(file, "optimizer/")) for file in (path, its)]
    keys: dict[str, list[str]] = {}
    for full in sides[0] | sides[1]:
        keys.setdefault(full.rpartition(".")[2], []).append(full)
    for key, names in keys.items():
        whole = norm_over(_read(path, f"optimizer/{full}") for full in names if full in sides[0])
        for full in names:
            name, has = full.rpartition(".")[0], [full in side for side in sides]
            if not all(has):
                yield SideDifference("optimizer state", f"{key} of {name}", None, 0.0, [], has)
                continue
            right, left = (_read(file, f"optimizer/{full}") for file in (path, its))
            size = share_of_norm(difference_norm(right, left), whole)
            largest.optimizer_state = max(largest.optimizer_state, size)
            if size > bound:
                ranks = _holders(theirs, one, name, right, left, bound * whole)
                yield SideDifference("optimizer state", f"{key} of {name}", size, bound, ranks)
    for name in {**one["numbers"], **other["numbers"]}:
        right, left = (event["numbers"].get(name, {}) for event in (one, other))
        for key in {**right, **left}:
            if not _is_equal(right.get(key), left.get(key)):
                values = [right.get(key), left.get(key)]
                yield SideDifference("optimizer state", f"{key} of {name}", None, 0.0, [], values)


def _compare_groups(one: Event, other: Event) -> Iterator[SideDifference]:
    """Yield the optimizer's numbers that differ on some rank from those of a single process."""
    for number, group in enumerate(one["groups"][0]):
        for key, value in group.items():
            got = [
                rank[number].get(key) if number < len(rank) else None for rank in other["groups"]
            ]
            ranks = [rank for rank, its in enumerate(got) if not _is_equal(its, value)]
            if ranks:
                name = f"{key} of group {number}"
                yield SideDifference("optimizer", name, None, 0.0, ranks, [value, got[ranks[0]]])


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether two numbers of an optimizer are equal, to rounding."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-12)
    return bool(one == other)


def _holders(
    record: SideRecord,
    event: Event,
    name: str,
    right: torch.Tensor,
    left: torch.Tensor | None,
    least: float,
) -> list[int]:
    """Return the ranks whose part of a tensor differs by more than `least`."""
    shards = record.runs[event["run"]]["shards"]
    found = []
    for rank, parts in enumerate(shards):
        boxes: Boxes = parts.get(name, ())
        if any(len(box) != right.ndim for box in boxes):
            continue  # a step count or a factor of the optimizer, which is whole on every rank
        pieces = [tuple(slice(first, end) for first, end in box) for box in boxes]
        if left is None or left.shape != right.shape:
            differs = bool(pieces)
        else:
            differs = any(not difference_norm(right[p], left[p]) <= least for p in pieces)
        if differs:
            found.append(rank)
    return found


def _list_actions(at: Event, its: Event, before: Event) -> list[str]:
    """Return what the script did before the first difference, the latest first."""
    found = [*at.get("actions", ())]
    for name, groups in its.get("loss_ranks", {}).items():
        ranks = " and ".join(", ".join(map(str, group)) for group in groups)
        found.append(f"has a loss that reads {name}, which is another on ranks {ranks}")
    if at.get("event") == "update" and before.get("run") == at.get("run"):
        found += [text for text in before.get("actions", ()) if text not in found]
    return found


def _run_name(record: SideRecord, event: Event) -> str:
    """Return the variable of a run, where the script has several; "" for the only one."""
    if len(record.runs) < 2:
        return ""
    return str(event.get("variable") or f"run {event.get('run', 0) + 1}")


def _event_text(event: Event) -> str:
    kind = "the update of step" if event["event"] == "update" else "step"
    return f"{kind} {event['step']} of run {event['run'] + 1}"


def _share(right: torch.Tensor, left: torch.Tensor | None) -> float:
    return share_of_norm(difference_norm(right, left), max(1e-30, norm_over([right])))


def _names(path: Path, prefix: str) -> list[str]:
    """Return the names of a file's tensors that begin with a prefix, without it."""
    if not path.exists():
        return []
    with safe_open(path, framework="pt") as file:
        names: list[str] = list(file.keys())
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def _read(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)
