"""Light commands stay light: no torch, and an answer before anyone wonders."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROBE = """
import sys
sys.argv = ["shoal", *{arguments!r}]
from shoal.cli.main import main
try:
    main()
except SystemExit:
    pass
heavy = [m for m in ("torch", "numpy", "tokenizers", "safetensors") if m in sys.modules]
sys.exit(f"imported {{heavy}}" if heavy else 0)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["checkpoint", "--help"],
        ["config", "import", "x.json", "--era", "0.19.8"],
        ["doctor", "--help"],
        ["--version"],
        ["train", "x.y=1"],
    ],
)
def test_no_torch_is_imported(arguments: list[str]) -> None:
    script = PROBE.format(arguments=arguments)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 0, done.stderr


def cpu_seconds(command: list[str]) -> float:
    """User and system time of one command."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["doctor", "--help"]])
def test_help_answers_in_time(arguments: list[str]) -> None:
    """In CPU seconds: other work on the machine delays the answer itself, and slows its core."""
    limit_s, best_s = 0.3, 9.0
    for _ in range(20):
        best_s = min(best_s, cpu_seconds([sys.executable, "-m", "shoal", *arguments]))
        if best_s < limit_s:
            break
    assert best_s < limit_s


def seconds_to_first_line(folder: Path) -> float:
    """How long `shoal train` takes to say something."""
    began_s = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal", "train"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
    )
    try:
        line = process.stdout.readline()
        elapsed_s = time.perf_counter() - began_s
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert line.startswith("shoal ")
    return elapsed_s


def test_first_line_of_train_comes_within_a_second(tmp_path: Path) -> None:
    """The best of a few: other work on the machine may delay any one of them."""
    assert any(seconds_to_first_line(tmp_path) < 1.0 for _ in range(5))
