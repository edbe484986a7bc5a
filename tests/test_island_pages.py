"""The pages for data centres and homes: their commands run as they stand, and figures have sources."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.launch.processes import free_port

ROOT = Path(__file__).resolve().parents[1]
START, RESULTS = ROOT / "docs" / "start", ROOT / "benchmarks" / "results"
LIMIT_S = 120.0
STOPPED = (0, 130, 143)
"""Exit codes of a command that Ctrl-C stopped."""


class Terminals:
    """Commands of a page, each in a terminal of its own; ports are free ones."""

    def __init__(self, page: str, folder: Path) -> None:
        self.page, self.folder = (START / f"{page}.md").read_text(), folder
        self.ports = {str(29400 + k): str(free_port()) for k in range(3)}
        self.running: dict[str, subprocess.Popen[str]] = {}

    def block(self, number: int) -> str:
        """A bash block of the page, with ports that are free."""
        found = re.findall(r"^```bash\n(.*?)^```$", self.page, re.MULTILINE | re.DOTALL)[number]
        for port, free in self.ports.items():
            found = found.replace(port, free)
        return str(found)

    def run(self, text: str) -> str:
        done = subprocess.run(
            ["bash", "-ec", text],
            cwd=self.folder, env=environment(self.folder), capture_output=True, text=True,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, name: str, text: str) -> None:
        words = shlex.split(text.replace("\\\n", " "))
        self.running[name] = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=self.folder, env=environment(self.folder), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def kill(self, name: str) -> None:
        """As a machine that loses power."""
        os.killpg(self.running.pop(name).pid, signal.SIGKILL)

    def finish(self, name: str) -> str:
        """Press Ctrl-C in a terminal; return what the command printed."""
        process = self.running.pop(name)
        os.killpg(process.pid, signal.SIGINT)
        output = process.communicate(timeout=LIMIT_S)[0]
        assert process.returncode in STOPPED, output
        return output

    def rounds(self, run: str) -> list[dict[str, Any]]:
        """Events of the rounds of a run."""
        file = self.folder / "runs" / run / "events.jsonl"
        text = file.read_text().splitlines(keepends=True) if file.exists() else []
        events = [json.loads(line) for line in text if line.endswith("\n")]
        return [one for one in events if one["event"] == "round_committed"]

    def count_rounds(self, run: str) -> int:
        return int(self.rounds(run)[-1]["round"])

    def wait_for(self, run: str, wanted: Any) -> None:
        """Wait for a round of a run: (event) → bool."""
        until_s = time.monotonic() + LIMIT_S
        while True:
            if any(map(wanted, self.rounds(run))):
                return
            for name, process in self.running.items():
                assert process.poll() is None, f"{name}: {process.communicate()[0]}"
            assert time.monotonic() < until_s, f"{run}: waited in vain"
            time.sleep(0.05)


def environment(folder: Path) -> dict[str, str]:
    first = Path(sys.executable).parent
    kept = {"PATH": f"{first}:{os.environ['PATH']}", "SHOAL_CACHE": str(folder / "cache")}
    return {**os.environ, **kept}


@pytest.fixture
def terminals(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Terminals]:
    found = Terminals(request.param, tmp_path)
    yield found
    for process in found.running.values():
        os.killpg(process.pid, signal.SIGKILL)


def shapes(text: str) -> list[str]:
    """What a table of members says beside its numbers of steps and tokens: who, joined, left."""
    found = []
    for line in text.splitlines()[1:]:
        if line.strip() != "…":
            members = re.sub(r"\(\d+\)", "", line.strip())
            found.append(re.sub(r"^\d+ +[\d.]+[KM]? +", "", members))
    return [one for k, one in enumerate(found) if not k or one != found[k - 1]]


def shown(page: str) -> list[str]:
    """The shapes of the table that a page shows."""
    (text,) = re.findall(r"^```\n( round .*?)^```$", page, re.MULTILINE | re.DOTALL)
    return shapes(text)


def check_table(terminals: Terminals, run: str) -> None:
    """The rounds of a page come in this order; on a busy machine others are between them."""
    found = iter(shapes(terminals.run(f"shoal islands show runs/{run}")))
    wanted = shown(terminals.page)
    assert len(wanted) >= 4
    for shape in wanted:
        assert shape in found, f"{shape} is not in its place"


PAGES = {"data-centres": 950, "machine-died": 600, "over-the-internet": 800}
"""Pages of three questions → most words. A reader comes from the table of the README."""


@pytest.mark.parametrize("name", PAGES)
def test_a_question_of_islands_is_answered_in_1500_words(name: str) -> None:
    """From the first line of the README to the end of the page that its row names."""
    before, found, _ = (ROOT / "README.md").read_text().partition(f"docs/start/{name}.md")
    page = (START / f"{name}.md").read_text()
    assert found
    assert len(page.split()) <= PAGES[name]
    assert len(before.split()) + len(page.split()) <= 1500


@pytest.mark.proof
@pytest.mark.parametrize("terminals", ["data-centres"], indirect=True)
def test_a_data_centre_joins_and_leaves_as_its_page_says(terminals: Terminals) -> None:
    terminals.run(terminals.block(0))
    terminals.start("one", terminals.block(1))
    terminals.wait_for("one", lambda turn: turn["round"] >= 2)
    terminals.start("two", terminals.block(2))
    terminals.wait_for("one", lambda turn: len(turn["members"]) == 2)
    assert "connections are encrypted" in terminals.finish("two")
    terminals.wait_for("one", lambda turn: turn["left"])
    past = terminals.count_rounds("one")
    terminals.wait_for("one", lambda turn: turn["round"] > past)
    assert "connections are encrypted" in terminals.finish("one")
    check_table(terminals, "one")


@pytest.mark.proof
@pytest.mark.parametrize("terminals", ["data-centres"], indirect=True)
def test_the_first_data_centre_is_back_with_an_empty_disk(terminals: Terminals) -> None:
    """By its first command, which names itself alone: the other one dials it."""
    terminals.run(terminals.block(0))
    terminals.start("one", terminals.block(1))
    terminals.wait_for("one", lambda turn: turn["round"] >= 2)
    terminals.start("two", terminals.block(2))
    terminals.wait_for("two", lambda turn: len(turn["members"]) == 2)
    terminals.kill("one")
    past = terminals.count_rounds("two")
    shutil.rmtree(terminals.folder / "runs" / "one")
    terminals.start("one", terminals.block(1))
    terminals.wait_for("two", lambda turn: turn["round"] > past and len(turn["members"]) == 2)
    terminals.wait_for("one", lambda turn: turn["round"] > past and len(turn["members"]) == 2)
    assert min(turn["round"] for turn in terminals.rounds("one")) >= past
    for name in ("two", "one"):
        terminals.finish(name)


@pytest.mark.proof
@pytest.mark.parametrize("terminals", ["data-centres"], indirect=True)
def test_two_centres_that_went_on_alone_lose_no_weights(terminals: Terminals) -> None:
    """Both lost the other one, and somebody typed islands.count=1 in both; then they meet again."""
    terminals.run(terminals.block(0))
    terminals.start("one", terminals.block(1))
    terminals.wait_for("one", lambda turn: turn["round"] >= 1)
    terminals.start("two", terminals.block(2))
    terminals.wait_for("two", lambda turn: len(turn["members"]) == 2)
    for name in ("one", "two"):
        terminals.kill(name)
    for name in ("one", "two"):
        past = terminals.count_rounds(name)
        terminals.start(name, f"shoal train --resume runs/{name} islands.count=1")
        terminals.wait_for(name, lambda turn, past=past: turn["round"] > past + 1)  # type: ignore[misc]
        terminals.finish(name)
    at = ",".join(f"127.0.0.1:{terminals.ports[port]}" for port in ("29400", "29401"))
    words = f"islands.count=2 islands.at={at}"
    for index, name in enumerate(("one", "two")):
        terminals.start(name, f"shoal train --resume runs/{name} {words} islands.index={index}")
    past = max(map(terminals.count_rounds, ("one", "two")))
    for name in ("one", "two"):
        terminals.wait_for(name, lambda turn: turn["round"] > past and len(turn["members"]) == 2)
    outputs = {name: terminals.finish(name) for name in ("two", "one")}
    (line,) = [line for line in outputs["one"].splitlines() if "another history" in line]
    assert "another history" not in outputs["two"], "it was started later"
    found = re.fullmatch(r"rounds? (\d+)(?: – (\d+))? of this island .* kept in (\S+), .*", line)
    assert found
    kept = terminals.folder / found[3]
    (step, *_) = sorted((kept / "checkpoints").glob("step-*"))
    terminals.run(f"shoal checkpoint verify {found[3]}")
    assert step.name in terminals.run(f"shoal checkpoint list {found[3]}")
    assert f"1. {line}" in terminals.run("shoal diagnose runs/one || true")


@pytest.mark.proof
@pytest.mark.parametrize("terminals", ["homes"], indirect=True)
def test_a_home_dies_and_is_back_as_its_page_says(terminals: Terminals) -> None:
    terminals.run(terminals.block(0))
    for home in "012":
        text = terminals.block(1).replace("K=0\n", "").replace("$K", home)
        terminals.start(f"home-{home}", text)
    terminals.wait_for("home-0", lambda turn: turn["round"] >= 2)
    terminals.kill("home-1")
    terminals.wait_for("home-0", lambda turn: turn["seats"] == [0, 2])
    past = terminals.count_rounds("home-0")
    terminals.wait_for("home-0", lambda turn: turn["round"] > past)
    terminals.start("home-1", terminals.block(2))
    terminals.wait_for("home-0", lambda turn: turn["round"] > past and len(turn["members"]) == 3)
    for home in "120":
        assert "connections are encrypted" in terminals.finish(f"home-{home}")
    check_table(terminals, "home-0")


PROGRAMS = {
    "one building, fast links": "ddp",
    "several data centres": "shoal_diloco",
    "the same, 50 Mbit/s": "shoal_int8",
    "10 Mbit/s, a list that stays": "shoal_streaming",
}
LEARNT = {
    "several data centres": ("diloco, 2 islands", "diloco, 4 islands"),
    "10 Mbit/s, a list that stays": ("streaming e3m0, 2 islands",),
}


def read_table() -> dict[str, str]:
    """Rows of the table of methods: what you have → what was measured."""
    page = (START / "which-method.md").read_text()
    rows = re.findall(r"^\| (.*?) \| .*? \| (.*?) \|$", page, re.MULTILINE)
    return {have: measured for have, measured in rows if have not in ("you have", "---")}


def test_shares_of_time_in_the_table_are_those_of_the_benchmark() -> None:
    raw = json.loads((RESULTS / "islands-utilisation-20261122.json").read_text())
    table, count = read_table(), 0
    for have, program in PROGRAMS.items():
        shares = {
            row["rate_mbit"]: row["utilisation"] for row in raw["rows"] if row["program"] == program
        }
        rates = {
            float(rate): share for share, rate in re.findall(r"([\d.]+) % at (\d+)", table[have])
        }
        for rate, share in rates.items():
            assert f"{100 * shares[rate]:.1f}" == share, (have, rate)
            count += 1
    assert count == 8


def test_losses_in_the_table_are_those_of_the_benchmark() -> None:
    raw = json.loads((RESULTS / "islands-learning.json").read_text())["rows"]
    table = read_table()
    plain = mean_loss(raw, "data parallel")
    for have, kinds in LEARNT.items():
        wanted = [f"{100 * (mean_loss(raw, kind) / plain - 1):.1f}" for kind in kinds]
        assert re.findall(r"\+([\d.]+) %", table[have]) == wanted


def mean_loss(raw: dict[str, Any], kind: str) -> float:
    found = [row["validation_loss"] for name, row in raw.items() if name.partition(" |")[0] == kind]
    assert len(found) == 3
    return sum(found) / 3


def test_a_wrong_company_of_the_page_of_owners_has_wrong_labels(monkeypatch: Any) -> None:
    """Only in training, and only that company."""
    (code,) = re.findall(
        r"^```python\n(.*?)^```$", (START / "owners.md").read_text(), re.MULTILINE | re.DOTALL
    )
    page: dict[str, Any] = {}
    exec(code, page)

    def read(number: int) -> list[set[int]]:
        return [{int(label) for _, label in data} for data in page[f"p{number}"]()]

    assert [read(number) for number in range(5)] == [[{2 * k, 2 * k + 1}] * 2 for k in range(5)]
    monkeypatch.setenv("WRONG", "4")
    assert read(3) == [{6, 7}, {6, 7}]
    assert read(4) == [{3, 4}, {8, 9}]


def test_owners_in_the_table_are_those_of_their_proof() -> None:
    proof = (ROOT / "docs" / "proof" / "owners.md").read_text()
    table = read_table()
    row = re.findall(r"^\| logistic \| (.*?) \| (.*?) \|", proof, re.MULTILINE)[0]
    fedavg, scaffold = ([int(one) for one in cell.split(", ")] for cell in row)
    wanted = f"after {min(scaffold)} to {max(scaffold)} rounds, `fedavg` after {min(fedavg)} to {max(fedavg)}"
    assert table["unlike data that stay with owners"].endswith(wanted)
    rows = re.findall(r"^\| (\w+ \w+) \| .*? \| ([\d.]+) \|", proof, re.MULTILINE)
    lost = dict(reversed(rows))  # the first table's
    robust = [f"{float(lost[f'median {fault}']):.1f}" for fault in ("reversed", "permuted")]
    plain = [f"{float(lost[f'mean {fault}']):.1f}" for fault in ("reversed", "permuted")]
    assert table["an owner that may be wrong"] == (
        f"{robust[0]} and {robust[1]} points lost, by the mean {plain[0]} and {plain[1]}"
    )
    domains = (ROOT / "docs" / "reference" / "federated.md").read_text()
    start = (START / "owners.md").read_text()
    figures = json.loads((ROOT / "proof" / "results" / "owners.json").read_text())["figures"]
    for split, part in (("even", "wrong"), ("dirichlet:0.1", "unlike"), ("labels:2", "unlike")):
        lead = "" if part == "wrong" else f"{split} "
        for merge in ("mean", "scaffold", "median", "trimmed"):
            if f"{lead}{merge} none" not in figures[part]:
                continue
            right, one_wrong = (
                100 * figures[part][f"{lead}{merge} {fault}"]["accuracy"][0]
                for fault in ("none", "permuted")
            )
            row = f"| {right:.1f} % | {one_wrong:.1f} % |"
            name = "mean, SCAFFOLD" if merge == "scaffold" else merge
            assert re.search(rf"`{split}` \| \**{name}\** {re.escape(row)}", start), (split, row)
    for name, figure in (("ensemble", "1.20"), ("merge", "3.17"), ("best single branch", "5.41")):
        mean = re.findall(rf"^\| {name}.*\| ([\d.]+) \|$", domains, re.MULTILINE)[0]
        assert f"{float(mean):.2f}" == figure
        assert figure in table["domains, an expert for each"]
