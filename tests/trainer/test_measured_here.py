"""Whose measurement a run is foreseen by: that of the devices its ranks compute on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shoal.fabric import start_world
from shoal.forecast.machines.measured_machine import machine_path
from shoal.machine.measure import QUICK, measure_machine
from shoal.trainer.autotune import rank_layouts
from shoal.trainer.jobs.run_forecast import describe_local_cluster


def test_a_machine_with_gpus_that_computes_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its GPUs were measured once; ranks on the CPU are foreseen by the CPU, and what they hold."""
    monkeypatch.setattr(rank_layouts, "cache_folder", lambda: tmp_path)
    measure_machine(start_world(), tmp_path, QUICK)
    threads = torch.get_num_threads()
    document = json.loads(machine_path(tmp_path, 1, "cpu", threads).read_text())
    machine_path(tmp_path, 1, "gpu", threads).write_text(json.dumps({**document, "kind": "gpu"}))

    here = describe_local_cluster(1, torch.device("cpu"), held_bytes=2**28)
    assert (here.device.kind, here.device.reserved_bytes) == ("cpu", 2**28)
    assert describe_local_cluster(1, torch.device("cuda", 0), held_bytes=2**28).device.kind == "gpu"
