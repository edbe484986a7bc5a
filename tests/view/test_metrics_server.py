"""`shoal serve`: the page of metrics, and a server that hostile clients cannot break."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from shoal.view.metrics_server.run_metrics import format_page

RUNS = Path(__file__).parents[1] / "fixtures" / "run_folders" / "runs"


def test_the_page_is_read_by_prometheus() -> None:
    samples = [s for family in text_string_to_metric_families(format_page(RUNS)) for s in family.samples]
    losses = {s.labels["run"] for s in samples if s.name == "shoal_run_loss"}
    assert {"ddp", "islands/island-0", "own-loop"} <= losses
