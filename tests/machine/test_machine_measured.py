"""A stored machine becomes a cluster; what cannot be read is as if it were not there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from shoal.base.estimates.facts import MachineFacts
from shoal.fabric import World
from shoal.fabric.rendezvous.process_info import ProcessInfo
from shoal.forecast.machines.cluster_syntax import parse_machines
from shoal.forecast.machines.measured_machine import (
    BUSY_BYTES,
    BUSY_WAIT_S,
    _gpu_name,
    cluster_from_document,
    estimate_this_machine,
    machine_path,
    read_measured,
)
from shoal.machine import measure as machine
from shoal.machine.link_rates import fit_line
from shoal.machine.measure import MeasurementSizes, best_rates, measure_machine, write_bytes_per_s

LINE = {"latency_s": 2e-5, "bytes_per_s": 1e9, "error": 0.04}
DOCUMENT = {
    "version": 1,
    "kind": "cpu",
    "device": "a chip, 4 cores / 2",
    "processes": 4,
    "local": 2,
    "threads": 2,
    "torch": "2.13.0",
    "when": "2026-11-20",
    "memory_bytes": 8e9,
    "process_bytes": 3e8,
    "matrix": {"fp32": [[1e6, 1e10], [1e9, 4e10]], "bf16": [[1e6, 1e10], [1e9, 1e11]]},
    "stream": [[1e5, 2e10], [1e8, 5e9]],
    "operation_s": 3e-6,
    "operation_backward_s": 6e-6,
    "host_bytes_per_s": 7e9,
    "disk_bytes_per_s": 4e8,
    "links": {
        "inside": {
            "ranks": 2,
            "all_reduce": LINE,
            "reduce_scatter": {**LINE, "bytes_per_s": 5e8},
            "all_gather": {**LINE, "bytes_per_s": 2e9},
        },
        "across": {"ranks": 2, "all_reduce": {**LINE, "bytes_per_s": 1e8}},
    },
}


def store(folder, document, processes=4, kind="cpu"):
    path = machine_path(folder, processes, kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document if isinstance(document, str) else json.dumps(document))


def test_a_document_is_a_cluster(tmp_path):
    store(tmp_path, DOCUMENT)
    cluster = read_measured(tmp_path, 4)
    device = cluster.device
    assert (cluster.nodes, cluster.per_node, cluster.devices) == (2, 2, 4)
    assert device.matrix_flops_per_s == {"fp32": 4e10, "bf16": 1e11}
    assert device.ladder_of("fp32") == ((1e6, 0.25), (1e9, 1.0))
    assert device.ladder_of("bf16") == ((1e6, 0.1), (1e9, 1.0))
    assert device.ladder_of("fp64") == device.ladder == device.ladder_of("fp32")
    assert device.stream_ladder == ((1e5, 2e10), (1e8, 5e9))
    assert (device.stream_bytes_per_s, device.reserved_bytes) == (5e9, 3e8)
    # in a step the cores are busy, so messages wait
    assert cluster.inside.latency_s == 2e-5 + BUSY_WAIT_S
    assert cluster.inside.bytes_per_s == 1e9 / BUSY_BYTES
    assert cluster.across.bytes_per_s == 1e8
    assert cluster.calibration.constants_s == {"operation": 3e-6, "operation_backward": 6e-6}
    assert cluster.calibration.efficiency == {"parameters": 0.5, "reduce_scatter": 2.0}
    assert cluster.disk_bytes_per_s == 4e8
    assert "measured here" in device.source
    assert "not measured" not in device.source


def test_one_process_has_no_links():
    alone = cluster_from_document({**DOCUMENT, "processes": 1, "local": 1, "links": {}})
    assert alone.devices == 1
    assert "not measured" in alone.inside.source
    assert alone.calibration.efficiency == {}


@pytest.mark.parametrize(
    "broken",
    [
        "{ half",
        "[]",
        {**DOCUMENT, "version": 0},
        {k: v for k, v in DOCUMENT.items() if k != "stream"},
        {**DOCUMENT, "matrix": {"fp32": []}},
        {**DOCUMENT, "matrix": {"fp32": [[1e6, 0.0]]}},
    ],
)
def test_what_cannot_be_read_is_not_there(tmp_path, broken):
    store(tmp_path, broken)
    assert read_measured(tmp_path, 4) is None


def test_kinds_and_numbers_of_processes_are_apart(tmp_path):
    store(tmp_path, {**DOCUMENT, "kind": "gpu"}, kind="gpu")
    assert read_measured(tmp_path, 4).device.kind == "gpu"
    assert read_measured(tmp_path, 4, "cpu") is None
    assert read_measured(tmp_path, 2) is None
    machine = MachineFacts(4, 2**34, 1)
    assert "not measured" in parse_machines("4xcpu", machine, tmp_path).device.source
    store(tmp_path, DOCUMENT)
    assert "measured here" in parse_machines("4xcpu", machine, tmp_path).device.source


def test_a_gpu_machine_that_was_not_measured(tmp_path):
    told = tmp_path / "0000:01:00.0"
    told.mkdir()
    (told / "information").write_text("Model: \t NVIDIA H200\nIRQ: 7\n")
    assert _gpu_name(tmp_path) == "NVIDIA H200"
    assert _gpu_name(tmp_path / "none") == ""
    cluster = estimate_this_machine(MachineFacts(16, 2**37, 2), 2)
    assert cluster.device.kind == "gpu"
    assert "not measured" in cluster.device.source


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_the_line_gives_back_latency_and_rate(kind, ranks):
    both = 2 if kind == "all_reduce" else 1
    points = [(m, both * (ranks - 1) * (3e-5 + m / ranks / 2e9)) for m in (1e3, 1e5, 1e6, 1e7)]
    told = fit_line(points, ranks, kind)
    assert told["latency_s"] == pytest.approx(3e-5)
    assert told["bytes_per_s"] == pytest.approx(2e9)
    assert told["error"] == pytest.approx(0, abs=1e-9)


def test_noise_never_gives_less_than_nothing():
    falling = fit_line([(1e3, 1e-3), (1e6, 1e-4)], 2, "all_reduce")
    steep = fit_line([(1e3, 1e-9), (1e6, 1e-3)], 2, "all_reduce")
    assert falling["latency_s"] >= 0
    assert steep["latency_s"] >= 0
    assert min(falling["bytes_per_s"], steep["bytes_per_s"]) > 0
    # nobody saw more than the largest message's 1 MB in 0.1 ms
    assert falling["bytes_per_s"] == pytest.approx(1e6 / 1e-4)


def test_facts_are_those_of_as_many_threads_as_the_user_asked_for(tmp_path, monkeypatch):
    """Measured by ranks of one thread, a plan in the same shell must find them."""
    monkeypatch.setattr("shoal.forecast.machines.measured_machine.usable_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "3,1")
    asked = machine_path(tmp_path, 2, "cpu", 3)
    assert machine_path(tmp_path, 2, "cpu") == asked
    assert asked.name.endswith("-3-threads.json")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert machine_path(tmp_path, 2, "cpu") == machine_path(tmp_path, 2, "cpu", 4) != asked


def test_a_file_of_no_version_is_measured_again(tmp_path, monkeypatch):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({k: v for k, v in DOCUMENT.items() if k != "version"}))
    monkeypatch.setattr(machine, "cluster_from_document", lambda document: document)
    assert machine._read(path) is None
    path.write_text(json.dumps(DOCUMENT))
    assert machine._read(path) == DOCUMENT


@pytest.fixture
def one_thread(monkeypatch):
    """A run that was told to have one: two that wait for a busy core spin for seconds."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_one_process_measures_and_remembers(tmp_path):
    world = World(ProcessInfo(), torch.device("cpu"), None)
    tiny = MeasurementSizes((16, 32), (4096, 16384), (1024, 65536), 4096, 2, 2)
    first = measure_machine(world, tmp_path, tiny)
    assert [flop for flop, _ in first["matrix"]["bf16"]] == [2 * 16**3, 2 * 32**3]
    assert [size for size, _ in first["stream"]] == [4096, 16384]
    assert first["links"] == {}
    assert min(first[k] for k in ("process_bytes", "operation_s", "disk_bytes_per_s")) > 0
    machine_path(tmp_path, 1, "cpu").write_text(json.dumps({**first, "device": "remembered"}))
    assert measure_machine(world, tmp_path, tiny)["device"] == "remembered"
    assert measure_machine(world, tmp_path, tiny, again=True)["device"] == first["device"]
    assert read_measured(tmp_path, 1).device.name == first["device"]


def test_of_several_passes_the_best_of_each_number_counts():
    def passed(slow_matrix, slow_links):
        message = [(1e3, 1e-4 * slow_links), (1e6, 1e-3 * slow_links)]
        kinds = {kind: {"points": message} for kind in ("all_reduce", "reduce_scatter")}
        return {
            "matrix": {"fp32": [[1e6, 1e10 / slow_matrix], [1e9, 4e10]][: 3 - slow_matrix]},
            "stream": [[1e5, 2e10 / slow_links]],
            "host_bytes_per_s": 7e9 / slow_matrix,
            "disk_bytes_per_s": 4e8 / slow_links,
            "operation_s": 3e-6 * slow_matrix,
            "operation_backward_s": 6e-6 * slow_links,
            "links": {"inside": {"ranks": 2, **kinds, "all_gather": {"points": message}}},
        }

    # Each pass has a slow half; the second one gave up the larger product.
    best = best_rates([passed(1, 2), passed(2, 1)])
    alone = best_rates([passed(1, 1)])
    assert best == alone
    assert best["matrix"]["fp32"] == [[1e6, 1e10], [1e9, 4e10]]
    line = fit_line([(1e3, 1e-4), (1e6, 1e-3)], 2, "all_reduce")
    assert best["links"]["inside"]["all_reduce"]["bytes_per_s"] == line["bytes_per_s"]


def test_a_cache_that_cannot_be_written_costs_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    world = World(ProcessInfo(), torch.device("cpu"), None)
    told = measure_machine(
        world, tmp_path / "file", MeasurementSizes((16,), (4096,), (1024, 4096), 4096, 1, 1)
    )
    assert told["disk_bytes_per_s"] == 0


def test_the_disk_keeps_nothing(tmp_path):
    assert write_bytes_per_s(tmp_path / "new", 10000) > 0
    assert list((tmp_path / "new").iterdir()) == []


def test_reading_needs_no_torch():
    program = (
        "import sys; from shoal.forecast.machines import cluster_syntax; "
        "cluster_syntax.parse_machines('16x8xH100 + 8xA100'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0
