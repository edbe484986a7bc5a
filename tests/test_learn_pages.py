"""The learning pages (docs/learn): their numbers, outputs, programs and exercises are as they say."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import HEADINGS
from shoal.config.sections import Config, keys
from shoal.teach.exercises.answers import all_exercises
from shoal.teach.simulate_table import ALIASES, WHATS

ROOT = Path(__file__).resolve().parents[1]
SITE, LEARN = ROOT / "website", ROOT / "docs" / "learn"
sys.path.append(str(SITE))

import browser_zip  # noqa: E402
import learn_items  # noqa: E402
import page_values  # noqa: E402

PAGES = sorted(path.stem for path in LEARN.glob("*.md"))
CONCEPTS = [
    "why", "ranks", "by-hand", "ddp", "targets", "sharding", "pipelines", "inside-layers", "precision",
    "failures", "diloco", "servers", "planning", "proving",
]  # fmt: skip
"""Pages with a question, exercises, a pitfall and a command, in the order of reading."""
QUICK = ["targets", "bugs"]
"""Pages whose programs of one process run in `make test`; all of them run by `make proof`."""
SHARED = "by-hand"
"""Page whose program runs in `make test` on one process and on two."""


def page(name: str) -> str:
    """Return the text of a page."""
    return (LEARN / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_numbers_and_outputs_are_those_of_their_sources(name: str) -> None:
    assert list(page_values.page_problems(page(name))) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{value}`6.5 <= 1/(0.1 + 0.9/16)>`", "the page has '6.5'"),
        (
            "{value}`1.69 <benchmarks/planner/results/at-hand.json#llama demo.rows.1.speedup>`",
            "1.68",
        ),
        (
            "{value}`1 <benchmarks/planner/results/at-hand.json#llama demo.rows.1.speed>`",
            "KeyError",
        ),
        ("{value}`60.1 ms <shoal simulate ddp#walk.facts.step>`", "61.1 ms"),
        (
            "```console\n$ shoal simulate exercise ranks-1 5\nranks-1: 5\n```\n",
            "prints something else",
        ),
        ("```console\n$ shoal simulate puzzles\nLLM\n…\n```\n", "prints something else"),
    ],
)
def test_a_drift_is_found(text: str, message: str) -> None:
    """The guard of `make docs`: each kind of source with a page that no longer has it."""
    (found,) = page_values.page_problems(f"A line.\n\n{text}")
    assert message in found[1]
    assert found[0] in (3, 4)


@pytest.mark.parametrize("name", CONCEPTS)
def test_a_concept_page_has_its_parts(name: str) -> None:
    text = page(name)
    assert text.splitlines()[2].startswith("*Needs ")
    for part in ("**Question.**", "\n## Exercises\n", "\n## The pitfall\n", "\n## For real\n"):
        assert text.count(part) == 1, part
    drawn = re.search(r"!\[|^\$ shoal (simulate|plan) |^## The drawing", text, re.MULTILINE)
    assert drawn
    assert re.findall(r":::\{exercise\} (\S+)", text) == [f"{name}-1", f"{name}-2"]


@pytest.mark.parametrize(("name", "following"), list(pairwise(CONCEPTS)))
def test_a_page_names_the_next_one(name: str, following: str) -> None:
    line = page(name).splitlines()[2]
    assert f"]({following}.md)" in line.partition("Next: ")[2]


def test_exercises_on_pages_are_those_of_the_command() -> None:
    found = {}
    for name in PAGES:
        for label, text in re.findall(r":::\{exercise\} (\S+)\n(.*?)\n:::", page(name), re.DOTALL):
            found[label] = " ".join(text.split())
    assert found == {name: one.question for name, one in all_exercises().items()}


@pytest.mark.parametrize("name", PAGES)
def test_commands_and_keys_in_a_sentence_exist(name: str) -> None:
    """What stands as code in the text, which nobody runs: verbs, drawings, keys of run.toml."""
    verbs = {verb for group in HEADINGS.values() for verb in group}
    known = {
        f"{section}.{key.name}"
        for section, values in vars(Config()).items()
        for key in keys(values)
    }
    text = re.sub(r"^```.*?^```$", "", page(name), flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`([^`]+)`", page_values.ROLE.sub("", text)):
        words = code.split()
        if words[0] == "shoal" and len(words) > 1:
            assert words[1] in verbs, code
        if words[:2] == ["shoal", "simulate"] and len(words) > 2:
            assert words[2] in WHATS or words[2] in ALIASES, code
        if words[:2] == ["shoal", "find"]:
            assert words[2] in ("lr", "micro-batch"), code
        for key in re.findall(r"\b([a-z]+\.[a-z_]+)=", code):
            assert key in known or key.partition(".")[0] not in vars(Config()), code


# Programs of the pages.


def write_programs(name: str, folder: Path) -> None:
    """Write each ```python block that a file name before it or a command after it names."""
    text = page(name)
    parts = re.split(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    for before, code in zip(parts[::2], parts[1::2], strict=False):
        names = re.findall(r"`(\w+\.py)`", before.rpartition("\n## ")[2])
        if names:
            (folder / names[-1]).write_text(code, encoding="utf-8")


def run_world(words: list[str], folder: Path, programs: Any) -> Any:
    """Run a torchrun command: under torchrun, or quicker, if rank 0 alone prints, as forks."""
    if words[-1] == "by_hand.py":
        return programs.world(int(words[2]), words[-1], cwd=folder)[0]
    return programs.run("-m", "torch.distributed.run", "--standalone", *words[1:], cwd=folder)


def run_page(name: str, folder: Path, programs: Any, *, worlds: bool) -> int:
    """Run the page's python and torchrun commands; return how many ran."""
    write_programs(name, folder)
    count = 0
    for one in page_values.sessions(page(name)):
        words = shlex.split(one.command)
        if words[0] == "python":
            done = programs.run(*words[1:], cwd=folder)
        elif words[0] == "torchrun" and worlds:
            done = run_world(words, folder, programs)
        else:
            continue
        assert page_values.same_output(one.shown, done.stdout), (
            one.command,
            done.stdout,
            done.stderr,
        )
        count += 1
    return count


@pytest.mark.parametrize("name", QUICK)
def test_programs_print_what_their_page_says(name: str, tmp_path: Path, programs: Any) -> None:
    assert run_page(name, tmp_path, programs, worlds=False) >= 1


def test_the_loop_by_hand_prints_equal_numbers_on_two(tmp_path: Path, programs: Any) -> None:
    assert run_page(SHARED, tmp_path, programs, worlds=True) == 2
    one, two = [session.shown for session in page_values.sessions(page(SHARED))][:2]
    assert one == two


@pytest.mark.proof
@pytest.mark.parametrize("name", ["ranks", "bugs"])
def test_worlds_of_pages_print_what_they_say(name: str, tmp_path: Path, programs: Any) -> None:
    assert run_page(name, tmp_path, programs, worlds=True) >= 1


@pytest.mark.proof
@pytest.mark.parametrize("name", PAGES)
def test_commands_of_pages_succeed(name: str, tmp_path: Path, programs: Any) -> None:
    """Those that start processes or measure: exit status 0, in the order of the page."""
    for one in page_values.sessions(page(name)):
        words = shlex.split(one.command)
        own_file = "--program" in words  # test_programs_of_puzzles_are_scored
        if words[0] == "shoal" and not one.runs_here and not own_file:
            done = programs.run("-m", *words, cwd=tmp_path, timeout=600)
            assert done.returncode == 0, (one.command, done.stderr[-2000:])
            if one.shown:
                assert page_values.same_output(one.shown, done.stdout), (one.command, done.stdout)


def test_programs_of_bugs_are_short() -> None:
    for code in re.findall(r"```python\n(.*?)```", page("bugs"), re.DOTALL):
        assert len([line for line in code.splitlines() if line.strip()]) <= 20


def test_programs_of_puzzles_are_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's own programs, from files; their output is compared as that of the other commands."""
    write_programs("puzzles", tmp_path)
    monkeypatch.chdir(tmp_path)
    page_values.run_command.cache_clear()
    seen = 0
    for one in page_values.sessions(page("puzzles")):
        if "--program" in one.command:
            assert page_values.same_output(one.shown, page_values.run_command(one.command))
            seen += 1
    assert seen == 2


# The site's script.


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on this machine")
def test_sliders_compute_what_the_calculators_compute() -> None:
    from shoal.teach.calculators import collectives_costs, goodput, pipeline, scaling
    from shoal.teach.walks.zero_walk import formula_bytes

    script = """
    const f = require(process.argv[1]);
    console.log(JSON.stringify([
      f.amdahl(0.05, 64), f.ringSeconds(16, 2.4e9, 2e-5, 25e9),
      f.stepSeconds(1, 16, 2.4e9, 2e-5, 25e9, 1.5, 0.5), f.bubbleShare(8, 32),
      [0, 1, 2, 3].map((stage) => f.stateBytes(stage, 8, 7e9)), f.youngSeconds(60, 11160),
      f.meanOfTargets(10, 2, 2, 5), f.meanOfMeans(2, 5),
    ]));
    """
    done = subprocess.run(
        ["node", "-e", script, str(SITE / "static" / "formulas.js")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    got = json.loads(done.stdout)
    assert got == [
        pytest.approx(scaling.amdahl_speedup(0.05, 64)),
        pytest.approx(collectives_costs.ring_all_reduce_s(16, 2.4e9, 2e-5, 1 / 25e9)),
        pytest.approx(scaling.ring_step_s(1, 16, 2.4e9, 2e-5, 1 / 25e9, volume=1.5, overlap=0.5)),
        pytest.approx(pipeline.bubble_of_step("1f1b", 8, 32)),
        pytest.approx([formula_bytes(stage, 8, 7e9) for stage in range(4)]),
        pytest.approx(goodput.young_interval_s(60, 11160)),
        2.5,
        3.5,
    ]


IMPORTED = """
import sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    __import__(name)
strange = {one.split(".")[0] for one in sys.modules} - set(sys.stdlib_module_names)
print(sorted(strange))
"""


def test_the_part_for_browsers_needs_the_standard_library_alone(tmp_path: Path) -> None:
    """Without site packages, from the zip that pages load."""
    packed = tmp_path / "shoal.zip"
    assert browser_zip.write_zip(packed) < 500_000
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", IMPORTED, str(packed), *browser_zip.MODULES],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.stdout.strip(), done.stderr) == ("['__main__', 'shoal']", "")


# Items of the notes that the pages answer.


def test_every_item_is_found_from_the_front_page() -> None:
    assert learn_items.find_problems() == []
    assert [one["number"] for one in learn_items.read_items()] == list(range(1, 84))


def test_an_item_that_is_not_there_is_reported() -> None:
    lost = [{"number": 1, "term": "quantum", "page": "learn/ddp.md"},
            {"number": 2, "term": "DDP", "page": "learn/none.md"},
            {"number": 3, "term": "DDP", "page": "learn/ddp.md#no-such-heading"}]  # fmt: skip
    assert [problem.partition(":")[0] for problem in learn_items.find_problems(lost)] == [
        "item 1", "item 2", "item 3",
    ]  # fmt: skip


# Questions to readers.


def test_answers_to_the_readers_questions_are_those_of_the_pages() -> None:
    folder = ROOT / "tests" / "readers" / "learn-questions"
    questions = (folder / "questions.md").read_text(encoding="utf-8")
    answers = tomllib.loads((folder / "answers.toml").read_text(encoding="utf-8"))["answer"]
    asked = [int(number) for number in re.findall(r"^(\d+)\. ", questions, re.MULTILINE)]
    assert asked == [one["number"] for one in answers] == list(range(1, 31))
    assert len(re.findall(r"^\d+\. .*[\u4e00-\u9fff]", questions, re.MULTILINE)) == 10
    for one in answers:
        assert one["page"] in PAGES
        if "source" in one:
            value = page_values.find_value(one["source"])
            assert page_values.agrees(one["figure"], value), one
            figure = one["figure"].partition(" ")[0]
            assert re.search(one["accept"][0], one["figure"])
            assert figure in page(one["page"])
