"""A layout computes what one process computes: design §6's definition of equal, in float64.

Reference twice over: `single` is held against a loop written by hand with plain PyTorch, and `ddp`
at 2 and 4 processes against `single`.
"""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file

import cases
import trajectory
from shoal.base.batches import cut_step
from shoal.data.order import samples_at
from shoal.fabric import World, start_world
from shoal.fabric.place import Place

GRADIENT_BOUND = WEIGHT_BOUND = 1e-12
ADAMW_BOUND = 1e-10


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory):
    """Trajectories of one process, each computed once."""
    known: dict[tuple[str, str], tuple[dict, dict[str, torch.Tensor]]] = {}
    folder = tmp_path_factory.mktemp("reference")

    def compute(case: str, optimizer: str):
        if (case, optimizer) not in known:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            out = str(folder / f"{case}-{optimizer}.safetensors")
            told = trajectory.run(start_world({}), case, optimizer, out)
            torch.set_num_threads(threads)
            known[case, optimizer] = told, load_file(out)
        return known[case, optimizer]

    return compute


def norm_of(tensors: dict[str, torch.Tensor], prefix: str) -> float:
    parts = [t.double().norm() for n, t in tensors.items() if n.startswith(prefix)]
    return float(torch.stack(parts).norm())


def largest(ours: dict, theirs: dict, prefix: str) -> float:
    """Largest norm of a difference of one tensor, over the norm of all."""
    differences = [
        float((ours[n].double() - theirs[n].double()).norm()) for n in ours if n.startswith(prefix)
    ]
    return max(differences) / norm_of(ours, prefix)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", ["llama", "cnn", "mlp"])
def test_sgd_trajectory_is_equal(worlds, reference, tmp_path, case: str, size: int) -> None:
    told, expected = reference(case, "sgd")
    out = str(tmp_path / "ours.safetensors")
    answers = worlds(size).call("trajectory:run", case=case, optimizer="sgd", out=out)
    ours = load_file(out)
    assert len({a["digest"] for a in answers}) == 1, "ranks ended with different weights"
    for row, other in zip(told["rows"], answers[0]["rows"], strict=True):
        assert row[2] == other[2], "counts of targets differ"
        assert math.isclose(row[0], other[0], rel_tol=1e-12)
        assert math.isclose(row[1], other[1], rel_tol=1e-12)
    for step in range(1, 6):
        assert largest(expected, ours, f"{step}.gradient.") <= GRADIENT_BOUND
        for name in expected:
            if name.startswith(f"{step}.used."):
                assert expected[name] == ours[name], f"{name}: used in one layout only"
    assert largest(expected, ours, "final.") <= WEIGHT_BOUND
    assert math.isclose(told["evaluated"]["loss"], answers[0]["evaluated"]["loss"], rel_tol=1e-12)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", ["llama", "cnn", "mlp"])
def test_adamw_stays_together(worlds, reference, tmp_path, case: str, size: int) -> None:
    _, expected = reference(case, "adamw")
    out = str(tmp_path / "ours.safetensors")
    worlds(size).call("trajectory:run", case=case, optimizer="adamw", out=out)
    ours = load_file(out)
    assert largest(expected, ours, "1.gradient.") <= GRADIENT_BOUND
    assert largest(expected, ours, "final.") <= ADAMW_BOUND


def test_cases_hold_the_traps(reference) -> None:
    """The battery is worth something only if its traps are really in it."""
    _, mlp = reference("mlp", "sgd")
    used = {n.split(".", 2)[2]: bool(t) for n, t in mlp.items() if n.startswith("1.used.")}
    assert used["never"] is False
    assert "frozen.weight" not in used
    told, _ = reference("llama", "sgd")
    counts = [row[2] for row in told["rows"]]
    assert len(set(counts)) > 1, "counts of targets are equal in all steps"
    tied = dict(cases.build("llama").named_parameters(remove_duplicate=False))
    assert len({id(p) for p in tied.values()}) < len(tied), "no tied weight"
    last = cut_step(48, cases.SAMPLES, cases.BATCH, cases.MICRO_BATCH)
    assert len(last) == 3
    assert last[-1].stop - last[-1].start == 1, "the last batch is not uneven"


@pytest.mark.parametrize("case", ["llama", "mlp"])
def test_single_equals_a_loop_by_hand(reference, case: str) -> None:
    """`single` against plain PyTorch: sum over targets / count, torch's own clipping and SGD."""
    from shoal.parallel.randomness import blocks, key

    told, expected = reference(case, "sgd")
    model = cases.build(case).double()
    data = cases.dataset(case)
    optimizer = trajectory.OPTIMIZERS["sgd"]([p for p in model.parameters() if p.requires_grad])
    at = [0, 0]
    for name, block in blocks(model):
        # The one thing a plain loop lacks: dropout keyed by (seed, step, micro-batch, block).
        block.register_forward_pre_hook(lambda m, i, n=name: seed(3, *at, n) and None)
        block.register_forward_hook(lambda m, i, o, n=name: seed(3, *at, f"{n}/after") and None)

    def seed(*parts) -> None:
        torch.manual_seed(key(*parts))

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
            total += float(loss_sum)
            count += float(n)
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= count
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert math.isclose(told["rows"][step][0], total / count, rel_tol=1e-12)
        assert math.isclose(told["rows"][step][1], float(norm), rel_tol=1e-12)
        optimizer.step()
        position = micro_batches[-1].stop
    final = {f"final.{n}": t for n, t in model.state_dict().items()}
    assert largest(expected, final, "final.") <= WEIGHT_BOUND


def test_adamw_given_equal_gradients_updates_equally() -> None:
    """The optimizer under a program is torch's own: same gradients in, same update to 1e-14."""
    import shoal

    world = World(Place(), torch.device("cpu"), None)
    run = shoal.parallelize(
        cases.build("llama"), trajectory.OPTIMIZERS["adamw"], precision="fp64", world=world
    )
    twin = cases.build("llama").double()
    plain = trajectory.OPTIMIZERS["adamw"](list(twin.parameters()))
    torch.manual_seed(0)
    for _ in range(3):
        for ours, theirs in zip(run.model.parameters(), twin.parameters(), strict=True):
            ours.grad = torch.randn_like(ours)
            theirs.grad = ours.grad.clone()
        run.optimizer.step()
        plain.step()
    for ours, theirs in zip(run.model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-14)
