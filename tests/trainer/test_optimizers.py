"""Any torch optimizer: which are taken, which refused, and that a step is plain PyTorch's step."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trainer_small import assert_same_bits, bits, busy, linear, pair, run_of, sgd, squares

import shoal
from shoal.base.errors import ConfigError, PlanError
from shoal.base.layouts.policies import OptimizerPolicy
from shoal.fabric import start_world
from shoal.trainer.guards.optimizer_checks import MovementCheck
from shoal.trainer.guards.optimizer_settings import OptimizerSettingsGuard


def test_parameters_of_another_model_are_refused() -> None:
    with pytest.raises(PlanError) as failure:
        run_of(linear(), sgd(list(linear().parameters())))
    text = str(failure.value)
    assert text.startswith("optimizer: parameter 0 of group 0, shape [8, 4], is not in the model")
    assert "\n" not in text


def test_an_optimizer_over_a_deepcopy_is_refused() -> None:
    """Also where the copy is what trains: the optimizer holds the original's parameters."""
    model = linear()
    optimizer = sgd(model.parameters())
    with pytest.raises(PlanError, match="is not in the model"):
        run_of(copy.deepcopy(model), optimizer)


class Hoarder(torch.optim.SGD):
    """Steps over its own copies, as wrappers with master weights do."""

    def __init__(self, parameters, **settings) -> None:
        super().__init__(parameters, **settings)
        self.inner = None

    def step(self, closure=None):
        if self.inner is None:
            held = [p for g in self.param_groups for p in g["params"]]
            self.inner = torch.optim.SGD([p.detach().clone() for p in held], lr=0.1)
        self.inner.step()


def test_a_first_update_that_moves_nothing_is_an_error() -> None:
    run = run_of(linear(), lambda p: Hoarder(p, lr=0.1))
    with pytest.raises(ConfigError, match=r"^optimizer: its first step moved no parameter"):
        run.step(pair())


def test_learning_rate_0_is_said_once_and_is_no_error(caplog) -> None:
    """Warm-ups begin at 0; the first real update is still checked."""
    model = linear()
    optimizer = sgd(model.parameters())
    optimizer.param_groups[0]["lr"] = 0.0
    run = run_of(model, optimizer)
    with caplog.at_level(logging.WARNING, "shoal"):
        run.step(pair())
        run.step(pair())
    lines = [r.getMessage() for r in caplog.records]
    assert lines == ["shoal: optimizer: every learning rate is 0, so nothing trains yet"]
    before = bits(model)
    optimizer.param_groups[0]["lr"] = 0.1
    run.step(pair())
    assert not torch.equal(bits(model)["0.weight"], before["0.weight"])


def test_groups_that_rest_are_no_reason_for_an_error() -> None:
    """The smallest parameters rest at lr 0, or are not the optimizer's at all: both are legal."""
    for rest in ("slow group", "not held"):
        model = nn.Sequential(*(nn.LayerNorm(4) for _ in range(5)), nn.Linear(4, 2))
        groups = [{"params": [model[5].weight]}]
        if rest == "slow group":
            groups.append({"params": model[:5].parameters(), "lr": 0.0})
        run_of(model, torch.optim.SGD(groups, lr=0.1)).step(pair())


def test_an_update_that_rounding_swallows_proves_nothing() -> None:
    """1 − 1e-9 is 1 in float32: a warm-up that starts so low is legal."""
    model = nn.RMSNorm(4)  # all its weights are 1
    run = run_of(model, lambda p: torch.optim.SGD(p, lr=1e-12))
    run.step((torch.randn(8, 4), torch.randn(8, 4)))
    run.step((torch.randn(8, 4), torch.randn(8, 4)))


@pytest.mark.parametrize("form", ["instance", "function"])
def test_closures_are_refused(form: str) -> None:
    model = linear()

    def build(parameters):
        return torch.optim.LBFGS(parameters)

    with pytest.raises(ConfigError) as failure:
        run_of(model, build(model.parameters()) if form == "instance" else build)
    assert str(failure.value).startswith("optimizer: LBFGS evaluates the model itself")
    assert "try: torch.optim.AdamW" in str(failure.value)


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="a torch.optim.Optimizer or a function .* got str"):
        run_of(linear(), "adamw")
    with pytest.raises(ConfigError, match="the function gave list"):
        run_of(linear(), list)


def test_sparse_gradients_are_refused() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4, sparse=True)

        def forward(self, x):
            return self.table(x)

    with pytest.raises(ConfigError) as failure:
        run_of(Words(), lambda p: torch.optim.SparseAdam(p))
    assert str(failure.value).startswith("model: table gives sparse gradients")


class Lists(torch.optim.SGD):
    """Keeps a list per parameter."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["history"] = [1, 2]


class Named(torch.optim.SGD):
    """Keeps state under a name instead of a parameter."""

    def step(self, closure=None):
        super().step(closure)
        self.state["global"] = {"k": 1}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Lists, "optimizer: Lists keeps history of 0.weight as list; tensors and numbers can be"),
        (Named, "optimizer: Named keeps state under 'global', which is no parameter of the model"),
    ],
)
def test_state_that_cannot_be_saved_is_refused_after_the_first_step(kind, words: str) -> None:
    run = run_of(linear(), lambda p: kind(p, lr=0.1, momentum=0.9))
    with pytest.raises(ConfigError) as failure:
        run.step(pair())
    assert words in str(failure.value)


def test_groups_with_their_own_settings_are_plain_torch() -> None:
    def groups(model):
        return torch.optim.SGD(
            [
                {"params": model[0].parameters(), "lr": 0.5},
                {"params": model[2].parameters(), "momentum": 0.9, "weight_decay": 0.1},
            ],
            lr=0.01,
        )

    model, twin = linear(), linear()
    run = run_of(model, groups(model), micro_batch=3)
    plain = groups(twin)
    for step in range(3):
        x, y = pair(seed=step)
        result = run.step((x, y))
        plain.zero_grad()
        F.mse_loss(twin(x), y).backward()
        plain.step()
        assert result.lr == 0.5
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    assert [g["lr"] for g in run.optimizer.param_groups] == [0.5, 0.01]


def test_a_schedule_of_ours_keeps_the_ratio_of_groups() -> None:
    model = linear()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}], lr=0.1
    )
    policy = OptimizerPolicy(schedule="linear", warmup_steps=2)
    run = run_of(model, optimizer, schedule=policy, total_steps=6)
    seen = []
    for _ in range(6):
        run.step(pair())
        seen.append([g["lr"] for g in optimizer.param_groups])
    assert seen[0] == [0.25, 0.05]
    assert seen[1] == [0.5, 0.1]
    assert seen[5] == [0.125, 0.025]


def test_a_schedule_needs_the_length_of_the_run() -> None:
    """Without the guard the learning rate would stay constant, silently."""
    run = run_of(linear(), schedule=OptimizerPolicy())
    with pytest.raises(ConfigError, match="total_steps = 0: schedule = cosine needs the length"):
        run.step(pair())


def test_a_scheduler_of_torch_works(tmp_path) -> None:
    def made(model):
        optimizer = sgd(model.parameters())
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    model, twin = linear(), linear()
    optimizer, scheduler = made(model)
    run = run_of(model, optimizer, folder=tmp_path)
    plain, plain_scheduler = made(twin)
    for step in range(5):
        x, y = pair(seed=step)
        result = run.step((x, y))
        scheduler.step()
        plain.zero_grad()
        (squares(twin(x), y).sum() / y.numel()).backward()
        assert result.lr == plain.param_groups[0]["lr"]
        plain.step()
        plain_scheduler.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    run.save()
    resumed = run_of(linear(1), sgd, folder=tmp_path)
    resumed.restore()
    again = torch.optim.lr_scheduler.StepLR(
        resumed.optimizer, 2, gamma=0.5, last_epoch=resumed.step_count - 1
    )
    for _ in range(3):
        scheduler.step()
        again.step()
        assert resumed.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_frozen_and_unused_parameters_are_left_alone() -> None:
    """Weight decay and momentum act on no parameter without a gradient, as in plain torch."""
    model, twin = busy(), busy()
    run = run_of(
        model, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.5), micro_batch=4
    )
    before = bits(model)
    for _ in range(3):
        run.step(pair())
    after = bits(model)
    for name in ("frozen.weight", "frozen.bias", "unused"):
        assert torch.equal(before[name], after[name]), name
    assert model.unused.grad is None
    assert model.unused not in run.optimizer.state
    assert not torch.equal(before["head.weight"], after["head.weight"])
    assert twin.unused.grad is None


def test_changing_what_trains_after_parallelize_is_refused() -> None:
    model = busy()
    run = run_of(model)
    run.step(pair())
    model.frozen.bias.requires_grad_(True)
    with pytest.raises(PlanError) as failure:
        run.step(pair())
    assert str(failure.value).startswith("frozen.bias was frozen when shoal.parallelize was called")
    model.frozen.bias.requires_grad_(False)
    run.step(pair())
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(
        ConfigError, match="optimizer: holds 9 parameters, 8 when shoal.parallelize"
    ):
        run.step(pair())


def test_freezing_later_is_plain_torch() -> None:
    model, twin = linear(), linear()
    run = run_of(model)
    plain = sgd(twin.parameters())
    for step in range(4):
        for net in (model, twin):
            net[0].requires_grad_(step % 2 == 0)
        x, y = pair(seed=step)
        run.step((x, y))
        plain.zero_grad()
        F.mse_loss(twin(x), y).backward()
        plain.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_clipping_is_torchs() -> None:
    model, twin = linear(), linear()
    run = run_of(model, clip=0.05, precision="fp64", micro_batch=3)
    twin.double()
    plain = sgd(twin.parameters())
    for step in range(3):
        x, y = (t.double() for t in pair(seed=step))
        result = run.step((x, y))
        plain.zero_grad()
        F.mse_loss(twin(x), y).backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
        plain.step()
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-12)
        assert norm > 0.05, "nothing was clipped"
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-13)


def test_after_close_everything_is_plain_torch() -> None:
    """No hook is left, the optimizer is the user's own, and both go on as if nothing had been."""
    model, twin = busy(), busy()
    optimizer, plain = sgd(model.parameters()), sgd(twin.parameters())
    run = run_of(model, optimizer)
    assert run.optimizer is optimizer
    assert run.model is model
    run.step(pair())
    run.close()
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    for parameter in model.parameters():
        assert not parameter._post_accumulate_grad_hooks
    assert set(optimizer.param_groups[0]) == set(plain.param_groups[0])
    twin.load_state_dict(model.state_dict())
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(2):
        ends = []
        for net, steps in ((model, optimizer), (twin, plain)):
            torch.manual_seed(step)
            steps.zero_grad()
            x, y = pair(seed=step)
            F.mse_loss(net(x), y).backward()
            steps.step()
            ends.append(bits(net))
        assert_same_bits(*ends)
    with pytest.raises(ConfigError, match="run.step was called after run.close"):
        run.step(pair())


def test_a_first_step_copies_little_of_a_model_with_few_large_tensors() -> None:
    """Else its first update would hold all weights once more than any later one."""
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = shoal.parallelize(model, optimizer, lambda y, t: ((y - t) ** 2).sum(1))
    run.forward_backward((torch.ones(4, 1024), torch.zeros(4, 1024)))
    check = MovementCheck()
    check.copy_weights(run.program, run.optimizer)
    assert [parameter.numel() for parameter, _ in check.before] == [1024, 1024]
    run.update()
    assert check.moved()


def test_a_rate_that_was_a_number_of_numpy_for_a_while_is_read_again() -> None:
    """Its object comes back, and with it the checksum that it had."""
    optimizer = torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1)
    group, guard = optimizer.param_groups[0], OptimizerSettingsGuard(optimizer, start_world({}))
    rate = group["lr"]
    first = guard.invariants(1)[0].value
    group["lr"] = np.float64(0.2)
    assert guard.invariants(2)[0].value != first
    group["lr"] = rate
    assert guard.invariants(3)[0].value == first
