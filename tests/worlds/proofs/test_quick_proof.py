"""The proof before a run: seconds, once, never at a restart, and a refusal only for a difference."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from shoal.base.layouts.layout import Layout
from shoal.base.layouts.schedule_names import SCHEDULES
from shoal.base.plans.batches import proof_batch
from shoal.base.plans.plan import Plan
from shoal.models.catalog import build as catalog
from shoal.models.loss import token_loss
from shoal.planning.pipeline_schedules import check_micro_batches
from shoal.proof import reference_seconds
from shoal.proof.proof_case import ProofCase, select_first_samples
from shoal.proof.start_proof import _build_structure
from shoal.trainer.known_proofs import hash_source, model_parts


def ask(worlds, folder: Path, **arguments):
    """The same answer on both ranks."""
    answers = worlds(2).call("quick_case:ask", folder=str(folder), **arguments)
    assert {a.get("error") for a in answers} == {answers[0].get("error")}
    return answers[0]


def test_it_is_proven_once_and_then_known(worlds, tmp_path: Path) -> None:
    line = ask(worlds, tmp_path)["line"]
    assert line.startswith(
        "proof: ddp (dp_replicate = 2) computes what one process computes: 9 parameters, 2 steps"
    )
    (known,) = json.loads((tmp_path / "cache" / "proofs.json").read_text()).values()
    assert known["verdict"] == "equal"
    assert ask(worlds, tmp_path)["line"] == ""
    assert ask(worlds, tmp_path, case="towers")["line"].startswith("proof: ddp"), "another model"
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["proof.json"]


def test_it_tells_what_it_is_busy_with(worlds, tmp_path: Path) -> None:
    phases = ask(worlds, tmp_path, case="llama", layout={"tp": 2})["phases"]
    assert [phases[0], phases[-1]] == [["proof"], []]
    assert ["proof", "one process", "steps", "build"] in phases
    assert ["proof", "steps", "split layers"] in phases
    assert ["proof", "steps", "check layers"] in phases


def test_a_difference_refuses_and_is_not_kept(worlds, tmp_path: Path) -> None:
    for _ in range(2):
        told = ask(worlds, tmp_path, bug="factor lost")
        assert told["code"] == 3, "a restart would meet it again"
        assert told["error"].startswith(
            "proof: ddp (dp_replicate = 2) on 2 processes does not compute what one process "
            "computes: "
        )
        assert "is 0.5 × that of one process, 1/2 for 2 data-parallel ranks" in told["error"]
        assert told["error"].endswith("train.prove=off trains all the same")


def test_a_proof_that_ended_is_not_repeated_at_a_restart(worlds, tmp_path: Path) -> None:
    bug = {"bug": "factor lost"}
    assert ask(worlds, tmp_path)["line"].startswith("proof: ddp")
    (tmp_path / "cache" / "proofs.json").unlink()
    for name in ("SHOAL_ATTEMPT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        assert ask(worlds, tmp_path, **bug, environ={name: "1"})["line"] == ""
    (tmp_path / "run" / "run.toml").write_text("another configuration")
    assert "error" in ask(worlds, tmp_path, **bug, environ={"SHOAL_ATTEMPT": "1"})
    (tmp_path / "run" / "checkpoints" / "step-3").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-3" / "manifest.json").write_text("{}")
    assert ask(worlds, tmp_path, **bug)["line"] == "", "a resume had its proof"


def test_a_difference_is_told_again_at_every_restart(worlds, tmp_path: Path) -> None:
    """torchrun restarts whatever ends: at the third start it trained what was proven wrong."""
    first = ask(worlds, tmp_path, bug="factor lost")["error"]
    for _ in range(3):
        told = ask(worlds, tmp_path, environ={"TORCHELASTIC_RESTART_COUNT": "1"})
        assert told["error"] == first
    assert ask(worlds, tmp_path)["line"].startswith("proof: ddp"), "a start of its own"


def test_a_proof_that_was_killed_counts_as_not_done(worlds, tmp_path: Path) -> None:
    again = {"SHOAL_ATTEMPT": "1"}
    assert "error" in ask(worlds, tmp_path, bug="factor lost", environ=again), "never begun"
    ask(worlds, tmp_path)
    (tmp_path / "cache" / "proofs.json").unlink()
    file = tmp_path / "run" / "proof.json"
    told = {**json.loads(file.read_text()), "verdict": ""}
    file.write_text(json.dumps({**told, "begun": 1}))
    line = ask(worlds, tmp_path, environ=again)["line"]
    assert line.startswith("proof: ddp (dp_replicate = 2) computes")
    (tmp_path / "cache" / "proofs.json").unlink()
    file.write_text(json.dumps({**told, "begun": 2}))
    assert ask(worlds, tmp_path, environ=again)["line"] == (
        "proof: not proven: begun 2 times and ended neither time (the run was killed, hung or "
        "broke off); training goes on"
    )
    assert ask(worlds, tmp_path)["line"].startswith("proof: ddp"), "a start of its own"


def test_a_proof_that_breaks_off_leaves_that_it_began(worlds, tmp_path: Path) -> None:
    """What a kill leaves is what is there while the proof runs."""
    answers = worlds(2).call("quick_case:begun_meanwhile", folder=str(tmp_path))
    assert (answers[0]["begun"], answers[0]["verdict"]) == (1, "")


def test_the_estimate_is_the_work_at_the_rate_of_here(monkeypatch) -> None:
    monkeypatch.setattr(reference_seconds, "_measure_flops_per_s", lambda device: 1000.0)
    module = nn.Linear(10, 5)  # 2 · 50 FLOP forward, as many for the weight's gradient

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
        return outputs.sum(), len(targets)

    data = [(torch.zeros(10), torch.zeros(())) for _ in range(40)]
    case = ProofCase(lambda: module, loss, data, None, "ddp", Plan(Layout(), 64, 16)).shrink(4)
    assert reference_seconds.expected_seconds(module, case, torch.device("cpu")) == 200 * 18 / 500
    stream = ProofCase(
        lambda: module, loss, iter(data), None, "ddp", Plan(Layout(), 64, 16)
    ).shrink(4)
    assert reference_seconds.expected_seconds(module, stream, torch.device("cpu")) == 0.0


def test_the_key_of_our_models_needs_no_numbers() -> None:
    def build() -> nn.Module:
        return catalog("llama", {"dim": 32, "layers": 2}, vocabulary=64, sequence=16)

    case = ProofCase(build, token_loss, range(9), None, "ddp", Plan(Layout(), 8, 2), ours=True)
    light, full = _build_structure(case), _build_structure(replace(case, ours=False))
    assert all(p.is_meta for p in light.parameters())
    assert model_parts(light) == model_parts(full)


def test_small_steps_hold_a_short_one() -> None:
    small = ProofCase(nn.Identity, None, range(100), None, "ddp", Plan(Layout(), 64, 16)).shrink(4)
    assert (small.plan.batch, small.plan.micro_batch, small.full_steps) == (16, 2, 1)
    assert len(select_first_samples(range(100), 16, 2, 1)) == 18
    assert len(select_first_samples(range(100), 32, 8, 2)) == 64 + 8 + 4
    assert len(select_first_samples(range(5), 32, 8, 2)) == 5
    assert select_first_samples(iter(range(10**9)), 2, 1, 1) == [0, 1, 2], (
        "of a stream only what is needed"
    )


def test_ranks_that_share_a_micro_batch_ask_for_no_more_of_them() -> None:
    """tp and cp multiply processes, and nothing of what one process must compute beside them."""

    def step(layout: dict[str, int], processes: int) -> int:
        case = ProofCase(nn.Identity, None, range(100), None, layout, Plan(Layout(), 64, 16))
        return case.shrink(processes).plan.batch

    assert step({"tp": 2, "pp": 2}, 4) == step({"pp": 2}, 2) == 8
    assert step({"tp": 4, "cp": 2}, 8) == step({"tp": 2}, 2) == 4
    assert step({"tp": 2, "dp_shard": 2}, 4) == 8


def test_every_schedule_can_run_the_steps_of_a_proof() -> None:
    for schedule in SCHEDULES:
        for pp in (2, 4, 6):
            chunks = 2 if schedule == "interleaved" else 1
            layout = Layout(pp=pp, dp_replicate=3, schedule=schedule, chunks=chunks)
            batch, micro_batch = proof_batch(layout, 8)
            check_micro_batches(layout, batch, micro_batch)


def test_the_key_knows_the_model() -> None:
    def linear(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, 2), nn.Dropout(0.1))

    assert model_parts(linear(3)) == model_parts(linear(3))
    assert model_parts(linear(3)) != model_parts(linear(4))
    other = linear(3)
    other[1].p = 0.2
    assert model_parts(linear(3)) != model_parts(other), "settings count"
    assert hash_source(linear) != hash_source(ask)
    assert hash_source(nn.Linear) == torch.nn.Linear.__module__


def test_what_would_take_too_long_is_not_begun(worlds, tmp_path: Path) -> None:
    line = ask(worlds, tmp_path, case="llama", budget_s=1e-9)["line"]
    assert line.startswith("proof: not proven: time: 2 steps in one process would take about ")
    assert line.endswith(
        f", 0.0 ms are allowed; training goes on; alone it is proven by: "
        f"shoal prove --quick {tmp_path}/run/run.toml"
    )
    assert not (tmp_path / "cache" / "proofs.json").exists(), "what was not begun is not known"


def test_spread_samples_are_of_the_whole_dataset() -> None:
    """Of sorted data, and of data whose kinds alternate."""
    few = list(select_first_samples(range(1000), 16, 2, 1, spread=True))
    assert len(set(few)) == 18
    assert {n // 250 for n in few} == {0, 1, 2, 3}
    assert {n % 2 for n in few} == {0, 1}
