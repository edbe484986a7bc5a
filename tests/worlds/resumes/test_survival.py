"""Kills, stops and resumes of the real command at 4 ranks: bit for bit the unbroken run."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from cli_run import TOY_ARGUMENTS, CommandLine, final_hashes, lines, trajectory
from shoal.report.goodput import compute_goodput

RANKS = "launch.processes=4"
STEPS = ("train.steps=16",)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happens to."""
    command = CommandLine(tmp_path_factory.mktemp("unbroken"), *TOY_ARGUMENTS, *STEPS, RANKS)
    code, output = command.finish()
    assert code == 0, output
    return command.run


def assert_same(run: Path, unbroken: Path) -> None:
    assert trajectory(run) == trajectory(unbroken)
    assert final_hashes(run) == final_hashes(unbroken)


def test_samples_of_the_unbroken_run_are_each_committed_once(unbroken: Path) -> None:
    spans = [samples for _, _, _, samples in trajectory(unbroken)]
    assert [step for step, *_ in trajectory(unbroken)] == list(range(1, 17))
    assert spans[0][0] == 0
    assert all(before[1] == after[0] for before, after in zip(spans, spans[1:], strict=False))
    # 70 samples in steps of 16: the fifth step of an epoch holds what is left.
    assert spans[4] == [64, 70]


def test_a_killed_rank_and_a_stop_are_survived_bit_for_bit(tmp_path: Path, unbroken: Path) -> None:
    """SIGKILL of a random rank, a restart by itself, SIGTERM of the whole, `--resume`."""
    seed = time.time_ns() % 10_000
    dice = random.Random(seed)
    victim, after = dice.randrange(4), dice.randrange(1, 7)
    command = CommandLine(tmp_path, *TOY_ARGUMENTS, *STEPS, RANKS)
    command.wait_for(lambda: command.steps() >= after)
    time.sleep(dice.random() * 0.08)
    command.kill(victim)
    command.wait_for(lambda: len(command.events("worker_started")) == 8)
    command.wait_for(lambda: command.steps() >= 11)
    command.process.send_signal(signal.SIGTERM)
    code, output = command.finish()
    assert code == 143, f"seed {seed}\n{output}"
    died = command.events("worker_died")
    assert [e["rank"] for e in died] == [victim], f"seed {seed}: {died}"
    assert output.count("killed") >= 1
    stopped_at = command.steps()
    assert 11 <= stopped_at < 16, f"seed {seed}"
    assert f"shoal train --resume runs/{command.run.name}" in output
    resumed = CommandLine(tmp_path, "--resume", "runs/run")
    code, output = resumed.finish()
    assert code == 0, f"seed {seed}\n{output}"
    assert_same(command.run, unbroken)
    assert f"resumed from step-{stopped_at}" in output
    check_goodput(command.run)


def check_goodput(run: Path) -> None:
    """Three starts, of which the first lost steps: the parts of the wall time add up to it."""
    found = compute_goodput(run)
    times_s = [event["time_s"] for event in lines(run / "events.jsonl")]
    assert found.wall_s == pytest.approx(max(times_s) - min(times_s), rel=0.01)
    assert found.committed_s == pytest.approx(
        sum(row["step_s"] for row in lines(run / "metrics.jsonl")), rel=0.05
    )
    assert (found.starts, found.steps, found.ranks) == (3, 16, 4)
    parts = found.parts()
    assert min(parts[name] for name in ("start", "validation", "lost", "between")) > 0


@pytest.mark.proof  # with workers that do not train: tests/launch/test_processes.py
def test_sigkill_of_the_supervisor_leaves_no_process(tmp_path: Path) -> None:
    command = CommandLine(tmp_path, *TOY_ARGUMENTS, "launch.processes=2")
    command.wait_for(lambda: command.steps() >= 1)
    family = psutil.Process(command.process.pid).children(recursive=True)
    assert len(family) >= 2
    command.process.kill()
    command.process.communicate(timeout=10)
    gone, alive = psutil.wait_procs(family, timeout=30)
    assert not alive, f"still there: {alive}"


@pytest.mark.proof
def test_a_kill_costs_one_start_and_two_steps_at_most(tmp_path: Path) -> None:
    """Saved at every step: the one that was under way and the one whose save was are done again."""
    command = CommandLine(tmp_path, *TOY_ARGUMENTS, "launch.processes=2", "checkpoint.every=1")
    command.wait_for(lambda: command.steps() >= 4)
    before = command.steps()
    command.kill(1)
    code, output = command.finish()
    assert code == 0, output
    assert len(command.events("restarting")) == 1
    (resumed,) = command.events("resumed")
    assert resumed["step"] >= before - 2


@pytest.mark.proof  # without processes: tests/trainer/test_own_folder.py
def test_live_folder_refuses_a_second_owner(tmp_path: Path) -> None:
    first = CommandLine(tmp_path, *TOY_ARGUMENTS, "launch.processes=1")
    first.wait_for(lambda: first.steps() >= 4)
    second = CommandLine(tmp_path, "--resume", "runs/run")
    code, output = second.finish()
    assert code == 2
    assert f"pid {first.process.pid}" in output
    assert "since" in output
    assert first.finish()[0] == 0


@pytest.mark.proof
def test_resume_on_another_number_of_processes(tmp_path: Path) -> None:
    """Four processes, then one: the curve goes on to rounding (design §6), samples as planned."""
    arguments = (*TOY_ARGUMENTS, "precision.compute=fp64", "checkpoint.every=6", RANKS)
    whole = CommandLine(tmp_path, *arguments)
    code, output = whole.finish()
    assert code == 0, output
    expected = trajectory(whole.run)
    (whole.run / "checkpoints" / "step-12").rename(tmp_path / "put-away")
    resumed = CommandLine(tmp_path, "--resume", "runs/run", "launch.processes=1")
    code, output = resumed.finish()
    assert code == 0, output
    assert "layout: ddp (dp_replicate = 4) → single" in output
    for ours, theirs in zip(trajectory(whole.run), expected, strict=True):
        assert ours[3] == theirs[3], "other samples"
        assert ours[1] == pytest.approx(theirs[1], rel=1e-10)
        assert ours[2] == pytest.approx(theirs[2], rel=1e-10)


def test_metrics_hold_every_promised_key(unbroken: Path) -> None:
    promised = [
        "step",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "step_s",
        "tokens_per_s",
        "mfu",
        "peak_memory_bytes",
        "comm_bytes",
        "comm_exposed_s",
        "data_wait_s",
    ]
    for row in lines(unbroken / "metrics.jsonl"):
        assert set(promised) <= set(row)
    started = [e for e in lines(unbroken / "events.jsonl") if e["event"] == "worker_started"]
    assert sorted(e["rank"] for e in started) == [0, 1, 2, 3]
    assert all(isinstance(e["pid"], int) for e in started)
