"""The proof before a run: seconds, once, never at a restart, and a refusal only for a difference."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from shoal.trainer.proof.material import Material, head
from shoal.trainer.proof.quick import model_parts, source_of


def ask(worlds, folder: Path, **arguments):
    """The same answer on both ranks."""
    answers = worlds(2).call("quick_case:ask", folder=str(folder), **arguments)
    assert {a.get("error") for a in answers} == {answers[0].get("error")}
    return answers[0]


def test_it_is_proven_once_and_then_known(worlds, tmp_path: Path) -> None:
    line = ask(worlds, tmp_path)["line"]
    assert line.startswith(
        "proof: ddp (dp_replicate = 2) computes what one process computes: 8 parameters, 2 steps"
    )
    (known,) = json.loads((tmp_path / "cache" / "proofs.json").read_text()).values()
    assert known["verdict"] == "equal"
    assert ask(worlds, tmp_path)["line"] == ""
    assert ask(worlds, tmp_path, case="towers")["line"].startswith("proof: ddp"), "another model"
    assert not (tmp_path / "run").exists()


def test_a_difference_refuses_and_is_not_kept(worlds, tmp_path: Path) -> None:
    for _ in range(2):
        told = ask(worlds, tmp_path, bug="factor lost")
        assert told["code"] == 3, "a restart would meet it again"
        assert told["error"].startswith(
            "proof: ddp (dp_replicate = 2) on 2 processes does not compute what one process "
            "computes: "
        )
        assert "a factor 2 is lost" in told["error"]
        assert told["error"].endswith("train.prove=off trains all the same")


def test_never_at_a_restart_or_a_resume(worlds, tmp_path: Path) -> None:
    for name in ("SHOAL_ATTEMPT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        assert ask(worlds, tmp_path, bug="factor lost", environ={name: "1"})["line"] == ""
    (tmp_path / "run" / "checkpoints" / "step-3").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-3" / "manifest.json").write_text("{}")
    assert ask(worlds, tmp_path, bug="factor lost")["line"] == ""


def test_small_steps_hold_a_short_one() -> None:
    small = Material(nn.Identity, None, range(100), None, "ddp", 64, 16).small(4)
    assert (small.batch, small.micro_batch, small.full_steps) == (16, 2, 1)
    assert len(head(range(100), 16, 2, 1)) == 18
    assert len(head(range(100), 32, 8, 2)) == 64 + 8 + 4
    assert len(head(range(5), 32, 8, 2)) == 5
    assert head(iter(range(10**9)), 2, 1, 1) == [0, 1, 2], "of a stream only what is needed"


def test_the_key_knows_the_model() -> None:
    def linear(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, 2), nn.Dropout(0.1))

    assert model_parts(linear(3)) == model_parts(linear(3))
    assert model_parts(linear(3)) != model_parts(linear(4))
    other = linear(3)
    other[1].p = 0.2
    assert model_parts(linear(3)) != model_parts(other), "settings count"
    assert source_of(linear) != source_of(ask)
    assert source_of(nn.Linear) == torch.nn.Linear.__module__
