"""Planted device bugs are named by the simulated device in one run; their mended twins are not."""

from __future__ import annotations

import re

import pytest

CRASHES = "device_memory_read_by_the_host"
PLACE = r"planted\.py:\d+"


MODES = ("drawn", "lazy", "eager")


def test_each_is_named_in_one_run_with_both_places(forks) -> None:
    """Seed 0, whatever the schedule: clocks know a missing wait also where all went well."""
    names = forks.run("planted.py", "names", "planted", "0").stdout.split()
    assert len(names) >= 15
    done = forks.run("planted.py", "all", "planted", "0", ",".join(MODES), SIM_UNPINNED="refuse")
    assert done.returncode == 1, done.stderr
    said = {tuple(line.split()[:2]): line for line in done.stdout.splitlines() if ": " in line}
    assert set(said) == {(n, mode) for n in names for mode in MODES if n != CRASHES}
    for (name, _), line in said.items():
        one_place = name == "asynchronous_copy_of_unpinned_memory"  # the other is no operation
        assert len(re.findall(PLACE, line)) >= (1 if one_place else 2), line
        assert "wrong numbers" not in line


def test_a_read_of_device_memory_by_the_host_ends_the_process(forks) -> None:
    done = forks.run("planted.py", CRASHES, "planted", "0")
    assert done.returncode == -11
    assert len(re.findall(PLACE, done.stderr)) == 2
    assert "memory of cuda:0 touched by the host" in done.stderr


def test_mended_twins_are_clean(forks) -> None:
    done = forks.run(
        "planted.py", "all", "mended", "0", ",".join(MODES), "3", SIM_UNPINNED="refuse"
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.proof
def test_mended_twins_are_clean_under_200_seeds(forks) -> None:
    done = forks.run("planted.py", "all", "mended", "0", "drawn", "200", SIM_UNPINNED="refuse")
    assert done.returncode == 0, done.stdout + done.stderr


def test_reports_end_in_a_status(forks, run) -> None:
    """Where nothing is raised, a process does not end as if nothing had been, forked or not."""
    for start in (run, forks.run):
        done = start("planted.py", "prefetched_without_wait", "planted", "0", SIM_RACES="report")
        assert done.returncode == 86
        assert len(re.findall(PLACE, done.stderr)) == 2
