"""`shoal doctor` finds each planted fault by its name, and none on a sound machine.

Real: a full disk and a small shared memory (a tmpfs), a held port, a lowered limit of files. Handed
over: clocks that step, a table of versions, a table of measured pairs. In tests/worlds: a wrong sum
(test_doctor_sums.py), and a pair of machines with a slow cable (test_doctor_pair.py).
"""

from __future__ import annotations

import itertools
import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.machine import health_check
from shoal.machine.link_check import Pair, best_pairs, check_pairs, select_slow_pairs


def doctor(*words: str, before: str = "") -> tuple[int, list[dict[str, object]]]:
    """Exit status and lines of the real command; `before` runs in its process first."""
    script = f"{before}\nfrom shoal.cli.main import main\nmain()"
    done = subprocess.run(
        [sys.executable, "-c", script, "doctor", "--json", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert not done.stderr, done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2M", "tmpfs", str(place)]
    if (done := subprocess.run(mount, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"a full disk NOT TESTED: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_sound_machine_has_no_fault(tmp_path: Path) -> None:
    code, told = doctor("--processes", "2", "--folder", str(tmp_path), "--free-gib", "0.1")
    assert [one for one in told if not one["ok"]] == []
    assert code == 0
    names = [one["check"] for one in told]
    assert {"clock", "disk", "memory", "file limit", "ports", "versions"} <= set(names)
    assert names[-2:] == ["sums", "links"]


def test_a_held_port_a_full_disk_and_a_low_limit_are_named(small: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        lower = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 4096))"
        words = ("--processes", "1", "--folder", str(small), "--port", str(port))
        code, told = doctor(*words, before=lower)
    assert code == 1
    wrong = {str(one["check"]): one for one in told if not one["ok"]}
    assert set(wrong) == {"disk", "file limit", "ports"}
    assert f"{small} has 2.0 MiB free, 1.0 GiB are needed" in str(wrong["disk"]["what"])
    assert "have 200 files" in str(wrong["file limit"]["what"])
    assert wrong["file limit"]["mend"] == "ulimit -n 1024"
    assert f"port {port} cannot be listened at" in str(wrong["ports"]["what"])
    assert "nearest free: " in str(wrong["ports"]["mend"])


def test_a_disk_that_takes_no_file_is_named(small: Path) -> None:
    """It has room by its own word, and a file of the probe's size does not fit."""
    told = health_check.check_disk("disk", small, 2**20)
    assert not told.ok
    assert "cannot be written and synced: No space left on device" in told.what
    assert list(small.iterdir()) == []


def test_a_small_shared_memory_is_named(small: Path) -> None:
    told = health_check.check_shared_memory(small)
    assert not told.ok
    assert f"{small} has 2.0 MiB free of 2.0 MiB, 256.0 MiB are needed" in told.what
    assert "--shm-size=1g" in told.mend


def test_a_clock_that_steps_or_is_another_than_the_disk_s_is_named(tmp_path: Path) -> None:
    began_s = time.monotonic()

    def steps() -> float:
        return time.time() + (
            3.0 if time.monotonic() - began_s > health_check.CLOCK_WATCHED_S / 2 else 0.0
        )

    told = health_check.check_clock(tmp_path, wall=steps)
    assert not told.ok
    assert "moved by +3000 ms" in told.what
    told = health_check.check_clock(tmp_path, wall=lambda: time.time() - 3600)
    assert not told.ok
    assert "-3600.0 s from the clock that dates files" in told.what
    assert health_check.check_clock(tmp_path).ok


@pytest.mark.parametrize(
    ("have", "asked", "what"),
    [
        ({"torch": "2.10.0+cpu"}, "torch<2.14,>=2.11", "torch 2.10.0+cpu, >=2.11 is needed"),
        ({"torch": "2.14.0"}, "torch<2.14,>=2.11", "torch 2.14.0, <2.14 is needed"),
        ({"numpy": None}, "numpy>=1.26", "numpy is missing, >=1.26 is needed"),
        ({"python": "3.10.9"}, "python<3.14,>=3.11", "python 3.10.9, >=3.11 is needed"),
    ],
)
def test_an_old_version_is_named(have: dict[str, str | None], asked: str, what: str) -> None:
    told = health_check.check_versions(have, [asked])
    assert not told.ok
    assert told.what == what
    assert asked in told.mend


def pairs(**unlike: float) -> list[Pair]:
    """Of four ranks; that of ranks 1 and 3 differs."""
    found = [
        {"a": a, "b": b, "latency_s": 1e-4 * (1 + 0.1 * a), "bytes_per_s": 1e9 * (1 + 0.1 * b)}
        for a, b in itertools.combinations(range(4), 2)
    ]
    return [{**p, **unlike} if (p["a"], p["b"]) == (1, 3) else p for p in found]


@pytest.mark.parametrize("unlike", [{"latency_s": 4e-4}, {"bytes_per_s": 3e8}])
def test_a_slow_pair_is_named(unlike: dict[str, float]) -> None:
    told = check_pairs(pairs(**unlike), [""] * 4)
    assert [one.ok for one in told] == [False]
    assert told[0].what.startswith("ranks 1 and 3 take ")
    named = check_pairs(pairs(**unlike), ["north", "south", "south", "north"])
    assert named[0].what.startswith("ranks 1 (south) and 3 (north) take ")
    assert select_slow_pairs(best_pairs(pairs(**unlike), select_slow_pairs(pairs()))) != []
    assert [one.ok for one in check_pairs(best_pairs(pairs(**unlike), pairs()), [""] * 4)] == [True]


def test_too_little_memory_and_too_few_cores_are_named(tmp_path: Path) -> None:
    table = tmp_path / "meminfo"
    table.write_text("MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n")
    assert health_check.check_memory(2, table, tmp_path).ok
    (tmp_path / "memory.max").write_text(f"{700 * 2**20}\n")
    (tmp_path / "memory.current").write_text(f"{100 * 2**20}\n")
    told = health_check.check_memory(2, table, tmp_path)
    assert not told.ok
    assert f"600.0 MiB free within the limit of {tmp_path / 'memory.max'}" in told.what
    assert told.mend == "launch.processes=1"
    assert health_check.check_cores(2, 0.5, cores=2).ok
    assert health_check.check_cores(3, 0.5, cores=2).mend == "launch.processes=2"
    hard = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert health_check.check_files(hard, 4096).ok


@pytest.mark.parametrize("words", [["--port", "70000"], ["--free-gib", "nan"]])
def test_wrong_input_is_refused(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "doctor", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"shoal: {words[0]} {words[1]}: from 0 to ")
