"""What runs taught about this machine: how long real steps take against the rates of small tests.

A rate measured on one product in a loop is not what a step reaches: caches, other operations and
the allocator take their share, about the same one in every step of a machine and number format.
After a run its share is written down, and the median of the latest runs corrects later plans:

    share   (measured step − what is no matrix product in the prediction) / predicted products

Kept beside the machine's facts, one JSON line per run; a run that was disturbed is one of many.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

from shoal.base.estimates.cluster import Cluster

LATEST = 15
"""Runs per number format whose median counts."""

LEAST, MOST = 0.3, 4.0
"""Shares beyond are no fact about the machine: something else took its cores."""

LEAST_PRODUCTS = 0.5
"""Of a predicted step: with less in matrix products, the rest would be blamed on them."""


def runs_path(machine: Path) -> Path:
    """Where the runs of a machine stand: beside its facts."""
    return machine.with_suffix(".runs.jsonl")


def share_of(parts: dict[str, float], step_s: float, known: float) -> float | None:
    """Compute a run's share: measured over predicted seconds of its matrix products.

    (step_s − all parts but "matrix") / "matrix" · known. None where that says nothing: products are
    less than half of the predicted step, or the share is outside 0.3 … 4 (a disturbed machine).

    Args:
        parts: predicted seconds of a step by name.
        step_s: measured.
        known: the share by which the prediction's rates were corrected already; 1: by none.

    >>> round(share_of({"matrix": 0.5, "gradients": 0.1}, 0.7, 1.0), 3)
    1.2
    """
    products_s = parts.get("matrix", 0.0)
    others_s = sum(parts.values()) - products_s
    if products_s <= 0.0 or products_s < LEAST_PRODUCTS * (products_s + others_s):
        return None
    share = (step_s - others_s) / products_s * known
    return share if LEAST <= share <= MOST else None


def note_run(machine: Path, compute: str, share: float) -> None:
    """Append a run's share to the file of runs beside a machine's facts; the newest 120 stay.

    Args:
        machine: path of the facts (`machine_path`).
        compute: number format.
        share: as `share_of`.

    A file that cannot be read or written is left as it is, without an error.
    """
    try:
        path = runs_path(machine)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        lines.append(json.dumps({"compute": compute, "share": share}))
        path.write_text("\n".join(lines[-8 * LATEST :]) + "\n", encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return


def learnt(machine: Path) -> dict[str, float]:
    """Read what runs taught of a machine: number format → median share of its latest 15 runs.

    A share is measured seconds by predicted ones.

    Args:
        machine: path of the machine's facts (`machine_path`), beside which runs are noted.

    Returns:
        {} where there are none or the file cannot be read; damaged lines are passed over.
    """
    found: dict[str, list[float]] = {}
    try:
        lines = runs_path(machine).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    for line in lines:
        try:
            record = json.loads(line)
            found.setdefault(str(record["compute"]), []).append(float(record["share"]))
        except (ValueError, KeyError, TypeError):
            continue
    return {name: statistics.median(shares[-LATEST:]) for name, shares in found.items()}


def corrected(cluster: Cluster, shares: dict[str, float]) -> Cluster:
    """The cluster with the matrix rates that runs reach.

    >>> from shoal.base.estimates.cluster import Device, Link
    >>> link = Link("wire", 1e-5, 1e9)
    >>> cluster = Cluster(Device("d", 1.0, {"fp32": 12e9, "bf16": 9e9}, 1e9), 1, 1, link, link)
    >>> corrected(cluster, {"fp32": 1.2}).device.matrix_flops_per_s
    {'fp32': 10000000000.0, 'bf16': 9000000000.0}
    """
    if not shares:
        return cluster
    rates = {
        name: rate / shares.get(name, 1.0)
        for name, rate in cluster.device.matrix_flops_per_s.items()
    }
    source = f"{cluster.device.source}; corrected by runs"
    return replace(cluster, device=replace(cluster.device, matrix_flops_per_s=rates, source=source))
