"""Phases: told to a run folder while they last, by the thread that was asked to, and by no other."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path

import pytest

from shoal.wire.phases import iter_with_progress, phase, set_phase_listener, write_phases_to_folder


def told(folder: Path) -> list[tuple[str, int, int]]:
    phases = json.loads((folder / "phase.json").read_text())["phases"]
    return [(row["name"], row["done"], row["of"]) for row in phases]


def test_a_folder_says_what_is_going_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.wire.phases.EVERY_S", 0.0)
    write_phases_to_folder(tmp_path)
    try:
        with contextlib.suppress(RuntimeError), phase("proof"):
            for number in iter_with_progress("steps", 3, range(3)):
                assert told(tmp_path) == [("proof", 0, 0), ("steps", number, 3)]
                if number == 1:
                    break
            assert told(tmp_path) == [("proof", 0, 0)]  # a loop that is left has ended

            @phase("save")
            def save() -> None:
                assert told(tmp_path) == [("proof", 0, 0), ("save", 0, 0)]

            save()
            beside = threading.Thread(target=lambda: phase("beside").__enter__())
            beside.start()
            beside.join()
            assert told(tmp_path) == [("proof", 0, 0)]
            raise RuntimeError
        assert told(tmp_path) == []
        (tmp_path / "phase.json").unlink()
        tmp_path.rmdir()
        with phase("where nothing can be written"):
            pass
    finally:
        set_phase_listener(None)
