"""Corrections of this machine's matrix rates by the steps of earlier runs.

A step does not reach the rate of one product in a loop: caches, other operations and the allocator
cost time, about the same share in every step of a machine and number format. Every run records its
share, and the median of the latest runs corrects later plans:

    share     (measured step − predicted seconds without matrix products) / predicted products

The file lies beside the machine's facts, one JSON line per run; the median ignores disturbed runs.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

from shoal.base.estimates.cluster import Cluster

LATEST = 15
"""Latest runs per number format of which the median counts."""

LEAST, MOST = 0.3, 4.0
"""Shares outside come from other programs on the cores, not from the machine."""

LEAST_PRODUCTS = 0.5
"""Least share of matrix products in a predicted step; with less the rest would distort the fit."""


def runs_path(machine: Path) -> Path:
    """Return the path of a machine's file of runs, beside its facts."""
    return machine.with_suffix(".runs.jsonl")


def rate_share(parts: dict[str, float], step_s: float, known: float) -> float | None:
    """Return a run's share: measured over predicted seconds of its matrix products.

    (step_s − all parts but "matrix") / "matrix" · known. None if the run is not informative:
    products are less than half of the predicted step, or the share is outside 0.3 … 4 (a disturbed
    machine).

    Args:
        parts: predicted seconds of a step by name.
        step_s: measured seconds.
        known: the share that already corrected the prediction's rates; 1: none.

    >>> round(rate_share({"matrix": 0.5, "gradients": 0.1}, 0.7, 1.0), 3)
    1.2
    """
    products_s = parts.get("matrix", 0.0)
    others_s = sum(parts.values()) - products_s
    if products_s <= 0.0 or products_s < LEAST_PRODUCTS * (products_s + others_s):
        return None
    share = (step_s - others_s) / products_s * known
    return share if LEAST <= share <= MOST else None


def record_run(machine: Path, compute: str, share: float) -> None:
    """Append a run's share to the file of runs beside a machine's facts; the newest 120 stay.

    A file that cannot be read or written stays unchanged, without an error.

    Args:
        machine: path of the facts (`machine_path`).
        compute: number format.
        share: from `rate_share`.
    """
    try:
        path = runs_path(machine)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        lines.append(json.dumps({"compute": compute, "share": share}))
        path.write_text("\n".join(lines[-8 * LATEST :]) + "\n", encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return


def read_corrections(machine: Path) -> dict[str, float]:
    """Read a machine's corrections: number format → median share of its latest 15 runs.

    A share is measured seconds divided by predicted ones.

    Args:
        machine: path of the machine's facts (`machine_path`), beside the file of runs.

    Returns:
        {} if there are none or the file cannot be read; damaged lines are skipped.
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


def correct_rates(cluster: Cluster, shares: dict[str, float]) -> Cluster:
    """Return the cluster with its matrix rates divided by the shares.

    >>> from shoal.base.estimates.cluster import Device, Link
    >>> link = Link("wire", 1e-5, 1e9)
    >>> cluster = Cluster(Device("d", 1.0, {"fp32": 12e9, "bf16": 9e9}, 1e9), 1, 1, link, link)
    >>> correct_rates(cluster, {"fp32": 1.2}).device.matrix_flops_per_s
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
