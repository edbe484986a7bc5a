"""Damaged run folders: what is whole is told, and no byte in them ends a view or a resume."""

from __future__ import annotations

import io
import json
import random
import shutil
from pathlib import Path

import pytest

from shoal.base.runlog.damaged_lines import parse_object
from shoal.view import LiveView, summarise_run
from told_run import tell_run

ODD = (None, 1, -1, 1e300, 10**400, "x", True, [], [1, "a"], {}, {"a": []}, [[1], {}])
DEEP = b'{"step":' + b"[" * 100_000 + b"\n"


def whole(folder: Path) -> Path:
    """A run folder as a run of two ranks leaves it."""
    folder.mkdir()
    tell_run(folder, steps=4)
    return folder


def damage(folder: Path, luck: random.Random) -> None:
    """Overwrite bytes of one file, replace a line, or give a field another type."""
    path = folder / luck.choice(["metrics.jsonl", "events.jsonl", "plan.json"])
    data = bytearray(path.read_bytes())
    lines = bytes(data).splitlines(keepends=True)
    if not lines:
        return
    place = luck.randrange(len(lines))
    match luck.randrange(4):
        case 0:
            data[luck.randrange(len(data))] = luck.choice(
                [0xFF, 0, 10, 34, 123, luck.randrange(256)]
            )
            lines = [bytes(data)]
        case 1:
            lines[place] = luck.choice([b"null\n", b"1\n", b"[]\n", b"\xff\xfe\n", b"\n", DEEP])
        case 2:
            lines[place] = lines[place][: luck.randrange(1 + len(lines[place]))]
        case _:
            record = parse_object(lines[place]) or {"step": 1}
            record[luck.choice(list(record))] = luck.choice(ODD)
            lines[place] = json.dumps(record).encode() + b"\n"
    path.write_bytes(b"".join(lines))


@pytest.mark.parametrize("seed", range(3))
def test_no_damage_ends_a_view(tmp_path: Path, seed: int) -> None:
    source = whole(tmp_path / "whole")
    luck = random.Random(seed)
    for number in range(60):
        folder = tmp_path / f"copy-{number}"
        shutil.copytree(source, folder)
        for _ in range(luck.randrange(1, 4)):
            damage(folder, luck)
        assert summarise_run(folder).splitlines()
        for colour in (False, True):
            stream = io.StringIO()
            view = LiveView(folder, stream=stream, colour=colour)
            for kind in ("metrics.jsonl", "events.jsonl"):  # as if they were written just now
                (folder / kind).rename(folder / "kept")
                view.tick()
                (folder / "kept").rename(folder / kind)
                view.tick()
            view.finish()


def test_what_is_whole_beside_the_damage_is_told(tmp_path: Path) -> None:
    folder = whole(tmp_path / "run")
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"null\n" + DEEP + b'{"step":5,"loss":"x","tokens":8}\n\xff\n')
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b'{"event":"validated","loss":[1]}\n1\n')
    text = summarise_run(folder)
    assert text.startswith("completed at step 5, by SIGTERM\n  trained      5 steps, 40 tokens in ")
    assert "checkpoints" not in text
    assert "  validation" not in text, "a row of damaged records is left out"
    assert "restarts     1; last: rank 1" in text
