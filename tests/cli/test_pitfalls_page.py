"""docs/how-it-works/pitfalls.md holds: its programs and commands are run as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from forks import Forks

PAGE = Path(__file__).parents[2] / "docs" / "how-it-works" / "pitfalls.md"


def section(title: str) -> tuple[str, list[str]]:
    """(the program, the commands) of a section of the page."""
    text = next(one for one in PAGE.read_text().split("\n## ") if one.startswith(title))
    program = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    return program, re.findall(r"^shoal .*$", text, re.MULTILINE)


def ran(
    command: str,
    folder: Path,
    environ: Mapping[str, str] = os.environ,
    programs: Forks | None = None,
) -> tuple[int, str]:
    """(exit status, output) of a command of the page, by itself or forked."""
    if programs is not None:
        forked = programs.run("-m", "shoal", *shlex.split(command)[1:], cwd=folder, timeout=240)
        return forked.returncode, forked.stdout + forked.stderr
    done = subprocess.run(
        [sys.executable, "-m", "shoal", *shlex.split(command)[1:]],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**environ, "PYTHONPATH": f"{folder}:{environ.get('PYTHONPATH', '')}"},
    )
    return done.returncode, done.stdout + done.stderr


def test_a_deadlock_is_caused_detected_and_mended(tmp_path: Path, programs: Forks) -> None:
    program, commands = section("Deadlock")
    (tmp_path / "stuck.py").write_text(program)
    line = 1 + program.splitlines().index("            dist.barrier()  # rank 0 is not asked")
    assert f"(stuck.py:{line})" in PAGE.read_text()
    ended = [ran(command, tmp_path, programs=programs) for command in commands]
    assert [code for code, _ in ended] == [1, 1, 0, 0], ended
    told = ended[1][1]
    assert re.search(r"no rank goes on for \d+\.\d s: rank 1 on ", told), told
    assert f"torch.distributed.barrier (stuck.py:{line}), rank 0 in all_reduce" in told
    last = [text for code, text in ended[2:] if not code][-1]
    assert "no fault" in last


def told(title: str, name: str, folder: Path, **more: Any) -> tuple[str, str]:
    """What `diagnose` says of the run that has a pitfall, and of the mended one."""
    program, commands = section(title)
    (folder / name).write_text(program)
    ended = [ran(command, folder, **more) for command in commands]
    assert [code for code, _ in ended] == [0, 0, 0, 0], ended
    return ended[1][1], ended[3][1]


@pytest.mark.proof
def test_a_communication_bottleneck_is_caused_detected_and_mended(tmp_path: Path) -> None:
    def share(text: str) -> int:
        found = re.search(r"speed: communication takes (\d+)% of a step", text)
        return int(found[1]) if found else 0  # below a fifth, nothing is said

    starved, fed = map(share, told("Communication", "wide.py", tmp_path))
    assert starved >= 40, "most of a step"
    assert fed <= 0.6 * starved, "on a machine that others use too, some waits stay"


@pytest.mark.proof
def test_an_imbalance_is_caused_detected_and_mended(tmp_path: Path, programs: Forks) -> None:
    uneven, even = told("Load imbalance", "uneven.py", tmp_path, programs=programs)
    assert re.search(r"speed: rank 1 on \S+ is slow in data", uneven), uneven
    assert "data.workers=2" in uneven
    assert "is slow" not in even
