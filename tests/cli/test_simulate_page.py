"""docs/how-it-works/simulate.md: every command on it works, and every drawing is what its command draws today."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from shoal.cli.simulate import simulate

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "how-it-works" / "simulate.md").read_text()
COMMANDS = [
    line.split("  #")[0] for line in PAGE.splitlines() if re.match(r"shoal simulate [a-z0-9]", line)
]
app = typer.Typer(pretty_exceptions_enable=False)
app.command("simulate")(simulate)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_shows_what_the_command_draws(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs" / "drawings").mkdir(parents=True)
    result = CliRunner().invoke(app, shlex.split(command)[2:])
    assert result.exit_code == 0, result.output
    for drawn in (tmp_path / "docs" / "drawings").iterdir():
        shown = ROOT / "docs" / "drawings" / drawn.name
        assert shown.exists(), f"run in the project's folder: {command}"
        assert drawn.read_text() == shown.read_text(), f"out of date, run again: {command}"


def test_every_drawing_is_on_the_page_and_every_command_makes_one() -> None:
    kept = {path.name for path in (ROOT / "docs" / "drawings").glob("*.svg")}
    shown = set(re.findall(r"\]\(\.\./drawings/([^)]+)\)", PAGE))
    made = set(re.findall(r"--svg docs/drawings/(\S+)", PAGE))
    assert shown == made
    assert shown <= kept
    assert len(shown) >= 16
