"""Planning and applying the split of a whole model: what is chosen, named and refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from threads import ThreadAxis, on_ranks
from torch import Tensor, nn
from user_modules import Gated

from shoal.base.errors import ConfigError, PlanError
from shoal.base.layouts.layout import Layout
from shoal.base.plans.placement import Placement
from shoal.models.llama import Llama
from shoal.parallel.spmd.labelling.labels import Split, Whole
from shoal.parallel.spmd.model_split import keep_blocks_whole, plan_split
from shoal.parallel.spmd.split_block import ModelSplit
from shoal.parallel.tensor_parallel import place
from shoal.parallel.tensor_parallel.cut_weights import apply_split
from shoal.trace.flow.forward_record import ForwardRecord

IDS = torch.randint(0, 33, (2, 8), generator=torch.Generator().manual_seed(0))


def llama(**settings: Any) -> nn.Module:
    sizes = {"dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 24, "sequence": 8}
    return Llama(vocabulary=33, **{**sizes, **settings}).double()


def plan(module: nn.Module, degree: int = 2, inputs: Tensor = IDS, **options: Any) -> ModelSplit:
    return plan_split(ForwardRecord(module, lambda m: m(inputs)), degree, **options)


class Layer(nn.Module):
    """A feed-forward layer that knows its number, and may do what no graph can."""

    def __init__(self, number: int, kind: str = "") -> None:
        super().__init__()
        self.number, self.kind = number, kind
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "looks" and float(x.detach().sum()) > 1e9:
            return x
        if self.kind == "numbered":
            x = x * self.number
        return x + self.mlp(x)


class Stack(nn.Module):
    def __init__(self, kind: str = "", layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(k, kind) for k in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


def test_every_parameter_has_a_label_and_a_reason() -> None:
    split = plan(llama(tied=False))
    labels = {name: one.label for name, one in split.parameters.items()}
    assert labels["embedding.weight"] == labels["head.weight"] == Split(0)
    assert labels["blocks.1.attention.q.weight"] == labels["blocks.1.mlp.up.weight"] == Split(0)
    assert labels["blocks.1.attention.o.weight"] == labels["blocks.0.mlp.down.weight"] == Split(1)
    assert isinstance(labels["norm.weight"], Whole)
    assert all(one.reason for one in split.parameters.values())
    assert [group.names for group in split.classes] == [("blocks.0", "blocks.1")]
    assert not split.notices


def test_equal_blocks_are_solved_once_though_they_know_their_number() -> None:
    same = plan(Stack(), inputs=X)
    assert [group.names for group in same.classes] == [("layers.0", "layers.1", "layers.2")]
    different = plan(Stack("numbered"), inputs=X)
    assert len(different.classes) == 3, "a number that is computed with makes another graph"


def test_a_block_without_a_graph_is_split_by_its_parts_and_named() -> None:
    split = plan(Stack("looks"), inputs=X)
    names = ("layers.0.mlp", "layers.1.mlp", "layers.2.mlp")
    assert [group.names for group in split.classes] == [names]
    (notice,) = split.notices
    assert notice.startswith("layout.tp = 2: layers.0 (and 2 like it) is split by its parts only: ")
    with pytest.raises(PlanError, match=r"layout.tp = 2 with layout.strict: layers.0 \(and 2 like"):
        plan(Stack("looks"), inputs=X, strict=True)


def test_parts_of_all_equal_blocks_are_split_though_some_blocks_are_echoed() -> None:
    """Blocks that do not know their number: from the third on they need not compute."""
    split = plan(Gated(layers=4), inputs=X)
    assert [group.names for group in split.classes] == [tuple(f"layers.{k}.mix" for k in range(4))]
    for k in range(4):
        assert split.calls[f"layers.{k}.mix"].follows == (f"layers.{k}.norm",)


def test_heads_that_do_not_divide_are_named() -> None:
    split = plan(llama(heads=4, kv_heads=1), 4)
    assert any("blocks.0.attention.k.weight (and in 1 like it) stays" in n for n in split.notices)
    with pytest.raises(PlanError, match=r"with layout.strict: blocks.0.attention.k.weight"):
        plan(llama(heads=4, kv_heads=1), 4, strict=True)


def test_nothing_to_split_is_refused() -> None:
    odd = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3))
    with pytest.raises(
        PlanError, match=r"nothing of Sequential can be split over layout.tp = 2: .* layout.tp=1$"
    ):
        plan(odd, inputs=torch.randn(4, 3))


def test_the_users_patterns() -> None:
    split = plan(llama(), overrides={"blocks.*.mlp.*": "whole", "embedding.*": "whole"})
    whole = {name for name, one in split.parameters.items() if isinstance(one.label, Whole)}
    assert {"embedding.weight", "blocks.0.mlp.up.weight", "blocks.1.mlp.down.weight"} <= whole
    assert split.parameters["blocks.0.attention.q.weight"].label == Split(0)
    assert not split.notices, "what the user wants needs no telling"
    with pytest.raises(
        PlanError, match=r'"blocks.*.mpl.up.weight": matches no parameter of Llama; '
    ):
        plan(llama(), overrides={"blocks.0.mpl.up.weight": "whole"})
    with pytest.raises(PlanError, match=r"try: blocks.0.mlp.up.weight$"):
        plan(llama(), overrides={"blocks.0.mpl.up.weight": "whole"})
    with pytest.raises(ConfigError, match=r"= colum: not one of whole, column, row; try: col"):
        plan(llama(), overrides={"blocks.0.mlp.up.weight": "colum"})


def test_wishes_for_one_block_only() -> None:
    split = plan(llama(), overrides={"blocks.0.mlp.*": "whole"})
    assert sorted(group.names for group in split.classes) == [("blocks.0",), ("blocks.1",)]
    assert split.parameters["blocks.1.mlp.up.weight"].label == Split(0)


def test_planning_changes_nothing() -> None:
    module = llama(dropout=0.5)
    before = copy.deepcopy(module.state_dict())
    random = torch.get_rng_state()
    plan(module, sequence=True)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
    assert not any("forward" in part.__dict__ or part._forward_hooks for part in module.modules())


def whole_rows(module: torch.nn.Module) -> dict[str, Placement]:
    return {
        name: Placement(name, tuple(p.shape), "float32", trains=True)
        for name, p in module.named_parameters()
    }


def test_parameters_stay_the_same_objects_and_know_their_place() -> None:
    whole = llama()
    split = plan(whole)

    def work(axis: ThreadAxis) -> Any:
        module = copy.deepcopy(whole)
        kept = dict(module.named_parameters())
        names = list(module.state_dict())
        rows = place(whole_rows(whole), split)
        undo = apply_split(module, split, axis)
        assert dict(module.named_parameters()) == kept, "an optimizer would lose them"
        assert list(module.state_dict()) == names
        assert module.head.weight is module.embedding.weight
        layout = Layout(tp=2)
        for name, row in rows.items():
            part = row.shard(layout.at(axis.rank))
            assert part.elements == kept[name].numel()
            assert row.local_shape(layout.at(axis.rank)) == tuple(kept[name].shape)
            own = [whole.get_parameter(name)[tuple(slice(*r) for r in b)] for b in part.slices]
            assert torch.equal(torch.cat([t.flatten() for t in own]), kept[name].flatten())
            assert row.copies_in_model(layout) == (1 if row.cut else 2)
        for take_away in undo:
            take_away()
        assert not any("forward" in part.__dict__ for part in module.modules())
        return rows["embedding.weight"].shard(layout.at(axis.rank)).slices

    assert on_ranks(2, work) == [(((0, 17), (0, 16)),), (((17, 33), (0, 16)),)]


def test_a_copy_of_a_split_model_computes_with_its_own_weights() -> None:
    whole, x = Stack().double(), X.double()
    split = plan(whole, inputs=x)

    def work(axis: ThreadAxis) -> None:
        module = copy.deepcopy(whole)
        apply_split(module, split, axis)
        twin = copy.deepcopy(module)
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()
        assert torch.equal(twin(x), x)
        assert torch.allclose(module(x), whole(x))

    on_ranks(2, work)


def test_another_number_of_ranks_is_a_bug() -> None:
    module = Stack()
    split = plan(module, inputs=X)
    with pytest.raises(Exception, match="a split for 2 ranks was applied to 4"):
        on_ranks(4, lambda axis: apply_split(module, split, axis))


def test_planned_collectives_count_every_call() -> None:
    class Again(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x))

    once, twice = (plan(kind(), inputs=X.clone().requires_grad_()) for kind in (Stack, Again))
    for name, exchanges in once.exchanges.items():
        assert twice.exchanges[name] == exchanges * 2


def test_classes_can_be_left_whole_after_all() -> None:
    module = llama()
    split = plan(module)
    less = keep_blocks_whole(module, split, {"blocks.0": "it is wrong"})
    assert not less.classes
    assert set(less.exchanges) == {"embedding", "loss"}
    assert less.notices[-1].endswith("blocks.0 (and 1 like it) stays whole: it is wrong")
    assert less.parameters["blocks.1.mlp.up.weight"].label == Whole()
    stack = Stack()
    with pytest.raises(PlanError, match="stays whole: it is wrong; nothing else can be split"):
        keep_blocks_whole(stack, plan(stack, inputs=X), {"layers.0": "it is wrong"})
