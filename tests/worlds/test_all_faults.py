"""The field's faults, done to the real command one by one: who, why, what it cost, what is left.

Of each: the run comes back as if nothing had been, or ends with a status that says so; `shoal
diagnose` names the rank and the cause from the folder alone; no process and no lock is left. The
numbers are those of the field's table of 25 faults. Of those that are missing here a full disk is
in test_faults, hostile files in tests/checkpoint, strangers in test_hijack and test_attacked, a
slow rank in test_slow_ranks; clocks that jump have no test yet.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from cli_run import CommandLine, lines, trajectory
from shoal.checkpoint.listing import find
from shoal.view.diagnose import Finding, diagnose

HERE = Path(__file__).parent
ARGUMENTS = [
    "model.build=faulty:build", "data.source=faulty:data", "train.batch=8", "train.micro_batch=2",
    "train.steps=24", "checkpoint.every=4", "precision.compute=fp32", "train.prove=off",
    "launch.patience_s=0", "launch.processes=2",
]  # fmt: skip
AFTER = {"forward": 34, "data": 70}
"""Passes, samples of one rank: in the middle of the run."""


def command(folder: Path, asked: dict[str, Any] | None, *arguments: str) -> CommandLine:
    """A run in which something goes wrong; None: nothing."""
    for name in ("hanging.py", "faulty.py"):
        shutil.copy(HERE / name, folder)
    place = (asked or {}).get("place", "")
    told = {"rank": 1, "after": AFTER.get(place, 0), **(asked or {"place": ""})}
    for name in ("hang.json", "fault.json"):
        (folder / name).write_text(json.dumps(told))
    return CommandLine(folder, *ARGUMENTS, *arguments)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Losses, norms and samples of the run that nothing happens to; nothing is wrong with it."""
    run = command(tmp_path_factory.mktemp("unbroken"), None)
    code, output = run.finish()
    assert code == 0, output
    assert diagnose(run.run) == []
    return trajectory(run.run)


def wrong(run: CommandLine) -> list[Finding]:
    """What is wrong with the run, by its folder."""
    return [one for one in diagnose(run.run) if not one.advice]


def nothing_left(run: CommandLine) -> None:
    """No process of the run lives, nobody holds its folder."""
    until_s = time.monotonic() + 5
    pids = {event["pid"] for event in run.events("worker_started")}
    while pids := {pid for pid in pids if _lives(pid)}:
        assert time.monotonic() < until_s, f"{pids} live on"
        time.sleep(0.05)
    assert not (run.run / "owner.json").exists()


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


RECOVERED: dict[str, tuple[dict[str, Any], str, str, str]] = {
    # name: (what happens, the layout, the event's words, the cause that is found)
    "1 a rank is killed": (
        {"kind": "killed", "place": "forward"},
        "layout.strategy=ddp",
        "killed by SIGKILL",
        "a SIGKILL leaves no words",
    ),
    "3 the coordinator is killed": (
        {"kind": "killed", "place": "data", "rank": 0},
        "layout.strategy=fsdp",
        "killed by SIGKILL",
        "a SIGKILL leaves no words",
    ),
    "9 a rank hangs": (
        {"kind": "stopped", "place": "data"},
        "layout.strategy=fsdp",
        "ended by the watch",
        "",
    ),
    "14 a barrier too many": (
        {"kind": "barrier", "place": "forward"},
        "layout.strategy=ddp",
        "ended by the watch",
        "",
    ),
    "15 a link is cut": (
        {"kind": "cut", "place": "data"},
        "layout.pp=2",
        "ended by the watch",
        "",
    ),
    "an exception": (
        {"kind": "raises", "place": "forward"},
        "layout.strategy=ddp",
        "the model broke on purpose",
        "an exception that nobody caught",
    ),
}


@pytest.mark.parametrize("name", RECOVERED)
def test_a_rank_that_fails_is_named_and_the_run_comes_back(
    tmp_path: Path, unbroken: list[Any], name: str
) -> None:
    asked, layout, how, cause = RECOVERED[name]
    run = command(tmp_path, asked, layout)
    code, output = run.finish(120)
    assert (tmp_path / "hung").exists(), output
    assert code == 0, output
    (died,) = run.events("worker_died")
    # Who has cut a link none of its ends can know.
    assert died["rank"] == asked.get("rank", 1) or asked["kind"] == "cut", died
    assert how in f"{died['how']} {died['traceback']}", died
    found = wrong(run)
    assert {one.rank for one in found} == {died["rank"]}, found
    assert all(one.over for one in found), found
    assert cause in found[-1].why, found
    same(run, unbroken, exactly="strategy=ddp" in layout)
    nothing_left(run)


def same(run: CommandLine, unbroken: list[Any], *, exactly: bool) -> None:
    """Every step once, with the samples and the losses of the run that nothing happened to."""
    rows = trajectory(run.run)
    assert [row[0] for row in rows] == [row[0] for row in unbroken]
    assert [row[3] for row in rows] == [row[3] for row in unbroken]
    if exactly:
        assert rows == unbroken
    for ours, theirs in zip(rows, unbroken, strict=True):
        assert ours[1] == pytest.approx(theirs[1], rel=1e-5)
    restarts = run.events("restarting")
    made = [event["saved"] for event in restarts]
    assert all(saved is not None and saved % 4 == 0 for saved in made), "from a checkpoint"


def test_2_the_launcher_is_killed(tmp_path: Path, unbroken: list[Any]) -> None:
    run = command(tmp_path, None)
    run.wait_for(lambda: run.steps() >= 9)
    run.process.kill()
    run.process.wait(timeout=10)
    until_s = time.monotonic() + 2
    while any(map(_lives, run.pids().values())):
        assert time.monotonic() < until_s, "orphans"
        time.sleep(0.02)
    (found,) = wrong(run)
    assert found.kind == "killed"
    assert found.command == f"shoal train --resume {run.run}"
    again = CommandLine(tmp_path, "--resume", "runs/run")
    code, output = again.finish()
    assert code == 0, output
    same(again, unbroken, exactly=True)
    nothing_left(again)


@pytest.mark.parametrize("whom", ["4 the launcher", "4 one rank"])
def test_4_a_stop_saves_and_nothing_is_wrong(tmp_path: Path, whom: str) -> None:
    run = command(tmp_path, None)
    run.wait_for(lambda: run.steps() >= 6)
    if whom == "4 the launcher":
        run.process.send_signal(signal.SIGTERM)
    else:
        run.kill(1, signal.SIGTERM)
    code, output = run.finish()
    assert code == 143, output
    assert find(run.run / "checkpoints")[0].step == run.steps()
    assert wrong(run) == []
    nothing_left(run)


def test_6_a_death_in_a_save_leaves_the_one_before(tmp_path: Path, unbroken: list[Any]) -> None:
    run = command(tmp_path, None)
    folder = run.run / "checkpoints"
    run.wait_for(lambda: run.steps() >= 8 and any(folder.glob("step-*.tmp-*")))
    for pid in [*run.pids().values(), run.process.pid]:
        os.kill(pid, signal.SIGKILL)
    run.process.wait(timeout=10)
    newest = find(folder)[0].step
    again = CommandLine(tmp_path, "--resume", "runs/run")
    code, output = again.finish()
    assert code == 0, output
    assert f"step-{newest}" in output
    same(again, unbroken, exactly=True)


def test_7_a_flipped_byte_is_named(tmp_path: Path) -> None:
    run = command(tmp_path, None, "train.steps=12")
    assert run.finish()[0] == 0
    victim = find(run.run / "checkpoints")[0].path / "rank-0.safetensors"
    raw = bytearray(victim.read_bytes())
    raw[len(raw) // 2] ^= 4
    victim.write_bytes(raw)
    again = CommandLine(tmp_path, "--resume", "runs/run")
    code, output = again.finish()
    assert code == 0, output
    found = wrong(again)
    assert {one.kind for one in found} == {"checkpoint_damaged"}
    assert "rank-0.safetensors" in found[0].what


def test_8_13_another_world_goes_on_with_each_sample_once(
    tmp_path: Path, unbroken: list[Any]
) -> None:
    run = command(tmp_path, None)
    run.wait_for(lambda: run.steps() >= 8)
    run.process.send_signal(signal.SIGTERM)
    assert run.finish()[0] == 143
    other = ("launch.processes=4", "layout.strategy=hsdp")
    again = CommandLine(tmp_path, "--resume", "runs/run", *other)
    code, output = again.finish()
    assert code == 0, output
    same(again, unbroken, exactly=False)
    assert wrong(again) == []


def test_11_numbers_that_are_not_finite_are_named(tmp_path: Path) -> None:
    run = command(tmp_path, {"place": "", "nan": [13]})
    code, output = run.finish()
    assert code == 0, output
    skipped = run.events("step_skipped")
    assert skipped
    found = wrong(run)
    assert {one.kind for one in found} == {"step_skipped"}
    assert {one.rank for one in found} <= {0, 1}
    assert all("13" in one.what for one in found)


def test_16_a_second_run_in_the_folder_is_refused_by_name(tmp_path: Path) -> None:
    run = command(tmp_path, None, "train.steps=400")
    run.wait_for(lambda: run.steps() >= 5)
    code, output = CommandLine(tmp_path, "--resume", "runs/run").finish()
    assert code == 2, output
    assert re.search(r"in use by pid \d+ on host", output), output
    run.process.send_signal(signal.SIGTERM)
    assert run.finish()[0] == 143
    assert wrong(run) == []


def test_21_memory_that_is_not_there_is_named(tmp_path: Path) -> None:
    run = command(tmp_path, {"kind": "memory", "place": "forward"})
    code, output = run.finish()
    assert code == 2, output
    assert "train.micro_batch = 2: rank 1, step" in output
    assert "nearest: train.micro_batch=1" in output
    (found,) = wrong(run)
    assert (found.rank, found.over) == (1, False)
    assert found.why == "memory: it asked for more than there is"


def test_23_another_rate_stops_a_resume(tmp_path: Path) -> None:
    run = command(tmp_path, None, "train.steps=8")
    assert run.finish()[0] == 0
    words = ("--resume", "runs/run", "optimizer.lr=0.5", "train.steps=12")
    code, output = CommandLine(tmp_path, *words).finish()
    assert code == 2, output
    assert "optimizer.lr: 0.001 → 0.5" in output
    assert "--force" in output
    assert len(lines(run.run / "metrics.jsonl")) == 8, "nothing was touched"
    code, output = CommandLine(tmp_path, *words, "--force").finish()
    assert code == 0, output
    assert diagnose(run.run)[-1].advice, "said, and no fault"


@pytest.mark.parametrize("kind", ["killed", "read"])
def test_25_a_loaders_process_that_dies_or_cannot_read_costs_nothing(
    tmp_path: Path, unbroken: list[Any], kind: str
) -> None:
    run = command(tmp_path, {"kind": kind, "place": "data", "after": 20}, "data.workers=1")
    code, output = run.finish(120)
    assert (tmp_path / "hung").exists(), output
    assert code == 0, output
    assert run.events("worker_died") == []
    assert trajectory(run.run) == unbroken
    found = [(one.kind, one.rank, one.over) for one in wrong(run)]
    assert found == [("loader", 1, True)], (
        "a process that is made again, a read that is tried again"
    )
    nothing_left(run)


def test_24_a_disk_that_refuses_a_save_is_named_and_training_goes_on(
    tmp_path: Path, unbroken: list[Any]
) -> None:
    run = command(tmp_path, {"kind": "fsync", "place": ""})
    code, output = run.finish()
    assert code == 0, output
    assert trajectory(run.run) == unbroken
    found = wrong(run)
    assert {(one.kind, one.rank, one.over) for one in found} == {("checkpoint_failed", 1, True)}
    assert find(run.run / "checkpoints")[0].step == 24


def test_17_a_bit_that_turns_over_is_named_and_never_saved(
    tmp_path: Path, unbroken: list[Any]
) -> None:
    asked = {"kind": "flip", "place": "", "after": 10}
    run = command(tmp_path, asked, "train.on=faulty:flip", "train.drift=every")
    code, output = run.finish()
    assert code == 0, output
    (told,) = run.events("drift")
    assert told["ranks"] == [1], told
    assert "last.weight" in told["text"], told
    assert trajectory(run.run) == unbroken, "nothing that came of it is kept"
    found = wrong(run)
    assert found[0].kind == "drift"
    assert found[0].rank == 1


def test_14_sums_in_another_order_are_named(tmp_path: Path) -> None:
    run = command(tmp_path, {"kind": "swap", "place": ""}, "layout.strategy=ddp")
    code, output = run.finish(120)
    assert code == 3, output
    (told,) = run.events("collectives_differ")
    assert "faulty.py" in told["text"], told
    found = wrong(run)
    assert found[0].kind == "collectives_differ"
