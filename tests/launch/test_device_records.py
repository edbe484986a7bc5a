"""devices.jsonl: what nvidia-smi says, and that no nvidia-smi holds up a watch or spoils its file."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.launch.watch.device_records import (
    FIELDS,
    PROGRAM,
    DeviceRecordFile,
    DeviceSampler,
    parse_devices,
)

ROW = "{}, NVIDIA H200, 83, 1024, 143771, 612.31, 61"
EIGHT = "\n".join(ROW.format(index) for index in range(8))
DEADLINE_S = 20.0


def fake(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """Put a program by the name of nvidia-smi first on PATH; return the file of its arguments."""
    folder.mkdir(exist_ok=True)
    program, asked = folder / PROGRAM, folder / "asked"
    program.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return asked


def until(sampler: DeviceSampler, done: Any) -> list[Any]:
    """Poll until `done()`; return the samples that came."""
    found, until_s = [], time.monotonic() + DEADLINE_S
    while not done() and time.monotonic() < until_s:
        if (sample := sampler.poll()) is not None:
            found.append(sample)
        time.sleep(0.005)
    assert done(), "within the deadline"
    return found


def starts(asked: Path) -> int:
    return len(asked.read_text().splitlines()) if asked.exists() else 0


def test_eight_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake(tmp_path / "bin", monkeypatch, f"cat <<'END'\n{EIGHT}\nEND")
    sampler, found = DeviceSampler(every_s=0.0), []
    found = until(sampler, lambda: starts(asked) >= 3)
    sampler.close()
    assert asked.read_text().splitlines()[0] == (
        f"--query-gpu={','.join(FIELDS)} --format=csv,noheader,nounits"
    )
    assert [one["index"] for one in found[0]] == list(range(8))
    assert found[0][3] == {
        "index": 3,
        "name": "NVIDIA H200",
        "utilisation": 0.83,
        "memory_used_bytes": 1024 * 2**20,
        "memory_total_bytes": 143771 * 2**20,
        "power_w": 612.31,
        "temperature_c": 61.0,
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0, A100 MIG, [N/A], [N/A], 81920, [N/A], 40", [(0, None, None, None, 40.0)]),
        ("0, X, ERR!, 1, 2, [Unknown Error], inf", [(0, None, 2**20, None, None)]),
        ("0, X, 250, -1, 2, nan, 5", [(0, None, None, None, 5.0)]),
        ("No devices were found", []),
        ("NVIDIA-SMI has failed because it couldn't communicate with the driver", []),
        ("0, X, 1, 2, 3\n, , , , , ,\n²,X,1,2,3,4,5\n1, A, B, 50, 1, 2, 3, 4", [(1, 0.5, 2**20, 3.0, 4.0)]),
        ("0, \x1b[31mX, 1, 1, 1, 1, 1", [(0, 0.01, 2**20, 1.0, 1.0)]),
        ("", []),
    ],
)  # fmt: skip
def test_fields_that_are_not_known_are_null(text: str, expected: list[Any]) -> None:
    keys = ("index", "utilisation", "memory_used_bytes", "power_w", "temperature_c")
    found = parse_devices(text)
    assert [tuple(one[key] for key in keys) for one in found] == expected
    assert all(one["name"].isprintable() for one in found)
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    "script",
    [
        "head -c 300000 /dev/urandom",  # more than a pipe holds
        "yes '0, X, 1, 2, 3, 4, 5' | head -c 300000",  # sound lines, without end
        f"echo '{ROW.format(0)}'; exit 9",
        "exec sleep 1000",
        "trap '' TERM INT; sleep 1000 & wait; sleep 1000",  # with a child that holds the pipe
        "echo oops",
        "kill -9 $$",
    ],
)
def test_a_broken_one_is_ended_and_asked_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    asked = fake(tmp_path / "bin", monkeypatch, script)
    sampler = DeviceSampler(every_s=0.0, limit_s=0.1, after_failure_s=0.1)
    assert until(sampler, lambda: starts(asked) >= 2) == []
    child = sampler._child
    sampler.close()
    if child is not None:
        child.wait(DEADLINE_S)


def test_a_slow_one_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many polls pass while it thinks; its answer comes, and no second one runs beside it."""
    go = tmp_path / "go"
    script = f"while [ ! -e {go} ]; do sleep 0.02; done; echo '{ROW.format(0)}'"
    asked = fake(tmp_path / "bin", monkeypatch, script)
    sampler = DeviceSampler(every_s=0.0, limit_s=DEADLINE_S)
    polls: list[None] = []
    assert until(sampler, lambda: polls.append(None) or (len(polls) > 20 and starts(asked))) == []
    assert starts(asked) == 1
    go.touch()
    found: list[Any] = []
    until_s = time.monotonic() + DEADLINE_S
    while not found and time.monotonic() < until_s:
        found = sampler.poll() or []
        time.sleep(0.005)
    sampler.close()
    assert found[0]["utilisation"] == 0.83


def test_without_the_program_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    sampler = DeviceSampler()
    assert sampler.path is None
    assert sampler.poll() is None


def test_the_file_stays_bounded_and_a_torn_line_spoils_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts take turns: each keeps its own lines, the old ones further apart."""
    monkeypatch.setattr("shoal.launch.watch.device_records.FILE_BYTES", 4000)
    path = tmp_path / "devices.jsonl"
    path.write_text('{"time_s":1,"host":"a","devi')
    file = DeviceRecordFile(tmp_path)
    for number in range(400):
        file.append_sample("ab"[number % 2], [{"index": number}])
    assert path.stat().st_size <= 4000 + 200
    rows = [json.loads(line) for line in path.read_text().splitlines() if "devices" in line]
    for host in "ab":
        own = [row["devices"][0]["index"] for row in rows if row["host"] == host]
        assert own[0] == "ab".index(host), "the first sample stays"
        assert own[-1] == 398 + "ab".index(host)
        steps = [after - before for before, after in zip(own, own[1:], strict=False)]
        assert steps[-1] == 2
        assert max(steps) > 2
        assert len(own) > 15
    assert not list(tmp_path.glob(".*")), "no file is left beside it"
    DeviceRecordFile(tmp_path / "gone").append_sample("a", [])
    assert not (tmp_path / "gone").exists()
