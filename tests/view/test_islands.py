"""What a run's events say of its islands: sums, and the table beside a prediction."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.base.layouts.island_options import IslandsPolicy
from shoal.forecast.search.island_choice import RATES_BYTES_PER_S, costs_by_link
from shoal.forecast.time.island_costs import IslandsFacts, islands_cost
from shoal.view.island_lines import islands_summary_line, link_lines, sum_rounds
from shoal.view.summary import summarise_run

Record = dict[str, Any]


def ended(round_number: int, **changed: Any) -> Record:
    return {
        "event": "round_committed",
        "round": round_number,
        "steps": 50,
        "seconds": 26.0,
        "compute_s": 25.0,
        "exposed_s": 0.8,
        "exchange_s": 8.0,
        "sent_bytes": 40_000_000,
        "tokens": 50_000,
        "tokens_all": 150_000,
        "admitted": [0, 1, 2],
        "refused": {},
        "divisor": 150_000.0,
        "digest": "00",
        **changed,
    }


RUN = [
    {"event": "islands_met", "count": 3, "at": "10.0.0.1:29400", "encrypted": False},
    ended(0, exchange_s=6.4),
    {"event": "step_skipped", "step": 3},
    ended(1, event="round_discarded", seconds=99.0, refused={"1": "norm", "2": "norm"}),
    ended(1, admitted=[0, 2], refused={"1": "norm"}),
]


def test_the_summary_adds_up_the_steps_of_all_islands(tmp_path: Path) -> None:
    for island, steps in ((0, 3), (1, 5)):
        folder = tmp_path / f"island-{island}"
        folder.mkdir()
        (folder / "plan.json").write_text('{"unit": "samples"}')
        rows = [
            {"step": step, "loss": 1.0 + island, "samples": [16 * step - 16, 16 * step]}
            for step in range(1, steps + 1)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folders = [tmp_path / "island-0", tmp_path / "island-1"]
    (folders[0] / "events.jsonl").write_text(json.dumps(ended(0)) + "\n")
    text = summarise_run(folders[0], islands=folders)
    assert "  islands      1 round, 96.2% used, 800 B per target and island" in text
    whole = "  trained      8 steps, 128 samples in 2 islands; mean of last losses 1.5000\n"
    assert whole in text
    assert "  island-0     3 steps, 48 samples; last loss 1.0000" in text


def test_committed_rounds_add_up() -> None:
    found = sum_rounds(RUN)
    assert found is not None
    assert (found.rounds, found.discarded, found.steps) == (2, 1, 100)
    assert found.refused == {"1": 2, "2": 1}
    assert found.figures() == {
        "round_s": 26.0,
        "waited_s": pytest.approx(1.0),
        "exposed_s": pytest.approx(0.8),
        "exchange_s": pytest.approx(7.2),
        "utilisation": pytest.approx(25 / 26),
        "bytes_per_token": 800.0,
        "mean_bytes_per_s": pytest.approx(40e6 / 26),
        "peak_bytes_per_s": pytest.approx(40e6 / 6.4),
    }


def test_what_is_measured_is_named_as_what_is_foreseen() -> None:
    found = sum_rounds(RUN)
    assert found is not None
    cost = islands_cost(IslandsPolicy("diloco", count=2), IslandsFacts(1e6, 1.0, 1e6))
    assert set(found.figures()) <= set(cost.record())


def test_without_a_prediction_the_measured_stand_alone() -> None:
    assert islands_summary_line(RUN[:2]) == "1 round, 96.2% used, 800 B per token and island"
    row = islands_summary_line(RUN, {"utilisation": 0.977})
    assert row == ("2 rounds, 1 discarded, 96.2% used (foreseen 97.7%), 800 B per token and island")


def test_islands_that_stay_apart_say_how_far() -> None:
    """The newest round's that told; an island may have been alone in the last one."""
    told = [ended(0, spread=0.5), ended(1, spread=0.0123), ended(2)]
    assert islands_summary_line(told).endswith(" per token and island, weights 1.23% apart")


def test_runs_without_rounds_show_nothing() -> None:
    assert sum_rounds(RUN[:1]) is None
    assert islands_summary_line([]) == ""


def test_broken_fields_do_no_harm() -> None:
    line = islands_summary_line([ended(0, seconds=None, sent_bytes="x", tokens=0, refused=None)])
    assert line.startswith("1 round")
    assert "nan" not in line
    assert "per token" not in line
    predicted = {"utilisation": float("nan"), "steps": []}
    assert islands_summary_line([{"event": "round_committed"}], predicted)
    assert islands_summary_line([{"event": "round_discarded"}]) == "0 rounds, 1 discarded"


def test_links_before_a_run() -> None:
    policy, facts = IslandsPolicy("diloco", count=3), IslandsFacts(20e6, 0.5, 1.0)
    costs = costs_by_link(policy, facts)
    lines = link_lines(list(zip(RATES_BYTES_PER_S, costs, strict=True)))
    assert max(map(len, lines)) <= 80
    assert len(lines) == 5
    assert lines[2].split()[:3] == ["50", "Mbit/s", f"{costs[1].utilisation:.1%}"]


def test_a_run_ends_with_its_islands(tmp_path: Path) -> None:
    said = {"predicted": {"islands": {"utilisation": 0.977}}}
    (tmp_path / "plan.json").write_text(json.dumps(said))
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in RUN[:2]))
    assert "  islands      1 round, 96.2% used (foreseen 97.7%), 800 B per token and island" in (
        summarise_run(tmp_path).splitlines()
    )


def test_no_torch_is_loaded() -> None:
    code = "import sys; import shoal.view.island_lines; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=300).returncode == 0
