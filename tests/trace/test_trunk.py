"""The blocks of models of many families are found, in call order, and nothing is left behind."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from hf_families import FAMILIES
from hf_modules import HF_EXAMPLES
from torch import nn
from user_modules import EXAMPLES, HIDDEN, Example, Layer, made, named, numbers, tokens

from shoal.forecast.models.hf_presence import count_hf_layers
from shoal.models.catalog import build
from shoal.trace.find.trunk import ForwardFunction, Trunk
from shoal.trace.flow.forward_record import ForwardRecord, InnerBackwardError
from shoal.trace.isolation.preserve_state import preserve_state

LLAMA = {"vocabulary": 31, "dim": 16, "layers": 4, "heads": 4, "kv_heads": 2, "hidden": 24}
OURS = {
    "llama": Example(partial(build, "llama", {**LLAMA, "sequence": 8}), tokens, named("blocks.{}")),
    "our mlp": Example(
        partial(build, "mlp", {"inputs": 6, "hidden": 16, "layers": 3, "classes": 3}),
        lambda n: numbers(n, 6),
        (*named("layers.{}", 3), "head"),
    ),
    "resnet": Example(
        partial(build, "resnet", {"image_channels": 1, "channels": 4, "classes": 3}),
        lambda n: numbers(n, 1, 8, 8),
        (),
    ),
}
ALL = {**OURS, **EXAMPLES, **{f"hf {name}": example for name, example in HF_EXAMPLES.items()}}
LEAVES = {"mlp", "our mlp", "lstm"}


def find_trunk(module: nn.Module, run: ForwardFunction) -> Trunk:
    return ForwardRecord(module, run).trunk


@pytest.mark.parametrize("name", ALL)
def test_the_blocks_are_found(name: str) -> None:
    if name.startswith("hf "):
        pytest.importorskip("transformers")
    example = ALL[name]
    module = made(example.build)
    inputs = example.inputs(2)
    trunk = find_trunk(module, lambda m: example.call(m, inputs))
    expected = example.blocks or tuple(f"blocks.{k}" for k in range(len(module.blocks)))
    assert trunk.blocks == expected
    assert trunk.leaf == (name in LEAVES)
    assert all("forward" not in vars(part) for part in module.modules())


def test_calls_hold_what_came_in() -> None:
    example = EXAMPLES["unet"]
    module = made(example.build)
    inputs = example.inputs(2)
    record = ForwardRecord(module, lambda m: example.call(m, inputs))
    calls = record.calls(record.trunk.blocks)
    assert tuple(calls) == record.trunk.calls
    for name, call in calls.items():
        again = module.get_submodule(name)(*call.args, **call.kwargs)
        assert [again.shape] == record.first_pass.shapes[name]
    assert list(calls[record.trunk.calls[-1]].kwargs) == ["skip"]
    assert record.passes == {"look": 1}


def test_a_block_called_often_has_many_calls() -> None:
    example = EXAMPLES["recurrent"]
    inputs = example.inputs(2)
    trunk = find_trunk(made(example.build), lambda m: example.call(m, inputs))
    assert trunk.blocks == ("block",)
    assert trunk.calls == ("block",) * 4


class Rewriting(nn.Module):
    """A block that writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x.mul_(2)) + self.first(x)


def test_arguments_are_kept_as_they_were_before_the_call() -> None:
    module = nn.Sequential(*(Rewriting() for _ in range(3)))
    x = torch.randn(2, 4)
    before = x.clone()
    record = ForwardRecord(module, lambda m: m(x))
    assert record.trunk.blocks == ("0", "1", "2")
    assert torch.equal(record.calls(["0"])["0"].args[0], before)
    assert not torch.equal(x, before)


class Potential(nn.Sequential):
    """Forces of an energy: the forward pass differentiates by its inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(
                super().forward(x).square().sum(), x, create_graph=self.training
            )
        return force


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_backward_pass_inside_of_forward_is_named(device: str) -> None:
    """What autograd saved is dropped: torch's own error was about sizes of 0."""
    module = Potential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).to(device)
    record = ForwardRecord(module, lambda m: m(torch.ones(2, 4, device=device)))
    with pytest.raises(InnerBackwardError, match="its forward pass runs a backward pass") as found:
        record.is_runnable()
    assert found.value.is_twice


class Experts(nn.Module):
    """A block that consists mostly of like modules, which do not follow one another."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 32), nn.ReLU(), nn.Linear(32, HIDDEN)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x).flatten(0, 1)
        return x + sum(e(rows[k::4]).sum() for k, e in enumerate(self.experts))


def test_a_mixture_is_a_block_and_its_experts_are_not() -> None:
    module = nn.Sequential(nn.Linear(5, HIDDEN), Experts(), Experts(), nn.Linear(HIDDEN, 2))
    trunk = find_trunk(module, lambda m: m(torch.randn(2, 6, 5)))
    assert trunk.blocks == ("1", "2")


def test_a_large_vocabulary_does_not_hide_the_blocks() -> None:
    module = nn.Sequential(
        nn.Embedding(5000, HIDDEN), Layer(), Layer(), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 5000)
    )
    assert find_trunk(module, lambda m: m(torch.ones(1, 3, dtype=torch.long))).blocks == ("1", "2")


def test_a_model_without_layers_has_no_blocks() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    assert find_trunk(Bare(), lambda m: m(torch.ones(3))).blocks == ("",)


def test_buffers_and_generators_are_left_as_they_were() -> None:
    module = nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Conv1d(4, 4, 3)
    )
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    objects = dict(module.named_buffers())
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    find_trunk(module, lambda m: m(torch.ones(2, 2, 9)))
    assert torch.equal(torch.rand(4), expected)
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, before[name]), name
        assert buffer is objects[name]


def test_what_is_seen_does_not_depend_on_a_rank_s_draws() -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)) for _ in range(2)))
    x, seen = torch.ones(4, 3), []
    for rank in range(2):
        torch.manual_seed(rank)
        drawn = torch.get_rng_state()
        seen.append(ForwardRecord(module, lambda m: m(x)).calls(["1"])["1"].args[0])
        assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(*seen)


def test_attributes_are_left_as_they_were() -> None:
    class Keeps(nn.Linear):
        """As recurrent layers keep their state, and routers what they chose."""

        def __init__(self) -> None:
            super().__init__(3, 3)
            self.seen: list[torch.Tensor] = []
            self.calls, self.state = 0, None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.state = self.result = super().forward(x)
            self.seen.append(self.result)
            return self.result

    module = nn.Sequential(Keeps(), Keeps())
    with preserve_state(module):
        module(torch.ones(2, 3))
        assert module[1].calls == 1
    for part in module:
        assert (part.calls, part.state, part.seen, hasattr(part, "result")) == (0, None, [], False)


SEVERAL_STACKS = {"bart", "pegasus", "mt5", "whisper", "swin", "convnext", "segformer", "switch",
                  "perceiver", "mpt"}  # fmt: skip
"""Families whose configuration does not say in one number how many layers there are."""

QUICK = {"llama", "albert", "zamba2", "bart", "swin", "bloom"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.proof]) for n in FAMILIES]
)
def test_a_configuration_says_how_many_blocks_there_are(name: str, tmp_path: Path) -> None:
    """The command refuses too many stages by that number, before anything is imported."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    module = FAMILIES[name].build().eval()
    module.config.save_pretrained(tmp_path)
    batch = FAMILIES[name].inputs(2)
    calls = find_trunk(module, lambda m: m(**batch)).calls
    assert count_hf_layers(f"hf:{tmp_path}") == (None if name in SEVERAL_STACKS else len(calls))
