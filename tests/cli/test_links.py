"""`shoal links`: every collective, group and pair is measured, shown as table, pictures and JSON.

How the page's commands run, and what is refused before any process starts. What is measured of
whom: `tests/worlds/machines/test_machine_links.py`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.base.errors import ConfigError
from shoal.cli import links

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-it-works" / "links.md"
COMMANDS = PAGE.read_text().split("```")[1].strip().splitlines()
SHOAL = [sys.executable, "-m", "shoal"]


def ran(command: str, folder: Path) -> str:
    """What a command of the page prints."""
    words = command.split()
    if words[0] == "torchrun":
        words = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    else:
        words = [*SHOAL, *words[1:]]
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def check(document: dict[str, Any], sizes: list[int]) -> None:
    """Everything that was asked for is there."""
    assert [group["name"] for group in document["groups"]] == ["all 2 ranks"]
    told = document["groups"][0]["links"]
    assert set(told) == set(links.NAMES)
    for kind in told.values():
        assert [point["bytes"] for point in kind["points"]] == sizes
        assert all(0 < point["best_s"] <= point["median_s"] for point in kind["points"])
    (pair,) = document["pairs"]
    assert (pair["a"], pair["b"]) == (0, 1)
    assert min(pair["latency_s"], pair["bytes_per_s"]) > 0


def test_json_and_what_is_drawn_of_it(tmp_path: Path) -> None:
    document = json.loads(ran(COMMANDS[2], tmp_path))
    check(document, [4096, 262144])
    lines = links.links_table(document)
    assert max(map(len, lines)) <= 100
    for name in links.NAMES.values():
        assert len([line for line in lines if line.startswith(f"{name} · all 2 ranks")]) == 1
    assert re.fullmatch(r" +0 – 1 +[\d.]+ (us|ms) +[\d.]+ [KMG]iB/s", lines[-1])
    drawn = links.links_charts(document)
    assert [chart.title for chart in drawn] == list(links.NAMES.values())
    points = document["groups"][0]["links"]["all_gather"]["points"]
    dots, line = drawn[2].series
    assert dots.points == tuple((p["bytes"] / 1024, p["median_s"] * 1e3) for p in points)
    assert line.points == tuple((p["bytes"] / 1024, p["model_s"] * 1e3) for p in points)
    page = links.links_html(document)
    assert page.count("<svg") == 5
    assert "all-to-all · all 2 ranks" in page


@pytest.mark.proof
@pytest.mark.parametrize("number", [0, 1, 3])
def test_commands_of_the_page(number: int, tmp_path: Path) -> None:
    told = ran(COMMANDS[number], tmp_path)
    assert told.count("all-reduce · all 2 ranks") == 1, "rank 0 alone speaks"
    if number == 1:
        assert "message, KiB" in told
        assert (tmp_path / "links.html").read_text().count("<svg") == 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"sizes": "4KB,1MiB"}, "--sizes 4KB: bytes are written 4096, 32KiB, 1MiB, 1GiB"),
        ({"sizes": "1MiB"}, "--sizes 1MiB: a line needs two sizes; try: 1MiB,16MiB"),
        ({"sizes": "1,2"}, "--sizes 1: from 256 bytes to 4GiB; try: 256"),
        ({"sizes": "1KiB,8GiB"}, "--sizes 8GiB: from 256 bytes to 4GiB; try: 4GiB"),
        ({"groups": "1"}, "--groups 1: a group has two ranks or more; try: 2"),
        ({"groups": "3"}, "--groups 3: 4 ranks make no such groups; try: 2"),
        ({"processes": 1}, "--processes 1: one process has no links; try: 2"),
        ({"processes": 5000}, "--processes 5000: from 0 to 1024; try: 1024"),
        ({"repeats": 0}, "--repeats 0: from 1 to 10000; try: 1"),
        ({"html": Path("nowhere/a.html")}, "--html nowhere/a.html: nowhere is no folder"),
    ],
)
def test_what_is_refused_before_any_process(
    words: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.launch.supervise", lambda *given, **named: pytest.fail("started"))
    usual = {"processes": 4, "sizes": "", "groups": "", "repeats": 2, "plot": False, "html": None}
    with pytest.raises(ConfigError) as caught:
        links.links(**{**usual, **words}, as_json=False)
    assert str(caught.value) == said


def test_sizes_as_people_write_them() -> None:
    assert links._parse_sizes("1MiB, 4096,2kib,1m") == [2048, 4096, 2**20]
    assert links._parse_sizes("") == list(links.USUAL)
