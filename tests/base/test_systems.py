"""Systems on which Shoal was never tried: one line that says what is missing, or a refusal."""

from __future__ import annotations

import sys

import pytest

import shoal
from shoal.base import operating_systems
from shoal.base.errors import ConfigError
from shoal.cli.main import main

MACOS = (
    "macOS: never tried; missing here: the parent-death signal (workers outlive a launcher that is "
    "killed together with its guardian), /proc (who owned a run folder is not known, memory is the "
    "peak), saves that are on the drive and read back from it (fsync ends at its cache), Apple's "
    "GPU (runs use the CPU); tried on: Linux"
)
WINDOWS = (
    "Windows: never tried; missing here: locks of run folders (fcntl), process groups to end "
    "workers by, the parent-death signal, sockets handed to workers; try: WSL 2, which is Linux"
)


def told_by(
    verb: str, system: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """(exit code, standard error) of a command that ends before anything starts."""
    monkeypatch.setattr(operating_systems, "system_name", lambda: system)
    monkeypatch.setattr(sys, "argv", ["shoal", verb, "train.stepz=1"])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, capsys.readouterr().err


def test_linux_says_nothing(monkeypatch, capsys) -> None:
    code, err = told_by("train", "linux", monkeypatch, capsys)
    assert code == 2
    assert err.startswith("shoal: command line: train.stepz")
    assert err.count("\n") == 1


@pytest.mark.parametrize("verb", ["train", "compare", "prove"])
def test_macos_is_told_what_is_missing_and_goes_on(verb, monkeypatch, capsys) -> None:
    code, err = told_by(verb, "darwin", monkeypatch, capsys)
    first, second = err.splitlines()
    assert first == f"shoal: {MACOS}"
    assert second.startswith("shoal: command line: train.stepz")
    assert code == 2


@pytest.mark.parametrize("verb", ["train", "compare", "prove"])
def test_windows_is_refused(verb, monkeypatch, capsys) -> None:
    assert told_by(verb, "win32", monkeypatch, capsys) == (2, f"shoal: {WINDOWS}\n")


def test_other_systems_are_named(monkeypatch, capsys) -> None:
    _, err = told_by("train", "freebsd14", monkeypatch, capsys)
    assert err.startswith("shoal: freebsd14: never tried; missing here: the parent-death signal")


def test_an_own_loop_on_windows_is_refused_before_an_import_fails(monkeypatch) -> None:
    monkeypatch.setattr(operating_systems, "system_name", lambda: "win32")
    monkeypatch.delitem(vars(shoal), "parallelize", raising=False)
    with pytest.raises(ConfigError) as refusal:
        _ = shoal.parallelize
    assert str(refusal.value) == WINDOWS
    assert issubclass(shoal.PlanError, shoal.ShoalError)


def test_the_loopback_has_its_name_of_that_system(monkeypatch) -> None:
    assert operating_systems.loopback_interface() == "lo"
    monkeypatch.setattr(operating_systems, "system_name", lambda: "darwin")
    assert operating_systems.loopback_interface() == "lo0"
