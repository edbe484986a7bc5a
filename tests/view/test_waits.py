"""Waits of `prove`, `export` and `compare` by text: the phase and how far it is, never silence."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from terminals import Terminal, busy

from shoal.view.compare_progress import ComparisonProgress
from shoal.view.phase_lines import CurrentPhases, PhaseLine, read_current_phases, show_phases
from shoal.wire.phases import Phase, phase


def frames(stream: io.StringIO) -> list[str]:
    """What stood in the line, one drawing after the other."""
    return [text.removesuffix("\x1b[K") for text in stream.getvalue().split("\r")[1:]]


def test_prove_on_a_terminal(tmp_path: Path) -> None:
    """As `prove` does it: the phases of its first worker, in place, and gone at the end."""
    stream = Terminal()
    line = PhaseLine(stream)
    busy(tmp_path, ("battery", 0, 0, 30.1), ("one process: sgd", 2, 5, 4.1))
    line.show(read_current_phases(tmp_path))
    line.finish()
    assert frames(stream) == ["battery: one process: sgd 2/5 · 4 s · 6 s left", ""]


def test_prove_through_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, now_s = io.StringIO(), 0.0
    monkeypatch.setattr("shoal.view.phase_lines.time.monotonic", lambda: now_s)
    line = PhaseLine(stream)
    for now_s in range(8):
        line.show(CurrentPhases((Phase("layout", 10, int(now_s), 100.0),), 100.0 + now_s))
    assert stream.getvalue().splitlines() == [
        "phase=layout done=2/10 seconds=2 left=8s",
        "phase=layout done=6/10 seconds=6 left=4s",
    ]


def test_export_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `export` does it: the phases of this very process."""
    now_s = 0.0
    monkeypatch.setattr("shoal.view.phase_lines.time.monotonic", lambda: now_s)
    monkeypatch.setattr("shoal.wire.phases.time.monotonic", lambda: now_s)
    stream = Terminal()
    with show_phases(stream):
        now_s = 1.0
        with phase("export", of=38) as told:
            for now_s in (2.0, 3.0):  # noqa: B007 - the clock
                told.step(9)
    with phase("nobody listens"):
        pass
    assert frames(stream) == ["export 0/38 · 0 s", "export 9/38 · 0 s", "export 18/38 · 0 s", ""]


@pytest.mark.parametrize("terminal", [True, False])
def test_compare_names_the_row_and_its_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    now_s = 50.0
    monkeypatch.setattr("shoal.view.phase_lines.time.monotonic", lambda: now_s)
    stream = Terminal() if terminal else io.StringIO()
    waiting = ComparisonProgress(tmp_path / "rows.jsonl", [("ddp", 1), ("fsdp", 2)], stream)
    waiting.tick()
    (tmp_path / "rows.jsonl").write_text('{"began": 1, "unit": "tokens"}\n')
    now_s = 53.0
    busy(tmp_path, ("timed steps", 4, 6, 3.0))
    waiting.since_s = 0.0
    waiting.tick()
    if terminal:
        assert frames(stream)[0] == "starting processes · 0 s"
        assert frames(stream)[-1] == "measuring fsdp × 2 (row 2 of 2) · 0 s · timed steps 4/6"
    else:
        assert stream.getvalue() == (
            "layout=fsdp processes=2 phase=timed-steps done=4/6 seconds=3 left=2s\n"
        )
