"""Every verb writes to what it was started with: any encoding, closed streams, full disks, pipes.

Programs are started for real: the guards are about a process and its standard streams.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shoal.base.text.terminal_encoding import READABLE, SPELT, ascii_replacement
from shoal.cli.train import _watch_hint

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
PLAN = ("plan", "model.name=llama-3-8b", "--on", "8xH100-80GB", "--top", "2")
TRAIN = ("train", "model.name=mlp", "data.source=digits", "train.steps=6", "launch.processes=1",
         "run.name=a")  # fmt: skip


def shoal(
    folder: Path, words: Sequence[str], environ: dict[str, str] | None = None, how: str = ""
) -> subprocess.CompletedProcess[bytes]:
    """Run a verb as a shell does; how: what stands behind the command."""
    command = f'"$0" -m shoal "$@" {how}'
    return subprocess.run(
        ["bash", "-c", command, sys.executable, *words],
        cwd=folder, env={**os.environ, **(environ or {})}, capture_output=True, timeout=300,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize("letter", [*SPELT, "┼", "─", "é", "⁹", "漢"])
def test_what_a_letter_becomes_is_ascii(letter: str) -> None:
    assert ascii_replacement(letter).isascii()
    assert ascii_replacement(letter)


def test_an_encoding_keeps_what_it_has() -> None:
    assert "8 × H100 → fits…".encode("latin-1", READABLE).decode("latin-1") == "8 × H100 -> fits..."
    assert "8 × H100 → fits…".encode("cp1252", READABLE).decode("cp1252") == "8 × H100 -> fits…"


def test_a_plan_on_a_terminal_that_speaks_ascii(tmp_path: Path) -> None:
    done = shoal(tmp_path, PLAN, ASCII)
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode("ascii")
    assert "on 8 x H100-80GB" in text
    assert "?" not in text


@pytest.mark.proof("faults")
@pytest.mark.parametrize("environ", [ASCII, {"PYTHONIOENCODING": "latin-1"},
                                     {"PYTHONIOENCODING": "cp1252"}], ids=str)  # fmt: skip
@pytest.mark.parametrize(
    "words",
    ["simulate", "simulate ring --ranks 4", "simulate 1f1b", "simulate amdahl", "simulate goodput",
     "plan --table memory", "--help", "train --help", "links --help", "compare --help", "doctor",
     "train --dry-run", "config --help", "checkpoint --help", "diagnose .", "prove --help",
     "launch --help", "find --help", "sample --help", "run --help"],
)  # fmt: skip
def test_every_verb_on_such_a_terminal(tmp_path: Path, words: str, environ: dict[str, str]) -> None:
    done = shoal(tmp_path, words.split(), environ)
    assert b"Error" not in done.stderr, done.stderr.decode("latin-1")
    done.stdout.decode("ascii" if environ is ASCII else environ["PYTHONIOENCODING"])


def test_a_word_that_the_locale_cannot_read_is_named(tmp_path: Path) -> None:
    done = shoal(tmp_path, [*TRAIN, "run.folder=läufe"], ASCII)
    assert done.returncode == 2
    assert b"has letters that this locale (ascii) lacks" in done.stderr


@pytest.mark.proof("faults")
def test_training_on_such_a_terminal_writes_its_folder_in_utf_8(tmp_path: Path) -> None:
    done = shoal(tmp_path, TRAIN, ASCII)
    assert done.returncode == 0, done.stderr
    assert "·" in (tmp_path / "runs" / "a" / "logs" / "rank-0.log").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "how",
    [
        "<&- >&- 2>&-",
        pytest.param(">&-", marks=pytest.mark.proof("faults")),
        pytest.param("> /dev/full", marks=pytest.mark.proof("faults")),
        pytest.param("| (exec 0<&-)", marks=pytest.mark.proof("faults")),
    ],
)
def test_training_goes_on_without_its_terminal(tmp_path: Path, how: str) -> None:
    done = shoal(tmp_path, TRAIN, how=f"{how}; exit ${{PIPESTATUS[0]}}")
    assert done.returncode == 0, done.stderr
    lost = b"shoal: standard output: No space left on device; try: another file or terminal\n"
    assert done.stderr == (lost if "full" in how else b"")
    assert (tmp_path / "runs" / "a" / "checkpoints" / "step-6" / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        (">&-", 0, b""),
        pytest.param("2>&-", 0, b"", marks=pytest.mark.proof("faults")),
        ("> /dev/full", 2, b"shoal: standard output: No space left on device; try: another file"),
    ],
)
def test_a_verb_that_only_prints(tmp_path: Path, how: str, code: int, said: bytes) -> None:
    done = shoal(tmp_path, ("simulate", "ring", "--ranks", "4"), how=how)
    assert done.returncode == code
    assert done.stderr.startswith(said) if said else done.stderr == b""


def test_a_pipe_that_nobody_reads_ends_a_verb_that_only_prints(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "shoal", "simulate", "ring", "--ranks", "4"],
            cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, timeout=300, check=False,
        )  # fmt: skip
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_line_of_an_error_survives_a_closed_standard_output(tmp_path: Path) -> None:
    done = shoal(tmp_path, ("plan", "model.name=nope"), how=">&-")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert shoal(tmp_path, ("plan", "model.name=nope"), how="2>&-").returncode == 2


@pytest.mark.proof("faults")
def test_a_loop_of_ones_own_with_closed_streams(tmp_path: Path) -> None:
    """No file of the run gets the number of a standard stream."""
    (tmp_path / "own.py").write_text(
        "import os, torch, shoal\n"
        "m = torch.nn.Linear(3, 1)\n"
        "run = shoal.parallelize(m, torch.optim.SGD(m.parameters(), 0.1), lambda o, y: (((o - y) ** 2)"
        ".sum(), len(y)), 'single', folder='run')\n"
        "for _ in range(3): run.step((torch.rand(4, 3), torch.rand(4, 1)))\n"
        "run.print('a line')\n"
        "open('told', 'w').write(' '.join(os.readlink(f'/proc/self/fd/{n}') for n in range(3)))\n"
        "run.steps()\n"
    )
    done = subprocess.run(
        ["bash", "-c", '"$0" own.py <&- >&- 2>&-', sys.executable], cwd=tmp_path, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1, "the last line is a mistake, whose words nobody can read"
    assert (tmp_path / "told").read_text() == "/dev/null /dev/null /dev/null"


def test_the_first_line_breaks_at_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns would cut the folder's name; a pipe gets one line."""
    folder = Path("runs/llama-stdlib-1")
    hint = "to watch it: shoal watch runs/llama-stdlib-1"
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert _watch_hint(folder, 47) == f"\n  {hint}"
    assert _watch_hint(folder, 30) == f"; {hint}"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert _watch_hint(folder, 47) == f"; {hint}"
