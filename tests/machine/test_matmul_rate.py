"""The machine's matrix rate: kept while it can be right, measured again when it cannot. No clocks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.fabric import World
from shoal.fabric.rendezvous.process_info import ProcessInfo
from shoal.machine import matmul
from shoal.machine.matmul import DAY_S, FILE, KEEP_DAYS, invalidate_rate, matmul_flops_per_s
from shoal.trainer.metrics_recorder import MetricsRecorder
from shoal.trainer.step.metrics_rows import write_row

NOW_S = 1_700_000_000.0


class Machine:
    """What the next measurements give, how many were made, and what day it is."""

    def __init__(self, cache: Path, patch: pytest.MonkeyPatch) -> None:
        self.cache, self.made, self.now_s = cache, 0, NOW_S
        self.next: tuple[float, bool] = (0.0, True)
        patch.setattr(matmul, "_measure_flops_per_s", self.measure)
        patch.setattr(matmul, "time", SimpleNamespace(**{**vars(matmul.time), "time": self.clock}))
        self.world = World(ProcessInfo(), torch.device("cpu"), None)

    def clock(self) -> float:
        return self.now_s

    def measure(self, *_: Any) -> tuple[float, bool]:
        self.made += 1
        return self.next

    def rate(self, gives: float = 0.0, quiet: bool = True, precision: str = "fp32") -> float:
        self.next = gives, quiet
        return matmul_flops_per_s(self.world, precision, self.cache)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_a_quiet_measurement_is_kept(machine: Machine) -> None:
    assert [machine.rate(100.0), machine.rate(999.0)] == [100.0, 100.0]
    assert machine.made == 1
    (kept,) = json.loads((machine.cache / FILE).read_text()).values()
    assert kept == {"flops_per_s": 100.0, "measured_s": NOW_S, "doubt": ""}


def test_one_under_load_is_made_again_and_the_best_stays(machine: Machine) -> None:
    rates = [machine.rate(27.0, quiet=False), machine.rate(91.0, quiet=False), machine.rate(40.0)]
    assert rates == [27.0, 91.0, 91.0]
    assert machine.rate(999.0) == 91.0, "the last one was quiet"
    assert machine.made == 3


def test_an_old_one_is_replaced_whatever_it_was(machine: Machine) -> None:
    assert machine.rate(100.0) == 100.0
    machine.now_s += KEEP_DAYS * DAY_S
    assert machine.rate(60.0) == 100.0, "to the day"
    machine.now_s += 1
    assert machine.rate(60.0) == 60.0
    machine.now_s = NOW_S - 1
    assert machine.rate(70.0) == 70.0, "from the future: some clock was wrong"


@pytest.mark.parametrize("left", ["{", "[1]", '{"KEY": "fast"}', '{"KEY": {"flops_per_s": -1}}'])
def test_a_damaged_file_is_not_there(machine: Machine, left: str) -> None:
    key = matmul._key(machine.world, "fp32")
    (machine.cache / FILE).write_text(left.replace("KEY", key))
    assert machine.rate(100.0) == machine.rate(999.0) == 100.0


def test_what_an_older_version_kept_has_no_date(machine: Machine) -> None:
    key = matmul._key(machine.world, "fp32")
    (machine.cache / FILE).write_text(json.dumps({key: 27.4, "another": 5.0}))
    assert machine.rate(147.5) == 147.5
    assert machine.rate(999.0) == 147.5
    assert json.loads((machine.cache / FILE).read_text())["another"] == 5.0


def test_steps_that_pass_it_have_it_measured_again(machine: Machine, tmp_path: Path) -> None:
    """No share beyond 100 % is ever shown: it is left out, said once, and right at the next start."""
    rate = machine.rate(27.4e9)
    recorder = MetricsRecorder(tmp_path / "run", machine.world)
    recorder.machine_flops_per_s, recorder.flops_per_sample = rate, 1e30
    recorder.passed = lambda: invalidate_rate(machine.world, "fp32", machine.cache)
    rows = [write_row(recorder, {"step": step, "tokens": 1}, 8) for step in (1, 2)]
    assert [row["mfu"] for row in rows] == [None, None]
    events = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    said = [json.loads(line)["text"] for line in events]
    assert len(said) == 1
    assert "MFU: steps pass the 27.4 GFLOP/s that this machine's" in said[0]
    assert "(2023-11-1" in said[0]
    assert machine.rate(147.5e9) == 147.5e9
    recorder.machine_flops_per_s, recorder.flops_per_sample = 1e30, 1e9
    assert 0 < write_row(recorder, {"step": 3, "tokens": 1}, 8)["mfu"] < 1


def test_formats_have_their_own_and_imitated_fp16_is_fp32(machine: Machine) -> None:
    assert machine.rate(100.0, precision="fp32") == 100.0
    assert machine.rate(200.0, precision="bf16") == 200.0
    assert machine.rate(300.0, precision="fp16") == 100.0


def test_a_real_one_is_finite_and_says_whether_it_was_quiet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matmul, "ROUNDS", 1)
    rate, quiet = matmul._measure_flops_per_s(torch.float32, torch.device("cpu"))
    assert rate > 0
    assert isinstance(quiet, bool)
    monkeypatch.setattr(matmul, "QUIET", 1e9)
    assert not matmul._measure_flops_per_s(torch.float32, torch.device("cpu"))[1]
