"""Own programs of the puzzles: the author's, as files, have the author's scores; mistakes are named."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.base.errors import ConfigError, PlanError
from shoal.cli.main import app
from shoal.teach import browser
from shoal.teach.puzzles import PUZZLES, reference
from shoal.teach.puzzles.user_program import load_program, run_user_program


def write_author_program(number: int, folder: Path) -> Path:
    """Write the author's program as a user would: one file, with the functions that it calls."""
    source = inspect.getsource(reference)
    name = PUZZLES[number].program.__name__
    path = folder / f"puzzle_{number}.py"
    path.write_text(f"{source}\n\nprogram = {name}\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("number", range(8))
def test_the_authors_programs_have_the_authors_scores(number: int, tmp_path: Path) -> None:
    timeline, lines = run_user_program(PUZZLES[number], str(write_author_program(number, tmp_path)))
    steps, held = PUZZLES[number].author
    assert timeline.facts["score"] == f"{steps:g} steps, memory {held:,.0f}"
    assert re.match(rf"yours\s+{steps:g} steps\s+{held:,.0f} numbers", lines[0])
    assert lines[-1] == "The target is reached."


@pytest.mark.parametrize("number", range(8))
def test_a_page_starts_from_the_authors_program(number: int) -> None:
    code = browser.author_code(number)["code"]
    answer = json.loads(
        browser.call(json.dumps({"what": "puzzle", "number": number, "code": code}))
    )
    steps, held = PUZZLES[number].author
    assert answer["lines"][0].split()[1:4] == [f"{steps:g}", "steps", f"{held:,.0f}"]
    assert answer["svg"].startswith("<svg ")


@pytest.mark.parametrize(
    ("request_of_page", "said"),
    [
        ({"what": "walk", "name": "ring", "ranks": 1}, "try: --ranks 2"),
        ({"what": "walk", "name": "rings"}, "there is no such walk"),
        ({"what": "pipeline", "name": "2f2b"}, "2f2b"),
        ({"what": "puzzle", "number": 9, "code": ""}, "puzzles are 0 to 7"),
        ({"what": "plan", "model": "llama-9", "machines": "8xH100-80GB", "samples": 8}, "llama-9"),
        ({"what": "plan", "model": "llama-3-8b", "machines": "8xH9", "samples": 8}, "H9"),
    ],
)
def test_a_page_gets_one_line_for_a_mistake(request_of_page: dict[str, object], said: str) -> None:
    answer = json.loads(browser.call(json.dumps(request_of_page)))
    assert said in answer["error"]
    assert "\n" not in answer["error"]


@pytest.mark.parametrize("name", sorted(browser.WALKS))
def test_a_page_draws_every_walk(name: str) -> None:
    answer = json.loads(browser.call(json.dumps({"what": "walk", "name": name, "ranks": 4})))
    assert answer["svg"].startswith("<svg ")


@pytest.mark.parametrize(
    ("model", "machines"), [("llama-3-8b", "8xH100-80GB"), ("gpt-3-1.3b", "1xRTX4090-24GB")]
)
def test_a_page_plans_as_the_command_does(model: str, machines: str) -> None:
    words = [f"model.name={model}", "--on", machines, "train.batch=512", "--json"]
    told = CliRunner().invoke(app, ["plan", *words])
    request = {"what": "plan", "model": model, "machines": machines, "samples": 512}
    answer = json.loads(browser.call(json.dumps(request)))
    assert answer["layouts"] == json.loads(told.stdout)["layouts"]
    assert answer["lines"][0].startswith("1. ")


ONE = "async def program(m):\n"


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("def program(m):\n    pass\n", ConfigError, "it has no async def program(m)"),
        ("def program(m:\n", ConfigError, "line 1: SyntaxError"),
        ("x = 1\ny = x / 0\n", ConfigError, "line 2: ZeroDivisionError"),
        (ONE + "    m.nothing()\n", ConfigError, "line 2: AttributeError"),
        (ONE + "    m.forward(0, 0, 1, 0)\n", PlanError, "rank 0 holds no activations[0]"),
        (ONE + "    m.load(0)\n", PlanError, "layer 0 ends without its whole weight at step 1"),
        (
            ONE + "    m.empty(0, 0)\n    if m.rank:\n        await m.all_reduce(0)\n"
            "    await m.receive(1, 1)\n",
            PlanError,
            "deadlock: rank 0 waits in receive for rank 1; rank 1 waits in all-reduce",
        ),
    ],
)
def test_a_mistake_is_one_line(
    code: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(code, encoding="utf-8")
    with pytest.raises(error) as failure:
        run_user_program(PUZZLES[2], str(path))
    assert message in str(failure.value)
    assert "\n" not in str(failure.value)


def test_a_score_over_the_target_says_by_how_much(tmp_path: Path) -> None:
    wasteful = inspect.getsource(reference.standard).replace(
        "async def standard", "async def program"
    )
    wasteful = re.sub(r"\s+m\.free\(\"activations\", (?:layer|m\.layers)\)", "", wasteful)
    path = tmp_path / "mine.py"
    path.write_text(wasteful.replace(": PuzzleRank", ""), encoding="utf-8")
    lines = run_user_program(PUZZLES[0], str(path))[1]
    assert lines[-1].startswith("Over the target: numbers ")


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="no such file; try: a file with async def program"):
        load_program("/nowhere/mine.py")
