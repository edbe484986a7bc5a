"""A second start of the same model runs and checks nothing, and computes the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def started(worlds: Any, *folders: Path, size: int = 2, **options: Any) -> list[dict[str, Any]]:
    """What a start tells on each rank; ranks have these cache folders in turn."""
    told = worlds(size).call("kept_case:start", folders=[str(f) for f in folders], **options)
    assert len({one["losses"][-1] for one in told}) == 1
    return told


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rows": 1},  # no micro-batch is like the sample
        {"layout": {"tp": 2, "sequence_parallel": "off"}},
        {"model": "tower", "layout": {"tp": 2, "split": ["head.*=whole"]}},
        {"size": 4},  # 2 key/value heads for 4 ranks
    ],
    ids=str,
)
def test_what_was_kept_is_what_was_found(worlds, tmp_path: Path, options: Any) -> None:
    first = started(worlds, tmp_path, **options)
    again = started(worlds, tmp_path, **options)
    assert all(one["passes"] > 0 for one in first)
    assert all(one["passes"] == 0 for one in again)
    for before, after in zip(first, again, strict=True):
        for what in ("told", "losses", "weights", "files"):
            assert after[what] == before[what], what
    assert len(again[0]["files"]) == 1


def test_stages_run_and_layers_are_not_split_again(worlds, tmp_path: Path) -> None:
    layout = {"tp": 2, "pp": 2}
    first = started(worlds, tmp_path, size=4, layout=layout)
    again = started(worlds, tmp_path, size=4, layout=layout)
    assert [one["weights"] for one in again] == [one["weights"] for one in first]
    assert 0 < again[0]["passes"] < first[0]["passes"]


@pytest.mark.parametrize("damage", ["cut off", "not of ours", "edited", "empty"])
def test_a_damaged_entry_is_made_again(worlds, tmp_path: Path, damage: str) -> None:
    first = started(worlds, tmp_path)
    (path,) = tmp_path.glob("splits/*.json")
    text = path.read_text()
    entry = json.loads(text)
    entry["split"]["classes"][0]["partial"] = []
    damaged = {
        "cut off": text[: len(text) // 2],
        "not of ours": '{"sum": "0", "split": []}',
        "edited": json.dumps(entry),
        "empty": "",
    }[damage]
    path.write_text(damaged)
    again = started(worlds, tmp_path)
    assert again[0]["passes"] == first[0]["passes"]
    assert path.read_text() == text
    assert again[0]["weights"] == first[0]["weights"]


def test_rank_0_decides_for_all(worlds, tmp_path: Path) -> None:
    full, empty = tmp_path / "full", tmp_path / "empty"
    first = started(worlds, full)
    without = started(worlds, full, empty)  # rank 1 has no file
    assert [one["passes"] for one in without] == [0, 0]
    assert without[1]["weights"] == first[1]["weights"]
    assert not empty.exists()
    alone = started(worlds, empty, full)  # rank 1 has one
    assert all(one["passes"] > 0 for one in alone)


def test_other_settings_are_another_entry(worlds, tmp_path: Path) -> None:
    files = started(worlds, tmp_path)[0]["files"]
    for options in ({"dropout": 0.2}, {"layout": {"tp": 2, "split": ["blocks.0.*=whole"]}}):
        told = started(worlds, tmp_path, **options)
        assert told[0]["passes"] > 0
        assert len(told[0]["files"]) == len(files) + 1
        files = told[0]["files"]


def test_a_cache_that_cannot_be_written_keeps_nothing(worlds, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    for _ in range(2):
        assert started(worlds, blocked)[0]["passes"] > 0
