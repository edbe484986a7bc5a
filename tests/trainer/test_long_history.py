"""A million steps before: what a resume of five reads of them, and holds."""

from __future__ import annotations

import io
import json
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.base.runlog import damaged_lines
from shoal.base.runlog.events import EventLog, append_line
from shoal.base.runlog.truncate_logs import quarantine_damage, truncate_steps
from shoal.cli.ending import SessionEnding
from shoal.view import LiveView, summarise_run

STEPS = 1_000_000
LINES, BYTES = 60_000, 12 << 20
"""What may be read of a history of a million lines: parsed, and held at one time."""


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a run that made STEPS steps, ended, and goes on from STEPS − 5."""
    folder = tmp_path_factory.mktemp("history")
    with (folder / "metrics.jsonl").open("w") as file:
        for block in range(0, STEPS, 10_000):
            rows = (
                f'{{"step":{step},"loss":1.5,"tokens":8,"step_s":0.01,"mfu":null}}\n'
                for step in range(block + 1, block + 10_001)
            )
            file.writelines(rows)
    return folder


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts the lines that are parsed, and what memory peaks at."""
    counted = [0, 0]
    plain = json.loads

    def loads(text: Any, *more: Any, **words: Any) -> Any:
        counted[0] += 1
        return plain(text, *more, **words)

    monkeypatch.setattr(damaged_lines.json, "loads", loads)
    tracemalloc.start()
    yield counted
    tracemalloc.stop()


def test_a_resume_reads_the_end_of_a_long_history(history: Path, read: list[int]) -> None:
    """The live view begins, the recorder cuts, five steps are made, all is summed up."""
    log = EventLog(history / "events.jsonl", 0)
    log.emit("run_started", resumed=True)
    path, out = history / "metrics.jsonl", io.StringIO()
    size = path.stat().st_size
    inode = path.stat().st_ino
    view = LiveView(history, stream=out)
    view.tick()
    assert truncate_steps(path, STEPS - 5) == ""
    assert (path.stat().st_ino, size > path.stat().st_size) == (inode, True), "made shorter"
    log.emit("resumed", step=STEPS - 5, folder=f"step-{STEPS - 5}")
    log.emit("compute_started")
    view.tick()
    for step in range(STEPS - 4, STEPS + 1):
        append_line(path, {"step": step, "loss": 1.25, "tokens": 8, "step_s": 0.01})
        view.tick()
    view.finish()
    assert f"step={STEPS}" in out.getvalue()
    assert SessionEnding.of(history).made == STEPS
    assert "5 steps, 40 targets in 50.0 ms; last loss 1.2500" in summarise_run(history)
    assert read[0] < LINES, "lines that were parsed"
    assert tracemalloc.get_traced_memory()[1] < BYTES, "bytes held at one time"


def test_the_end_of_a_long_session_is_told_of_its_last_steps(
    history: Path, read: list[int]
) -> None:
    (history / "events.jsonl").unlink(missing_ok=True)
    EventLog(history / "events.jsonl", 0).emit("run_started")
    told = summarise_run(history)
    assert f"{STEPS} steps; below: of the last 10000; last loss" in told
    assert read[0] < LINES
    assert tracemalloc.get_traced_memory()[1] < 2 * BYTES


def test_lines_from_the_end_are_those_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = random.Random(0)
    for _ in range(500):
        monkeypatch.setattr(damaged_lines, "BLOCK_BYTES", drawn.choice((1, 2, 3, 5, 64)))
        data = bytes(drawn.choice(b"ab\n\n") for _ in range(drawn.randrange(40)))
        expected, place = [], 0
        for line in data.split(b"\n")[:-1]:
            expected.append((place, line))
            place += len(line) + 1
        assert list(damaged_lines.iter_lines_backward(io.BytesIO(data))) == expected[::-1], data


@pytest.mark.parametrize(
    ("before", "step", "after", "aside"),
    [
        (b'{"step":1}\n{"step":2}\n{"step":3}\n', 2, b'{"step":1}\n{"step":2}\n', b""),
        (b'{"step":1}\n{"step":2}\n{"st', 2, b'{"step":1}\n{"step":2}\n', b""),
        (b'{"step":1}\nnull\n{"step":2}\n{"step":3}\n', 2, b'{"step":1}\n{"step":2}\n', b"null\n"),
        (b'{"step":1}\n{"step":2}\nnull\n', 2, b'{"step":1}\n{"step":2}\n', b"null\n"),
        (b'{"step":1}\n{"step":9}\n{"step":2}\n', 2, b'{"step":1}\n{"step":2}\n', b""),
        (b'{"step":1}\n', 0, b"", b""),
        (b"half", 3, b"", b""),
        (b"", 3, b"", b""),
    ],
)
def test_what_is_cut(tmp_path: Path, before: bytes, step: int, after: bytes, aside: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(before)
    assert bool(truncate_steps(path, step)) == bool(aside)
    assert path.read_bytes() == after
    damaged = tmp_path / "metrics.jsonl.damaged"
    assert (damaged.read_bytes() if damaged.exists() else b"") == aside


def test_what_cannot_be_read_is_put_aside_before_a_run_goes_on(tmp_path: Path) -> None:
    events, plan = tmp_path / "events.jsonl", tmp_path / "plan.json"
    assert quarantine_damage(tmp_path) == []
    whole = b'{"event":"notice","text":"a"}\n'
    events.write_bytes(whole + b"null\n" + whole + b'{"event":"not')
    plan.write_text('{"steps": ')
    assert quarantine_damage(tmp_path) == [
        f"{events}: 1 line that cannot be read, put aside into events.jsonl.damaged",
        f"{plan}: cannot be read, put aside as plan.json.damaged",
    ]
    assert events.read_bytes() == whole + whole
    assert (tmp_path / "events.jsonl.damaged").read_bytes() == b"null\n"
    assert not plan.exists()
    plan.write_text("{}")
    assert quarantine_damage(tmp_path) == []
