"""Which folder a launcher's job goes on with when it is restarted."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.base.errors import ConfigError
from shoal.cli.start import prepare_run, write_run_folder
from shoal.cli.torchrun import JOB_FILE, continue_job

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
AGAIN = {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}
SMALL = ["model.name=mlp", "data.source=digits"]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def save(folder: Path) -> None:
    step = folder / "checkpoints" / "step-3"
    step.mkdir(parents=True)
    (step / "manifest.json").touch()


def test_a_restart_resumes_and_leaves_the_file_out(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("[model]\nname = 'mlp'\n[data]\nsource = 'digits'\n")
    arguments = ["my.toml", "run.name=mine"]
    assert continue_job(arguments, None, TORCHRUN, 0) == (arguments, None)
    first = prepare_run(arguments, None, 2)
    first.folder.mkdir(parents=True)
    write_run_folder(first)
    # It died before its first checkpoint: the folder is used again, from the start.
    assert continue_job(arguments, None, AGAIN, 1) == (arguments, None)
    assert not prepare_run(arguments, None, 2).resumed
    save(tmp_path / "runs" / "mine")
    rest, folder = continue_job(arguments, None, AGAIN, 1)
    assert (rest, folder) == (["run.name=mine"], Path("runs/mine"))
    assert prepare_run(rest, folder, 2).resumed


def test_the_launchers_name_for_the_job_names_the_folder(tmp_path: Path) -> None:
    slurm = {"SLURM_JOB_ID": "77"}
    assert continue_job(SMALL, None, slurm, 0) == ([*SMALL, "run.name=job-77"], None)
    save(tmp_path / "runs" / "job-77")
    requeued = {**slurm, "SLURM_RESTART_COUNT": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
    assert continue_job(SMALL, None, requeued, 1)[1] == Path("runs/job-77")
    (tmp_path / "my.toml").write_text("[run]\nname = 'mine'\n")
    assert continue_job(["my.toml"], None, slurm, 0) == (["my.toml"], None), (
        "a name in the file stays"
    )


def test_a_restart_without_any_name_is_refused() -> None:
    assert continue_job(SMALL, None, TORCHRUN, 0) == (SMALL, None)
    with pytest.raises(ConfigError) as caught:
        continue_job(SMALL, None, AGAIN, 1)
    assert str(caught.value) == (
        "run.name: is empty at restart 1, and the launcher has no name for the job, so its folder "
        "cannot be found again; set run.name=NAME"
    )


def test_what_the_user_resumes_is_resumed_at_every_attempt() -> None:
    assert continue_job([], Path("runs/mine"), AGAIN, 1) == ([], Path("runs/mine"))


def test_a_job_whose_nodes_became_more_goes_on_although_nothing_failed(tmp_path: Path) -> None:
    job = {"TORCHELASTIC_RUN_ID": "j1", "TORCHELASTIC_RESTART_COUNT": "0"}
    arguments = [*SMALL, "run.name=mine"]
    first = prepare_run(arguments, None, 1)
    (first.folder / "logs").mkdir(parents=True)
    write_run_folder(first)
    (first.folder / JOB_FILE).write_text("j1")
    assert continue_job(arguments, None, job, 0) == (arguments, None), "nothing is saved yet"
    save(first.folder)
    assert continue_job(arguments, None, job, 0)[1] == first.folder
    assert continue_job(arguments, None, {**job, "TORCHELASTIC_RUN_ID": "j2"}, 0)[1] is None
    with pytest.raises(ConfigError) as caught:
        continue_job(arguments, None, TORCHRUN, 0)
    assert str(caught.value) == (
        "run.name = mine: runs/mine holds a run already; to go on with it: --resume runs/mine; so "
        "that it goes on by itself when nodes come or leave: torchrun --rdzv-id=mine"
    )
