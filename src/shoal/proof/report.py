"""JSON report of a proof: a verdict, and per trajectory the distance of the two sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from shoal.base.runlog.damaged_lines import replace_non_finite
from shoal.proof.equality_bounds import EqualityBounds
from shoal.proof.trajectory_record import TrajectoryRecord
from shoal.proof.verdict import RecordComparison

Report = dict[str, Any]
"""JSON: verdict (equal, different, not proven), reason, cause, layout, processes, precision,
steps, seconds, versions, by_blocks (one block of each kind and the ends), said (changes of
the model for the proof), and per trajectory its bounds, rows and parameters; `as_is` are its
largest differences before casts were lifted."""


SMOOTH = ("loss", "gradient", "gradient norm", "weights", "buffer")
"""Differences that rounding can cause; it cannot change counts, decisions or used parameters."""

ROUNDINGS = 16
"""How much farther than one change of all weights in their last bits rounding may take a layout: it
adds numbers in another order in every layer and step."""


def trajectory_json(
    name: str,
    expected: TrajectoryRecord,
    got: TrajectoryRecord,
    comparison: RecordComparison,
    bounds: EqualityBounds,
) -> Report:
    """Return one trajectory's JSON, without a cause; numbers that are not finite become null."""
    first = comparison.first
    found: Report = {
        "optimizer": name,
        "equal": comparison.equal,
        "bounds": asdict(bounds),
        "largest": {
            "loss": comparison.largest_loss,
            "gradient_norm": comparison.largest_norm,
            "gradient": max((p.gradient for p in comparison.parameters), default=0.0),
            "weights": max((p.weights for p in comparison.parameters), default=0.0),
        },
        "rows": [
            {
                "label": ours.label,
                "step": ours.step,
                "targets": ours.targets,
                "loss": [ours.loss, theirs.loss],
                "grad_norm": [ours.grad_norm, theirs.grad_norm],
            }
            for ours, theirs in zip(expected.rows, got.rows, strict=False)
        ],
        "parameters": [asdict(p) for p in comparison.parameters],
        "first": None if first is None else asdict(first),
        "cause": None,
    }
    return replace_non_finite(found)


def make_verdict(trajectories: list[Report], why: str) -> Report:
    """Return the verdict, with its reason or its cause.

    Args:
        why: the reason why nothing is proven, "" otherwise.
    """
    wrong = [t for t in trajectories if not t["equal"]]
    return {
        "verdict": "not proven" if why else "different" if wrong else "equal",
        "reason": why,
        "cause": wrong[0]["cause"] if wrong else None,
    }


def largest_difference(told: Report) -> str:
    """Return the largest difference of a trajectory's losses, norms and gradients."""
    largest = [told["largest"][what] for what in ("loss", "gradient_norm", "gradient")]
    return "infinitely far" if None in largest else f"{max(largest):.0e}"


def format_first_difference(first: Mapping[str, Any]) -> str:
    """Return the first difference over its bound, as text.

    >>> format_first_difference(
    ...     {"what": "buffer", "name": "norm.running_mean", "size": 4e-10, "bound": 1e-10}
    ... )
    'buffer norm.running_mean is 4e-10 off, bound 1e-10'
    """
    size = "infinitely far" if first["size"] is None else f"{first['size']:.0e}"
    bound = f", bound {first['bound']:.0e}" if first["bound"] else ""
    return f"{first['what']} {first['name']}".strip() + f" is {size} off{bound}"


def is_within_rounding(told: Report, rounding: Report) -> bool:
    """Return whether no number of a trajectory differs more than rounding alone makes it differ."""
    pairs = [(told["largest"][what], rounding["largest"][what]) for what in told["largest"]]
    return all(
        a is not None and (b is None or a <= max(ROUNDINGS * b, told["bounds"]["first"]))
        for a, b in pairs
    )


def format_float32_note(report: Report) -> str:
    """Return the line on a float32 report about a model that cannot run in float64."""
    if report["verdict"] == "not proven":
        return f"nor in float32: {report['reason']}"
    if report["verdict"] == "different":
        return f"in float32 it differs, as rounding alone may: {report['cause']['text']}"
    first = report["trajectories"][0]
    return (
        f"in float32 instead it is equal within {first['bounds']['first']:.0e} at step 1 "
        f"(largest difference of a gradient {largest_difference(first)})"
    )
