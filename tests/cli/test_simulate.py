"""`shoal simulate`: everything in its list can be shown, files are written, mistakes are one line."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from shoal.base.errors import ShoalError
from shoal.cli import simulate as command
from shoal.teach import simulate_shows
from shoal.teach.calculate import SCREENS
from shoal.teach.simulate_table import ALIASES, CALCULATOR, WHATS

app = typer.Typer(pretty_exceptions_enable=False)
app.command("simulate")(command.simulate)

DRAWN = [name for name, entry in WHATS.items() if entry.function != CALCULATOR]
TEXTS = ("puzzles", "exercise")
WITHOUT_TIME = ("zero", "tp", "cp", "ep")


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def simulate(*arguments: str) -> tuple[int, str]:
    """Exit status and what is said: standard output, or the one line of an error."""
    result = CliRunner().invoke(app, arguments)
    failure = result.exception
    if failure is not None and not isinstance(failure, SystemExit):
        assert isinstance(failure, ShoalError | OSError), repr(failure)
        return getattr(failure, "exit_code", 2), str(failure)
    return result.exit_code, result.output


def test_without_arguments_it_lists_what_there_is() -> None:
    code, text = simulate()
    assert code == 0
    for name, entry in WHATS.items():
        line = next(line for line in text.splitlines() if line.startswith(f"  {name} "))
        assert len(line.split(maxsplit=1)[1]) > 10, "one line about it"
        assert (entry.text or SCREENS[name][0]) in line
    assert max(map(len, text.splitlines())) <= 100
    assert len(text.splitlines()) <= 48, "one screen"


def test_every_calculator_is_reachable() -> None:
    assert {name for name, e in WHATS.items() if e.function == CALCULATOR} == set(SCREENS)
    code, text = simulate("amdahl", "gpus=8")
    assert code == 0
    assert "Amdahl" in text
    code, text = simulate("amdahl", "gpus=8", "--json")
    assert json.loads(text)["calculator"] == "amdahl"


def test_other_names_lead_somewhere() -> None:
    for name in ALIASES:
        assert command.find_entry(name)[0] in WHATS
    for name, entry in WHATS.items():
        assert name not in ALIASES
        assert entry.function == CALCULATOR or hasattr(simulate_shows, entry.function)


@pytest.mark.parametrize("what", DRAWN)
def test_everything_can_be_shown_kept_and_given_as_data(what: str) -> None:
    words = [what, "2"] if what == "puzzle" else [what]
    code, text = simulate(*words)
    assert code == 0
    assert max(map(len, text.splitlines())) <= 100
    if what in TEXTS:
        return
    files = ["--svg", "a.svg"] + ([] if what in WITHOUT_TIME else ["--trace", "a.json"])
    code, text = simulate(*words, *files, "--json")
    assert code == 0
    data = json.loads(text)
    assert data["walk"] or data["timelines"]
    ET.parse("a.svg")
    if what not in WITHOUT_TIME:
        assert json.loads(Path("a.json").read_text())["traceEvents"]
        spans = [span for line in data["timelines"] for span in line["spans"]]
        assert all(span["end_s"] >= span["start_s"] >= 0 for span in spans)


def test_options_change_what_is_shown() -> None:
    data = json.loads(simulate("ring", "--ranks", "3", "--bytes", "3e6", "--json")[1])
    assert len(data["walk"]["rows"]) == 3
    assert len(data["walk"]["steps"]) == 4
    assert data["timelines"][0]["facts"]["with M"] == "2.9 MiB"
    line = json.loads(simulate("1f1b", "--micro-batches", "2", "--forward", "2.5", "--json")[1])
    firsts = [s for s in line["timelines"][0]["spans"] if s["kind"] == "forward"]
    assert len(firsts) == 4 * 2
    assert {s["end_s"] - s["start_s"] for s in firsts} == {2.5}
    assert len(json.loads(simulate("afab-vs-1f1b", "--json")[1])["timelines"]) == 2
    pieces = json.loads(simulate("interleaved", "--chunks", "4", "--json")[1])["timelines"][0]
    assert {s["label"].split("@")[1] for s in pieces["spans"] if s["kind"] == "forward"} == {
        str(stage) for stage in range(16)
    }
    turns = json.loads(simulate("fsdp", "--micro-batches", "2", "--json")[1])
    assert len(turns["walk"]["steps"]) == 2 * 8 + 1


def test_the_table_of_puzzles_holds_the_scores() -> None:
    rows = json.loads(simulate("puzzles", "--json")[1])["puzzles"]
    assert [row["number"] for row in rows] == list(range(8))
    assert rows[6]["author"] == [33.3, 4_194_304]
    assert all(row["ours"][0] <= row["author"][0] for row in rows)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("rnig", "shoal simulate rnig: there is no such thing; try: shoal simulate ring"),
        ("xxyyzz", "shoal simulate xxyyzz: there is no such thing; shoal simulate lists them all"),
        ("ring --ranks 1", "try: --ranks 2"),
        ("ring --ranks 0", "--ranks = 0: must be at least 1; try: --ranks 1"),
        ("ring --ranks 40", "try: --ranks 16"),
        ("ring --chunks 3", "--chunks: shoal simulate ring takes --ranks, --bytes"),
        ("ring --bytes nan", "--bytes = nan: must be at least 1"),
        ("ring 4", "shoal simulate ring 4: ring takes options only"),
        ("halving --ranks 6", "try: --ranks 4 or --ranks 8"),
        ("1f1b --forward -1", "--forward = -1: seconds are 0 or more"),
        ("1f1b --weight inf", "--weight = inf: seconds are 0 or more"),
        ("1f1b --forward 0 --backward 0 --weight 0", "nothing takes any time"),
        ("1f1b --micro-batches 99999999", "too much to draw"),
        ("dualpipe --ranks 3", "--ranks 3 and --micro-batches 8; try: --ranks 4"),
        (
            "interleaved --micro-batches 6",
            "got --micro-batches 6; try: --micro-batches 8, or shoal",
        ),
        ("puzzle", "one number from 0 to 7 is wanted, got nothing"),
        ("puzzle six", "one number from 0 to 7 is wanted, got six"),
        ("puzzle 8", "try: 7"),
        ("puzzles --svg a.svg", "--svg: shoal simulate puzzles is a table, not a drawing"),
        ("zero --trace a.json", "--trace: shoal simulate zero has no timeline"),
        ("amdahl --ranks 4", "--ranks: shoal simulate amdahl takes NAME=VALUE instead"),
        ("amdahl --trace a.json", "--trace: shoal simulate amdahl has no timeline"),
        ("amdahl gpu=4", "try: gpus"),
    ],
)
def test_mistakes_are_one_line_and_two(typed: str, said: str) -> None:
    code, text = simulate(*typed.split())
    assert code == 2
    assert said in text
    assert len(text.strip().splitlines()) == 1
    assert not list(Path().iterdir()), "nothing was written"


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    code, text = simulate("ring", "--svg", str(tmp_path / "none" / "a.svg"))
    assert code == 2
    assert "a.svg" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["dualpipe", "--ranks", "4", "--micro-batches", "7"],
         "got --ranks 4 and --micro-batches 7; try: --ranks 4 and --micro-batches 8"),
        (["interleaved", "--ranks", "4", "--micro-batches", "6"],
         "got --micro-batches 6; try: --micro-batches 8, or shoal simulate 1f1b"),
    ],
)  # fmt: skip
def test_refusals_name_the_option_that_was_typed(words: list[str], says: str) -> None:
    with pytest.raises(ShoalError) as told:
        app(words, standalone_mode=False)
    assert says in str(told.value)
