"""A cache folder that cannot be used costs a line and time, no run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.base.files import cache_folder, cache_trouble

TRAIN = ("train", "model.name=mlp", "data.source=digits", "train.steps=4", "launch.processes=1",
         "run.name=a")  # fmt: skip


def shoal(folder: Path, cache: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoal", *words],
        cwd=folder, env={**os.environ, "SHOAL_CACHE": cache}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


def test_what_is_wrong_with_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert cache_trouble(tmp_path / "file") == "a file is in its place"
    assert cache_trouble(tmp_path / "file" / "below") == "Not a directory"
    assert cache_trouble(Path("/proc/nothing")) == "No such file or directory"
    assert cache_trouble(tmp_path / "new" / "folder") == ""
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def test_a_user_without_a_home_has_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHOAL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert cache_folder().name == f"shoal-cache-{os.getuid()}"


def test_one_line_and_the_command_goes_on(tmp_path: Path) -> None:
    """As far as a wrong key, so that no machine is measured here."""
    (tmp_path / "file").touch()
    done = shoal(tmp_path, str(tmp_path / "file"), *TRAIN, "train.stepz=4")
    first, second = done.stderr.splitlines()
    assert first == (
        f"shoal: cache folder {tmp_path / 'file'}: a file is in its place; nothing is kept between "
        f"runs; try: SHOAL_CACHE=another folder"
    )
    assert "train.stepz" in second
    good = shoal(tmp_path, str(tmp_path / "good"), *TRAIN, "train.stepz=4")
    assert good.stderr.splitlines() == [second]


@pytest.mark.proof("faults")
@pytest.mark.parametrize("cache", ["/proc/nothing", "/dev/null/below"])
def test_training_goes_on_without_it(tmp_path: Path, cache: str) -> None:
    done = shoal(tmp_path, cache, *TRAIN)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"shoal: cache folder {cache}: ")
    assert len(done.stderr.splitlines()) == 1
    assert (tmp_path / "runs" / "a" / "checkpoints" / "step-4" / "manifest.json").is_file()
