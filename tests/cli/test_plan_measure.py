"""`shoal plan --measure` refuses a slip before it measures for half a minute."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from shoal.cli import main, measure


def test_a_wrong_machine_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[list[str]] = []
    monkeypatch.setattr(measure, "measure_this_machine", measured.append)
    failure = CliRunner().invoke(main.app, ["plan", "--measure", "--on", "8xH1000"]).exception
    assert "H100-80GB" in str(failure)
    assert not measured
