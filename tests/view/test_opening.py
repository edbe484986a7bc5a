"""The lines of `shoal train` before its first step: five at most, warnings always, -v all."""

from __future__ import annotations

import io
from pathlib import Path

from terminals import busy

from shoal.base.runlog.events import EventLog, append_line
from shoal.view.live import OPENING_LINES, LiveView

FACTS = {
    "data: 3 files": 2, "model: llama": 1, "formats: fp32": 9, "proof: equal": 4, "validation": 6,
}  # fmt: skip
WHY = "auto: ddp, 1 s foreseen; also possible: fsdp"


def begin(folder: Path, *warnings: str) -> None:
    events = EventLog(folder / "events.jsonl", None)
    events.emit("run_started", processes=2)
    for warning in warnings:
        events.emit("notice", text=warning)
    for text, importance in FACTS.items():
        events.emit("notice", text=text, opening=importance)
    events.emit("notice", text=WHY, short=WHY.partition(";")[0], opening=3)
    events.emit("compute_started", step=0)
    events.emit("notice", text="validation at the end", opening=6)


def shown(folder: Path, most: int | None, *, ticks: int = 1) -> list[str]:
    stream = io.StringIO()
    view = LiveView(folder, stream=stream, most_opening_lines=most)
    for _ in range(ticks):
        view.tick()
    view.finish()
    return stream.getvalue().splitlines()


def test_the_most_important_lines_fill_the_room_in_the_order_of_time(tmp_path: Path) -> None:
    begin(tmp_path)
    assert shown(tmp_path, OPENING_LINES - 1) == [
        "data: 3 files", "model: llama", "proof: equal", "auto: ddp, 1 s foreseen",
    ]  # fmt: skip


def test_verbose_shows_every_line_whole(tmp_path: Path) -> None:
    begin(tmp_path, "seed = 3: another order")
    told = shown(tmp_path, None)
    assert told == ["seed = 3: another order", *FACTS, WHY, "validation at the end"]


def test_warnings_are_always_shown_and_take_the_room(tmp_path: Path) -> None:
    warnings = [f"train.x{k} = 1: is fixed" for k in range(3)]
    begin(tmp_path, *warnings)
    assert shown(tmp_path, 4) == [*warnings, "model: llama"]


def test_more_warnings_than_lines_are_shown_all_the_same(tmp_path: Path) -> None:
    warnings = [f"train.x{k} = 1: is fixed" for k in range(7)]
    begin(tmp_path, *warnings)
    assert shown(tmp_path, 4) == warnings


def test_a_validation_before_the_first_step_has_its_room(tmp_path: Path) -> None:
    begin(tmp_path)
    events = (tmp_path / "events.jsonl").read_text()
    marked = events.replace('"compute_started",', '"compute_started","validates":true,')
    assert marked != events
    (tmp_path / "events.jsonl").write_text("".join(marked.splitlines(keepends=True)[:-1]))
    EventLog(tmp_path / "events.jsonl", None).emit("validated", step=0, loss=5.5)
    assert shown(tmp_path, 4) == [
        "data: 3 files", "model: llama", "auto: ddp, 1 s foreseen",
        "validation at step 0: loss 5.5000",
    ]  # fmt: skip


def test_a_start_that_fails_shows_what_was_known(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events.jsonl", None)
    events.emit("run_started", processes=1)
    events.emit("notice", text="data: 3 files", opening=2)
    assert shown(tmp_path, 4) == ["data: 3 files"]
    events.emit("worker_died", rank=0, pid=7, how="exit code 1", traceback="", fatal=False)
    assert shown(tmp_path, 4) == ["data: 3 files", "rank 0 (pid 7): exit code 1"]


def test_a_damaged_importance_is_no_importance(tmp_path: Path) -> None:
    for value in ("1", True, None, [1]):
        row = {"event": "notice", "text": f"line {value}", "opening": value, "short": [3]}
        append_line(tmp_path / "events.jsonl", row)
    assert shown(tmp_path, 2) == ["line 1", "line True", "line None", "line [1]"]


def test_short_waits_of_a_start_are_no_lines_of_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    busy(tmp_path, ("import", 0, 0, 45.0))
    for most, silent_s, lines in ((4, 20, 0), (None, 20, 1), (4, 60, 1)):
        stream = io.StringIO()
        view = LiveView(tmp_path, stream=stream, most_opening_lines=most)
        view.silence.spoken_s -= silent_s
        for _ in range(3):
            view.tick()
        told = stream.getvalue().splitlines()
        assert told == ["phase=import seconds=45"] * lines
