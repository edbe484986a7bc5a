"""A stranger who reaches the port of a run that has a token: he gets nothing, and it trains on."""

from __future__ import annotations

import json
from typing import Any

import pytest

import stranger
from attacked_case import ATTACKS, PORT, ROUNDS
from netns import FORBIDDEN, skip

PRIVATE = f"listens at ['01004D0A:{PORT:04X}']"
"""10.77.0.1 and nowhere else."""


def attacked(programs: Any, *words: str) -> list[Any]:
    """(what the stranger reached, member 0, member 1)."""
    stranger.needed("a stranger in another network namespace")
    done = programs.run("worlds/attacked_case.py", *words, timeout=300)
    if done.returncode == FORBIDDEN:
        skip("a stranger in another network namespace", done.stderr.strip())
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("members", ["ranks", "islands"])
def test_a_run_with_a_token_is_not_disturbed(programs, members: str) -> None:
    reached, *answers = attacked(programs, members)
    assert set(reached) == set(ATTACKS)
    assert all(
        told.startswith("refused") or name in ("lengths of 2^62", "garbage")  # they were sent
        for name, told in reached.items()
    ), reached
    for answer in answers:
        assert answer.get("right") == ROUNDS, answer
    first = answers[0]
    said = first["heard"] if members == "ranks" else first["lines"]
    assert any(
        "somebody at 10.77.0.3 was refused at the store of this run" in line for line in said
    )
    if members == "islands":
        assert first["told"] == [[[], ""], [[], ""]], "nobody was accused"
    assert PRIVATE in first["heard"]
    grown_kib = first["peak_kib"] - answers[1]["peak_kib"]
    assert grown_kib < 64 << 10, "300 MiB of junk were sent, again and again"


def test_without_a_token_he_can_stop_the_start_and_one_line_said_so(programs) -> None:
    """The control: the same attacks reach a store of torch's."""
    reached, *answers = attacked(programs, "ranks", "")
    assert reached["list and overwrite"] == "listed and overwrote keys"
    assert "has no token: whoever reaches that port can end this run" in str(answers[0])
    assert PRIVATE in answers[0]["heard"], "all the same"
