"""A layout computes what one process computes: design §6's definition of equal, in float64.

Reference twice over: the battery that users run as `shoal prove` holds layouts against one process,
and here one process is held against a loop written by hand with plain PyTorch. The full table is
`tests/proof/equality.py`; this is a sample of it, in which every layout and every case comes up.
"""

from __future__ import annotations

import math

import pytest
import torch

import cases
import trajectory
from shoal.base.plans.batches import cut_step
from shoal.data.loading.sample_order import samples_at
from shoal.fabric import World
from shoal.fabric.rendezvous.process_info import ProcessInfo
from shoal.proof.battery import OPTIMIZERS, SGD
from shoal.proof.distances import difference_norm, norm_over
from shoal.proof.trajectory_record import TrajectoryRecord
from shoal.proof.trial_side import perturb
from shoal.view.proof_lines import proof_text

WEIGHT_BOUND = 1e-12


def alone(case: str) -> TrajectoryRecord:
    """What one process computes on a case, with SGD."""
    return trajectory.battery(case).twin(SGD, torch.device("cpu"))


@pytest.mark.parametrize(("layout", "case", "size"), trajectory.SAMPLE)
def test_a_layout_equals_one_process(worlds, layout: str, case: str, size: int) -> None:
    """Two full steps and a short one, with SGD; one row per layout with AdamW too.

    A wrong gradient shows at step 1; `make proof` trains every row with both, for 5 steps.
    """
    whole = trajectory.WHOLE[layout] == (layout, case, size)
    shorter = {"steps": 3, "optimizer": "" if whole else SGD}
    reports = trajectory.ask(worlds, layout, case, size, **shorter)
    report = reports[0]
    assert report["verdict"] == "equal", proof_text(report)
    assert all(r["verdict"] == "equal" for r in reports)
    optimizers = ["sgd", "adamw"] if whole else ["sgd"]
    assert [t["optimizer"] for t in report["trajectories"]] == optimizers
    assert report["processes"] == (1 if layout == "dp" else size)
    assert report["layout"].startswith(f"{layout} (")
    for told in report["trajectories"]:
        assert {row["step"] for row in told["rows"]} == set(range(1, 4))
        assert told["largest"]["loss"] <= 1e-12


@pytest.mark.parametrize(
    ("case", "layout", "reshard", "per_node"),
    [
        ("llama", "fsdp", "no", 0),
        pytest.param("cnn", "hsdp", "no", 0, marks=pytest.mark.proof),
        ("llama", "fsdp", "node", 2),
    ],
)
def test_weights_kept_between_passes_compute_the_same(
    worlds, case: str, layout: str, reshard: str, per_node: int
) -> None:
    more = {"reshard": reshard, "per_node": per_node, "steps": 3, "optimizer": SGD}
    for report in trajectory.ask(worlds, layout, case, 4, **more):
        assert report["verdict"] == "equal", proof_text(report)
        assert report["trajectories"][0]["largest"]["loss"] <= 1e-12


def test_every_layout_and_case_is_in_the_sample() -> None:
    assert {layout for layout, _, _ in trajectory.SAMPLE} == set(trajectory.LAYOUTS)
    assert {case for _, case, _ in trajectory.SAMPLE} == set(trajectory.CASES)


def test_cases_hold_the_traps() -> None:
    """The battery is worth something only if its traps are really in it."""
    mlp = alone("mlp")
    assert "never" in mlp.trainable
    assert all("never" not in gradients for gradients in mlp.gradients)
    assert "frozen.weight" in mlp.frozen
    counts = [row.targets for row in alone("llama").rows]
    assert len(set(counts)) > 1, "counts of targets are equal in all steps"
    assert alone("llama").tied
    assert alone("gpt").tied == {"head.weight": "tokens.weight"}
    assert any("running_mean" in name for name in alone("cnn").buffers)
    last = cut_step(48, cases.SAMPLES, cases.BATCH, cases.MICRO_BATCH)
    assert len(last) == 3
    assert last[-1].stop - last[-1].start == 1, "the last batch is not uneven"


def test_perturbed_weights_hide_nothing() -> None:
    """No bias at 0 and no gain at 1: a gradient that is lost would not show in those."""
    start = alone("gpt").start
    for name, tensor in start.items():
        assert bool((tensor != 0).all()), name
        assert not bool((tensor == 1).any()), name
    again = perturb(cases.build("gpt")).double()
    assert all(torch.equal(start[n], p) for n, p in again.named_parameters())


@pytest.mark.parametrize("case", ["llama", "mlp", "gpt"])
def test_one_process_equals_a_loop_by_hand(case: str) -> None:
    """`single` against plain PyTorch: sum over targets / count, torch's own clipping and SGD."""
    from shoal.parallel.dropout_rng import derive_seed
    from shoal.trace.find.blocks import iterate_blocks

    expected = alone(case)
    battery = trajectory.battery(case)
    model = perturb(cases.build(case)).double()
    data = cases.dataset(case)
    optimizer = battery.optimizers[SGD]([p for p in model.parameters() if p.requires_grad])
    at = [0, 0]
    for name, block in iterate_blocks(model):
        # The one thing a plain loop lacks: dropout keyed by (seed, step, micro-batch, block).
        block.register_forward_pre_hook(lambda m, i, n=name: seed(3, *at, n) and None)
        block.register_forward_hook(lambda m, i, o, n=name: seed(3, *at, f"{n}/after") and None)

    def seed(*parts) -> None:
        torch.manual_seed(derive_seed(*parts))

    position = 0
    for step in range(5):
        optimizer.zero_grad()
        total, count = 0.0, 0.0
        micro_batches = cut_step(position, cases.SAMPLES, cases.BATCH, cases.MICRO_BATCH)
        for m in micro_batches:
            _, indices = samples_at(m.start, m.stop, cases.SAMPLES, 3)
            items = [data[int(i)] for i in indices]
            batch = torch.utils.data.default_collate(items)
            batch = {k: v.double() for k, v in batch.items()} if isinstance(batch, dict) else batch
            at[:] = [step, m.index]
            seed(3, *at, "")
            loss_sum, n = cases.plain_loss(case, model, batch)
            loss_sum.backward()
            total += float(loss_sum.detach())
            count += float(n)
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= count
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), battery.clip)
        assert math.isclose(expected.rows[step].loss, total / count, rel_tol=1e-12)
        assert math.isclose(expected.rows[step].grad_norm, float(norm), rel_tol=1e-12)
        whole = norm_over(expected.gradients[step].values())
        for name, p in model.named_parameters():
            if p.requires_grad and p.grad is not None:
                assert difference_norm(p.grad, expected.gradients[step][name]) <= 1e-12 * whole, (
                    name
                )
        optimizer.step()
        position = micro_batches[-1].stop
    whole = norm_over(expected.weights.values())
    for name, p in model.named_parameters():
        assert difference_norm(p.detach(), expected.weights[name]) <= WEIGHT_BOUND * whole, name


def test_adamw_given_equal_gradients_updates_equally() -> None:
    """The optimizer under a program is torch's own: same gradients in, same update to 1e-14."""
    import shoal

    world = World(ProcessInfo(), torch.device("cpu"), None)
    run = shoal.parallelize(
        cases.build("llama"), OPTIMIZERS["adamw"], precision="fp64", world=world
    )
    twin = cases.build("llama").double()
    plain = OPTIMIZERS["adamw"](list(twin.parameters()))
    torch.manual_seed(0)
    for _ in range(3):
        for ours, theirs in zip(run.model.parameters(), twin.parameters(), strict=True):
            ours.grad = torch.randn_like(ours)
            theirs.grad = ours.grad.clone()
        with run.guards.writes.mark_own_step():
            run.optimizer.step()
        plain.step()
    for ours, theirs in zip(run.model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-14)
