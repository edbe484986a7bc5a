"""Planted device bugs are named by the simulated device in one run; their mended twins are not."""

from __future__ import annotations

import re

import pytest

CRASHES = "device_memory_read_by_the_host"
PLACE = r"planted\.py:\d+"


def told(output: str) -> dict[str, str]:
    """What was said about each bug."""
    return {line.split()[0]: line for line in output.splitlines() if " seed " in line}


@pytest.mark.parametrize("mode", ["drawn", "lazy", "eager"])
def test_each_is_named_in_one_run_with_both_places(run, mode: str) -> None:
    """Seed 0, whatever the schedule: clocks know a missing wait also where all went well."""
    names = run("planted.py", "names", "planted", "0").stdout.split()
    assert len(names) >= 15
    done = run("planted.py", "all", "planted", "0", mode, SIM_UNPINNED="refuse")
    assert done.returncode == 1, done.stderr
    said = told(done.stdout)
    assert set(said) == set(names) - {CRASHES}
    for name, line in said.items():
        one_place = name == "asynchronous_copy_of_unpinned_memory"  # the other is no operation
        assert len(re.findall(PLACE, line)) >= (1 if one_place else 2), line
        assert "wrong numbers" not in line


def test_a_read_of_device_memory_by_the_host_ends_the_process(run) -> None:
    done = run("planted.py", CRASHES, "planted", "0")
    assert done.returncode == -11
    assert len(re.findall(PLACE, done.stderr)) == 2
    assert "memory of cuda:0 touched by the host" in done.stderr


@pytest.mark.parametrize("mode", ["drawn", "lazy", "eager"])
def test_mended_twins_are_clean(run, mode: str) -> None:
    done = run("planted.py", "all", "mended", "0", mode, "3", SIM_UNPINNED="refuse")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.proof
def test_mended_twins_are_clean_under_200_seeds(run) -> None:
    done = run("planted.py", "all", "mended", "0", "drawn", "200", SIM_UNPINNED="refuse")
    assert done.returncode == 0, done.stdout + done.stderr


def test_reports_end_in_a_status(run) -> None:
    """Where nothing is raised, a process does not end as if nothing had been."""
    done = run("planted.py", "prefetched_without_wait", "planted", "0", SIM_RACES="report")
    assert done.returncode in (1, 86)
    assert len(re.findall(PLACE, done.stderr)) == 2
