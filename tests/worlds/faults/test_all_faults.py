"""The field's faults, done to the real command one by one: who, why, what it cost, what is left.

Of each: the run comes back as if nothing had been, or ends with a status that says so; `shoal
diagnose` names the rank and the cause from the folder alone; no process and no lock is left. The
numbers are those of the field's table of 25 faults. Of some more is done elsewhere: hostile files in
tests/checkpoint, strangers in test_hijack and test_attacked, slow ranks in test_slow_ranks. By
kinds, ranks and layouts: tests/proof/faults.py.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import stranger
from cli_run import CommandLine, lines, trajectory
from fault_runs import command, lives, nothing_left, same, wrong
from shoal.checkpoint.format.listing import list_checkpoints, verify
from shoal.view.diagnose import diagnose


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Losses, norms and samples of the run that nothing happens to; nothing is wrong with it."""
    run = command(tmp_path_factory.mktemp("unbroken"), None)
    code, output = run.finish()
    assert code == 0, output
    assert diagnose(run.run) == []
    return trajectory(run.run)


RECOVERED: dict[str, tuple[dict[str, Any], str, str, str]] = {
    # name: (what happens, the layout, the event's words, the cause that is found)
    "1 a rank is killed": (
        {"kind": "killed", "place": "forward"},
        "layout.strategy=ddp",
        "killed by SIGKILL",
        "nothing is known of the sender",
    ),
    "3 the coordinator is killed": (
        {"kind": "killed", "place": "data", "rank": 0},
        "layout.strategy=fsdp",
        "killed by SIGKILL",
        "nothing is known of the sender",
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


LONG = (
    *("1 a rank is killed", "3 the coordinator is killed"),
    *("14 a barrier too many", "15 a link is cut"),
)
"""Rows that `make proof` runs: 20 kills both ranks, 9 and test_hangs end by the watch, and a link is
cut in test_elastic."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.proof) if n in LONG else n for n in RECOVERED]
)
def test_a_rank_that_fails_is_named_and_the_run_comes_back(
    tmp_path: Path, unbroken: list[Any], name: str
) -> None:
    asked, layout, how, cause = RECOVERED[name]
    run = command(tmp_path, asked, layout)
    code, output = run.finish()
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


def test_a_process_that_leaves_quietly_has_not_come_to_its_end(tmp_path: Path) -> None:
    asked = {"kind": "leaves", "place": "data", "rank": 0}
    run = command(tmp_path, asked, "launch.processes=1", "launch.restarts=0")
    code, output = run.finish()
    assert code == 1, output
    where = f"after step {run.steps()} of 24, in data, before the run's end"
    line = f"left with status 0 {where}: something in it calls os._exit(0)"
    assert output.splitlines().count(line) == 1, output
    (found,) = wrong(run)
    assert (found.kind, found.rank, found.over) == ("worker_died", 0, False)
    assert "the run was not done" in found.why
    again = CommandLine(tmp_path, "--resume", "runs/run")
    code, output = again.finish()
    assert code == 0, output
    assert again.steps() == 24


def test_2_the_launcher_is_killed(tmp_path: Path, unbroken: list[Any]) -> None:
    run = command(tmp_path, None)
    run.wait_for(lambda: run.steps() >= 9 and list_checkpoints(run.run / "checkpoints") != [])
    run.process.kill()
    run.process.wait(timeout=10)
    until_s = time.monotonic() + 2
    while any(map(lives, run.pids().values())):
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


@pytest.mark.proof  # test_survival stops a run of four ranks; view/test_diagnose reads such a folder
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
    assert list_checkpoints(run.run / "checkpoints")[0].step == run.steps()
    assert wrong(run) == []
    nothing_left(run)


def fill(path: Path, spare_bytes: int = 16384) -> None:
    """Write until nothing fits, and give a little back; a run that writes beside it takes its part."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    os.truncate(path, path.stat().st_size - spare_bytes)


@pytest.mark.parametrize("resumed", [False, pytest.param(True, marks=pytest.mark.proof)])
def test_5_a_full_disk_is_named_and_training_goes_on(tmp_path: Path, resumed: bool) -> None:
    """The run folder lies on a tmpfs that is filled up while the run goes."""
    runs = tmp_path / "runs"
    runs.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(runs)]
    made = subprocess.run(mount, capture_output=True)
    if made.returncode:
        pytest.skip(f"this machine forbids mounting a tmpfs: {made.stderr.decode().strip()}")
    try:
        run = command(tmp_path, None)
        run.wait_for(lambda: run.events("checkpoint_saved") != [])
        filler = runs / "filler"
        fill(filler)
        run.wait_for(lambda: run.events("checkpoint_failed") != [])
        filler.unlink()
        code, output = run.finish()
        assert code == 0, output
        assert [row[0] for row in trajectory(run.run)] == list(range(1, 25))
        newest = list_checkpoints(run.run / "checkpoints")[0]
        assert newest.step == 24, "saving works again once there is room"
        assert verify(newest.path) == []
        found = wrong(run)
        assert {(one.kind, one.why, one.over) for one in found} == {
            ("checkpoint_failed", "the disk is full", True)
        }
        nothing_left(run)
        if resumed:
            again = CommandLine(tmp_path, "--resume", "runs/run", "train.steps=26")
            assert again.finish()[0] == 0
    finally:
        subprocess.run(["umount", "-l", str(runs)], check=False)


def test_6_a_death_in_a_save_leaves_the_one_before(tmp_path: Path, unbroken: list[Any]) -> None:
    run = command(tmp_path, None)
    folder = run.run / "checkpoints"
    # One save is complete; on a busy machine steps are faster than the first of them.
    run.wait_for(
        lambda: (
            run.steps() >= 8 and list_checkpoints(folder) != [] and any(folder.glob("step-*.tmp-*"))
        )
    )
    for pid in [*run.pids().values(), run.process.pid]:
        os.kill(pid, signal.SIGKILL)
    run.process.wait(timeout=10)
    newest = list_checkpoints(folder)[0].step
    again = CommandLine(tmp_path, "--resume", "runs/run")
    code, output = again.finish()
    assert code == 0, output
    assert f"step-{newest}" in output
    same(again, unbroken, exactly=True)


@pytest.mark.proof
def test_7_a_flipped_byte_is_named(tmp_path: Path) -> None:
    run = command(tmp_path, None, "train.steps=12")
    assert run.finish()[0] == 0
    victim = list_checkpoints(run.run / "checkpoints")[0].path / "rank-0.safetensors"
    raw = bytearray(victim.read_bytes())
    raw[len(raw) // 2] ^= 4
    victim.write_bytes(raw)
    again = CommandLine(tmp_path, "--resume", "runs/run")
    code, output = again.finish()
    assert code == 0, output
    found = wrong(again)
    assert {one.kind for one in found} == {"checkpoint_damaged"}
    assert "rank-0.safetensors" in found[0].what


@pytest.mark.proof
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


@pytest.mark.proof  # with another part of the step: test_slow_ranks
def test_10_a_slow_rank_is_named_with_its_part(tmp_path: Path) -> None:
    asked = {"kind": "slow", "place": "", "extra_s": 0.006}
    run = command(tmp_path, asked, "layout.strategy=ddp", "train.steps=64", "checkpoint.every=0")
    code, output = run.finish()
    assert code == 0, output
    (told,) = run.events("slow_rank")
    assert (told["rank"], told["phase"]) == (1, "data")
    (found,) = diagnose(run.run)
    assert (found.kind, found.rank, found.advice) == ("slow_rank", 1, True)
    assert run.steps() == 64


def test_12_a_batch_that_leaps_out_is_named_and_left_out(
    tmp_path: Path, unbroken: list[Any]
) -> None:
    run = command(tmp_path, {"place": "", "wild": [15]}, "train.spikes=skip")
    code, output = run.finish()
    assert code == 0, output
    skipped = run.events("step_skipped")
    assert len(skipped) >= 2, "three epochs"
    for event in skipped:
        assert any(15 in ids for one in event["culprits"] for ids in one["samples"]), event
    found = wrong(run)
    assert {one.kind for one in found} == {"step_skipped"}
    assert all("unlike the others" in one.why and "15" in one.what for one in found), found
    hit = {event["step"] for event in skipped}
    clean = [row[1] for row in trajectory(run.run) if row[0] not in hit]
    assert max(clean) < 2 * max(row[1] for row in unbroken)


@pytest.mark.proof  # test_faults has such a sample, view/test_diagnose such a folder
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


@pytest.mark.proof  # without processes: tests/trainer/test_own_folder.py
def test_16_a_second_run_in_the_folder_is_refused_by_name(tmp_path: Path) -> None:
    run = command(tmp_path, None, "train.steps=400")
    run.wait_for(lambda: run.steps() >= 5)
    code, output = CommandLine(tmp_path, "--resume", "runs/run").finish()
    assert code == 2, output
    assert re.search(r"in use by pid \d+ on host", output), output
    run.process.send_signal(signal.SIGTERM)
    assert run.finish()[0] == 143
    assert wrong(run) == []


class Canary:
    """Unpickling this makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return (os.mkdir, (str(self.path),))


def test_18_a_hostile_checkpoint_runs_nothing(tmp_path: Path, unbroken: list[Any]) -> None:
    run = command(tmp_path, None)
    assert run.finish()[0] == 0
    canary = tmp_path / "canary"
    torch.save(Canary(canary), kept := io.BytesIO())
    newest, older = list_checkpoints(run.run / "checkpoints")[:2]
    (newest.path / "rank-1.safetensors").write_bytes(kept.getvalue())
    for name in (".metadata", "rng.pt", "loader.pkl", "pytorch_model.bin"):
        (older.path.parent / name).write_bytes(kept.getvalue())
    again = CommandLine(tmp_path, "--resume", "runs/run")
    code, output = again.finish()
    assert code == 0, output
    assert f"step-{older.step}" in output
    same(again, unbroken, exactly=True)
    assert not canary.exists()
    found = wrong(again)
    assert {(one.kind, one.over) for one in found} == {("checkpoint_damaged", True)}
    assert "rank-1.safetensors" in found[0].what
    torch.load(io.BytesIO(kept.getvalue()), weights_only=False)
    assert canary.exists(), "the canary works"


def test_19_another_user_disturbs_nothing(tmp_path: Path, unbroken: list[Any]) -> None:
    stranger.needed("another user at a run's store and ports")
    run = command(tmp_path, None)
    run.wait_for(lambda: run.steps() >= 4)
    pids = [run.process.pid, *run.pids().values()]
    ports = {
        one.laddr[:2]
        for pid in pids
        for one in psutil.Process(pid).net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    }

    files = [path for path in run.run.rglob("*") if path.exists()]
    assert len(files) > 10

    def reach() -> list[str]:
        told: list[str] = []
        for pid in pids:  # the store is a file of the launcher's that has no name
            try:
                told += os.listdir(f"/proc/{pid}/fd")
            except OSError as refused:
                told.append(type(refused).__name__)
        told += [str(path) for path in files if os.access(path, os.W_OK)]
        for at in ports:  # gloo's
            with socket.create_connection(at, timeout=5) as one:
                one.sendall(os.urandom(4096))
        return told

    assert ports, "ranks listen for each other"
    assert stranger.as_nobody(reach) == ["PermissionError"] * len(pids)
    code, output = run.finish()
    assert code == 0, output
    assert trajectory(run.run) == unbroken
    assert wrong(run) == []
    nothing_left(run)


@pytest.mark.parametrize("kills", [2, pytest.param(4, marks=pytest.mark.proof)])
def test_20_every_start_of_many_finds_its_own_place(
    tmp_path: Path, unbroken: list[Any], kills: int
) -> None:
    run = command(tmp_path, None, "launch.restarts=5")
    folder = run.run / "checkpoints"
    for number in range(kills):
        least = 5 * number + 5
        run.wait_for(lambda least=least: run.steps() >= least and list_checkpoints(folder) != [])
        run.kill(number % 2)
        run.wait_for(lambda number=number: len(run.events("restarting")) > number)
    code, output = run.finish()
    assert code == 0, output
    assert [event["rank"] for event in run.events("worker_died")] == [0, 1] * (kills // 2)
    assert all(one.kind == "worker_died" and one.over for one in wrong(run))
    same(run, unbroken, exactly=True)
    nothing_left(run)


def test_21_memory_that_is_not_there_is_named(tmp_path: Path) -> None:
    run = command(tmp_path, {"kind": "memory", "place": "forward"})
    code, output = run.finish()
    assert code == 2, output
    assert "train.micro_batch = 2: rank 1, step" in output
    assert "try: train.micro_batch=1" in output
    (found,) = wrong(run)
    assert (found.rank, found.over) == (1, False)
    assert found.why == "memory: it asked for more than there is"


JUMPS = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long ahead(void) {
    struct timespec up;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &up);
    return 3600 * ((5 * up.tv_sec + up.tv_nsec / 200000000) % 3);
}
int clock_gettime(clockid_t which, struct timespec *at) {
    int told = syscall(SYS_clock_gettime, which, at);
    if (!told && which == CLOCK_REALTIME) at->tv_sec += ahead();
    return told;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""
"""The wall clock of a process jumps every fifth of a second: an hour on, one more, two back."""


@pytest.mark.parametrize("whose", ["Python's", pytest.param("C's", marks=pytest.mark.proof)])
def test_22_clocks_that_jump_change_nothing(
    tmp_path: Path, unbroken: list[Any], monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    killed = {"kind": "killed", "place": "data"}
    if whose == "Python's":
        run = command(tmp_path, killed, first="jumping_clock")
    else:
        library = tmp_path / "jumps.so"
        compiler = ["gcc", "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(library)]
        subprocess.run(compiler, input=JUMPS, text=True, check=True)
        monkeypatch.setenv("LD_PRELOAD", str(library))
        run = command(tmp_path, killed, cold=True)
        monkeypatch.delenv("LD_PRELOAD")
    code, output = run.finish()
    assert code == 0, output
    times = [event["time_s"] for event in lines(run.run / "events.jsonl")]
    assert any(later - before < -600 for before, later in zip(times, times[1:], strict=False))
    (found,) = wrong(run)
    assert (found.kind, found.rank, found.over) == ("worker_died", 1, True)
    same(run, unbroken, exactly=True)
    nothing_left(run)


@pytest.mark.proof
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


@pytest.mark.parametrize("kind", ["killed", pytest.param("read", marks=pytest.mark.proof)])
def test_25_a_loaders_process_that_dies_or_cannot_read_costs_nothing(
    tmp_path: Path, unbroken: list[Any], kind: str
) -> None:
    run = command(tmp_path, {"kind": kind, "place": "data", "after": 20}, "data.workers=1")
    code, output = run.finish()
    assert (tmp_path / "hung").exists(), output
    assert code == 0, output
    assert run.events("worker_died") == []
    assert trajectory(run.run) == unbroken
    found = [(one.kind, one.rank, one.over) for one in wrong(run)]
    assert found == [("loader", 1, True)], (
        "a process that is made again, a read that is tried again"
    )
    nothing_left(run)


@pytest.mark.proof  # 5 and test_saving: other refusals of the same save
def test_24_a_disk_that_refuses_a_save_is_named_and_training_goes_on(
    tmp_path: Path, unbroken: list[Any]
) -> None:
    run = command(tmp_path, {"kind": "fsync", "place": ""})
    code, output = run.finish()
    assert code == 0, output
    assert trajectory(run.run) == unbroken
    found = wrong(run)
    assert {(one.kind, one.rank, one.over) for one in found} == {("checkpoint_failed", 1, True)}
    assert list_checkpoints(run.run / "checkpoints")[0].step == 24


@pytest.mark.proof  # test_drift has it with a restart
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
    assert [(one.kind, one.rank) for one in found] == [("drift", 1)], found


@pytest.mark.proof  # test_hangs swaps two sums, too
def test_14_sums_in_another_order_are_named(tmp_path: Path) -> None:
    run = command(tmp_path, {"kind": "swap", "place": ""}, "layout.strategy=ddp")
    code, output = run.finish()
    assert code == 3, output
    (told,) = run.events("collectives_differ")
    assert "faulty.py" in told["text"], told
    found = wrong(run)
    assert found[0].kind == "collectives_differ"


def test_all_of_the_table_are_here() -> None:
    names = [name for name in globals() if name.startswith("test_")]
    numbers = re.findall(
        r"(?<=[ _])\d+(?=[ _])", " ".join(f" {one} " for one in [*names, *RECOVERED])
    )
    assert set(map(int, numbers)) == set(range(1, 26))
