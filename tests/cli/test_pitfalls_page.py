"""docs/pitfalls.md holds: its programs and commands are run as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "pitfalls.md"


def section(title: str) -> tuple[str, list[str]]:
    """(the program, the commands) of a section of the page."""
    text = next(one for one in PAGE.read_text().split("\n## ") if one.startswith(title))
    program = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    return program, re.findall(r"^shoal .*$", text, re.MULTILINE)


def ran(command: str, folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "shoal", *shlex.split(command)[1:]],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"},
    )
    return done.returncode, done.stdout + done.stderr


def test_a_deadlock_is_caused_detected_and_mended(tmp_path: Path) -> None:
    program, commands = section("Deadlock")
    (tmp_path / "stuck.py").write_text(program)
    line = 1 + program.splitlines().index("            dist.barrier()  # rank 0 is not asked")
    assert f"(stuck.py:{line})" in PAGE.read_text()
    ended = [ran(command, tmp_path) for command in commands]
    assert [code for code, _ in ended] == [1, 1, 0, 0], ended
    told = ended[1][1]
    assert re.search(r"no rank goes on for \d+\.\d s: rank 1 on ", told), told
    assert f"torch.distributed.barrier (stuck.py:{line}), rank 0 in all_reduce" in told
    last = [text for code, text in ended[2:] if not code][-1]
    assert "nothing wrong" in last
