"""Runs correct what small tests said of a machine: the median of the latest, by number format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.base.estimates.cluster import Cluster, Device, Link
from shoal.forecast.machines import measured_machine
from shoal.forecast.machines.refit_rates import (
    LATEST,
    MOST,
    correct_rates,
    rate_share,
    read_corrections,
    record_run,
    runs_path,
)

LINK = Link("wire", 1e-5, 1e9)
CLUSTER = Cluster(Device("d", 1e9, {"fp32": 1e10, "bf16": 4e10}, 1e9), 1, 2, LINK, LINK)


def test_a_share_is_of_the_products_alone() -> None:
    parts = {"matrix": 0.4, "gradients": 0.1}
    assert rate_share(parts, 0.5, 1.0) == pytest.approx(1.0)
    assert rate_share(parts, 0.9, 1.0) == pytest.approx(2.0)
    assert rate_share(parts, 0.5, 1.5) == pytest.approx(1.5), "what was corrected already counts"
    assert rate_share(parts, 60.0, 1.0) is None, "something else took the cores"
    assert rate_share(parts, 0.9, 1.5 * MOST) is None
    assert rate_share({"gradients": 0.1}, 0.5, 1.0) is None
    assert rate_share({"matrix": 0.1, "gradients": 0.2}, 0.5, 1.0) is None, "few products"


def test_the_median_of_the_latest_counts(tmp_path: Path) -> None:
    machine = tmp_path / "m.json"
    assert read_corrections(machine) == {}
    record_run(machine, "fp32", 9.0)
    for share in [1.2, 1.1, 1.3] * (LATEST // 3):
        record_run(machine, "fp32", share)
    record_run(machine, "bf16", 2.0)
    assert read_corrections(machine) == {"fp32": 1.2, "bf16": 2.0}
    with runs_path(machine).open("a") as file:
        file.write("torn\n")
    assert read_corrections(machine)["bf16"] == 2.0


def test_rates_follow(tmp_path: Path) -> None:
    assert correct_rates(CLUSTER, {}) is CLUSTER
    device = correct_rates(CLUSTER, {"fp32": 1.25}).device
    assert device.matrix_flops_per_s == {"fp32": 8e9, "bf16": 4e10}
    assert device.source.endswith("corrected by runs")


def test_a_folder_that_cannot_be_written_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    record_run(tmp_path / "file" / "m.json", "fp32", 1.0)
    assert read_corrections(tmp_path / "file" / "m.json") == {}


def test_what_is_read_is_corrected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = measured_machine.machine_path(tmp_path, 2, "cpu")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"version": measured_machine.VERSION}))
    monkeypatch.setattr(measured_machine, "cluster_from_document", lambda document: CLUSTER)
    record_run(path, "fp32", 2.0)
    found = measured_machine.read_measured(tmp_path, 2, "cpu")
    assert found is not None
    with monkeypatch.context() as broken:  # a file with "local": 0
        broken.setattr(measured_machine, "cluster_from_document", lambda document: 1 // 0)
        assert measured_machine.read_measured(tmp_path, 2, "cpu") is None
    assert found.device.matrix_flops_per_s["fp32"] == 5e9
