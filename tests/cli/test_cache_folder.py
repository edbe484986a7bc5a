"""A cache folder that cannot be used costs a line and time, no run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from shoal.base.runlog.atomic_files import cache_folder, check_cache_folder, replace_compiler_caches

TRAIN = ("train", "model.name=mlp", "data.source=digits", "train.steps=4", "launch.processes=1",
         "run.name=a")  # fmt: skip


def shoal(folder: Path, cache: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoal", *words],
        cwd=folder, env={**os.environ, "SHOAL_CACHE": cache}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip


def test_what_is_wrong_with_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert check_cache_folder(tmp_path / "file") == "a file is in its place"
    assert check_cache_folder(tmp_path / "file" / "below") == "Not a directory"
    assert check_cache_folder(Path("/proc/nothing")) == "No such file or directory"
    assert check_cache_folder(tmp_path / "new" / "folder") == ""
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


@pytest.mark.parametrize("name", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"])
def test_torchs_compiler_gets_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """torch makes its folder as it imports the compiler, and ended every run in a traceback."""
    for one in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(one, str(tmp_path / "good"))
    assert replace_compiler_caches(lambda: tmp_path / "own") == []
    monkeypatch.setenv(name, "/dev/null/below")
    (line,) = replace_compiler_caches(lambda: tmp_path / "own")
    assert line == (
        f"torch's compiler: cache folder /dev/null/below: Not a directory; compiled code is kept for "
        f"this run alone; try: {name}=another folder"
    )
    assert os.environ[name].startswith(str(tmp_path / "own"))
    assert replace_compiler_caches(lambda: tmp_path / "own") == []


def test_torchs_own_folder_below_the_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    for one in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(one, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    Path(default_cache_dir()).touch()
    (line,) = replace_compiler_caches(lambda: tmp_path / "own")
    assert f"cache folder {default_cache_dir()}: a file is in its place" in line
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")


@pytest.mark.proof("faults")
@pytest.mark.parametrize("cache", ["/proc/nothing", "/dev/null/below"])
def test_training_goes_on_without_it(tmp_path: Path, cache: str) -> None:
    done = shoal(tmp_path, cache, *TRAIN)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"shoal: cache folder {cache}: ")
    assert len(done.stderr.splitlines()) == 1
    assert (tmp_path / "runs" / "a" / "checkpoints" / "step-4" / "manifest.json").is_file()


LLAMA = ("train", "model.name=llama", "model.dim=32", "model.layers=2", "model.heads=2",
         "data.sequence=16", "data.source=text:a.txt", "train.steps=2", "train.batch=4",
         "train.micro_batch=2", "run.name=a")  # fmt: skip
CACHE = "cache folder {}: Read-only file system; nothing is kept between runs"
CODE = "torch's compiler: cache folder {}: Read-only file system; compiled code is kept"
READ_ONLY = {
    "home": ({"HOME": ""}, [], CACHE.format("ro/.cache/shoal")),
    "xdg": ({"XDG_CACHE_HOME": "x"}, [], CACHE.format("ro/x/shoal")),
    "shoal": ({"SHOAL_CACHE": "y"}, [], CACHE.format("ro/y")),
    "inductor": ({"TORCHINDUCTOR_CACHE_DIR": "i"}, ["train.compile=blocks"], CODE.format("ro/i")),
    "inductor, not compiled": ({"TORCHINDUCTOR_CACHE_DIR": "i"}, [], CODE.format("ro/i")),
    "triton": ({"TRITON_CACHE_DIR": "t"}, ["train.compile=blocks"], CODE.format("ro/t")),
    "temporary": ({"TMPDIR": ""}, ["train.compile=blocks"], ""),
}


def mounted_read_only(folder: Path, script: str, environ: dict[str, str]) -> Any:
    """Run a shell line in a mount namespace, in which `folder` is read-only."""
    lines = (
        f"mount --bind {folder} {folder} && mount -o remount,ro,bind {folder} || exit 77\n{script}"
    )
    try:
        done = subprocess.run(
            ["unshare", "--mount", "bash", "-c", lines], cwd=folder.parent, env=environ, text=True,
            capture_output=True, timeout=300, check=False,
        )  # fmt: skip
    except FileNotFoundError as failure:
        pytest.skip(f"read-only mounts NOT TESTED: {failure}")
    if done.returncode == 77 or "unshare:" in done.stderr:
        pytest.skip(f"read-only mounts NOT TESTED: {done.stderr.strip()}")
    return done


@pytest.mark.proof("faults")
@pytest.mark.parametrize("name", READ_ONLY)
def test_training_goes_on_beside_a_read_only_mount(tmp_path: Path, name: str) -> None:
    given, more, said = READ_ONLY[name]
    (tmp_path / "ro").mkdir()
    (tmp_path / "a.txt").write_text("some words of a text, again and again\n" * 99)
    environ = {k: v for k, v in os.environ.items() if k not in ("SHOAL_CACHE", "XDG_CACHE_HOME")}
    environ |= {key: str(tmp_path / "ro" / word) for key, word in given.items()}
    if "SHOAL_CACHE" not in given and said.startswith("torch"):
        environ["SHOAL_CACHE"] = str(tmp_path / "cache")
    ranks = 1 if "train.compile=blocks" in more else 2  # a minute of compilation on each
    words = (*LLAMA, *more, f"launch.processes={ranks}")
    script = f"exec {sys.executable} -m shoal {' '.join(words)}"
    done = mounted_read_only(tmp_path / "ro", script, environ)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == bool(said), done.stderr
    assert said.replace("folder ro", f"folder {tmp_path}/ro") in "".join(lines)
    assert (tmp_path / "runs" / "a" / "checkpoints" / "step-2" / "manifest.json").is_file()


@pytest.mark.proof("faults")
def test_a_run_folder_on_a_read_only_mount_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "ro").mkdir()
    script = f"cd ro && exec {sys.executable} -m shoal {' '.join(TRAIN)}"
    done = mounted_read_only(tmp_path / "ro", script, dict(os.environ))
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("shoal: runs: Read-only file system"), line
