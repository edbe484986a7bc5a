"""Rows of the catalogue: dense peaks, shown memory, every usual spelling."""

from __future__ import annotations

import pytest

from shoal.base.errors import PlanError
from shoal.forecast.machines.catalogue import (
    CATALOGUE,
    GIB,
    LINKS,
    NETWORKS,
    get_device_model,
    network_link,
)


@pytest.mark.parametrize("row", CATALOGUE.values(), ids=CATALOGUE)
def test_rows_are_plausible(row):
    device = row.device
    boxed = float(device.name.rsplit("-", 1)[1].removesuffix("GB"))
    assert 0.9 * boxed <= device.memory_bytes / GIB <= boxed
    peaks = device.matrix_flops_per_s
    assert peaks["fp16"] >= peaks["fp32"] >= peaks["fp64"] > 0
    assert "fp8" not in peaks or 1.9 < peaks["fp8"] / peaks["fp16"] < 2.1
    assert [*device.ladder] == sorted(device.ladder)
    assert all(0 < share <= 1 for _, share in device.ladder)
    # a product needs 20 to 600 FLOP per byte to be bound by arithmetic on everything ever built
    assert 20 < peaks["fp16"] / device.stream_bytes_per_s < 600
    assert row.inside in LINKS
    assert row.network[0] in NETWORKS
    assert device.source
    assert LINKS[row.inside].source


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("A100", 312),
        ("H100", 989.4),
        ("H200", 989.4),
        ("B200", 2250),
        ("MI250X", 191.5),
        ("L40S", 362),
    ],
)
def test_peaks_are_dense(name, teraflops):
    assert get_device_model(name).device.matrix_flops_per_s["bf16"] == teraflops * 1e12


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("NVIDIA GeForce RTX 4090", "RTX4090-24GB"),
        ("A100 PCIe 40GB", "A100-PCIe-40GB"),
        ("a100-pcie", "A100-PCIe-80GB"),
        ("v100", "V100-32GB"),
        ("gb200", "GB200-186GB"),
        ("AMD Instinct MI300X", "MI300X-192GB"),
    ],
)
def test_spellings(spelling, name):
    assert get_device_model(spelling).device.name == name


def test_unknown_names_the_nearest():
    with pytest.raises(PlanError, match="try: MI250X-64GB"):
        get_device_model("MI250X-128GB")
    with pytest.raises(PlanError, match="try: L40S-48GB"):
        get_device_model("L40")


def test_a_node_shares_its_cards():
    assert (
        network_link("ib", 8, 400, 8).bytes_per_s == 8 * network_link("ib", 1, 400, 8).bytes_per_s
    )
    assert network_link("eth", 1, 100, 1).latency_s > network_link("ib", 1, 100, 1).latency_s
