"""`shoal watch` on a terminal: what it draws, its keys, and the terminal as it was afterwards."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from watched_runs import make_run, write_event, write_ranks, write_steps

from shoal.cli.main import app
from shoal.view.watch import watch_loop
from shoal.view.watch.terminal_screen import ENTER, LEAVE, TerminalScreen
from shoal.view.watch.watch_screen import ScreenOptions
from shoal.view.watch.watch_state import WatchedRun


class PseudoTerminal:
    """A terminal whose other end the test holds."""

    def __init__(self, columns: int = 80, lines: int = 24) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(columns, lines)
        self.mode = termios.tcgetattr(self.slave)
        self.text = ""

    def resize(self, columns: int, lines: int) -> None:
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, size)

    def read(self, seconds: float = 0.0) -> str:
        """What was written since the last call."""
        found = b""
        while select.select([self.master], [], [], seconds)[0]:
            found += os.read(self.master, 65536)
            seconds = 0.0
        text = found.decode("utf-8", "replace")
        self.text += text
        return text

    def wait_for(self, text: str, deadline_s: float = 60.0) -> None:
        until_s = time.monotonic() + deadline_s
        while text not in self.text:
            assert time.monotonic() < until_s, f"{text!r} is not in {self.text[-3000:]!r}"
            self.read(0.1)

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def is_restored(self) -> bool:
        return self.text.endswith(LEAVE) and termios.tcgetattr(self.slave) == self.mode


@pytest.fixture
def terminal() -> Iterator[PseudoTerminal]:
    found = PseudoTerminal()
    yield found
    os.close(found.master)
    os.close(found.slave)


@pytest.fixture
def screen(terminal: PseudoTerminal) -> TerminalScreen:
    output = io.TextIOWrapper(io.FileIO(terminal.slave, "w", closefd=False), "utf-8")
    return TerminalScreen(output, terminal.slave, colour=True)


def test_only_lines_that_changed_are_written(
    terminal: PseudoTerminal, screen: TerminalScreen
) -> None:
    with screen:
        screen.draw([(("one", ""),), (("two", "bold"),)])
        first = terminal.read()
        assert first.startswith(ENTER)
        assert "\x1b[1;1H\x1b[2Kone" in first
        assert "\x1b[2;1H\x1b[2K\x1b[1mtwo\x1b[0m" in first
        screen.draw([(("one", ""),), (("two", "bold"),)])
        assert terminal.read() == ""
        screen.draw([(("one", ""),), (("three", ""),)])
        assert terminal.read() == "\x1b[2;1H\x1b[2Kthree"
        terminal.resize(120, 40)
        screen.draw([(("one", ""),), (("three", ""),)])
        assert terminal.read() == "\x1b[2J\x1b[1;1H\x1b[2Kone\x1b[2;1H\x1b[2Kthree"


def test_keys_are_read_one_by_one(terminal: PseudoTerminal, screen: TerminalScreen) -> None:
    with screen:
        terminal.press("q\t\x1b[A\x1b[6~é")
        assert screen.wait_for_keys(5) == ["q", "tab", "up", "page down", "é"]
        assert screen.wait_for_keys(0) == []


def test_an_exception_gives_the_terminal_back(
    terminal: PseudoTerminal, screen: TerminalScreen
) -> None:
    handler = signal.getsignal(signal.SIGTERM)

    def fail() -> None:
        with screen:
            assert termios.tcgetattr(terminal.slave) != terminal.mode
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    terminal.read()
    assert terminal.is_restored()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_an_encoding_without_blocks_gets_ascii(terminal: PseudoTerminal) -> None:
    output = io.TextIOWrapper(io.FileIO(terminal.slave, "w", closefd=False), "ascii")
    with TerminalScreen(output, None, colour=False) as screen:
        screen.draw([(("━━─ ↑ é", "red"),)])
        assert terminal.read().isascii()


class Script:
    """A terminal whose user presses given keys, and which notes what is drawn."""

    def __init__(self, keys: list[list[str]]) -> None:
        self.keys, self.drawn, self.waits_s = keys, [], []

    def size(self) -> tuple[int, int]:
        return 80, 24

    def draw(self, lines: Any) -> None:
        self.drawn.append(lines)

    def wait_for_keys(self, seconds: float) -> list[str]:
        self.waits_s.append(seconds)
        return self.keys.pop(0)


def test_a_reading_that_costs_much_is_repeated_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, cpu_s, readings = [100.0], [0.0], []

    def read() -> WatchedRun:
        readings.append(now_s[0])
        cpu_s[0] += 0.04
        return WatchedRun("mine", message="waiting")

    class Clock:
        time = staticmethod(time.time)
        monotonic = staticmethod(lambda: now_s[0])
        process_time = staticmethod(lambda: cpu_s[0])

    class Watched(Script):
        def wait_for_keys(self, seconds: float) -> list[str]:
            now_s[0] += seconds
            return ["q"] if now_s[0] > 160 else []

    monkeypatch.setattr(watch_loop, "time", Clock)
    watch_loop.watch_run(read, Watched([]), ScreenOptions())
    assert cpu_s[0] / 60 <= watch_loop.CPU_SHARE + 0.04 * 2 / 60
    assert len(readings) > 25


def test_a_paused_screen_reads_nothing_and_answers_keys() -> None:
    readings = []

    def read() -> WatchedRun:
        readings.append(1)
        return WatchedRun("mine", message="waiting")

    script = Script([["p"], [], ["?"], ["q"]])
    watch_loop.watch_run(read, script, ScreenOptions())
    assert len(readings) == 1
    assert len(script.drawn) == 3, "first, after p, after ?"


def own_terminal() -> None:
    """Make standard input the terminal of a new session; a shell's background job ignores Ctrl-C."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(terminal: PseudoTerminal, *words: str, **environ: str) -> Any:
    """`shoal watch` with the pseudo-terminal as its own."""
    code = "import sys; from shoal.cli.main import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, "watch", *words],
        stdin=terminal.slave,
        stdout=terminal.slave,
        stderr=terminal.slave,
        env={**os.environ, "TERM": "xterm-256color", "PYTHONUTF8": "1", **environ},
        start_new_session=True,
        preexec_fn=own_terminal,
    )


def end(process: Any, stop: Callable[[], None]) -> int:
    try:
        stop()
        return int(process.wait(timeout=300))
    finally:
        process.kill()
        process.wait()


def test_a_run_from_before_its_folder_to_its_end(tmp_path: Path, terminal: PseudoTerminal) -> None:
    process = start(terminal, str(tmp_path / "mine"))
    try:
        terminal.wait_for("no such folder yet")
        make_run(tmp_path / "mine", steps=4)
        terminal.wait_for("step 4/200")
        write_steps(tmp_path / "mine", range(5, 8))
        write_ranks(tmp_path / "mine", range(5, 8), {})
        terminal.wait_for("step 7/200")
        terminal.resize(120, 40)
        terminal.wait_for("\x1b[40;1H")
        terminal.press("\t")
        terminal.wait_for("gradient norm")
    finally:
        code = end(process, lambda: terminal.press("q"))
    terminal.read(0.2)
    assert code == 0, terminal.text[-2000:]
    assert terminal.is_restored()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_gives_the_terminal_back(
    tmp_path: Path, terminal: PseudoTerminal, number: int, code: int
) -> None:
    process = start(terminal, str(make_run(tmp_path / "mine", steps=2)), NO_COLOR="1")
    terminal.wait_for("step 2/200")
    assert end(process, lambda: process.send_signal(number)) == code
    terminal.read(0.2)
    assert terminal.is_restored(), terminal.text[-300:]
    assert "\x1b[1m" not in terminal.text, "NO_COLOR"


def test_a_pipe_gets_the_state_once_as_text_or_as_json(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "mine", steps=5)
    write_event(folder, "validated", step=5, loss=3.5)
    told = CliRunner().invoke(app, ["watch", str(folder)])
    assert told.exit_code == 0, told.output
    assert "step 5/200" in told.stdout
    assert "\x1b" not in told.stdout
    record = json.loads(CliRunner().invoke(app, ["watch", str(folder), "--json"]).stdout)
    assert [rank["step"] for rank in record["ranks"]] == [5] * 4
    assert record["ranks"][0]["seconds"]["passes"] == pytest.approx(0.05)
    assert record["last_step"]["loss"] == pytest.approx(record["run"]["loss"])
    assert record["validations"] == [{"step": 5.0, "loss": 3.5}]
    assert record["left_s"] == pytest.approx(195 * 0.25)


def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "mine", steps=1)
    for path, words in (
        (tmp_path / "none", "does not exist; try: "),
        (tmp_path / "runs", f"holds a run; try: {tmp_path}/runs/mine, or shoal runs"),
        (tmp_path / "runs" / "mine" / "plan.json", "is a file, and no run folder; try: "),
    ):
        told = CliRunner().invoke(app, ["watch", str(path)])
        assert words in str(told.exception), told
