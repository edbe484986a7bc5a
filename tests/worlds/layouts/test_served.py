"""Parameter servers by the real command: deaths, bounds, samples, and another layout that goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import served_case as case
from cli_run import CommandLine, final_hashes, trajectory


def test_a_worker_that_dies_is_left_out_and_no_gradient_is_too_stale(tmp_path: Path) -> None:
    """Two servers, three workers of which one is slow and one is killed; then ddp goes on."""
    command = case.start(
        tmp_path,
        "launch.processes=5", "layout.servers=2", "layout.updates=bounded-stale",
        "layout.staleness=3", "train.steps=60", "checkpoint.every=20", "launch.restarts=0",
        "model.sleep_s=0.02",
    )  # fmt: skip
    command.wait_for(lambda: command.steps() >= 12)
    command.kill(1)
    code, output = command.finish()
    assert code == 0, output
    assert not command.events("worker_died")
    (left_out,) = command.events("worker_left_out")
    assert (left_out["rank"], left_out["left"]) == (1, [0, 2])
    ranks = json.loads((command.run / "ranks.json").read_text())["ranks"]
    assert [one["rank"] for one in ranks] == [0, 1, 2, 3, 4], "workers too, which keep no folder"
    assert len({one["pid"] for one in ranks}) == 5
    assert "rank 1 was killed by SIGKILL, and the others go on without it" in output
    told = case.staleness(command.run)
    assert told["largest"] == told["largest_of_rows"] <= told["bound"] == 3
    assert sum(told["counts"].values()) == 60
    assert case.each_once(command.run, 60)
    assert "accuracy" in output or "validation" in output
    more = ("layout.strategy=ddp", "layout.servers=0", "layout.updates=", "layout.staleness=0")
    again = CommandLine(
        tmp_path, "--resume", "runs/run", *more, "launch.processes=2", "train.steps=64",
        "train.micro_batch=8", "--force",
    )  # fmt: skip
    code, output = again.finish()
    assert code == 0, output
    assert command.steps() == 64
    assert case.each_once(command.run, 64)


SMALL = ("train.batch=16", "train.micro_batch=4", "train.prove=off", "precision.compute=fp32")


def test_tables_go_on_under_ddp_by_what_the_refusal_says(tmp_path: Path) -> None:
    """The page's command; a resume by another strategy alone is refused, and told what to add."""
    command = case.click(tmp_path, *SMALL, "train.steps=6")
    code, output = command.finish()
    assert code == 0, output
    more = ("layout.strategy=ddp", "launch.processes=2", "train.steps=9")
    code, output = CommandLine(tmp_path, "--resume", "runs/run", *more).finish()
    assert code == 2
    line = output.splitlines()[-1]
    assert "has no servers; try: layout.strategy=parameter-server, or without: " in line
    without = line.rpartition("or without: ")[2].split()
    assert without == ["layout.servers=0", "layout.serves="]
    code, output = CommandLine(tmp_path, "--resume", "runs/run", *more, *without).finish()
    assert code == 0, output
    assert command.steps() == 9
    assert case.each_once(command.run, 9)


@pytest.mark.proof
@pytest.mark.parametrize("victim", [0, 2])
def test_tables_on_a_server_survive_bit_for_bit(tmp_path: Path, victim: int) -> None:
    """SIGKILL of a worker, of the server: all start again from the last checkpoint."""
    words = (*SMALL, "train.steps=120", "checkpoint.every=5")
    unbroken = case.click(tmp_path / "whole", *words)
    killed = case.click(tmp_path / "killed", *words)
    killed.wait_for(lambda: killed.steps() >= 12)
    killed.kill(victim)
    for command in (unbroken, killed):
        code, output = command.finish()
        assert code == 0, output
    assert [event["rank"] for event in killed.events("worker_died")] == [victim]
    assert trajectory(killed.run) == trajectory(unbroken.run)
    assert final_hashes(killed.run) == final_hashes(unbroken.run)


@pytest.mark.proof
def test_the_pages_example_runs(tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "how-it-works" / "parameter-server.md"
    line = page.read_text().split("```\n")[1].strip()
    words = line.removeprefix("shoal train ").split()
    command = CommandLine(tmp_path, *words)
    code, output = command.finish()
    assert code == 0, output
    assert "(bound 6)" in output
    assert case.staleness(command.run)["largest_of_rows"] <= 6


@pytest.mark.proof
@pytest.mark.parametrize("updates", ["asynchronous", "bounded-stale"])
def test_a_server_that_dies_is_resumed_from_its_checkpoint(tmp_path: Path, updates: str) -> None:
    command = case.start(
        tmp_path, "launch.processes=3", f"layout.updates={updates}", "train.steps=60",
        "checkpoint.every=10", "model.sleep_s=0.02",
    )  # fmt: skip
    command.wait_for(lambda: command.steps() >= 25)
    command.kill(2)
    code, output = command.finish()
    assert code == 0, output
    (resumed,) = command.events("resumed")
    assert resumed["step"] >= 10
    assert len(command.events("restarting")) == 1
    assert case.each_once(command.run, 60)


@pytest.mark.proof
@pytest.mark.parametrize("victim", [0, 2])
def test_a_synchronous_server_survives_bit_for_bit(tmp_path: Path, victim: int) -> None:
    """SIGKILL of a worker, of the server: all start again from the last checkpoint."""
    words = ("launch.processes=3", "train.micro_batch=4", "train.steps=30", "checkpoint.every=5")
    unbroken = case.start(tmp_path / "whole", *words, "model.sleep_s=0.01")
    killed = case.start(tmp_path / "killed", *words, "model.sleep_s=0.01")
    killed.wait_for(lambda: killed.steps() >= 12)
    killed.kill(victim)
    for command in (unbroken, killed):
        code, output = command.finish()
        assert code == 0, output
    assert [event["rank"] for event in killed.events("worker_died")] == [victim]
    assert trajectory(killed.run) == trajectory(unbroken.run)
    assert final_hashes(killed.run) == final_hashes(unbroken.run)
