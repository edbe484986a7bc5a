"""Several runs in one page: steps from which losses differ, keys that differ, damaged folders."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_folders import hostile_strings, plain_strings, write_hostile_folder
from typer.testing import CliRunner

from shoal.base.errors import ConfigError
from shoal.base.runlog.rank_records import HEADER, MAGIC, ROW
from shoal.cli.main import app
from shoal.report.comparison.best_run import best_run_text
from shoal.report.comparison.comparison_page import (
    comparison_record,
    make_comparison_page,
    read_comparison,
)
from shoal.report.comparison.key_differences import (
    RunKeys,
    compared_keys_text,
    list_key_differences,
)
from shoal.report.comparison.loss_differences import (
    LossSeries,
    compare_losses,
    find_separation,
    losses_before,
    mean_loss,
)

FIXTURES = Path(__file__).parents[1] / "fixtures" / "run_folders" / "runs"


def series(losses: Any, first: int = 1, tokens: int = 64) -> LossSeries:
    count = len(losses)
    steps = np.arange(first, first + count)
    sums = np.arange(1, count + 1)
    return LossSeries(steps, np.array(losses, np.float64), sums * float(tokens), sums * 0.1)


def noise(seed: int, count: int = 300) -> Any:
    return 3 + np.random.default_rng(seed).normal(0, 0.05, count)


def write_run(path: Path, losses: Any, *, toml: str = "", first: int = 1, **plan: object) -> Path:
    path.mkdir(parents=True)
    with (path / "metrics.jsonl").open("w") as file:
        for step, loss in enumerate(losses, first):
            row = {"step": step, "loss": float(loss), "tokens": 64, "step_s": 0.1, "lr": 0.1}
            file.write(json.dumps(row) + "\n")
    (path / "events.jsonl").write_text('{"event":"run_started","time_s":1.8e9}\n')
    (path / "plan.json").write_text(json.dumps(plan))
    if toml:
        (path / "run.toml").write_text(toml)
    return path


class Page(HTMLParser):
    """Elements with their attributes, texts by section, and the JSON of a page."""

    def __init__(self, folders: list[Path]) -> None:
        super().__init__()
        self.found = read_comparison(folders)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.data: Any = None
        self._section = ""
        self.feed(make_comparison_page(self.found))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "section":
            self._section = dict(attrs).get("id") or ""

    def handle_data(self, data: str) -> None:
        if not self.cdata_elem:
            self.texts[self._section] = self.texts.get(self._section, "") + data + " "
        elif self.elements[-1][1].get("type") == "application/json":
            self.data = json.loads(data)


def test_the_first_different_bit_and_the_separation_are_found() -> None:
    base = noise(0)
    other = base.copy()
    other[2] = np.nextafter(other[2], 9)
    found = compare_losses(series(base), series(other))
    assert (found.first_step, found.separation_step) == (3, None)
    assert found.text() == "first different loss: step 3; within three spreads up to step 300"
    other[120:] += 0.1
    found = compare_losses(series(base), series(other))
    assert found.first_step == 3
    # 0.1 is two noises of a step; means of 50 pass three spreads (0.03) after 15 of 50 steps.
    assert 121 < (found.separation_step or 0) <= 121 + 20
    assert found.newest_mean == pytest.approx(0.1)


def test_rounding_spikes_and_chance_are_no_separation() -> None:
    base = noise(1)
    spike = base.copy()
    spike[200] += 5
    assert find_separation(base, base + 1e-9) is None
    assert find_separation(base, spike) is None
    pairs = [(noise(2 * k), noise(2 * k + 1)) for k in range(1, 150)]
    assert [find_separation(*pair) for pair in pairs if find_separation(*pair) is not None] == []


def test_a_falling_loss_is_no_noise() -> None:
    """A spread of the losses themselves would be 100 times as large here, and hide the difference."""
    fall = np.linspace(100, 0, 300)
    assert find_separation(fall + noise(1), fall + noise(2) + 0.1) is not None


def test_a_separation_in_the_last_steps_is_found_and_a_shorter_one_is_not() -> None:
    base = noise(3)
    late, later = base.copy(), base.copy()
    late[265:] += 0.5
    later[290:] += 0.5
    assert find_separation(base, late) is not None
    assert find_separation(base, later) is None


def test_missing_losses_lengths_and_steps_without_common_ones() -> None:
    base = noise(4, 100)
    gap = base.copy()
    gap[9] = np.nan
    assert compare_losses(series(base), series(gap)).first_step == 10
    both = compare_losses(series(gap), series(gap.copy()))
    assert both.text() == "equal in every loss up to step 100"
    assert compare_losses(series(base), series(base[:60])).text().endswith("up to step 60")
    resumed = compare_losses(series(base), series(base[40:], first=41))
    assert (resumed.common_steps, resumed.first_step) == (60, None)
    assert compare_losses(series(base), series(base, first=500)).text() == "no step in common"
    assert compare_losses(series(base), series([])).text() == "no step in common"
    zeros = compare_losses(series([0.0, 1.0]), series([-0.0, 1.0]))
    assert zeros.first_step == 1
    assert "too short" in zeros.text()
    assert compare_losses(series([1e308] * 90), series([-1e308] * 90)).first_step == 1


def test_losses_at_equal_tokens_are_means_of_the_50_steps_before() -> None:
    run = series(np.arange(100.0))

    def mean(steps: int) -> float | None:
        return mean_loss(losses_before(run, run.tokens, 64.0 * steps))

    assert mean(80) == pytest.approx(np.arange(30, 80).mean())
    assert mean(2) == pytest.approx(0.5)
    assert mean(101) is None


def test_a_better_run_within_the_noise_is_called_so(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"run{k}", noise(k)) for k in (1, 2)]
    assert "within the noise of run" in Page(folders).texts["verdict"]


def test_a_key_that_a_run_lacks_counts_with_its_default() -> None:
    runs = [
        RunKeys({"train.batch": "8", "optimizer.clip": "1.0", "data.workers": "2"}, {}),
        RunKeys({"train.batch": "16", "optimizer.clip": "1.0"}, {"version of torch": "2.1"}),
        RunKeys(None, {"version of torch": "2.2"}),
    ]
    found = {one.key: (one.values, one.changes) for one in list_key_differences(runs)}
    assert found == {
        "train.batch": (("8", "16", "–"), True),
        "data.workers": (("2", "0", "–"), False),
        "version of torch": (("–", "2.1", "2.2"), False),
    }


def test_a_run_has_one_colour_in_all_charts(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"run{k}", noise(k)) for k in range(10)]
    with (folders[9] / "events.jsonl").open("a") as file:
        file.write('{"event":"validated","step":9,"loss":2.0}\n')
    page = Page(folders)
    curves = {curve["key"]: curve["series"] for curve in page.data["curves"]}
    assert [one["run"] for one in curves["loss"]] == list(range(10))
    assert [(one["run"], one["label"]) for one in curves["validation"]] == [(9, "run9")]
    classes = [a["class"] for tag, a in page.elements if tag == "polyline"]
    assert classes[:9] == [*(f"line s{k}" for k in range(8)), "line s0 d1"]
    assert classes[-1] == "line s1 d1", "the only line of validation is that of run 9"
    legend = [a for _, a in page.elements if a.get("data-run")]
    assert len(legend) == 10


def test_the_page_names_the_better_run_its_keys_and_the_steps(tmp_path: Path) -> None:
    base = noise(5)
    better = base.copy()
    better[2:] -= 0.4
    toml = "[optimizer]\nlr = 0.1\n[run]\nname = 'base'\n"
    folders = [
        write_run(tmp_path / "base", base, toml=toml),
        write_run(
            tmp_path / "better", better, toml=toml.replace("0.1", "0.2").replace("base", "better")
        ),
    ]
    page = Page(folders)
    head = page.texts["verdict"]
    assert "better has the lowest loss after 19.2K tokens" in head
    assert "0.4 below base" in head
    assert re.search(r"First different loss: step 3; apart by more than three spreads from", head)
    assert "differ: optimizer.lr." in head
    assert "nothing to gain" in head
    assert "optimizer.lr" in page.texts["results"]
    assert "run.name" not in page.texts["keys"]
    assert "(the shortest run)" in page.texts["equal"]
    assert "30.0 s" not in head, "a learning rate does not change the pace"
    assert "; what differs: optimizer.lr (0.1, 0.2)" in head
    losses = f"base {base[2]!r}, better {better[2]!r}".replace("np.float64", "")
    assert re.sub(r"[()]", "", losses) in page.texts["differences"]
    folders[0].rename(tmp_path / "moved")
    page = Page([tmp_path / "moved", folders[1]])
    assert "run.name" in page.texts["keys"], "a folder that was renamed"
    assert "Versions of moved and better are not recorded." in page.texts["verdict"]


def test_the_validation_stands_first_and_time_only_where_a_key_can_change_it(
    tmp_path: Path,
) -> None:
    base, toml = noise(5), "[train]\nmicro_batch = 4\n"
    folders = [
        write_run(tmp_path / "base", base, toml=toml),
        write_run(tmp_path / "better", base - 0.4, toml=toml.replace("4", "8")),
    ]
    for folder, loss in zip(folders, (3.5, 3.25), strict=True):
        with (folder / "events.jsonl").open("a") as file:
            event = {"event": "validated", "time_s": 2e9, "step": 300, "loss": loss}
            file.write(json.dumps(event) + "\n")
    text = best_run_text(read_comparison(folders))
    assert text.startswith(
        "better has the lowest validation loss: 3.2500, 0.25 below base; in training after 19.2K "
    )
    assert "; after 30.0 s, too: " in text
    assert " (a step: base 100.0 ms, better 100.0 ms)" in text
    assert text.endswith("; what differs: train.micro_batch (4, 8)")
    for folder in folders:
        text = (folder / "run.toml").read_text() + f"[data]\nsource = 'text:{folder.name}'\n"
        (folder / "run.toml").write_text(text)
    assert "validation" not in best_run_text(read_comparison(folders)), "another task"


def test_short_runs_have_a_distance_and_no_step(tmp_path: Path) -> None:
    base = noise(5)[:60]
    runs = [write_run(tmp_path / "a", base), write_run(tmp_path / "b", base + 0.5)]
    text = read_comparison(runs).summary()
    assert re.fullmatch(
        r"first different loss: step 1; [\d.]+ spreads apart over the last 50 steps \(from which "
        r"step: needs 74 common losses\)",
        text,
    )


def test_of_several_short_runs_the_farthest_is_named(tmp_path: Path) -> None:
    base = noise(5)[:60]
    shifts = {"a": 0.0, "b": 0.1, "c": 0.5}
    found = read_comparison([write_run(tmp_path / n, base + s) for n, s in shifts.items()])
    text = found.summary()
    assert re.search(r"step 1 \(b\); [\d.]+ spreads apart over the last 50 steps \(c\)$", text)


def test_validations_of_other_steps_have_their_steps(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "short", noise(5)[:100]), write_run(tmp_path / "long", noise(6))
    ]  # fmt: skip
    for folder, loss in zip(folders, (3.5, 3.25), strict=True):
        with (folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"event": "validated", "time_s": 2e9, "step": 9, "loss": loss}))
            file.write("\n")
    text = best_run_text(read_comparison(folders))
    assert "loss: 3.2500 (step 300), 0.25 below short (step 100)" in text


def write_equal_runs(tmp_path: Path, *step_s: float) -> list[Path]:
    folders = []
    for at, seconds in enumerate(step_s):
        folder = write_run(tmp_path / f"run{at}", noise(5), toml="[train]\nbatch = 8\n")
        path = folder / "metrics.jsonl"
        path.write_text(path.read_text().replace('"step_s": 0.1', f'"step_s": {seconds}'))
        folders.append(folder)
    return folders


def test_of_runs_with_equal_losses_the_faster_one_is_the_best(tmp_path: Path) -> None:
    folders = write_equal_runs(tmp_path, 0.3158, 0.1831)
    page = Page(folders)
    words = "run1: equal in every loss, and 1.72 times faster (183.1 against 315.8 ms a step)"
    assert words in page.texts["verdict"]
    assert "No key of run.toml differs; versions of" in page.texts["verdict"]
    assert "run0 lies under run1" in page.texts["curves"]
    assert "identical" in page.texts["differences"]
    record = comparison_record(page.found)
    assert (record["best"], [run["step_s"] for run in record["runs"]]) == (words, [0.3158, 0.1831])
    tokens, times = (
        [point for point in page.found.points if point.kind == kind] for kind in ("tokens", "time")
    )
    assert [point.winners for point in tokens] == [[0, 1]] * 4, "all that tie"
    assert times[-1].winners == [], "one run alone got so far"
    assert [tag for tag, _ in page.elements].count("b") == 2 * len(tokens) + 3
    alike = Page(write_equal_runs(tmp_path / "alike", 0.1, 0.101, 0.1)).texts["verdict"]
    assert "All 3 runs are equal in every loss, and equally fast (100.0 against 101.0 ms" in alike


def test_the_part_that_makes_a_run_slow_is_shown(tmp_path: Path) -> None:
    folders = write_equal_runs(tmp_path, 0.3, 0.2)
    for folder, data_s in zip(folders, (0.11, 0.01), strict=True):
        (folder / "rank_steps").mkdir()
        with (folder / "rank_steps" / "node-0.bin").open("wb") as file:
            file.write(HEADER.pack(MAGIC, 0))
            for step in (*range(1, 11), 301):  # the last one is later than the newest loss
                for rank, own_s in enumerate((0.01, data_s)):
                    parts = (0, own_s, 0.1, 0, 0, 0, 0, data_s - own_s)
                    file.write(ROW.pack(step, rank, 1, 1.8e9 + step, 0, *parts))
    text = Page(folders).texts["parts"]
    assert "rank 1: data 110.0 ms (mean of ranks 60.0 ms)" in text
    assert "none: all ranks take about the same time" in text
    assert "Means of the newest 10 steps" in text


def test_code_that_is_not_recorded_is_not_compared() -> None:
    own = {"data.collate": "rows.py:join", "data.source": "text:a.md", "model.build": ""}
    known = {"version of torch": "2", "source of rows.py": "1"}
    runs = [RunKeys(own, {}), RunKeys(own, known), RunKeys(None, known)]
    text = compared_keys_text("abc", runs)
    assert text == (
        "versions and sources of a, and run.toml of c are not recorded, "
        "so the code behind data.collate is not compared"
    )
    assert compared_keys_text("b", runs[1:2]) == ""


def test_damaged_empty_and_missing_folders_have_a_line_each(tmp_path: Path) -> None:
    good = [write_run(tmp_path / name, noise(k)) for k, name in enumerate(("x/run", "y/run"))]
    empty, plain = tmp_path / "empty", tmp_path / "plain"
    empty.mkdir()
    plain.write_text("a file")
    torn = tmp_path / "torn"
    torn.mkdir()
    (torn / "metrics.jsonl").write_bytes(b"\xff" * 99 + b'\n{"step":1,"loss":2.0}\n{"step":2,"l')
    page = Page([good[0], empty, plain, tmp_path / "none", torn, good[1], good[0]])
    assert [run.label for run in page.found.runs] == ["x/run", "torn", "y/run"]
    assert len(page.found.problems) == 4
    for word in (
        "empty: no run folder",
        "plain: is a file, and no run folder",
        "none: does not exist",
        "shown once",
    ):
        assert word in page.texts["verdict"]
    assert "lowest loss after 19.2K tokens" in page.texts["verdict"], "torn has one step only"
    late = [write_run(tmp_path / f"late{k}", noise(k), first=900) for k in (1, 2)]
    assert "No run has a step in common with run." in Page([good[0], *late]).texts["verdict"]
    with pytest.raises(ConfigError, match="does not exist"):
        read_comparison([tmp_path / "none", tmp_path / "nothing"])
    with pytest.raises(ConfigError, match="21 runs, but a report shows at most 20"):
        read_comparison([good[0]] * 21)


def test_a_pipe_in_a_folder_stops_no_report(tmp_path: Path) -> None:
    good, pipe = write_run(tmp_path / "good", noise(1)), tmp_path / "pipe"
    pipe.mkdir()
    (pipe / "metrics.jsonl").touch()
    os.mkfifo(pipe / "events.jsonl")
    page = Page([good, pipe])
    assert [run.label for run in page.found.runs] == ["good"]
    assert "events.jsonl: no file but a pipe" in page.texts["verdict"]


def test_islands_and_own_loops_stand_in_one_page() -> None:
    page = Page([FIXTURES / name for name in ("ddp", "islands", "own-loop")])
    labels = [run.label for run in page.found.runs]
    assert labels == ["ddp", "island-0", "island-1", "own-loop"]
    assert "No run.toml that can be read: own-loop" in page.texts["keys"]


def test_own_loops_are_compared_at_equal_targets(tmp_path: Path) -> None:
    """Their loss counts targets, which are no tokens."""
    folders = [
        write_run(tmp_path / name, noise(seed), unit="targets")
        for name, seed in (("one", 1), ("two", 2))
    ]
    page = Page(folders)
    assert " targets: " in best_run_text(page.found)
    assert "tokens" not in best_run_text(page.found)
    assert "Loss at equal targets and at equal time" in page.texts["equal"]


def test_runs_of_other_units_have_equal_time_only(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "text", noise(1)),
        write_run(tmp_path / "photos", noise(2), unit="samples"),
        write_run(tmp_path / "late", noise(3, 100), first=201),
    ]
    page = Page(folders)
    assert {point.kind for point in page.found.points} == {"time"}
    assert "The runs count targets and tokens: no equal amount of them." in page.texts["equal"]
    assert "Records of late begin after step 1" in page.texts["equal"]


def test_nothing_of_the_folders_becomes_an_element(tmp_path: Path) -> None:
    shapes = {}
    for kind, strings in (("hostile", hostile_strings()), ("plain", plain_strings())):
        folders = [
            write_hostile_folder(tmp_path / kind / str(k), strings[k:] + strings[:k])
            for k in (0, 7)
        ]
        for folder, word in zip(folders, strings, strict=False):
            text = f"[train]\n{json.dumps(word)} = {json.dumps(word)}\nbatch = {json.dumps(word)}\n"
            (folder / "run.toml").write_text(text, errors="replace")
        page = Page(folders)
        shapes[kind] = [(tag, tuple(attributes)) for tag, attributes in page.elements]
        assert "left out: records" not in "".join(page.texts.values())
        if kind == "hostile":
            assert "<script>" in page.texts["keys"], "the texts stand in the page, as texts"
            for letter in "\x00\x1b\u202e\u2066\x85":
                assert letter not in "".join(page.texts.values())
    assert shapes["hostile"] == shapes["plain"]


def test_the_command_prints_the_steps_and_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = noise(6)
    for name, losses in (("a", base), ("b", base), ("c", base + 1)):
        write_run(tmp_path / name, losses)
    done = CliRunner().invoke(app, ["report", "a", "b"])
    assert done.exit_code == 0
    assert "equal in every loss up to step 300\ncomparison.html: " in done.stdout
    done = CliRunner().invoke(app, ["report", "a", "b", "c", "nope", "--json", "--out", "x.html"])
    record = json.loads(done.stdout)
    assert record["bytes"] == (tmp_path / "x.html").stat().st_size
    assert [run.get("first_different_step") for run in record["runs"]] == [None, None, 1]
    assert record["runs"][2]["three_spreads_step"] == 50
    assert record["summary"].endswith("apart by more than three spreads from step 50 (c)")
    assert "nope: does not exist" in record["problems"][0]
