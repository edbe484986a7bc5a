"""The live view: which lines appear, in place on a terminal and as key=value through a pipe."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from terminals import Terminal, busy

import shoal.view.live
from shoal.base.runlog.events import EventLog, append_line
from shoal.view import LiveView
from shoal.view.phase_lines import read_current_phases
from shoal.view.summary import summarise_run

STEP = {
    "grad_norm": 0.91, "lr": 1e-3, "tokens": 1000, "step_s": 0.1, "tokens_per_s": 10000.0,
    "mfu": 0.341, "peak_memory_bytes": 432013312, "comm_bytes": {"all_reduce": 100},
    "comm_exposed_s": 0.0123, "data_wait_s": 0.0004,
}  # fmt: skip


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(shoal.view.live, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)


def write_step(folder: Path, step: int, **fields: Any) -> None:
    append_line(folder / "metrics.jsonl", {"step": step, "loss": 5.123, **STEP, **fields})


def events_of(folder: Path) -> EventLog:
    return EventLog(folder / "events.jsonl", None)


def piped(folder: Path, total_steps: int | None = 300) -> tuple[LiveView, io.StringIO]:
    stream = io.StringIO()
    return LiveView(folder, total_steps=total_steps, stream=stream, colour=True), stream


def shown(stream: io.StringIO) -> list[str]:
    """What a terminal of endless height would show of the lines that stay."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    return [line.split("\r")[-1].rstrip() for line in text.split("\n")]


def test_a_pipe_gets_key_values_now_and_then_and_the_last_step(
    tmp_path: Path, clock: Clock
) -> None:
    (tmp_path / "plan.json").write_text('{"unit": "tokens"}')
    view, stream = piped(tmp_path)
    for step in range(1, 41):
        write_step(tmp_path, step)
        view.tick()
        clock.now_s += 0.125
    view.finish()
    lines = stream.getvalue().splitlines()
    assert lines[0] == (
        "step=1/300 loss=5.1230 grad_norm=0.910 lr=1.0e-03 tokens_per_s=10000 mfu=34.1% "
        "memory=412.0MiB comm=12.3ms data_wait=0.4ms left=30s"
    )
    assert [line.split()[0] for line in lines] == [
        "step=1/300",
        "step=17/300",
        "step=33/300",
        "step=40/300",
    ]
    view.finish()
    assert stream.getvalue().splitlines() == lines


def test_a_long_run_says_less_through_a_pipe(tmp_path: Path, clock: Clock) -> None:
    view, stream = piped(tmp_path, total_steps=2000)
    for step in range(1, 1001):
        write_step(tmp_path, step)
        view.tick()
        clock.now_s += 2.5
    told = [line for line in stream.getvalue().splitlines() if line.startswith("step=")]
    assert 50 < len(told) < 120, "of 1000 steps in 42 minutes"


def test_what_is_not_known_is_left_out(tmp_path: Path, clock: Clock) -> None:
    view, stream = piped(tmp_path, total_steps=None)
    line = {"step": 1, "loss": None, "mfu": None, "gpu_utilisation": 0.97}
    append_line(tmp_path / "metrics.jsonl", line)
    view.tick()
    assert stream.getvalue() == "step=1 loss=nan gpu=97%\n"


def test_a_run_of_images_counts_targets_and_shows_three_spikes(
    tmp_path: Path, clock: Clock
) -> None:
    (tmp_path / "plan.json").write_text('{"unit": "samples"}')
    view, stream = piped(tmp_path)
    done = {"event": "round_committed", "round": 3, "admitted": [0, 1], "tokens_all": 1400}
    append_line(tmp_path / "events.jsonl", done)
    for step in range(9):
        spike = {"event": "spike", "step": step, "reason": "loss 3 is 9 deviations above 1"}
        append_line(tmp_path / "events.jsonl", spike)
    view.finish()
    merged, *spikes = stream.getvalue().splitlines()
    assert merged.startswith("round 3: 2 islands merged, 1.4K targets; ")
    assert len(spikes) == 3
    assert spikes[2].endswith("leaves such steps out; later ones are in the report alone")
    assert "  spikes       9, their updates were made" in summarise_run(tmp_path)


def test_a_rate_below_one_a_second_is_no_zero(tmp_path: Path, clock: Clock) -> None:
    """As of a first step that compiles for minutes."""
    view, stream = piped(tmp_path)
    write_step(tmp_path, 1, tokens=16, step_s=60.0)
    view.tick()
    assert " targets_per_s=0.27 " in stream.getvalue()
    assert "0.27 targets/s" in view.progress.terminal_line(80)


def test_the_plan_knows_the_length(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"layout": "ddp", "steps": 8}))
    view, stream = piped(tmp_path, total_steps=None)
    write_step(tmp_path, 1)
    view.tick()
    assert stream.getvalue().startswith("step=1/8 ")


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_samples_are_counted_where_they_are_no_tokens(
    tmp_path: Path, clock: Clock, stream: io.StringIO
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"unit": "samples"}))
    view = LiveView(tmp_path, total_steps=300, stream=stream, colour=False)
    for step in (1, 2):
        write_step(tmp_path, step, samples=[16 * step - 16, 16 * step])
    view.tick()
    view.finish()
    text = stream.getvalue()
    assert ("  160 samples/s  " if stream.isatty() else " samples_per_s=160 ") in text
    assert "token" not in text


def test_the_last_step_comes_before_what_followed_it(tmp_path: Path, clock: Clock) -> None:
    view, stream = piped(tmp_path, total_steps=2)
    write_step(tmp_path, 1)
    view.tick()
    write_step(tmp_path, 2)
    events_of(tmp_path).emit(
        "validated", step=2, loss=4.12345, targets=123456, unigram_entropy=6.30812
    )
    view.tick()
    view.finish()
    assert [line.split()[0] for line in stream.getvalue().splitlines()] == [
        "step=1/2", "step=2/2", "validation",
    ]  # fmt: skip


def test_the_first_line_is_the_first_steps_if_later_steps_come_with_it(
    tmp_path: Path, clock: Clock
) -> None:
    """Also before the validation of such a step, and after the notices of the start."""
    view, stream = piped(tmp_path, total_steps=3)
    events_of(tmp_path).emit("notice", text="data: 3 files", opening=2)
    events_of(tmp_path).emit("compute_started", step=0)
    for step in (1, 2, 3):
        write_step(tmp_path, step, loss=float(step))
    events_of(tmp_path).emit("validated", step=3, loss=4.0, targets=5)
    view.tick()
    view.finish()
    found = [line.split()[:2] for line in stream.getvalue().splitlines()]
    assert found == [
        ["data:", "3"], ["step=1/3", "loss=1.0000"], ["step=3/3", "loss=3.0000"],
        ["validation", "at"],
    ]  # fmt: skip


def test_old_lines_of_a_resumed_folder_are_not_shown_again(tmp_path: Path, clock: Clock) -> None:
    log = events_of(tmp_path)
    for event, text in (("run_started", ""), ("notice", "old"), ("run_started", "")):
        log.emit(event, text=text)
    log.emit("notice", text="of this session, before the view was made")
    for step in range(1, 8):
        write_step(tmp_path, step)
    view, stream = piped(tmp_path)
    view.tick()
    assert stream.getvalue() == "of this session, before the view was made\n"
    stream.truncate(0)
    stream.seek(0)
    kept = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)[:5]
    (tmp_path / "metrics.jsonl").write_text("".join(kept))
    view.tick()
    assert stream.getvalue() == ""
    write_step(tmp_path, 6)
    view.tick()
    assert stream.getvalue().startswith("step=6/300 ")


def test_a_death_is_told_with_its_traceback_once(tmp_path: Path, clock: Clock) -> None:
    view, stream = piped(tmp_path)
    log = events_of(tmp_path)
    trace = "Traceback (most recent call last):\n  File x\nValueError: boom"
    for attempt in (1, 2):
        log.emit("worker_died", rank=1, pid=7, how="exit code 1", traceback=trace, fatal=False)
        log.emit("restarting", attempt=attempt, of=3)
        view.tick()
    log.emit("worker_died", rank=1, pid=7, how="exit code 1", traceback=trace, fatal=True)
    view.finish()
    assert stream.getvalue().splitlines() == [
        "rank 1 (pid 7): exit code 1",
        "  Traceback (most recent call last):",
        "    File x",
        "  ValueError: boom",
        "restart 1 of 3, from the beginning: nothing was saved yet",
        "rank 1 (pid 7): exit code 1: ValueError: boom",
        "restart 2 of 3, from the beginning: nothing was saved yet",
    ]


def test_a_terminal_shows_one_dense_line_and_a_bar_within_80_columns(
    tmp_path: Path, clock: Clock
) -> None:
    stream = Terminal()
    view = LiveView(tmp_path, total_steps=300, stream=stream, colour=False)
    view.tick()
    assert any(line.startswith("starting") for line in shown(stream))
    (tmp_path / "plan.json").write_text('{"unit": "tokens"}')
    for step in (1, 150):
        write_step(tmp_path, step)
    events_of(tmp_path).emit("notice", text="word " * 40)
    clock.now_s += 1
    view.tick()
    view.finish()
    lines = shown(stream)
    assert max(map(len, lines)) <= 80
    assert "step 150/300  loss 5.1230  grad 0.910  10.0K tokens/s  MFU 34.1%  412.0 MiB/rank" in (
        lines
    )
    (bar,) = [line for line in lines if "━" in line]
    assert re.search(r" 50%  15 s left  comm 12\.3 ms  data 0\.4 ms$", bar)
    wrapped = [line for line in lines if "word word" in line]
    assert len(wrapped) == 3
    assert wrapped[1].startswith("  word")
    assert "\x1b[?25h" in stream.getvalue()  # the cursor is back


def test_a_narrow_terminal_drops_the_less_telling_fields(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    view = LiveView(tmp_path, total_steps=300, stream=stream, colour=False)
    write_step(tmp_path, 1)
    view.tick()
    view.finish()
    assert "step 1/300  loss 5.1230  grad 0.910" in shown(stream)
    assert max(map(len, shown(stream))) <= 40


def colours_in(stream: io.StringIO) -> bool:
    return re.search(r"\x1b\[[0-9;]*m", stream.getvalue()) is not None


@pytest.mark.parametrize(
    ("no_color", "wanted", "expected"), [("", True, True), ("1", True, False), ("", False, False)]
)
def test_colours_only_where_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_color: str, wanted: bool, expected: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    stream = Terminal()
    view = LiveView(tmp_path, total_steps=3, stream=stream, colour=wanted)
    events_of(tmp_path).emit("restarting", attempt=1, of=3)
    write_step(tmp_path, 1)
    view.tick()
    view.finish()
    assert colours_in(stream) is expected


def test_a_pipe_never_gets_escape_codes_whatever_a_model_writes(tmp_path: Path) -> None:
    view, stream = piped(tmp_path)
    events_of(tmp_path).emit("notice", text="def f():\n\treturn '\x1b[31m\x07'")
    view.finish()
    assert stream.getvalue() == "def f():\n    return '·[31m·'\n"


def test_a_stream_without_unicode_gets_ascii_letters(tmp_path: Path) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    view = LiveView(tmp_path, stream=stream, colour=False)
    events_of(tmp_path).emit("notice", text="2 × 3")
    view.finish()
    assert raw.getvalue() == b"2 x 3\n"


def test_a_closed_pipe_ends_the_drawing_not_the_run(tmp_path: Path) -> None:
    class Closed(io.StringIO):
        writes = 0

        def write(self, text: str) -> int:
            self.writes += 1
            raise BrokenPipeError

    stream = Closed()
    view = LiveView(tmp_path, stream=stream, colour=False)
    write_step(tmp_path, 1)
    for _ in range(3):
        view.tick()
    view.finish()
    assert stream.writes == 1


def test_light_rooms_do_without_torch() -> None:
    code = "import sys, shoal.view, shoal.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_a_terminal_names_what_is_waited_for_at_start_during_training_and_at_the_end(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    events_of(tmp_path).emit("run_started")
    stream = Terminal()
    view = LiveView(tmp_path, total_steps=40, stream=stream, colour=False)

    def last() -> str:
        clock.now_s += 1
        view.tick()
        return shown(stream)[-1]

    assert last() == "starting · 1 s"
    busy(tmp_path, ("proof", 0, 0, 9.2), ("steps", 1, 2, 4.1))
    assert last() == "starting: proof: steps 1/2 · 4 s · 4 s left"
    write_step(tmp_path, 20)
    busy(tmp_path, ("validation", 12, 40, 3.0))
    assert last().endswith(" 50%  validation 12/40  3 s  7 s left")
    events_of(tmp_path).emit("validated", loss=4.2)
    events_of(tmp_path).emit("validated", loss=4.3)
    busy(tmp_path)
    assert last().endswith(" 50%  2 s left  comm 12.3 ms  data 0.4 ms")
    assert "step 20/40  loss 5.1230  val 4.3000 (best 4.2000)" in shown(stream)[-2]
    write_step(tmp_path, 40)
    busy(tmp_path, ("validation", 120, 299, 1.0))
    assert last() == "finishing: validation 120/299 · 1 s"
    busy(tmp_path, ("finish", 0, 0, 1.0), ("validation", 120, 299, 1.0))
    assert last() == "finishing: validation 120/299 · 1 s"
    busy(tmp_path, ("finish", 0, 0, 1.0))
    assert last() == "finishing · 1 s"
    view.finish()
    assert max(map(len, shown(stream))) <= 60


def test_a_pipe_hears_of_waits_over_two_seconds_ever_less_often(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shoal.view.phase_lines.time, "monotonic", clock.monotonic)
    view, stream = piped(tmp_path)
    for second in range(32):
        busy(tmp_path, ("validation", second, 40, second))
        view.tick()
        clock.now_s += 1
    told = re.findall(r"phase=validation done=(\d+)/40 seconds=\1 left=\d+s\n", stream.getvalue())
    assert told == ["2", "6", "14", "30"]
    write_step(tmp_path, 1)  # something else was said, so silence begins anew
    busy(tmp_path, ("save", 0, 0, 1.9))
    view.tick()
    assert stream.getvalue().splitlines()[-1].startswith("step=1/300 ")


def test_what_a_worker_was_busy_with_that_is_gone_is_not_shown(tmp_path: Path) -> None:
    busy(tmp_path, ("first step", 0, 0, 9.0))
    time.sleep(0.01)
    events_of(tmp_path).emit("run_started")
    stream = Terminal()
    view = LiveView(tmp_path, total_steps=40, stream=stream, colour=False)
    view.tick()
    busy(tmp_path, ("data", 0, 0, 1.0))
    assert read_current_phases(tmp_path, view.since_s).names() == "data"
    time.sleep(0.01)
    events_of(tmp_path).emit("restarting", attempt=1, of=3)
    view.tick()
    assert "first step" not in stream.getvalue()
    assert not read_current_phases(tmp_path, view.since_s).phases
    for torn in ("", "[1]", '{"time_s": 9e9, "phases": [1, {"name": "x"}]}'):
        (tmp_path / "phase.json").write_text(torn)
        assert not read_current_phases(tmp_path).phases


def test_a_narrower_terminal_keeps_nothing_of_lines_that_it_broke(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    view = LiveView(tmp_path, total_steps=300, stream=stream, colour=False)
    write_step(tmp_path, 1)
    view.tick()
    for columns, rows in ((60, 2), (60, 0), (100, 0)):  # 88 and 100 columns were four rows
        view.console.width = columns
        before = len(stream.getvalue())
        clock.now_s += 1
        view.tick()
        drawn = stream.getvalue()[before:]
        assert drawn.count("\x1b[1A") == rows + 1, "the region itself is two rows"
    view.finish()
