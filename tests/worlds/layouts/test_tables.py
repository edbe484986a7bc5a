"""Embedding tables on servers: equal to one process; what travels; what is refused."""

from __future__ import annotations

import pytest

from shoal.view.proof_lines import proof_text


@pytest.mark.parametrize(
    ("size", "servers", "serves", "optimizer"),
    [
        pytest.param(2, 1, "embeddings", "", marks=pytest.mark.proof),
        pytest.param(4, 1, "embeddings", "sgd", marks=pytest.mark.proof),
        (4, 2, "embeddings", ""),
        (4, 2, "words,sums", "sgd"),
    ],
)
def test_tables_on_servers_equal_one_process(worlds, size, servers, serves, optimizer) -> None:
    """Unequal counts of targets, accumulation, a short step, momentum, AdamW with weight decay."""
    words = {"servers": servers, "serves": serves, "optimizer": optimizer}
    reports = worlds(size).call("tables_case:prove", case="clicked", **words)
    assert all(one["verdict"] == "equal" for one in reports), proof_text(reports[0])
    for told in reports[0]["trajectories"]:
        assert told["largest"]["loss"] <= 1e-12
    assert f"serves = {serves}" in reports[0]["layout"]


def test_only_rows_that_are_used_travel(worlds) -> None:
    """A table of 20,000 rows: bytes of a step by the world's counters, beside ddp's."""
    told = worlds(4).call("tables_case:bytes_of_a_step", servers=2)
    for worker in told[:2]:
        # Six micro-batches' asks and an end for each of two servers, 3 numbers of 8 bytes each.
        head_bytes = 7 * 2 * 3 * 8
        rows, width = worker["rows"], 16
        # Row numbers go to both servers, gradients come back by columns.
        wanted = rows * 4 * 2 + rows * width * 4 + head_bytes
        assert worker["sent"] == wanted
        assert worker["held_bytes"] == 0
    for server in told[2:]:
        assert server["sent"] == sum(one["rows"] for one in told[:2]) * 8 * 4
        assert server["held_bytes"] == 20_000 * 8 * 4
    assert told[0]["ddp"] > 1.5 * 20_000 * 16 * 4  # 2 · 3/4 of the table, whatever was used
    assert told[0]["sent"] < told[0]["ddp"] / 50


def test_evaluation_and_predictions_ask_servers(worlds) -> None:
    found = worlds(4).call("tables_case:evaluated", servers=2)
    losses = {one["served"] for one in found}
    assert len(losses) == 1
    assert losses.pop() == pytest.approx(found[0]["alone"], rel=1e-12)
    assert [one["predicted"] for one in found] == [True, True, False, False]


def test_what_servers_cannot_hold_is_said(worlds) -> None:
    """In one line each, the same on all ranks."""
    lines = worlds(2).call("tables_case:refused")[0]
    for words, line in lines.items():
        assert "\n" not in line
        assert "try: " in line, (words, line)
    assert "never_there is no table that servers can hold" in lines["unknown"]
    assert 'try: layout={"serves": "weights"}' in lines["tied"]
    assert "max_norm shortens the rows" in lines["max_norm"]
    assert "emb.weight is used in" in lines["read otherwise"]
    assert "outside of a run's calls" in lines["outside"]
