"""docs/how-it-works/calculators.md shows what the commands print: every example is run again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoal.teach.calculate import SCREENS, calculate

PAGE = (Path(__file__).parents[2] / "docs" / "how-it-works" / "calculators.md").read_text(
    encoding="utf-8"
)
EXAMPLES = re.findall(r"```\n\$ shoal simulate (.*?)\n(.*?)\n```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("command", "shown"), EXAMPLES, ids=[command for command, _ in EXAMPLES])
def test_the_page_shows_what_is_printed(
    command: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    word, *arguments = command.split()
    calculate(word, arguments)
    assert capsys.readouterr().out.startswith(shown.rstrip("\n"))
    assert len(shown.splitlines()) >= 4


def test_every_calculator_is_on_the_page() -> None:
    assert {command.split()[0] for command, _ in EXAMPLES} == set(SCREENS)
    assert all(f"`{word}`" in PAGE for word in SCREENS)
