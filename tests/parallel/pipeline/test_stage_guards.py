"""What a pipeline's stages must not do silently: every guard, by what it says."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from chain import Chain, assert_equal_to_whole, loss_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from user_modules import EXAMPLES, HIDDEN, Layer, made, numbers

from shoal.base.errors import BugError, PlanError
from shoal.parallel.pipeline import free_other_stages
from shoal.parallel.pipeline.cut_model import cut_stages
from shoal.parallel.pipeline.partition_model import StageCut
from shoal.parallel.pipeline.stage import PipelineStages, list_uncalled_units
from shoal.parallel.recompute import _Messages, _RecomputedForward
from shoal.trace.flow.forward_record import ForwardRecord

Glue = Callable[["Model", Tensor], Tensor]


class Block(Layer):
    """A layer that may do more than it returns."""

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        self.aside = x.mean()
        return super().forward(x)


class Model(nn.Module):
    """enter, four blocks, leave; `glue` is the user's code around the blocks."""

    def __init__(self, glue: Glue) -> None:
        super().__init__()
        self.enter = nn.Linear(5, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.leave = nn.Linear(HIDDEN, 2)
        self.gain = nn.Parameter(torch.randn(HIDDEN))
        self.glue = glue

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.glue(self, self.enter(x)))


def chained(model: Model, h: Tensor) -> Tensor:
    for block in model.blocks:
        h = block(h)
    return h


def samples(batch: int = 2) -> Tensor:
    return numbers(batch, 6, 5)


def called(module: nn.Module, batch: int = 2) -> Any:
    return module(samples(batch))


def cut_of(model: nn.Module, stages: int = 2) -> StageCut:
    return cut_stages(ForwardRecord(model, called), stages)


def refused(glue: Glue, *texts: str) -> None:
    with pytest.raises(PlanError) as failure:
        cut_of(made(lambda: Model(glue)))
    for text in texts:
        assert text in str(failure.value)
    assert "\n" not in str(failure.value)


def equal(glue: Glue, stages: int = 2, apart: bool = True) -> StageCut:
    model = made(lambda: Model(glue))
    cut = cut_of(model, stages)
    calls = [called, lambda module: called(module, 3)]
    assert_equal_to_whole(Chain(model, cut, apart), model, calls)
    return cut


def test_more_stages_than_blocks() -> None:
    with pytest.raises(PlanError, match=re.escape("layout.pp = 5: more stages than the 4 blocks")):
        cut_of(made(lambda: Model(chained)), 5)


def test_what_a_block_leaves_aside() -> None:
    def glue(model: Model, h: Tensor) -> Tensor:
        h = chained(model, h)
        return h + model.blocks[0].aside

    refused(glue, "blocks.0 leaves a tensor aside", "leave reads", "return it", "layout.pp=1")


def test_what_a_block_leaves_aside_for_its_own_stage() -> None:
    def glue(model: Model, h: Tensor) -> Tensor:
        return chained(model, h) + model.blocks[3].aside

    equal(glue)


def test_router_logits_caught_by_hooks() -> None:
    pytest.importorskip("transformers")
    from hf_modules import LLAMA, built, causal

    model = made(
        built(
            "MixtralConfig",
            "MixtralForCausalLM",
            **LLAMA,
            num_local_experts=4,
            num_experts_per_tok=2,
            output_router_logits=True,
        )
    )
    inputs = causal(2)

    def run(module: nn.Module) -> Any:
        return module(**inputs)

    with pytest.raises(PlanError, match="model.layers.0 leaves a tensor aside"):
        cut_stages(ForwardRecord(model, run), 2)


def test_values_that_leave_torch() -> None:
    def glue(model: Model, h: Tensor) -> Tensor:
        for block in model.blocks:
            h = block(h) * float(h.detach().numpy().mean() > 0.1)
        return h

    refused(glue, "would get other values than in the whole model", "numpy", "layout.pp=1")


def test_values_that_fail_on_the_host() -> None:
    def glue(model: Model, h: Tensor) -> Tensor:
        for block in model.blocks:
            h = block(h)
            if h.isnan().numpy().any():
                raise ValueError("not a number")
        return h

    refused(glue, "code before blocks.1", "ValueError: not a number")


def test_values_read_by_item_cross() -> None:
    def glue(model: Model, h: Tensor) -> Tensor:
        first = model.blocks[0](h)
        sign = 1.0 if first.mean().item() > 0 else -1.0
        for block in model.blocks[1:]:
            h = block(h * sign)
        return h + first * 0

    cut = equal(glue)
    assert (1, 0) in cut.crossings[1]  # the first block's output, for its sign


def test_values_that_nan_cannot_show() -> None:
    def glue(model: Model, h: Tensor) -> Tensor:
        first = h
        for block in model.blocks:
            h = block(h) + torch.nan_to_num(torch.where(first > 0, 0.0, first))
        return h

    cut = equal(glue, 4)
    assert [len(crossing) for crossing in cut.crossings] == [0, 2, 2, 2]


def test_blocks_in_another_order() -> None:
    def glue(model: Model, h: Tensor) -> Tensor:
        blocks = list(model.blocks)
        for block in reversed(blocks) if len(h) > 2 else blocks:
            h = block(h)
        return h

    model = made(lambda: Model(glue))
    chain = Chain(model, cut_of(model))
    chain.step([called])
    with pytest.raises(PlanError, match=r"calls blocks\.3 where the sample's called blocks\.0"):
        chain.step([lambda module: called(module, 3)])


def test_fewer_blocks() -> None:
    def glue(model: Model, h: Tensor) -> Tensor:
        for block in model.blocks if len(h) < 3 else []:
            h = block(h)
        return h

    model = made(lambda: Model(glue))
    chain = Chain(model, cut_of(model))
    with pytest.raises(PlanError, match=r"calls leave where the sample's called blocks\.0"):
        chain.step([lambda module: called(module, 3)])


def test_a_block_that_the_sample_did_not_call() -> None:
    """Only the last stage has its weights, and may run it once all other blocks have run."""

    class Towers(Model):
        def __init__(self, glue: Glue) -> None:
            super().__init__(glue)
            self.towers = nn.ModuleList([Block(), nn.Linear(2, 2)])

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out if len(x) < 4 else self.towers[1](out)

    def glue(model: Model, h: Tensor) -> Tensor:
        return chained(model, model.towers[0](h) if len(h) == 3 else h)

    model = made(lambda: Towers(glue))
    cut = cut_of(model)
    assert list_uncalled_units(model, cut) == ["towers.0", "towers.1"]
    chain = Chain(model, cut)
    chain.step([called])
    with pytest.raises(PlanError, match=r"calls towers\.0 where the sample's called blocks\.0"):
        chain.step([lambda module: called(module, 3)])
    whole = float(loss_of(called(model, 4)).detach())
    assert chain.step([lambda module: called(module, 4)]) == pytest.approx(whole)


def test_other_outputs() -> None:
    class Twice(Layer):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return (y, y + 1) if len(x) > 2 else (y,)

    class Told(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for block in self:
                x = block(x)[0]
            return x

    model = made(lambda: Told(*(Twice() for _ in range(4))))

    def run(module: nn.Module, batch: int = 2) -> Any:
        return module(numbers(batch, 6, HIDDEN))

    chain = Chain(model, cut_stages(ForwardRecord(model, run), 2))
    with pytest.raises(PlanError, match="0 returns 2 tensors where it returned 1 for the sample"):
        chain.step([lambda module: run(module, 3)])


def test_a_user_who_catches_everything() -> None:
    def glue(model: Model, h: Tensor) -> Tensor:
        for block in model.blocks:
            try:
                h = block(h)
            except Exception:
                h = h * 0
        return h

    equal(glue)


def test_hooks_of_the_blocks_and_of_the_model_run() -> None:
    model = made(lambda: Model(chained))
    cut = cut_of(model)
    held = PipelineStages(model, cut, [0], torch.device("cpu"))
    told: dict[str, Any] = {}
    model.register_forward_hook(lambda module, inputs, outputs: told.update(model=outputs))
    model.blocks[1].register_forward_hook(lambda module, inputs, outputs: told.update(last=outputs))
    model.blocks[2].register_forward_hook(lambda module, inputs, outputs: told.update(no=outputs))
    departures = held.stages[0].run(called, ())
    assert told["model"][0] is departures[0] is told["last"]
    assert "no" not in told
    held.restore_forwards()
    assert all("forward" not in vars(part) for part in model.modules())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_that_checkpoints_itself(reentrant: bool) -> None:
    """The reentrant one has no graph of its block, so all but the last stage trained nothing."""

    def glue(model: Model, h: Tensor) -> Tensor:
        for block in model.blocks:
            h = checkpoint(block, h, use_reentrant=reentrant)
        return h

    before = torch.utils.checkpoint.CheckpointFunction
    equal(glue)
    assert torch.utils.checkpoint.CheckpointFunction is before


class _OwnCheckpoint(torch.autograd.Function):
    """As libraries wrote it before torch had one."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            return block(x)


def test_a_checkpoint_of_another_library() -> None:
    def glue(model: Model, h: Tensor) -> Tensor:
        for block in model.blocks:
            h = _OwnCheckpoint.apply(block, h)
        return h

    model = made(lambda: Model(glue))
    chain = Chain(model, cut_of(model))
    wanted = r"layout\.pp = 2: blocks\.0 runs without a graph .*; try: memory\.recompute, or torch"
    with pytest.raises(PlanError, match=wanted):
        chain.step([called])


def test_blocks_that_are_frozen_by_no_grad() -> None:
    """They run without a graph because that is meant."""

    def glue(model: Model, h: Tensor) -> Tensor:
        with torch.no_grad():
            h = model.blocks[0](h)
        for block in model.blocks[1:]:
            h = block(h)
        return h

    equal(glue)


def test_checkpointing_over_a_boundary() -> None:
    def glue(model: Model, h: Tensor) -> Tensor:
        return checkpoint(lambda x: chained(model, x), h, use_reentrant=False)

    model = made(lambda: Model(glue))
    chain = Chain(model, cut_of(model))
    with pytest.raises(PlanError, match=r"blocks\.\d is called outside of a stage's forward pass"):
        chain.step([called])


def test_the_model_called_directly() -> None:
    model = made(lambda: Model(chained))
    held = PipelineStages(model, cut_of(model), [0], torch.device("cpu"))
    free_other_stages(model, held.cut.keep[0])
    held.stages[0].run(called, ())
    with pytest.raises(PlanError, match=r"blocks\.2 is called outside of a stage's forward pass"):
        called(model)


def test_recomputed_blocks() -> None:
    model = made(lambda: Model(chained))
    chain = Chain(model, cut_of(model))
    runs: list[str] = []
    for module in chain.modules:
        for name, block in module.named_modules():
            if isinstance(block, Block):
                _RecomputedForward(name, block, _Messages("full", []))
                block.up.register_forward_hook(lambda *_, name=name: runs.append(name))
    assert_equal_to_whole(chain, model, [called])
    assert sorted(runs) == sorted(2 * [f"blocks.{place}" for place in range(4)])


@pytest.mark.parametrize("name", ["unet", "tuples", "gpt", "recurrent"])
def test_stages_of_one_module(name: str) -> None:
    example = EXAMPLES[name]
    model = made(example.build)

    def run(module: nn.Module, batch: int = 2) -> Any:
        return example.call(module, example.inputs(batch))

    cut = cut_stages(ForwardRecord(model, run), 4)
    chain = Chain(model, cut, apart=False)
    assert_equal_to_whole(chain, model, [run, lambda module: run(module, 3)])


def test_a_mask_from_a_shape_that_another_stage_makes() -> None:
    def glue(model: Model, h: Tensor) -> Tensor:
        shape = h
        for block in model.blocks:
            shape = h if block is not model.blocks[1] else h[:, :3]
            h = block(h) * torch.arange(shape.shape[0] * shape.shape[1]).sum().div(100)
        return h

    equal(glue, 4)


class Routed(Block):
    """A block whose shapes inside depend on values."""

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        chosen = (x.sum(-1) > 0).nonzero(as_tuple=True)
        y = torch.zeros_like(x)
        y[chosen] = self.down(self.up(x[chosen]))
        return x + y


def routed(model: Model, h: Tensor) -> Tensor:
    for block in model.blocks:
        h = block(h)
    return h


def test_a_block_that_needs_values_has_its_inputs_shape() -> None:
    model = made(lambda: Model(routed))
    model.blocks = nn.ModuleList(Routed() for _ in range(4)).double()
    cut = cut_of(model, 4)
    assert_equal_to_whole(Chain(model, cut), model, [called, lambda m: called(m, 3)])


def test_a_block_whose_shape_cannot_be_told() -> None:
    class Halved(Routed):
        def forward(self, x: Tensor, *more: Tensor) -> Any:
            y = super().forward(x)
            return torch.cat([y, y], -1)

    def glue(model: Model, h: Tensor) -> Tensor:
        for block in model.blocks:
            h = block(h)[..., :HIDDEN]
        return h

    model = made(lambda: Model(glue))
    model.blocks = nn.ModuleList(Halved() for _ in range(4)).double()
    chain = Chain(model, cut_of(model))
    chain.step([called])
    with pytest.raises(PlanError, match=r"blocks\.0 cannot be run without values.*micro-batches"):
        chain.step([lambda module: called(module, 3)])


def test_dropout_leaves_no_trace_and_raises_no_alarm() -> None:
    def glue(model: Model, h: Tensor) -> Tensor:
        for block in model.blocks:
            h = torch.dropout(block(torch.dropout(h, 0.5, model.training)), 0.5, model.training)
        return h

    model = made(lambda: Model(glue))
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, inputs: (torch.dropout(*inputs, 0.5, True),))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    cut_of(model)
    assert torch.equal(torch.rand(3), expected)
    assert model.training


def test_bare_parameters_live_where_they_matter() -> None:
    def glue(model: Model, h: Tensor) -> Tensor:
        h = h * model.gain
        for block in model.blocks:
            h = block(h)
        return h

    cut = equal(glue, 3)
    assert ["gain" in kept for kept in cut.keep] == [True, False, False]
    assert not cut.ties

    def late(model: Model, h: Tensor) -> Tensor:
        for place, block in enumerate(model.blocks):
            h = block(h * model.gain if place in (0, 3) else h)
        return h

    assert equal(late, 3).ties == {"gain": (0, 2)}


def test_a_stage_holds_its_share() -> None:
    model = made(lambda: Model(chained))
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    block = sum(size for name, size in sizes.items() if name.startswith("blocks.0"))
    cut = cut_of(model, 4)
    for stage, kept in enumerate(cut.keep):
        drop = made(lambda: Model(chained))
        free_other_stages(drop, kept)
        real = {name for name, p in drop.named_parameters() if not p.is_meta}
        assert real == kept
        assert sum(sizes[n] for n in real if n.startswith("blocks")) == block, stage
    assert "gain" in cut.keep[3]  # used by none: kept once, to be saved


def test_dropped_weights_keep_form_and_ties() -> None:
    model = nn.ModuleDict(
        {
            "table": nn.Embedding(5, 4),
            "head": nn.Linear(4, 5, bias=False),
            "norm": nn.BatchNorm1d(4),
        }
    )
    model["head"].weight = model["table"].weight
    model["norm"].bias.requires_grad_(False)
    free_other_stages(model, {"norm.running_mean"})
    assert model["head"].weight is model["table"].weight
    assert model["head"].weight.is_meta
    assert not model["norm"].bias.requires_grad
    assert not model["norm"].running_mean.is_meta
    assert model["norm"].running_var.is_meta
    assert list(dict(model.named_parameters())) == ["table.weight", "norm.weight", "norm.bias"]
    with pytest.raises(BugError, match=r"nom\.weight is kept.*try: norm\.weight"):
        free_other_stages(model, {"nom.weight"})


def rescaled(model: Model, h: Tensor) -> Tensor:
    """RWKV's habit: for evaluation the blocks' weights are divided, in place."""
    if not model.training:
        with torch.no_grad():
            for block in model.blocks:
                next(block.parameters()).data.div_(2)
    return chained(model, h)


def test_a_model_that_writes_into_other_blocks_weights_is_refused_and_stays_as_it_is() -> None:
    model = made(lambda: Model(rescaled))
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(PlanError) as refusal:
        cut_of(model)
    assert re.match(
        r"layout.pp: in evaluation, Model's forward pass writes into a parameter outside of its "
        r"blocks \(blocks.0.[a-z0-9.]+, at test_stage_guards.py:\d+\), and other stages' parameters",
        str(refusal.value),
    )
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
