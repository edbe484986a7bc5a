"""Sixty damaged files of tests/proof/mutations.py: refused in words, or read past."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "proof"))

import mutations

EACH = 15


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    previous = signal.getsignal(signal.SIGALRM)
    yield
    signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize("name", mutations.FILES)
def test_no_damage_ends_in_a_traceback_or_a_hang(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended, wrong = mutations.run(name, EACH, 1, tmp_path)
    assert wrong == []
    assert ended.total() == EACH
    assert ended["refused" if name == "run.toml" else "read"], "some of it was seen"


@pytest.mark.parametrize(
    ("told", "how"),
    [
        ("layout.split = x", "refused"),
        ("something is wrong", "unnamed"),
        ("train.steps = 3:\n more", "many lines"),
        ("train.steps = " + "x" * 2000, "many lines"),
        ("", "read"),
    ],
)
def test_what_counts_as_wrong(told: str, how: str) -> None:
    assert mutations.judged(lambda: told, True)[0] == how


def test_a_traceback_and_a_hang_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mutations.judged(lambda: str(1 // 0), True)[0] == "traceback"
    monkeypatch.setattr(mutations, "LIMIT_S", 1)
    assert mutations.judged(lambda: str(time.sleep(60)), True)[0] == "hangs"


def test_a_line_break_in_a_word_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[layout]\ncompress = "a\\nb"\n')
    told = mutations.prepared(path, resumed=False)
    assert told == (
        f"{path}: layout.compress = 'a\\nb': holds a line break or another control character; "
        f"try: 'a b'"
    )
