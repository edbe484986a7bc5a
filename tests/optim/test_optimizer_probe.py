"""The probe: who may work on pieces, who may not and why, and that the user's optimizer sleeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shoal.base.layouts.policies import WHOLE_STEPS
from shoal.base.plans.tensor_shards import StepDivisibility
from shoal.optim.elementwise_probe import probe_slicing
from shoal.optim.lamb import LAMB
from shoal.optim.lion import Lion
from shoal.optim.muon import MuonWithAdamW
from shoal.optim.optimizer_support import ELEMENT_WISE, determine_slicing

YES = StepDivisibility("", "", "")


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(40, 12), (40,), (8, 3, 3, 3), ()]
    return [nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]


SLICED = {
    "sgd": lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True),
    "sgd fused": lambda p: torch.optim.SGD(p, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True, foreach=True, maximize=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adamw lr tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3)),
    "capturable": lambda p: torch.optim.Adam(p, capturable=True),
    "differentiable": lambda p: torch.optim.AdamW(p, differentiable=True),
    "lion": lambda p: Lion(p, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "rprop": lambda p: torch.optim.Rprop(p),
}


@pytest.mark.parametrize("name", SLICED)
def test_elementwise_rules_work_on_pieces(name: str) -> None:
    assert probe_slicing(SLICED[name](parameters())) == YES


@pytest.mark.parametrize("name", ELEMENT_WISE)
def test_what_is_known_without_asking_is_what_the_probe_finds(name: str) -> None:
    optimizer = getattr(torch.optim, name)(parameters())
    assert determine_slicing(optimizer) == probe_slicing(optimizer) == YES


def test_a_known_name_with_another_step_is_asked() -> None:
    class SGD(torch.optim.SGD):  # of somebody else's module
        def step(self, closure=None):
            torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
            return super().step(closure)

    assert determine_slicing(SGD(parameters())).flat
    patched = torch.optim.SGD(parameters())
    patched.step = lambda closure=None: None
    assert determine_slicing(patched) != YES


class EagerSums(torch.optim.Optimizer):
    """Adagrad's rule, with state that is there before the first step, as in torch 2.11."""

    def __init__(self, params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.full_like(p, 0.1)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    total = self.state[p]["sum"].addcmul_(p.grad, p.grad)
                    p.addcdiv_(p.grad, total.sqrt(), value=-group["lr"])


def test_state_that_is_there_from_the_start_is_tried_too() -> None:
    optimizer = EagerSums(parameters())
    assert probe_slicing(optimizer) == YES
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()
    assert probe_slicing(optimizer) == YES


WHOLE = {
    "adafactor": (torch.optim.Adafactor, "differs", "differs"),
    "lamb": (LAMB, "differs", "differs"),
    "muon": (lambda p: torch.optim.Muon(p[:1]), "raises ValueError", "differs"),
    "muon with adamw": (lambda p: MuonWithAdamW(p, fused=True), "raises ValueError", "differs"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_rules_on_whole_tensors_are_dealt_to_owners(name: str) -> None:
    make, flat, rows = WHOLE[name]
    found = probe_slicing(make(parameters()))
    assert flat in found.flat
    assert rows in found.rows
    assert found.apart == ""
    assert "\n" not in found.flat + found.rows


def test_the_line_says_who_what_and_where() -> None:
    found = probe_slicing(torch.optim.Adafactor(parameters()[:1]))
    assert found.flat.startswith(
        "Adafactor: a step on flat pieces of a parameter differs from that"
    )
    assert found.flat.endswith("(group 0, shape [40, 12])")
    muon = probe_slicing(torch.optim.Muon(parameters()[:1])).flat
    assert muon == (
        "Muon: a step on flat pieces of a parameter raises ValueError: "
        "Param gradient must be a 2D matrix"
    )


class Changed(torch.optim.SGD):
    """SGD that does something to gradients first."""

    def __init__(self, params, change, **settings):
        super().__init__(params, lr=1e-9, **settings)
        self.change = change

    @torch.no_grad()
    def step(self, closure=None):
        self.change([p for g in self.param_groups for p in g["params"] if p.grad is not None], self)
        return super().step(closure)


def unit_norm(params, optimizer):
    for p in params:
        p.grad /= p.grad.norm()


def clip_each(params, optimizer):
    for p in params:
        nn.utils.clip_grad_norm_([p], 100.0)


def clip_all(params, optimizer):
    nn.utils.clip_grad_norm_(params, 1.0)


def log_norms(params, optimizer):
    for p in params:
        optimizer.state[p]["norm"] = p.grad.norm()


def big_ones_in_eight_bits(params, optimizer):
    for p in params:
        if p.numel() > 4096:
            p.grad.copy_((p.grad / p.grad.abs().max() * 127).round())


def normalise_late(params, optimizer):
    optimizer.calls = getattr(optimizer, "calls", 0) + 1
    if optimizer.calls > 8:
        unit_norm(params, optimizer)


@pytest.mark.parametrize("change", [unit_norm, clip_each, clip_all, log_norms, normalise_late])
def test_whole_tensors_matter(change) -> None:
    found = probe_slicing(Changed(parameters(), change))
    assert found.flat
    assert found.rows


def test_what_starts_at_4096_elements_is_seen() -> None:
    large = [nn.Parameter(torch.ones(300, 200))]
    assert "differs" in probe_slicing(Changed(large, big_ones_in_eight_bits)).flat


def test_a_norm_over_all_parameters_may_not_even_be_dealt_out() -> None:
    assert probe_slicing(Changed(parameters(), unit_norm)).apart == ""
    found = probe_slicing(Changed(parameters(), clip_all)).apart
    assert found.startswith("Changed: a step on some parameters without the others differs from")
    assert probe_slicing(Changed(parameters()[:1], clip_all)).apart.endswith(
        "(group 0, shape [40, 12])"
    )


def test_state_of_a_piece_must_be_a_piece_of_the_state() -> None:
    found = probe_slicing(Changed(parameters(), log_norms))
    assert "leaves another norm in its state than a whole step" in found.flat


def forbidden(*_):
    raise AssertionError("ran on stand-ins")


def test_the_users_optimizer_notices_nothing() -> None:
    params = parameters()
    optimizer = torch.optim.AdamW(params, lr=1.0)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)  # hangs a step on the instance
    optimizer.register_step_pre_hook(forbidden)
    everywhere = register_optimizer_step_pre_hook(forbidden)
    before = [p.detach().clone() for p in params]
    state = {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    random = torch.get_rng_state()
    try:
        assert probe_slicing(optimizer) == YES
        with pytest.raises(AssertionError):
            torch.optim.SGD([params[0]]).step()  # the hook for all is there again
    finally:
        everywhere.remove()
    assert torch.equal(torch.get_rng_state(), random)
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert optimizer.param_groups[0]["params"] == params
    assert all(torch.equal(p.detach(), old) for p, old in zip(params, before, strict=True))
    assert optimizer.state.keys() == state.keys()
    for p, kept in state.items():
        assert all(torch.equal(optimizer.state[p][k], v) for k, v in kept.items())


def test_random_numbers_of_an_optimizer_are_not_the_users() -> None:
    def noise(params, optimizer):
        for p in params:
            p.grad += torch.randn_like(p)

    before = torch.get_rng_state()
    assert probe_slicing(
        Changed(parameters(), noise)
    ).apart  # another rank would draw other numbers
    assert torch.equal(torch.get_rng_state(), before)


class Wrapper(torch.optim.Optimizer):
    """Shares groups and state with the optimizer inside, as Lookahead and its like do."""

    def __init__(self, inner, share=True):
        super().__init__([p for g in inner.param_groups for p in g["params"]], {"lr": 0.1})
        self.inner = inner
        if share:
            self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure=None):
        return self.inner.step(closure)


def test_an_optimizer_inside_is_followed_if_it_shares_groups() -> None:
    params = parameters()
    before = [p.detach().clone() for p in params]
    assert probe_slicing(Wrapper(torch.optim.Adam(params))) == YES
    assert "Wrapper: a step on" in probe_slicing(Wrapper(LAMB(params))).rows
    found = probe_slicing(Wrapper(torch.optim.Adam(params), share=False))
    assert found.flat == found.rows == found.apart
    assert found.flat == (
        "Wrapper cannot be tried on stand-ins: it holds a Adam over parameter groups of its own"
    )
    assert all(torch.equal(p.detach(), old) for p, old in zip(params, before, strict=True))


def test_what_cannot_be_tried_is_refused_with_a_reason() -> None:
    still = Changed(parameters(), lambda params, optimizer: [p.grad.zero_() for p in params])
    assert "its steps leave group 0, shape [] where it was" in probe_slicing(still).apart
    locked = torch.optim.SGD(parameters())
    locked.lock = __import__("threading").Lock()
    assert probe_slicing(locked).apart.endswith("its lock, a lock, cannot be copied")
    replaced = torch.optim.SGD(parameters())
    replaced.step = forbidden
    assert probe_slicing(replaced).flat.endswith("its step was replaced on the instance")
    broken = probe_slicing(Changed(parameters(), forbidden))
    assert broken.rows.endswith("stand-ins: raises AssertionError: ran on stand-ins")


def test_groups_with_other_settings_are_all_tried() -> None:
    a, b = parameters()[:2]

    class Mixed(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                if group["normalise"]:
                    unit_norm(group["params"], self)
            return super().step(closure)

    plain = [{"params": [a], "normalise": False}, {"params": [b], "normalise": False}]
    assert probe_slicing(Mixed(plain)) == YES
    second = [{"params": [a], "normalise": False}, {"params": [b], "normalise": True}]
    assert "group 1, shape [40]" in probe_slicing(Mixed(second)).flat


BY_NAME = {
    "lamb": lambda p: LAMB(p),
    "muon": lambda p: MuonWithAdamW(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


@pytest.mark.parametrize("name", sorted({*WHOLE_STEPS, *BY_NAME}))
def test_what_is_refused_by_name_is_what_the_probe_refuses(name: str) -> None:
    """The command refuses these before anything starts; the probe, of any optimizer, with a model."""
    found = probe_slicing(BY_NAME[name](parameters()))
    assert name in WHOLE_STEPS
    assert found.flat
    assert found.rows


@pytest.mark.parametrize("name", sorted(SLICED))
def test_nothing_else_is_refused_by_name(name: str) -> None:
    assert name.split()[0] not in WHOLE_STEPS
