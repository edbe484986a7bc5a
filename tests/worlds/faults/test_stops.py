"""Stops in every phase of a real run, of tests/proof/stops.py: saved in time, or a status that says it was not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from forks import shared

sys.path.insert(0, str(Path(__file__).parents[2] / "proof"))

import stops

SAMPLE = [("tree", "USR1"), ("first step", "USR1")]
ALL = [(phase, name) for phase in stops.PHASES for name in ("TERM", "USR1")]


def begin(words: list[str], environ: dict[str, str], folder: Path) -> Any:
    """A fork, whose own processes are forks too."""
    return shared().start(words, environ, folder, merged=True)


@pytest.mark.parametrize(
    ("phase", "name"),
    [one if one in SAMPLE else pytest.param(*one, marks=pytest.mark.proof) for one in ALL],
)
def test_a_stop_is_saved_or_its_status_says_that_it_was_not(
    phase: str, name: str, tmp_path: Path
) -> None:
    told = stops.trial(phase, name, tmp_path / "trial", begin)
    assert told["wrong"] == "", told
    if phase == "tree":
        assert told["status"] == 138, told
        assert told["saved"] == told["made"] >= 6, "loader workers were signalled too"


@pytest.mark.parametrize(
    ("status", "made", "saved", "output", "wrong"),
    [
        (143, 4, 4, "", ""),
        (143, 4, 2, "", "status 143 although only step 2 of 4 is saved"),
        (1, 4, 2, "steps 3 – 4 are lost", ""),
        (1, 4, 2, "", "status 1, and no line says what is lost"),
        (1, 4, 4, "lost", "all is saved, and the status says it is not"),
        (0, 4, 4, "", "status 0"),
    ],
)
def test_what_counts_as_wrong(
    tmp_path: Path, status: int, made: int, saved: int, output: str, wrong: str
) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step":{n + 1}}}\n' for n in range(made)))
    (tmp_path / "checkpoints" / f"step-{saved}").mkdir(parents=True)
    (tmp_path / "checkpoints" / f"step-{saved}" / "manifest.json").touch()
    assert stops.judge(tmp_path, status, output, 15)["wrong"] == wrong
