"""Runs all stages of a pipeline in one process, gradients carried by hand as a runtime would."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.parallel.pipeline import free_other_stages
from shoal.parallel.pipeline.partition_model import StageCut
from shoal.parallel.pipeline.stage import PipelineStage, PipelineStages
from shoal.trace.isolation.meta_inputs import tensors_of

Call = Callable[[nn.Module], Any]
CPU = torch.device("cpu")


def loss_of(outputs: Any) -> Tensor:
    """A number that every floating-point output changes, none like another."""
    if callable(getattr(outputs, "logits", None)):
        outputs = outputs.logits()
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors_of(outputs):
        if tensor.is_floating_point():
            flat = tensor.double().flatten()
            total = total + (flat.tanh() * torch.linspace(-1, 2, len(flat)).double()).sum()
    return total


class Chain:
    """The stages of one cut, each on its own copy of the module, or all on one."""

    def __init__(self, module: nn.Module, cut: StageCut, apart: bool = True) -> None:
        self.cut = cut
        self.stages: list[PipelineStage] = []
        self.modules: list[nn.Module] = []
        self.held: list[PipelineStages] = []
        if not apart:
            self.modules = [copy.deepcopy(module)]
            self.held = [PipelineStages(self.modules[0], cut, range(cut.stages), CPU)]
            self.stages = [self.held[0].stages[number] for number in range(cut.stages)]
            return
        for number in range(cut.stages):
            one = copy.deepcopy(module)
            free_other_stages(one, cut.keep[number])
            self.modules.append(one)
            self.held.append(PipelineStages(one, cut, [number], CPU))
            self.stages.append(self.held[-1].stages[number])

    def step(self, calls: Sequence[Call]) -> float:
        """Forward of all micro-batches on each stage in turn, then backward; the summed loss."""
        arrived: list[list[tuple[Tensor, ...]]] = []
        left: list[list[tuple[Tensor, ...]]] = []
        coming: list[tuple[Tensor, ...]] = [() for _ in calls]
        for stage in self.stages:
            leaves = [
                tuple(t.detach().requires_grad_(t.requires_grad) for t in one) for one in coming
            ]
            made = [stage.run(call, one) for call, one in zip(calls, leaves, strict=True)]
            if stage.last:
                made = [(loss_of(outputs),) for outputs in made]
            arrived.append(leaves)
            left.append(made)
            coming = made
        total = sum(float(one[0].detach()) for one in coming)
        for micro_batch in reversed(range(len(calls))):
            given: list[Tensor | None] = [torch.ones((), dtype=torch.float64)]
            for number in reversed(range(len(self.stages))):
                made = left[number][micro_batch]
                pairs = [
                    (t, g if g is not None else torch.zeros_like(t))
                    for t, g in zip(made, given, strict=True)
                    if t.requires_grad
                ]
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
                given = [t.grad for t in arrived[number][micro_batch]]
        return total

    @torch.no_grad()
    def forward(self, call: Call) -> Any:
        """Evaluation: the model's outputs."""
        coming: Any = ()
        for stage in self.stages:
            coming = stage.run(call, coming)
        return coming

    def gradients(self) -> dict[str, Tensor]:
        """By first name, summed over the stages that keep the parameter."""
        found: dict[str, Tensor] = {}
        for number, module in enumerate(self.modules):
            for name, parameter in module.named_parameters():
                if parameter.grad is None:
                    continue
                assert len(self.modules) == 1 or name in self.cut.keep[number], name
                found[name] = found.get(name, 0) + parameter.grad
        return found


def assert_equal_to_whole(
    chain: Chain, module: nn.Module, calls: Sequence[Call], tolerance: float = 1e-12
) -> nn.Module:
    """Loss and every gradient of a step, relative to the whole gradient; gives the whole model.

    Running statistics are compared too.
    """
    whole = copy.deepcopy(module)
    losses = [loss_of(call(whole)) for call in calls]
    for loss in losses:
        loss.backward()
    expected = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    total = float(sum(loss.detach() for loss in losses))
    assert abs(chain.step(calls) - total) <= tolerance * abs(total)
    got = chain.gradients()
    assert set(got) == set(expected)
    norm = torch.stack([g.norm() for g in expected.values()]).norm()
    for name, gradient in expected.items():
        assert (got[name] - gradient).norm() <= tolerance * norm, name
    for name, buffer in whole.named_buffers():
        for place, one in enumerate(chain.modules):
            if len(chain.modules) == 1 or name in chain.cut.keep[place]:
                assert torch.equal(one.get_buffer(name), buffer), name
    return whole
