"""A run that was resumed and then killed: its starts, lost steps, goodput and numbers as JSON."""

from __future__ import annotations

import json
import re
import shlex
from html import unescape
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.base.runlog.rank_records import RankStep, encode_header
from shoal.cli.main import app
from shoal.report.report_page import make_page
from shoal.report.run_contents import read_run
from shoal.report.run_starts import list_starts

STEPS, KILLED_AT, SAVED_AT = 80, 71, 64


def write_run(folder: Path, *, recorded: int = STEPS, validations: int = 1) -> Path:
    """Steps 1–60, an hour's pause, a resume from step 60, and a kill at step 71."""
    folder.mkdir()
    rows = [
        {"step": n, "loss": 5.0 - n / 100, "step_s": 1.0 if n > 1 else 9.0, "tokens_per_s": 64.0,
         "tokens": 64, "peak_memory_bytes": 1000}
        for n in range(1, KILLED_AT + 1)
    ]  # fmt: skip
    events: list[dict[str, object]] = [
        {"time_s": 1e9, "event": "run_started", "processes": 2, "attempt": 0, "layout": "ddp"},
        {"time_s": 1e9 + 1, "event": "notice", "text": "auto: ddp: 1.6 s per step foreseen"},
        {"time_s": 1e9 + 40, "event": "compute_started", "step": 0},
        *({"time_s": 1e9 + 108, "event": "validated", "step": 60 - n, "loss": 4.5, "seconds": 1.0}
          for n in range(validations)),
        {"time_s": 1e9 + 110, "event": "run_finished", "step": 60, "how": "completed"},
        {"time_s": 1e9 + 3710, "event": "run_started", "processes": 2, "attempt": 0, "layout": "ddp"},
        {"time_s": 1e9 + 3715, "event": "resumed", "step": 60, "folder": "checkpoints/step-60"},
        {"time_s": 1e9 + 3720, "event": "compute_started", "step": 60},
        {"time_s": 1e9 + 3724, "event": "checkpoint_saved", "step": SAVED_AT, "seconds": 3.0},
        {"time_s": 1e9 + 3731, "event": "worker_died", "rank": 1, "pid": 7, "step": KILLED_AT,
         "how": "killed by SIGKILL", "traceback": "", "fatal": True},
    ]  # fmt: skip
    plan = {
        "steps": STEPS, "layout": {"dp_replicate": 2}, "predicted": {"step_s": 2.5},
        "why": "auto: ddp: 1.6 s per step foreseen",
    }  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "run.toml").write_text("[train]\n")
    saved = folder / "checkpoints" / f"step-{SAVED_AT}"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text("{}")
    (folder / "rank_steps").mkdir()
    content = b"".join(
        # Later rows are ten times as long, as those of another session would be.
        RankStep(n, rank, 1, 1e9 + n, 0, (0.0, 0.1, 1.0 if n <= KILLED_AT else 20.0, *[0.0] * 5)).encode()
        for n in range(1, recorded + 1)
        for rank in (0, 1)
    )  # fmt: skip
    (folder / "rank_steps" / "node-0.bin").write_bytes(encode_header(0) + content)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "my run")


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return make_page(read_run(folder))


def text_of(page: str) -> str:
    body = re.sub(r"<svg.*?</svg>", "", page.partition("<main>")[2], flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", body)))


def test_the_top_says_starts_and_how_the_run_goes_on(folder: Path, page: str) -> None:
    top = text_of(page).partition("Curves")[0]
    assert re.search(r"started \S+ \S+ · resumed \S+ \S+ from step 60 · 2 starts · 1 death", top)
    assert "Newest checkpoint: step 64; steps 65–71 are lost: 7 steps. Go on:" in top
    assert f"shoal train --resume {shlex.quote(str(folder))}" in top
    assert top.count("killed by SIGKILL") == 1, "the state does not repeat the verdict"
    assert "step, median of steps 2–71 1.0 s" in top


def test_goodput_counts_sessions_and_stands_after_the_curves(page: str) -> None:
    text = text_of(page)
    # 79 s of steps and 1 s of validation in 110 s, 11 s of steps in 21 s.
    assert "60% of the 2 min 11 s in which 2 sessions ran went into 71 committed steps" in text
    assert "Between the sessions nobody ran it for 1 h 00 min: not counted here." in text
    assert "No step was made again." in text
    assert "steps that count" in text
    order = [
        text.index(f" {head} ") for head in ("Curves", "Goodput", "History", "Ranks", "Layout")
    ]
    assert order == sorted(order)


def test_a_run_that_waited_longer_than_it_trained_says_so_beside_nothing_to_gain(
    tmp_path: Path,
) -> None:
    done = tmp_path / "done"
    done.mkdir()
    rows = [{"step": n, "loss": 1.0, "step_s": 1.0} for n in range(1, 41)]
    (done / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for until_s, expected in (
        (200, "But only 20% of the 3 min 20 s in which a session ran went into"),
        (75, ""),
    ):
        events = [
            {"time_s": 1e9, "event": "run_started"},
            {"time_s": 1e9 + 30, "event": "compute_started", "step": 0},
            {"time_s": 1e9 + until_s, "event": "run_finished", "how": "completed", "step": 40},
        ]
        (done / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
        top = text_of(make_page(read_run(done))).partition("Curves")[0]
        assert "Nothing to gain: no avoidable cost above 5% of a step, which takes 1.0 s" in top
        assert ("But only" in top) == bool(expected)
        assert expected in top
        assert ("steps; other 65%, start 15%." in top) == bool(expected)
        assert "started" in top
        assert "resumed" not in top
        assert "Newest checkpoint" not in top


def test_history_names_the_checkpoint_and_no_attempt_of_zero(page: str) -> None:
    history = text_of(page).partition("History")[2].partition("Ranks")[0]
    assert "resumed from checkpoint step-60" in history
    assert "at step 60" not in history
    assert "attempt" not in history
    assert (
        "1 checkpoint saved, written in 3.0 s (median). Writing goes on in the background"
        in history
    )


def test_forecasts_say_of_which_start_they_are(page: str) -> None:
    text = text_of(page)
    assert "1.6 s per step foreseen (foreseen at start 1 of 2)" in text
    assert "Foreseen at the last of 2 starts" in text
    assert "time of a step, median of steps 2–71" in text


def test_rows_of_ranks_end_with_the_metrics(page: str) -> None:
    text = text_of(page)
    assert "Means of steps 1–71 (71 rows)" in text
    assert re.search(r" mean 1\.1 s ", text.partition(" Ranks ")[2]), (
        "without the long rows after 71"
    )


def test_curves_mark_the_resume_and_a_single_value_is_a_number(tmp_path: Path, page: str) -> None:
    data = json.loads(re.findall(r'id="data">(.*?)</script>', page)[0])
    assert data["starts"] == [[[60, "resumed, step 60"]]]
    loss = page.partition('data-curve="loss"')[2].partition('data-curve="')[0]
    assert 'class="start" x1="842.9"' in loss, "59 of 70 steps"
    assert "resumed, step 60" in loss
    assert 'data-curve="validation"' not in page
    assert "4.5 at step 60, the only value" in text_of(page)
    two = make_page(read_run(write_run(tmp_path / "two", validations=2)))
    assert 'data-curve="validation"' in two
    assert "the only value" not in text_of(two)


def test_json_has_the_numbers_of_the_page(folder: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(folder), "--json"])
    found = json.loads(done.stdout)
    assert (found["state"], found["step"], found["steps"]) == ("killed", 71, 80)
    assert (found["loss"], found["validation_loss"]) == (5.0 - 0.71, 4.5)
    assert (found["median_step_s"], found["median_tokens_per_s"]) == (1.0, 64.0)
    assert found["goodput_share"] == pytest.approx(79 / 131)
    assert found["goodput_share_of"] == "session_s"
    assert found["session_s"] == pytest.approx(131)
    assert sum(found["session_starts_s"]) == pytest.approx(found["goodput_parts_s"]["start"])
    assert len(found["session_starts_s"]) == 2
    assert found["goodput_parts_s"]["between"] == 3600.0
    assert [one["resumed_from_step"] for one in found["newest_starts"]] == [None, 60]
    assert (found["starts"], found["lost_steps"], found["saved_steps"]) == (2, 7, [64])
    assert found["continuation"]["command"] == f"shoal train --resume {shlex.quote(str(folder))}"
    assert found["verdict_kind"] == "fault"
    assert [one["rank"] for one in found["ranks"]] == [0, 1]
    assert found["ranks"][0]["mean_step_s"] == pytest.approx(1.1)


def test_figures_stand_beside_their_forecast(folder: Path) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    said = {"step_s": 0.5, "peak_memory_bytes": 0, "sent_bytes": None}
    (folder / "plan.json").write_text(json.dumps({**plan, "predicted": said}))
    found = json.loads(CliRunner().invoke(app, ["report", str(folder), "--json"]).stdout)
    assert found["forecast"] == {"step_s": {"foreseen": 0.5, "measured": 1.0}}
    lines = CliRunner().invoke(app, ["report", str(folder)]).stdout.splitlines()
    assert lines[0].startswith("verdict: ")
    assert lines[1].startswith("run: ")
    assert f"step {found['step']} of {found['steps']}, loss {found['loss']:.4f}" in lines[1]
    assert lines[2] == "a step, median: 1.0 s, 2.00 × the forecast of 500.0 ms"
    assert lines[-1].startswith(f"{folder}/report.html: ")


def test_the_rate_of_a_run_without_tokens_is_in_samples(tmp_path: Path) -> None:
    """Targets of a run of images are labels; the number and its name are of samples."""
    folder = write_run(tmp_path / "images")
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**plan, "unit": "samples"}))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{**row, "samples": [8 * at, 8 * at + 8]} for at, row in enumerate(rows)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = json.loads(CliRunner().invoke(app, ["report", str(folder), "--json"]).stdout)
    assert found["median_samples_per_s"] == pytest.approx(8.0)
    assert "median_tokens_per_s" not in found
    assert "samples/s, median 8" in text_of(make_page(read_run(folder)))


def test_a_restart_without_a_checkpoint_is_a_start_from_the_beginning() -> None:
    events = [{"event": "run_started", "time_s": 1.0}, {"event": "restarting", "time_s": "x"}]
    found = list_starts([*events, {"event": "resumed", "step": "y"}])
    assert [(one.time_s, one.step) for one in found] == [(1.0, None), (None, None)]
