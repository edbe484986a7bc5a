"""Reports of a script's proof as text: a verdict for each layout, and the first difference.

They are the JSON of `shoal prove --json -- train.py`; no torch is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Report = Mapping[str, Any]

WHAT = {
    "gradient": "the mean gradient of {name}",
    "weights": "the weights {name}",
    "buffer": "the buffer {name}",
    "optimizer state": "the optimizer's {name}",
    "own parameter": "{name}, which an optimizer of no run steps,",
    "gradient norm": "the gradient's norm",
    "loss": "the loss",
}
"""Subject of a sentence on a difference with a size."""


def script_proof_text(reports: Sequence[Report]) -> str:
    """Format the reports of a script, one paragraph for each layout."""
    return "\n".join(line for report in reports for line in report_lines(report))


def report_lines(report: Report) -> list[str]:
    """Return the lines on one layout: its verdict, then what the script did, then notes."""
    name = report.get("layout") or report["asked"] or "the script's own layout"
    notes = [f"  {line}" for line in report["notes"]]
    if report["verdict"] in ("not proven", "refused"):
        return [f"{name}: {report['verdict']}: {report['reason']}", *notes]
    if report["verdict"] == "equal":
        size = report["largest"]["gradient"]
        steps = f"{report['steps']} step{'s' * (report['steps'] != 1)}"
        if report["runs"] > 1:
            steps += f" of {report['runs']} runs"
        return [
            f"{name}: equal to one process on the same micro-batches: {steps}, "
            f"{report['parameters']} parameters, largest "
            f"difference of a gradient {size:.0e} of the whole",
            *notes,
        ]
    first, *others = report["differences"]
    run = f" of {report['run']}" if report["run"] else ""
    alike = sorted(
        {one["name"] for one in others if one["what"] == first["what"]} - {first["name"]}
    )
    more = f"; {len(alike)} more: {_join_names(alike)}" if alike else ""
    lines = [f"{name}: different at step {report['step']}{run}: {difference_text(first)}{more}"]
    also = {one["what"]: difference_text(one) for one in reversed(others)}
    also.pop(first["what"], None)
    lines += [f"  also {text}" for text in reversed(also.values())]
    lines += [f"  the script {text}" for text in report["actions"]]
    lines += [f"  {text}" for text in advice_lines(first, report["actions"])]
    return [*lines, *notes]


def difference_text(one: Mapping[str, Any]) -> str:
    """Return a sentence on one difference.

    >>> difference_text(
    ...     {"what": "gradient", "name": "w", "size": 0.03, "bound": 1e-12, "ranks": [0, 1]}
    ... )
    'the mean gradient of w is off by 3e-02 of the whole, 1e-12 is allowed (ranks 0, 1)'
    """
    what, name = one["what"], one["name"]
    ranks = f" (ranks {_join_ranks(one['ranks'])})" if one["ranks"] else ""
    ranks = ranks.replace("ranks", "rank") if len(one["ranks"]) == 1 else ranks
    if what == "optimizer state" and one["values"]:
        right, left = one["values"]
        if isinstance(right, bool) and isinstance(left, bool):
            owner = "only one process" if right else "only the layout"
            return f"{owner} has {name} in the optimizer's state"
        return f"{name} in the optimizer's state is {left}, and {right} in one process"
    if what in WHAT:
        size = "infinitely far off" if one["size"] is None else f"off by {one['size']:.0e}"
        subject = WHAT[what].format(name=name)
        verb = "are" if what == "weights" else "is"
        of = " of the whole" if what in ("gradient", "optimizer state", "weights") else ""
        bound = f", {one['bound']:.0e} is allowed" if one["bound"] else ""
        return f"{subject} {verb} {size}{of}{bound}{ranks}"
    if what == "optimizer":
        right, left = one["values"]
        return f"{name} of the optimizer is {left}{ranks}, and {right} in one process"
    if what == "used":
        right = "only one process" if one["values"][0] else "only the layout"
        return f"{right} computes a gradient of {name}"
    if what in ("state dict", "replicas"):
        groups = " and ".join(_join_ranks(group) for group in one["values"])
        kind = "run.state_dict() has another" if what == "state dict" else "ranks hold another"
        return f"{kind} {name} on ranks {groups}"
    right, left = one["values"]
    if what == "steps":
        return f"the script goes on with {left}, and in one process with {right}"
    return f"{what} is {left}, and {right} in one process"


def advice_lines(first: Mapping[str, Any], actions: Sequence[str]) -> list[str]:
    """Return what the user can do about a difference, by what the script did."""
    text = " ".join(actions)
    if "changed .grad" in text:
        return [
            "under this layout .grad holds a rank's own sums there; try: clip= of "
            "shoal.parallelize, or run.update first"
        ]
    if first["what"] == "own parameter":
        return [
            "each rank steps it by its own samples; try: put it into the model, so that its "
            "gradient is summed"
        ]
    if "changed optimizer.state" in text:
        return ["the optimizer's state lies elsewhere under this layout"]
    if first["what"] == "optimizer":
        return ["try: set it from numbers that are equal on all ranks, as in result.loss"]
    if first["what"] == "weights" and "changed " in text:
        return [
            "under this layout a rank holds a part of the weights; try: write them before "
            "shoal.parallelize, or in place, element by element"
        ]
    if "hook" in text:
        return ["the hook sees a part of the tensor, or this rank's own gradient"]
    return []


def _join_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _join_names(names: Sequence[str], shown: int = 3) -> str:
    return ", ".join(names[:shown]) + ", …" * (len(names) > shown)
