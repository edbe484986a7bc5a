"""What `shoal diagnose` says of run folders: of each thing that went wrong, and of nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal.base.runlog.damaged_lines import Record
from shoal.base.runlog.events import EVENTS, EventLog
from shoal.checkpoint.format.lease import OWNER_FILE, Owner
from shoal.cli.main import app
from shoal.config.differences import changes_result
from shoal.view.diagnose import ALLOCATOR, LOOKS, RunFinding, diagnose, findings_text
from shoal.view.diagnosis.continuation import FREE_KEYS

GOES_ON = [("restarting", {"attempt": 1, "of": 3, "saved": 8}), ("compute_started", {})]
DIED: Record = {"rank": 1, "pid": 4711, "attempt": 0, "fatal": False}


def run_of(folder: Path, *events: tuple[str, dict[str, Any]], steps: int = 0, **row: Any) -> Path:
    """A run folder with these events, and so many alike steps."""
    log = EventLog(folder / "events.jsonl", rank=None)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").touch()
    log.emit("run_started", processes=2)
    for event, fields in events:
        log.emit(event, **fields)
    rows = [{"step": n + 1, "loss": 1.0, "step_s": 0.1, **row} for n in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return folder


def save(folder: Path, *steps: int) -> None:
    """Complete checkpoints of these steps, without tensors."""
    for step in steps:
        (folder / "checkpoints" / f"step-{step}").mkdir(parents=True)
        (folder / "checkpoints" / f"step-{step}" / "manifest.json").write_text("{}")


SLOW: Record = {"rank": 1, "host": "a", "step": 40, "extra_s": 0.032, "share": 0.304}
CASES: dict[str, tuple[list[tuple[str, dict[str, Any]]], str, str, str]] = {
    "a rank that is slow in data": (
        [("slow_rank", {**SLOW, "phase": "data"})],
        "rank 1 on a is slow in data: 32.0 ms a step (30%) more than the others",
        "it takes longer than the other ranks",
        "shoal train --resume RUN data.workers=2",
    ),
    "a rank that is slow in its passes": (
        [("slow_rank", {**SLOW, "phase": "forward"})],
        "rank 1 on a is slow in forward",
        "it waits least",
        "ps -eo pid,psr,pcpu,comm",
    ),
    "a kill": (
        [("worker_died", {**DIED, "how": "killed by SIGKILL", "traceback": ""})],
        "rank 1 (pid 4711): killed by SIGKILL",
        "nothing is known of the sender",
        "dmesg -T | grep -i -e oom",
    ),
    "memory in pieces": (
        [
            (
                "worker_died",
                {
                    **DIED,
                    "how": "exit code 2",
                    "traceback": "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has … "
                    "30.00 MiB is reserved by PyTorch but unallocated.",
                },
            )
        ],
        "rank 1 (pid 4711): exit code 2: CUDA out of memory",
        "more was free than it asked for",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True shoal train --resume RUN",
    ),
    "memory of a device": (
        [
            (
                "worker_died",
                {
                    **DIED,
                    "how": "exit code 2",
                    "traceback": "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has … "
                    "30.00 MiB is reserved by PyTorch but unallocated.",
                },
            )
        ],
        "rank 1 (pid 4711): exit code 2: CUDA out of memory",
        "memory: it asked for more than there is",
        "shoal plan RUN/run.toml --explain",
    ),
    "memory": (
        [
            (
                "worker_died",
                {
                    **DIED,
                    "how": "exit code 1",
                    "traceback": "DefaultCPUAllocator: can't allocate memory: you tried to "
                    "allocate 419430400 bytes",
                },
            )
        ],
        "rank 1 (pid 4711): exit code 1: DefaultCPUAllocator",
        "memory: it asked for more than there is",
        "shoal plan RUN/run.toml --explain",
    ),
    "a loader's process": (
        [
            (
                "worker_died",
                {
                    **DIED,
                    "how": "exit code 1",
                    "traceback": "DataLoader worker (pid 9) exited unexpectedly",
                },
            )
        ],
        "rank 1",
        "a process that loads data ended",
        "tail -n 50 RUN/logs/rank-1.log",
    ),
    "a peer that is gone": (
        [
            (
                "worker_died",
                {**DIED, "how": "exit code 1", "traceback": "Connection closed by peer [::1]:4"},
            )
        ],
        "rank 1",
        "it is no cause of its own",
        "tail -n 50 RUN/logs/rank-*.log",
    ),
    "a rank that left": (
        [
            (
                "worker_died",
                {**DIED, "how": "exit code 0", "traceback": "…: something in it calls os._exit(0)"},
            )
        ],
        "rank 1 (pid 4711): exit code 0",
        "the run was not done",
        "tail -n 50 RUN/logs/rank-1.log",
    ),
    "an exception": (
        [("worker_died", {**DIED, "how": "exit code 1", "traceback": "KeyError: 'gate'"})],
        "KeyError: 'gate'",
        "an exception that nobody caught",
        "tail -n 50 RUN/logs/rank-1.log",
    ),
    "a full disk": (
        [("checkpoint_failed", {"step": 8, "rank": 1, "reason": "0 B are free"})],
        "checkpoint at step 8 not saved: 0 B are free",
        "the disk is full",
        "df -h RUN",
    ),
    "a disk that refuses": (
        [("checkpoint_failed", {"step": 8, "rank": 1, "reason": "Input/output error"})],
        "not saved: Input/output error",
        "the file system, refused",
        "dmesg -T | tail",
    ),
    "a flipped byte": (
        [
            (
                "checkpoint_damaged",
                {"folder": "step-8", "file": "rank-1.safetensors", "tensor": "w", "reason": "hash"},
            )
        ],
        "checkpoint damaged: rank-1.safetensors w: hash",
        "its bytes on the disk are not those that were written",
        "shoal checkpoint verify RUN",
    ),
    "numbers": (
        [
            (
                "step_skipped",
                {"step": 3, "ranks": [1], "culprits": [{"rank": 1, "samples": [[107, 0]]}]},
            )
        ],
        "step 3 skipped",
        "not finite",
        "",
    ),
    "a batch that leaps out": (
        [("spike", {"step": 9, "reason": "loss 70 is 40 deviations above 2.3, the median of …"})],
        "step 9: loss 70 is 40 deviations above 2.3",
        "samples that are unlike the others",
        "try in the next run: train.spikes=skip",
    ),
    "one that was left out": (
        [("step_skipped", {"step": 9, "reason": "loss 70 is 31 times 2.3, the usual one"})],
        "step 9 skipped",
        "samples that are unlike the others",
        "",
    ),
    "one that was undone": (
        [("rewound", {"step": 9, "to": 8, "left_out": [64, 71], "reason": "loss 70"})],
        "back to step 8, without samples 64 – 71",
        "samples that are unlike the others",
        "",
    ),
    "a stop that saved nothing": (
        [("stop_requested", {"signal": "SIGTERM", "steps": True})],
        "SIGTERM asked for a stop, and no checkpoint was written after it",
        "longer than a stop may",
        "shoal checkpoint list RUN",
    ),
    "an island that waited for another one": (
        [
            (
                "worker_died",
                {
                    **DIED,
                    "traceback": "ClusterError: islands: waited 60 s "
                    "(islands.wait_s) for island 1 at 10.0.0.1:1; try: start island 1",
                },
            )
        ],
        "waited 60 s (islands.wait_s) for island 1",
        "other islands were not there",
        "shoal islands show RUN",
    ),
    "an island that is gone": (
        [("island_lost", {"islands": [2], "after_s": 3.0, "round": 4})],
        "island 2 was lost in round 5, after 3.0 s without a word",
        "the link",
        "tail -n 50 RUN/logs/*",
    ),
}


def left_in(number: int, *joined: int, **left: str) -> tuple[str, dict[str, Any]]:
    """A round after which islands have no seat; i2="its process ended"."""
    whys = {name[1:]: f"island {name[1:]}: {why}" for name, why in left.items()}
    return "round_committed", {"round": number, "left": whys, "joined": list(joined), "step": 9}


def test_an_island_that_left_is_named_with_its_round_and_how(tmp_path: Path) -> None:
    save(tmp_path, 4)
    found = diagnose(
        run_of(
            tmp_path,
            left_in(3, i1="its process ended"),
            left_in(4, 1),
            left_in(5, i2="its process ended"),
            left_in(7, i1="no change of it came in time"),
            left_in(8, i0="it said goodbye"),
        )
    )
    assert [(one.what, one.over, one.advice) for one in found] == [
        ("island 1 left in round 3: its process ended; it is back", True, False),
        ("island 2 left in round 5: its process ended", True, False),
        ("island 1 left in round 7: no change of it came in time", True, False),
        ("island 0 left in round 8: it said goodbye", False, True),
    ]
    assert found[0].command == f"shoal islands show {tmp_path}"
    text = findings_text(tmp_path, found)
    assert "island 2 left in round 5: its process ended; the run went on by itself" in text
    assert "note: island 0 left in round 8: it said goodbye" in text


def test_an_island_that_waits_for_others_says_so_until_they_meet(tmp_path: Path) -> None:
    save(tmp_path, 4)
    text = "no majority of the last round's islands, …: waits for island 1, at most 600 s"
    waits = ("notice", {"text": text})
    (found,) = diagnose(run_of(tmp_path / "a", waits))
    assert (found.kind, found.what, found.over) == ("island_wait", text, False)
    assert not diagnose(run_of(tmp_path / "b", waits, left_in(3)))


@pytest.mark.parametrize("case", CASES)
def test_each_thing_is_named_with_its_cause_and_the_next_command(tmp_path: Path, case: str) -> None:
    events, what, why, command = CASES[case]
    save(tmp_path, 4)
    (found,) = diagnose(run_of(tmp_path, *events))
    assert what in found.what
    assert why in found.why
    assert found.command.replace(str(tmp_path), "RUN").startswith(command)
    # What the run itself dealt with when it met it.
    dealt_with = ("step_skipped", "checkpoint_damaged", "spike", "rewound")
    assert found.over == (found.kind in dealt_with)
    assert found.advice == (found.kind == "slow_rank")


def test_what_went_on_by_itself_says_so_and_deaths_alike_are_told_once(tmp_path: Path) -> None:
    death = ("worker_died", {**DIED, "how": "exit code 1", "traceback": "OSError: no such host"})
    found = diagnose(run_of(tmp_path, death, *GOES_ON, death, *GOES_ON))
    assert [(one.over, one.what.endswith("(the last of 2 alike)")) for one in found] == [
        (True, True)
    ]
    assert "the run went on by itself" in findings_text(tmp_path, found)


def test_islands_that_were_started_again_went_on_and_a_person_who_resumes_is_not_the_run(
    tmp_path: Path,
) -> None:
    """An island's supervisor restarts nothing: each death is fatal there, the launcher goes on."""
    hang = ("hang", {"rank": 0, "host": "a", "pid": 9, "phase": "step 9", "why": "stopped"})
    died = ("worker_died", {**DIED, "how": "ended by the watch", "traceback": "", "fatal": True})
    lost = ("island_lost", {"islands": [0], "after_s": 0.2, "round": 1})
    for attempt, over in ((1, True), (0, False)):
        again = [("run_started", {"attempt": attempt}), ("compute_started", {})]
        hung = diagnose(run_of(tmp_path / f"a{attempt}" / "island-0", hang, died, *again))
        assert [(one.kind, one.over) for one in hung] == [("hang", over)]
        other = diagnose(run_of(tmp_path / f"a{attempt}" / "island-1", lost, *again))
        assert [(one.kind, one.over) for one in other] == [("island_lost", over)]
        assert other[0].command == f"shoal diagnose {tmp_path / f'a{attempt}' / 'island-0'}"


def test_a_hang_is_one_finding_also_where_it_ends_the_run(tmp_path: Path) -> None:
    hang = {"rank": 1, "host": "a", "pid": 9, "phase": "step 9", "why": "stopped", "waited_s": 6.0}
    died = {**DIED, "how": "ended by the watch", "traceback": "hung in step 9", "fatal": True}
    (found,) = diagnose(run_of(tmp_path, ("hang", hang), ("worker_died", died)))
    assert (found.kind, found.rank, found.why, found.over) == ("hang", 1, "stopped", False)


def test_a_script_of_ones_own_is_started_again(tmp_path: Path) -> None:
    """No command resumes what a script made."""
    run_of(tmp_path, ("slow_rank", {**SLOW, "phase": "data"}), steps=60, comm_exposed_s=0.03)
    mine = Owner.this_process("run")
    (tmp_path / OWNER_FILE).write_text(json.dumps({**asdict(mine), "born": mine.born - 1}))
    (tmp_path / "run.toml").unlink()
    assert [one.command for one in diagnose(tmp_path)] == [
        "start the script again, with run.loader(…, workers=2)",
        "start the script again; nothing was saved, so it begins at its first step",
    ]
    save(tmp_path, 8)
    assert diagnose(tmp_path)[1].command == (
        "start the script again; run.restore() goes on from its last checkpoint"
    )
    told = CliRunner().invoke(app, ["diagnose", str(tmp_path)]).output.splitlines()
    assert (
        told[-1] == "next: start the script again; run.restore() goes on from its last checkpoint"
    )
    (tmp_path / "events.jsonl").write_text("")
    (tmp_path / OWNER_FILE).unlink()
    (advice,) = diagnose(tmp_path)
    assert advice.command == "a larger batch, or another layout, for shoal.parallelize"


def test_deaths_of_a_script_are_told_once_with_what_its_loop_may_do(tmp_path: Path) -> None:
    """Each rank tells of what all refuse; who is asked to stop, and is deaf, may hear."""
    mine = Owner.this_process("run")
    dead = json.dumps({**asdict(mine), "born": mine.born - 1})

    def found(name: str, *events: tuple[str, dict[str, Any]]) -> list[RunFinding]:
        folder = run_of(tmp_path / name, *events)
        (folder / "run.toml").unlink()
        (folder / OWNER_FILE).write_text(dead)
        return diagnose(folder)

    raised = {"pid": 1, "how": "exit code 2", "traceback": "layout: no; try: ddp"}
    died = [("worker_died", {**raised, "rank": rank}) for rank in (1, 0)]
    (one,) = found("all", *died)
    assert (one.rank, one.over) == (1, False), "owner.json was left by the same end"
    assert (one.why, one.command) == ("something to correct, which the line says", "")
    again = ("resumed", {"step": 3, "folder": "step-3"})
    one, other, end = found("again", died[0], again, died[1], again)
    assert (one.rank, other.rank, one.over, other.over) == (1, 0, True, True)
    assert end.what.startswith("the run ended without a word: its first process (pid ")
    assert "; the run went on\n" in findings_text(tmp_path / "again", [one])
    (one,) = found(
        "asked", ("worker_died", {**raised, "how": "killed by SIGTERM", "traceback": ""})
    )
    assert one.why == "it was asked to stop, and this loop does not hear it"
    assert one.command.startswith("run.stop_on_signals(), before the loop")
    (one,) = found("left", ("worker_died", {**raised, "how": "ended", "traceback": ""}))
    assert one.why.startswith("it left no words")
    assert "logs/rank" not in one.command, "a launcher of somebody else's keeps it where it likes"


def test_the_allocators_setting_has_one_name() -> None:
    from shoal.machine.device_pool import SETTING, has_expandable_segments

    assert SETTING == ALLOCATOR
    assert has_expandable_segments(
        {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}
    )
    assert not has_expandable_segments({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"})


def test_nothing_wrong(tmp_path: Path) -> None:
    events = [
        ("worker_started", {"rank": 0, "pid": 1}),
        ("compute_started", {}),
        ("checkpoint_saved", {"step": 8, "folder": "step-8"}),
        ("stop_requested", {"signal": "SIGTERM", "steps": True}),
        ("checkpoint_saved", {"step": 9, "folder": "step-9"}),
        ("run_finished", {"how": "stopped"}),
    ]
    run_of(tmp_path, *events, steps=60, comm_exposed_s=0.01, data_wait_s=0.001)
    assert diagnose(tmp_path) == []
    told = CliRunner().invoke(app, ["diagnose", str(tmp_path)])
    first, last, *end = told.output.splitlines()
    assert (told.exit_code, first) == (0, f"{tmp_path}: no fault")
    assert last.startswith("verdict: nothing to gain")
    assert end == [
        "end: stopped at step 60 (stopped)",
        "saved: no complete checkpoint is in this folder; steps 1–60 are lost: 60 steps",
        f"next: shoal train {tmp_path}/run.toml",
    ]


@pytest.mark.parametrize(
    ("waits", "kind"), [("comm_exposed_s", "communication"), ("data_wait_s", "data")]
)
def test_a_wait_that_is_a_habit_is_advice(tmp_path: Path, waits: str, kind: str) -> None:
    run_of(tmp_path, steps=60, **{waits: 0.03})
    (found,) = diagnose(tmp_path)
    assert (found.kind, found.advice) == (kind, True)
    assert found.what.startswith(f"{kind} takes 30% of a step")
    told = CliRunner().invoke(app, ["diagnose", str(tmp_path)])
    assert told.exit_code == 0
    assert "no fault" in told.output
    run_of(tmp_path, steps=40, **{waits: 0.03})
    assert diagnose(tmp_path) == [], "forty steps are a moment"


def test_one_long_wait_is_no_habit(tmp_path: Path) -> None:
    run_of(tmp_path, steps=60, data_wait_s=0.001)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 61, "loss": 1.0, "step_s": 60.0, "data_wait_s": 59.0}\n')
    assert diagnose(tmp_path) == []


def test_a_resume_with_other_settings_is_a_note_and_no_fault(tmp_path: Path) -> None:
    run_of(tmp_path, ("resumed", {"step": 4, "folder": "step-4", "differs": ["seed: 0 → 1"]}))
    told = CliRunner().invoke(app, ["diagnose", str(tmp_path)])
    assert told.exit_code == 0
    assert told.output.splitlines()[1].startswith("note: resumed from step-4; different")
    assert "went on by itself" not in told.output
    other = {"differs": ["layout: zero2 → single"], "changes_result": False}
    run_of(tmp_path / "moved", ("resumed", {"step": 4, "folder": "step-4", **other}))
    assert diagnose(tmp_path / "moved") == [], "the result is the same, to rounding"


def test_a_launcher_that_was_killed_is_known_by_what_it_left(tmp_path: Path) -> None:
    run_of(tmp_path, ("compute_started", {}))
    mine = Owner.this_process("run")
    (tmp_path / OWNER_FILE).write_text(json.dumps(asdict(mine)))
    assert diagnose(tmp_path) == [], "it runs still"
    (tmp_path / OWNER_FILE).write_text(json.dumps({**asdict(mine), "born": mine.born - 1}))
    (found,) = diagnose(tmp_path)
    assert found.kind == "killed"
    assert f"pid {os.getpid()}" in found.what
    assert found.command == f"shoal train {tmp_path}/run.toml", "nothing was saved"
    (tmp_path / "checkpoints" / "step-4").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-4" / "manifest.json").touch()
    (found,) = diagnose(tmp_path)
    assert found.command == f"shoal train --resume {tmp_path}"


def test_damaged_records_are_no_traceback(tmp_path: Path) -> None:
    for name in LOOKS:
        assert name in EVENTS, name
        (tmp_path / "events.jsonl").write_text(
            json.dumps({"event": name, "step": {}, "ranks": 7, "signal": [], "reason": 3}) + "\n"
        )
        assert all(isinstance(one, RunFinding) for one in diagnose(tmp_path))


def test_islands_are_looked_at_each_and_json_is_a_line_each(tmp_path: Path) -> None:
    island = tmp_path / "island-1"
    island.mkdir()
    run_of(tmp_path)
    run_of(island, ("worker_died", {**DIED, "how": "killed by SIGKILL"}))
    told = CliRunner().invoke(app, ["diagnose", str(tmp_path), "--json"])
    (line,) = told.output.splitlines()
    assert told.exit_code == 1
    found = json.loads(line)
    assert (found["run"], found["kind"], found["rank"]) == (str(island), "worker_died", 1)


def test_text_and_json_name_one_cause(tmp_path: Path) -> None:
    """Advice that contradicts the verdict is in neither; the verdict is in both."""
    run_of(tmp_path, ("run_finished", {"how": "completed"}), steps=60, data_wait_s=0.03)
    text = CliRunner().invoke(app, ["diagnose", str(tmp_path)]).output.splitlines()
    records = [
        json.loads(line)
        for line in CliRunner()
        .invoke(app, ["diagnose", str(tmp_path), "--json"])
        .output.splitlines()
    ]
    assert [one["kind"] for one in records][-1] == "verdict"
    line = next(line for line in text if line.startswith("verdict: "))
    assert records[-1]["what"] == line.removeprefix("verdict: ")
    assert records[-1]["step_s"] > records[-1]["without_s"] > 0
    assert set(records[0]) <= set(records[-1])
    assert sum(records[-1]["parts_s"].values()) == pytest.approx(records[-1]["step_s"], rel=0.2)
    assert any(
        line.startswith("   a step, mean of ranks: ") and "data 30%" in line for line in text
    )
    speed = [line.removeprefix("speed: ") for line in text if line.startswith("speed: ")]
    assert [one["what"] for one in records[:-1]] == speed


def test_the_death_of_a_run_stands_before_what_it_went_on_from(tmp_path: Path) -> None:
    folder = run_of(
        tmp_path,
        (
            "spike",
            {"step": 3, "reason": "gradient norm 2 is 9 deviations above 0.4, the median of …"},
        ),
        ("worker_died", {"rank": 1, "pid": 7, "how": "killed by SIGKILL", "fatal": True}),
    )
    lines = findings_text(folder, diagnose(folder)).splitlines()
    numbered = [line for line in lines if line[:3] in ("1. ", "2. ")]
    assert "killed by SIGKILL" in numbered[0]
    assert "the run went on by itself" in numbered[1]
    assert "   try in the next run: train.spikes=skip" in lines
    assert "--force" not in "".join(lines)


def test_sessions_of_a_run_say_where_each_began_and_how_it_ended(tmp_path: Path) -> None:
    run_of(
        tmp_path,
        ("run_started", {}),
        ("compute_started", {"step": 0}),
        ("stop_requested", {"signal": "SIGINT"}),
        ("checkpoint_saved", {"step": 261, "folder": "step-261"}),
        ("run_finished", {"step": 261, "how": "stopped on request"}),
        ("run_started", {}),
        ("run_started", {}),
        ("resumed", {"step": 261, "folder": "step-261"}),
        ("compute_started", {"step": 261}),
        ("run_finished", {"step": 261, "how": "completed"}),
        steps=60,
    )
    text = CliRunner().invoke(app, ["diagnose", str(tmp_path)]).output.splitlines()
    assert text[-2:] == [
        "session 1: steps 1–261; stopped on request by Ctrl-C",
        "session 2: no step, resumed from step 261, no step lost; completed",
    ]


def test_no_run_folder_is_one_line_with_the_nearest(tmp_path: Path) -> None:
    (run_of(tmp_path) / "logs").mkdir()
    command = [sys.executable, "-m", "shoal", "diagnose", str(tmp_path / "logs")]
    told = subprocess.run(command, capture_output=True, text=True)
    assert told.returncode == 2
    line = f"shoal: {tmp_path}/logs: no run folder; try: {tmp_path}\n"
    assert (told.stdout, told.stderr) == ("", line)


KILLED = ("worker_died", {**DIED, "how": "killed by SIGKILL", "traceback": "", "fatal": True})
DMESG = "dmesg -T | grep -i -e oom -e 'killed process'"


def answer(folder: Path) -> tuple[int, list[str]]:
    """Exit status and lines of `shoal diagnose`, the folder called RUN."""
    told = CliRunner().invoke(app, ["diagnose", str(folder)])
    return told.exit_code, told.output.replace(str(folder), "RUN").splitlines()


def test_a_killed_run_says_what_is_saved_what_is_lost_and_how_to_go_on(tmp_path: Path) -> None:
    run_of(tmp_path, KILLED, steps=71)
    (tmp_path / "plan.json").write_text('{"steps": 80}')
    first = [
        "1. rank 1 (pid 4711): killed by SIGKILL",
        "   why: nothing is known of the sender: a person, a scheduler, or the kernel out of memory",
        "end: killed at step 71 of 80",
    ]
    gave_up = "restart: none: the launcher gave up after this death"
    assert answer(tmp_path) == (1, [
        *first,
        "saved: no complete checkpoint is in this folder; steps 1–71 are lost: 71 steps",
        gave_up, "next: shoal train RUN/run.toml", f"cause: {DMESG}",
    ])  # fmt: skip
    save(tmp_path, 48, 64)
    step = "saved: step 64 is the newest complete checkpoint (RUN/checkpoints/step-64); steps 65–71"
    assert answer(tmp_path) == (1, [
        *first, f"{step} are lost: 7 steps", gave_up, "next: shoal train --resume RUN", f"cause: {DMESG}",
    ])  # fmt: skip
    (tmp_path / "run.toml").write_text("[launch]\nrestarts = 0\n")
    assert "restart: none: launch.restarts = 0" in answer(tmp_path)[1]
    told = CliRunner().invoke(app, ["diagnose", str(tmp_path), "--json"]).output
    onward = json.loads(told)["continuation"]
    assert (onward["saved_step"], onward["last_step"]) == (64, 71)
    assert onward["command"] == f"shoal train --resume {tmp_path}"


def test_restarts_before_the_end_are_counted(tmp_path: Path) -> None:
    run_of(tmp_path, *GOES_ON, KILLED, steps=5)
    save(tmp_path, 5)
    lines = answer(tmp_path)[1]
    assert "restart: 1 of 3 restarts were made, then the launcher gave up" in lines
    assert lines[3].endswith("; no step is lost")


def test_speed_of_a_complete_run_is_advice_for_the_next_run(tmp_path: Path) -> None:
    done = ("run_finished", {"how": "completed"})
    run_of(tmp_path, ("slow_rank", {**SLOW, "phase": "data"}), done, steps=60)
    status, lines = answer(tmp_path)
    assert (status, lines[0]) == (0, "RUN: no fault")
    assert lines[1].startswith("speed: rank 1 on a is slow in data: 32.0 ms a step (30%)")
    assert lines[3] == "   try in the next run: data.workers=2"
    assert "--resume" not in "".join(lines)
    run_of(tmp_path / "wait", done, steps=60, data_wait_s=0.03)
    assert [one.command for one in diagnose(tmp_path / "wait")] == [
        "try in the next run: data.workers=2"
    ]


def test_a_slow_rank_has_one_share(tmp_path: Path) -> None:
    from shoal.cli.diagnose import _omit_figures
    from shoal.report.verdict import Verdict

    run_of(tmp_path, ("slow_rank", {**SLOW, "phase": "data"}))
    (found,) = diagnose(tmp_path)
    same = _omit_figures(found, Verdict("slow_rank", "rank 1's data", (), 0.25))
    assert same.what == "rank 1 on a is slow in data; the others wait for it"
    assert same.command == ""
    for cause in ("rank 2's data", "rank 1's forward pass"):
        assert _omit_figures(found, Verdict("slow_rank", cause, (), 0.25)) == found


def test_commands_that_would_be_refused_are_not_proposed(tmp_path: Path) -> None:
    spike = ("spike", {"step": 9, "reason": "loss 70"})
    how = {"rank": 1, "pid": 7, "how": "exit code 3", "fatal": True, "traceback": "diverged"}
    died = ("worker_died", how)
    found = diagnose(run_of(tmp_path / "unsaved", spike, died))
    assert found[1].command == f"shoal train {tmp_path}/unsaved/run.toml optimizer.lr=…"
    look = f"; shoal data look {tmp_path}/unsaved --step 9 shows them by loss"
    assert found[0].why.endswith("unlike the others" + look)
    save(tmp_path / "saved", 4)
    found = diagnose(run_of(tmp_path / "saved", spike, died))
    assert found[1].command == f"shoal train --resume {tmp_path}/saved --force optimizer.lr=…"
    assert found[0].command == "try in the next run: train.spikes=skip", "the run went on"
    assert [key for key in (*FREE_KEYS, "train.spikes") if changes_result(key)] == ["train.spikes"]
    (found,) = diagnose(
        run_of(tmp_path / "my run's", spike, ("run_finished", {"how": "completed"}))
    )
    assert found.command == "try in the next run: train.spikes=skip"
    (found,) = diagnose(run_of(tmp_path / "done", spike, ("run_finished", {"how": "completed"})))
    assert found.command == "try in the next run: train.spikes=skip"
    stop = ("stop_requested", {"signal": "SIGTERM", "steps": True})
    (found,) = diagnose(run_of(tmp_path / "stop", stop))
    assert found.command == "", "there is no checkpoint to list"
    run_of(tmp_path / "isl")
    island = run_of(tmp_path / "isl" / "island-0", died)
    assert diagnose(island)[0].command == (
        f"shoal train --resume {tmp_path}/isl --force optimizer.lr=…"
    )


def test_islands_go_on_together(tmp_path: Path) -> None:
    run_of(tmp_path)
    for island, steps in ((0, 30), (1, 29)):
        run_of(tmp_path / f"island-{island}", KILLED, steps=steps)
        save(tmp_path / f"island-{island}", 20, 25)
    save(tmp_path / "island-0", 30)  # no other island holds it
    status, lines = answer(tmp_path)
    assert (status, lines[0], lines[3]) == (1, "RUN/island-0:", "RUN/island-1:")
    saved = "step 25 is the newest complete checkpoint (RUN/island-0/checkpoints/step-25)"
    assert f"saved: {saved}; steps 26–30 are lost: 5 steps" in lines
    assert "next: shoal train --resume RUN" in lines


def test_a_cure_is_the_command_that_goes_on(tmp_path: Path) -> None:
    diverged = {**DIED, "how": "exit code 3", "traceback": "loss is non-finite", "fatal": True}
    run_of(tmp_path, ("worker_died", diverged), steps=9)
    save(tmp_path, 8)
    end = answer(tmp_path)[1][-4:]
    assert end[0] == "end: diverged at step 9"
    assert end[1].endswith("; step 9 is lost: 1 step")
    assert end[2:] == [
        "restart: none: after exit code 3 a restart would end the same way",
        "next: shoal train --resume RUN --force optimizer.lr=…",
    ]
