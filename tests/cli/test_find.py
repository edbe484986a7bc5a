"""`shoal find lr`: the curve, the rule and its value, on a loss whose best rate is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.base.errors import ConfigError
from shoal.cli import main
from shoal.trainer.jobs.rate_range import BLOWN_UP, RangeTestResult, smooth_losses

BOWL = """
import torch
from torch import nn

class Bowl(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 3.0))
    def forward(self, inputs):
        return inputs + self.weight

def build():
    return Bowl()

def data():
    return [(torch.zeros(4), torch.zeros(4))] * 64

def loss(outputs, targets):
    return 0.5 * outputs.square().sum(1)  # curvature 1: gradient descent ends at rates over 2
"""
WORDS = ["model.build=bowl:build", "model.loss=bowl:loss", "data.source=bowl:data", "train.batch=8",
         "optimizer.name=sgd", "optimizer.momentum=0", "optimizer.weight_decay=0", "optimizer.clip=0",
         "data.validation=0"]  # fmt: skip


@pytest.fixture
def bowl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bowl.py").write_text(BOWL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)


def test_the_curve_of_a_bowl(bowl: None) -> None:
    """Its loss falls while the rate is below 2, and grows beyond without an end."""
    given = ["find", "lr", *WORDS, "--from", "1e-4", "--to", "100", "--steps", "60", "--json"]
    done = CliRunner().invoke(main.app, given)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout.splitlines()[-1])
    rates, losses = told["rates"], told["losses"]
    assert rates[:2] == pytest.approx([1e-4, 1e-4 * 1e6 ** (1 / 59)])
    assert losses[0] == pytest.approx(18.0)
    # Step by step what gradient descent does to 0.5·w².
    weight = 3.0
    for rate, loss in zip(rates, losses, strict=True):
        assert loss == pytest.approx(2 * weight**2, rel=1e-4, abs=1e-12)
        weight -= rate * weight
    least = min(range(len(rates)), key=lambda k: told["smoothed"][k])
    assert told["named"] == pytest.approx(rates[least] / 10)
    assert told["ended"] or len(rates) == 60
    assert not list(Path.cwd().glob("runs*")), "nothing is written"


def test_what_is_drawn() -> None:
    from shoal.cli.find import range_test_lines

    losses = (4.0, 3.0, 1.0, 30.0)
    found = RangeTestResult(
        (1e-3, 1e-2, 1e-1, 1.0), losses, smooth_losses(losses), "at 1.0e+00 it blew up"
    )
    assert found.named == pytest.approx(1e-2)
    lines = range_test_lines(found)
    assert lines[-1] == (
        "optimizer.lr=1.0e-02: a tenth of the rate at which the smoothed loss is least"
    )
    assert "ended: at 1.0e+00 it blew up" in lines
    assert max(map(len, lines)) <= 100
    falling = RangeTestResult((1e-3, 1e-2), (2.0, 1.0), (2.0, 1.5), "")
    assert (
        "the least loss is at an end of the range: widen it by --from or --to"
        in range_test_lines(falling)
    )
    assert BLOWN_UP > 1


@pytest.mark.parametrize("ends", [("1", "1"), ("0", "1"), ("10", "1")])
def test_a_range_that_is_none_is_one_line(ends: tuple[str, str]) -> None:
    done = CliRunner().invoke(main.app, ["find", "lr", "--from", ends[0], "--to", ends[1]])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).endswith("try: --from 1e-07 --to 10")


def test_a_layout_is_left_out_with_a_line(bowl: None) -> None:
    given = ["find", "lr", *WORDS, "layout.tp=2", "--steps", "10"]
    done = CliRunner().invoke(main.app, given)
    assert done.exit_code == 0, done.output
    assert "layout.tp=2: left out, the test runs on one process" in done.output


@pytest.mark.parametrize("group", main.GROUPS)
def test_a_group_alone_shows_its_words_in_lines(
    group: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["shoal", group])
    with pytest.raises(SystemExit):
        main.main()
    told = capsys.readouterr()
    assert "Commands:\n" in told.out + told.err
