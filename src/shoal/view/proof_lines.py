"""A proof report as text: verdict first, then the worst parameters, then the cause.

It takes the report that `shoal.proof` wrote as JSON, without torch.
"""

from __future__ import annotations

from typing import Any

from shoal.base.text.units import seconds_text

Report = dict[str, Any]
WORST = 8
"""Parameters shown; --json has all."""


def proof_text(report: Report, worst: int = WORST) -> str:
    """Format a proof's report as text for a terminal: verdict, parameters, cause; no colours.

    Args:
        report: the JSON document that `shoal.proof` wrote.
        worst: how many parameters of each trajectory are shown: those that differ first, then by
            size.
    """
    lines = [verdict_line(report), *(f"  {text}" for text in report["said"])]
    for trajectory in report["trajectories"]:
        lines += ["", *_trajectory(trajectory, worst)]
    if report["cause"]:
        lines += ["", report["cause"]["text"]]
    return "\n".join(lines)


def verdict_line(report: Report) -> str:
    """Return on one line what was compared and the verdict.

    >>> verdict_line(
    ...     {
    ...         "verdict": "not proven",
    ...         "reason": "memory: 3 GiB are missing",
    ...         "layout": "ddp",
    ...         "processes": 2,
    ...         "precision": "fp64",
    ...         "steps": 5,
    ...         "seconds": 2.0,
    ...         "trajectories": [],
    ...     }
    ... )
    'not proven: memory: 3 GiB are missing'
    """
    if report["verdict"] == "not proven":
        return f"not proven: {report['reason']}"
    processes = report["processes"]
    where = f"{report['layout']} on {processes} process{'es' if processes > 1 else ''}"
    names = " and ".join(t["optimizer"] for t in report["trajectories"])
    took = f"{report['steps']} steps of {names} in {report['precision']}, "
    took += seconds_text(report["seconds"])
    by_blocks = ", by blocks" * report.get("by_blocks", False)
    if report["verdict"] == "equal":
        size = _size_text(max(t["largest"]["gradient"] or 0.0 for t in report["trajectories"]))
        return (
            f"equal{by_blocks}: {where} computes what one process computes; the largest gradient "
            f"difference is {size} of the whole ({took})"
        )
    first = next(t for t in report["trajectories"] if not t["equal"])
    return f"different{by_blocks}: {where}: {_first_difference_text(first)} ({took})"


def _first_difference_text(trajectory: Report) -> str:
    found = trajectory["first"]
    row = found["row"]
    when = f"at step {trajectory['rows'][row]['step']}" if row >= 0 else "at the end"
    name = f" of {found['name']}" if found["name"] else ""
    far = "" if found["size"] is None else f" by {_size_text(found['size'])}"
    bound = "" if not found["bound"] else f", {found['bound']:.0e} is allowed"
    return f"the first difference is the {found['what']}{name} {when}{far}{bound}"


def _trajectory(trajectory: Report, worst: int) -> list[str]:
    bounds, rows = trajectory["bounds"], trajectory["rows"]
    state = "equal" if trajectory["equal"] else "different"
    losses = " ".join(f"{row['loss'][1]:.6g}" for row in rows if row["loss"][1] is not None)
    lines = [
        f"{trajectory['optimizer']}: {state}; losses {losses}",
        f"  bounds: gradients {bounds['first']:.0e} of the whole gradient, weights "
        f"{bounds['weights']:.0e} of all weights",
    ]
    parameters = sorted(trajectory["parameters"], key=_sort_key)
    shown = parameters[:worst]
    width = max([len(p["name"]) for p in shown] + [9])
    lines.append(f"  {'parameter':<{width}}  {'gradient':>9}  {'at step':>7}  {'weights':>9}")
    for p in shown:
        mark = "" if p["equal"] else "  differs"
        lines.append(
            f"  {p['name']:<{width}}  {_size_text(p['gradient']):>9}  {p['step']:>7}  "
            f"{_size_text(p['weights']):>9}{mark}"
        )
    rest = len(parameters) - len(shown)
    if rest > 0:
        lines.append(f"  … and {rest} nearer ones")
    return lines


def _sort_key(parameter: Report) -> tuple[bool, float]:
    """Return the sort key of a parameter: differing ones first, then by size, NaN last."""
    gradient, weights = parameter["gradient"], parameter["weights"]
    size = float("inf") if gradient is None or weights is None else max(gradient, weights)
    return bool(parameter["equal"]), -size


def _size_text(value: float | None) -> str:
    """Format a share; None stands for a size that is not finite."""
    if value is None:
        return "∞"
    return f"{value:.1e}" if value else "0"
