"""A report of owners lists the last validation of each, the worst first."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

from shoal.report.owner_figures import read_owner_validation
from shoal.report.report_record import _state_line, _verdict_text, summary_lines
from shoal.report.sections.history import _saves_text
from shoal.report.sections.overview import (
    _owner_shares_table,
    _owners_table,
    _state_text,
    _verdict_box,
)
from shoal.report.sections.rank_heat import ranks_section
from shoal.report.verdict.run_verdict import Verdict


def run_of(*events: dict[str, Any]) -> Any:
    one = SimpleNamespace(
        named=lambda name: [e for e in events if name == e.get("event", "validated")]
    )
    return SimpleNamespace(curve_runs=[one])


def test_the_worst_owner_stands_first() -> None:
    old = {"step": 1, "worst": "a", "by_source": {"a": {"loss": 9.0, "targets": 1}}}
    rows = {
        "a<b>": {"loss": 1.5, "accuracy": 0.5, "targets": 2000},
        "c": {"loss": 2.5, "targets": 3},
        "d": {"loss": None, "targets": 0},
    }
    found = str(_owners_table(run_of(old, {"step": 7, "worst": "c", "by_source": rows})))
    assert "at step 7" in found
    cells = re.findall(r"<td[^>]*>(.*?)</td>", found)
    assert cells[::4] == ["c", "a&lt;b&gt;", "d"]
    assert cells[1:4] == ["2.5000", "–", "3"]
    assert cells[5:7] == ["1.5000", "50.0%"]


def test_owners_of_text_stand_by_bits_per_byte() -> None:
    """The tokenizer of east cuts north's text into short tokens: its loss per token is the least."""
    rows = {
        "north": {"loss": 1.5, "bits_per_byte": 1.9, "bytes": 10, "targets": 9},
        "east": {"loss": 2.9, "bits_per_byte": 1.2, "bytes": 40, "targets": 11},
        "west": {"loss": None, "targets": 0},
        "broken": {"loss": None, "bits_per_byte": None, "bytes": 40, "targets": 11},
    }
    found = str(_owners_table(run_of({"step": 7, "worst": "north", "by_source": rows})))
    assert "by bits per byte of text" in found
    cells = re.findall(r"<td[^>]*>(.*?)</td>", found)
    assert cells[::5] == ["broken", "north", "east", "west"]
    assert cells[5:10] == ["north", "1.9000", "1.5000", "–", "9"]


def test_a_mixture_has_no_owners() -> None:
    mixture = {"step": 7, "by_source": {"a": {"loss": 1.0, "targets": 1}}}
    assert _owners_table(run_of(mixture)) is None
    assert _owners_table(run_of({"step": 7, "worst": "a", "by_source": [1]})) is None


def test_shares_are_means_over_all_merges_and_rows_that_are_none_do_not_count() -> None:
    row = {"samples": 30, "steps": 3, "weight": 0.75}
    rounds: list[dict[str, Any]] = [
        {"a": row, "b": {"samples": 10, "steps": 1, "weight": 0.25}},
        {"a": {**row, "weight": 1.0}, "c": {"samples": "many"}, "d": 7},
        {},
    ]
    events = [{"event": "round_committed", "by_owner": one} for one in rounds]
    found = str(_owner_shares_table(run_of(*events)))
    assert "in the 2 merges" in found
    cells = re.findall(r"<td[^>]*>(.*?)</td>", found)
    assert cells == ["a", "30", "2", "6", "87.5%", "b", "10", "1", "1", "12.5%"]
    assert _owner_shares_table(run_of(events[2])) is None


def test_the_report_of_all_islands_leaves_steps_ranks_and_checkpoints_to_theirs() -> None:
    run = cast("Any", SimpleNamespace(
        islands=[1], plan={}, curve_runs=[SimpleNamespace(metrics=SimpleNamespace(steps=steps))
        for steps in ([1, 12], [84], [])], rank_times=None, saved=[],
        event_counts={}, named=lambda name: [],
    ))  # fmt: skip
    row: Any = SimpleNamespace(state="ended", how="", step=12, steps=84)
    nothing = Verdict("nothing", "no verdict yet: fewer than 20 steps after warm-up")
    assert "step 84 of 84" in _state_text(run, row, nothing)
    assert "no verdict" not in str(_verdict_box(nothing, run))
    assert _saves_text(run) == "Each island's checkpoints are in its own folder."
    assert "macOS" not in str(ranks_section(run))
    run.islands, run.curve_runs = [], run.curve_runs[2:]
    assert "step 0" in _state_text(run, row, nothing)
    assert _saves_text(run) == "No checkpoint is on disk."
    assert "macOS" in str(ranks_section(run))


def test_the_terminal_shows_the_mean_and_the_worst_owners() -> None:
    rows = {
        "p3": {"loss": 0.5, "accuracy": 0.9, "targets": 10},
        "p20": {"loss": 0.98834, "accuracy": 8 / 11, "targets": 11},
        "p7": {"loss": None, "targets": 0},
    }
    event = {"step": 7, "worst": "p20", "loss": 0.7561, "accuracy": 0.8095, "by_source": rows}
    found = read_owner_validation(run_of(event))
    assert found is not None
    assert found.lines() == [
        "owners with held-out samples: 2 of 3; mean loss 0.7561, accuracy 81.0%",
        "worst owner p20: loss 0.9883, accuracy 72.7%, of 11 targets; next: p3 loss 0.5000, "
        "accuracy 90.0%",
    ]
    few = {**rows, "p9": {"loss": 3.5, "accuracy": 0.0, "targets": 1}}
    found = read_owner_validation(run_of({**event, "owners": 6, "worst": "p9", "by_source": few}))
    assert found is not None
    head, worst, larger = found.lines()
    assert head.startswith("owners with held-out samples: 3 of 6; ")
    assert worst.startswith("worst owner p9: loss 3.5000, accuracy 0.0%, of 1 targets; next: p20 ")
    assert larger == (
        "worst owner with 10 targets or more p20: loss 0.9883, accuracy 72.7%, of 11 targets"
    )
    text = {
        "a": {"loss": 2.5, "bits_per_byte": 1.5, "targets": 8},
        "b": {"loss": 2.0, "bits_per_byte": 2.5, "targets": 8},
    }
    found = read_owner_validation(run_of({**event, "bits_per_byte": 2.0, "by_source": text}))
    assert found is not None
    assert found.lines()[1].startswith("worst owner b: 2.5000 bits per byte, loss 2.0000, of 8 ")


def test_a_run_of_islands_names_where_the_verdicts_are() -> None:
    nothing = Verdict("nothing", "no verdict yet: fewer than 20 steps after warm-up")
    islands = [SimpleNamespace(label=f"island-{k}", folder=f"runs/a/island-{k}") for k in (0, 1)]
    run = cast("Any", SimpleNamespace(islands=islands))
    record: Any = {
        "verdict": _verdict_text(run, nothing), "owners": None, "state": "ended", "step": 7,
        "steps": 7, "loss": 0.5, "validation_loss": None, "median_step_s": None,
        "verdict_parts_s": None, "peak_memory_bytes": None, "goodput_share": None,
    }  # fmt: skip
    assert summary_lines(record)[1] == f"verdict: {record['verdict']}"
    assert summary_lines({**record, "verdict": "slow disk"})[0] == "verdict: slow disk"
    assert _verdict_text(run, nothing) == (
        "each group of processes has its own (island-0, island-1); try: shoal report "
        "runs/a/island-0"
    )
    fault = Verdict("fault", "rank 1 died")
    assert _verdict_text(run, fault) == "rank 1 died"
    run.islands = []
    assert _verdict_text(run, nothing) == nothing.line()


def test_more_steps_than_foreseen_are_shown_without_the_forecast() -> None:
    record = {"state": "done", "step": 1633, "steps": 1125, "loss": None, "validation_loss": 0.5}
    assert _state_line(record) == "run: done, step 1633, validation loss 0.5000"
    assert _state_line({**record, "steps": 1700}).startswith("run: done, step 1633 of 1700")
