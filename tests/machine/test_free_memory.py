"""What is free is the least of the machine and of every cgroup around a process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.machine import free_memory
from shoal.machine.free_memory import create_memory_file, free_bytes

GIB = 2**30


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/job/step", "job", ("memory.max", "memory.current")),
        ("4:memory:/job/step", "memory/job", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ],
)
def test_a_cgroup_around_us_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, folder: str, names: tuple[str, str]
) -> None:
    machine = SimpleNamespace(available=40 * GIB)
    monkeypatch.setattr(free_memory.psutil, "virtual_memory", lambda: machine)
    monkeypatch.setattr(free_memory, "GROUPS", tmp_path)
    monkeypatch.setattr(free_memory, "OWN", tmp_path / "own")
    assert free_bytes() == 40 * GIB, "nothing tells of cgroups"
    (tmp_path / "own").write_text(f"9:name=systemd:/\n{line}\n")
    assert free_bytes() == 40 * GIB, "no cgroup has a limit"
    place = tmp_path / folder
    (place / "step").mkdir(parents=True)
    for name, told in zip(names, ("max", "7"), strict=True):
        (place / "step" / name).write_text(told)
    for name, told in zip(names, (16 * GIB, 3 * GIB), strict=True):
        (place / name).write_text(str(told))
    assert free_bytes() == 13 * GIB
    assert create_memory_file("test", GIB, 6 * GIB) is None, "12 is less than twice 7"
    (place / names[1]).write_text(str(17 * GIB))
    assert free_bytes() == 0
