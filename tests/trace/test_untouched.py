"""A pass that was only a look leaves a module as it was: attributes, and the hooks that go with them."""

from __future__ import annotations

import torch
from torch import nn

from shoal.trace.isolation.module_copies import copy_to_meta
from shoal.trace.isolation.preserve_state import preserve_state


class Hooked(nn.Module):
    """Adds a hook to its layer in its first pass, and notes that it has, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.heard = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not getattr(self, "_output_capturing_hooks_installed", False):
            self.layer.register_forward_hook(self.hear)
            self._output_capturing_hooks_installed = True
        return self.layer(x)

    def hear(self, *_: object) -> None:
        self.heard += 1


def test_hooks_that_a_pass_adds_are_not_added_twice() -> None:
    model = Hooked()
    with preserve_state(model):
        model(torch.ones(1, 2))
    assert not model.layer._forward_hooks
    model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    assert model.heard == 2


def test_a_users_own_hooks_stay() -> None:
    model, heard = Hooked(), []
    model.layer.register_forward_hook(lambda *_: heard.append(1))
    with preserve_state(model):
        model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    assert heard == [1, 1]


def test_a_twin_of_a_model_that_ran_adds_its_own() -> None:
    model = Hooked()
    model(torch.ones(1, 2))
    twin = copy_to_meta(model)
    twin(torch.ones(1, 2, device="meta"))
    assert len(twin.layer._forward_hooks) == 1
    assert model.heard == 1
