"""The launcher of several islands on one machine, piece by piece; whole runs are in worlds/."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.base.errors import UNSAVED_CODE
from shoal.base.runlog.events import EventLog, append_line
from shoal.cli import islands, start
from shoal.config.load import load_config
from shoal.config.save import MICRO_BATCH, is_derived


@pytest.mark.parametrize(("asked", "code"), [(True, 143), (False, -signal.SIGTERM)])
def test_a_stop_before_an_island_listens_is_a_stop(tmp_path: Path, asked: bool, code: int) -> None:
    """While it imports it dies by the signal; what ended the run is the island that refused."""
    guardian: Any = SimpleNamespace(tell=lambda *_: None)
    island = islands._IslandSupervisor(tmp_path, guardian)
    island.process = subprocess.Popen(["sleep", "60"])
    if asked:
        island.ask_to_stop()
    else:
        island.process.terminate()
    assert island.ended() == code
    assert (code in islands.STOPPED) == asked


def left(folder: Path, *, made: int, saved: int) -> None:
    """What an island leaves that made some steps and saved a checkpoint."""
    log = EventLog(folder / "events.jsonl", None)
    log.emit("run_started")
    log.emit("compute_started")
    for step in range(1, made + 1):
        append_line(folder / "metrics.jsonl", {"step": step, "loss": 1.0})
    if saved:
        (folder / "checkpoints" / f"step-{saved}").mkdir(parents=True, exist_ok=True)
        (folder / "checkpoints" / f"step-{saved}" / "manifest.json").touch()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Launches two islands that end with these codes and leave (steps made, saved); the status."""
    monkeypatch.chdir(tmp_path)

    def launch(
        codes: list[int], *states: tuple[int, int], first: int | None = None
    ) -> tuple[int, int]:
        base = ["model.name=mlp", "data.source=digits", "run.name=x", "launch.processes=1"]
        more = ["islands.method=diloco", "islands.count=2", "launch.restarts=2"]
        prepared, runs = start.prepare_run([*base, *more], None), 0

        def run_once(own: Any, environ: Any, view: Any, stop: Any, restarts: int) -> list[int]:
            nonlocal runs
            assert restarts == 0, "a fixed list restarts as a whole"
            stop.first, runs = first, runs + 1
            for index, (made, saved) in enumerate(states):
                left(own[index].folder, made=made, saved=saved)
            return codes

        monkeypatch.setattr(islands, "_run_islands", run_once)
        return start.launch_run(prepared, {}), runs

    return launch


@pytest.mark.parametrize(
    ("first", "states", "status", "line"),
    [
        (signal.SIGTERM, [(8, 8), (8, 8)], 143, ""),
        (signal.SIGINT, [(8, 8), (8, 8)], 130, ""),
        (signal.SIGINT, [(8, 8), (8, 5)], 1,
         "shoal: island 1: stopped by Ctrl-C; the newest checkpoint is step-5: steps 6 – 8 are lost\n"),
        (None, [(8, 0), (8, 8)], 1,
         "shoal: island 0: stopped by SIGTERM; nothing was saved: steps 1 – 8 are lost\n"),
        (signal.SIGTERM, [(8, 8), (0, 0)], 1, ""),
    ],
)  # fmt: skip
def test_a_stop_of_islands_claims_what_is_on_their_disks(
    ends: Any, capsys: pytest.CaptureFixture[str], first: Any, states: Any, status: int, line: str
) -> None:
    assert ends([143, 143], *states, first=first) == (status, 1)
    out, err = capsys.readouterr()
    assert err == line
    assert out.endswith("next: shoal train --resume runs/x\n")


def test_an_island_that_could_not_save_its_end_is_told_and_not_started_again(
    ends: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ends([0, UNSAVED_CODE], (8, 8), (8, 6)) == (1, 1)
    out, err = capsys.readouterr()
    assert err == (
        "shoal: island 1: the last checkpoint could not be written: the newest is step-6, so steps "
        "7 – 8 are lost\n"
    )
    assert out.endswith("next: mend that, then: shoal train --resume runs/x\n")


@pytest.mark.parametrize(("codes", "status", "runs"), [([0, 3], 3, 1), ([0, -9], 1, 3)])
def test_an_island_that_failed_is_named(
    ends: Any, capsys: pytest.CaptureFixture[str], codes: list[int], status: int, runs: int
) -> None:
    assert ends(codes, (8, 8), (8, 8)) == (status, runs)
    how = "exit status 3" if status == 3 else "killed by signal 9"
    assert capsys.readouterr().err.startswith(f"shoal: island 1: ended with {how}; log: ")


def test_islands_that_complete_are_exported_from_the_first(
    ends: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ends([0, 0], (8, 8), (8, 8)) == (0, 1)
    out, err = capsys.readouterr()
    assert err == ""
    assert "next: shoal checkpoint export runs/x/island-0 x-exported\n" in out


def test_a_restart_keeps_the_micro_batch_that_the_islands_chose(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The least of them, in the folder of the run too; before the first start there is none."""
    monkeypatch.chdir(tmp_path)
    base = ["model.name=mlp", "data.source=digits", "run.name=x", "launch.processes=1"]
    more = ["islands.method=diloco", "islands.count=2", "train.batch=32"]
    seen: list[list[tuple[int, bool]]] = []
    chosen = iter([(16, 8), (32, 32)])

    def run_once(own: Any, environ: Any, view: Any, stop: Any, *_: Any) -> list[int]:
        plans = [json.loads((one.folder / "plan.json").read_text()) for one in own]
        seen.append([(plan["micro_batch"], plan["sized"]) for plan in plans])
        for one, plan, size in zip(own, plans, next(chosen), strict=True):
            new = plan if plan["sized"] else plan | {"micro_batch": size, "sized": True}
            (one.folder / "plan.json").write_text(json.dumps(new))
            left(one.folder, made=8, saved=8)
            config = load_config(one.folder / "run.toml").config
            assert config.train.micro_batch == plan["micro_batch"]
            assert is_derived(one.folder / "run.toml", MICRO_BATCH)
        return [0, 0]

    monkeypatch.setattr(islands, "_run_islands", run_once)
    start.launch_run(start.prepare_run([*base, *more], None), {})
    assert seen == [[(32, False), (32, False)]]
    assert load_config(Path("runs/x/run.toml")).config.train.micro_batch == 8
    again = start.prepare_run([], Path("runs/x"), force=True)
    start.launch_run(again, {})
    assert seen[1:] == [[(8, True), (8, True)]]
    given = start.prepare_run(["train.micro_batch=4"], Path("runs/x"), force=True)
    assert given.plan.micro_batch == 4
