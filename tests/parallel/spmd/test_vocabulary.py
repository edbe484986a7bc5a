"""Tables over ranks: lookups, logits and losses of a vocabulary that divides by nothing."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from threads import ThreadAxis, on_ranks
from torch import Tensor, nn

from shoal.base.errors import ConfigError
from shoal.models.loss import Unprojected, find_logits, linear_cross_entropy, token_loss
from shoal.parallel.spmd.sequence_shards import compute_even_cuts
from shoal.parallel.tensor_parallel.vocabulary_parallel import (
    LogitsShard,
    SplitVocabulary,
    replace_table_forwards,
)
from shoal.trace.find.vocabulary_use import VocabularyTables, is_table
from shoal.trace.flow.forward_record import ForwardRecord

ROWS, DIM, CLASSES = 9, 6, 11


def part_of(axis: ThreadAxis, whole: Tensor) -> Tensor:
    cuts = compute_even_cuts(whole.shape[0], axis.size)
    return whole.detach()[cuts[axis.rank] : cuts[axis.rank + 1]].clone().requires_grad_()


def material() -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(ROWS, DIM, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(CLASSES, DIM, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, CLASSES, (ROWS,))
    targets[2] = -100
    return hidden, weight, targets


@pytest.mark.parametrize("kind", ["chunks", "one chunk", "logits", "looked at"])
@pytest.mark.parametrize("size", [2, 4])
def test_loss_and_gradients_are_those_of_the_whole_head(kind: str, size: int) -> None:
    hidden, weight, targets = material()
    total, count = token_loss(hidden @ weight.T, targets)
    (total * 0.3).backward()

    def work(axis: ThreadAxis) -> None:
        own = part_of(axis, weight)
        h = hidden.detach().clone().requires_grad_()
        vocabulary = SplitVocabulary(axis, compute_even_cuts(CLASSES, size))
        if kind in ("chunks", "one chunk"):
            got, counted = linear_cross_entropy(
                h, own, targets, chunk_rows=2 if kind == "chunks" else None, vocabulary=vocabulary
            )
        else:
            logits = find_logits(Unprojected(h, own, vocabulary))
            assert isinstance(logits, LogitsShard)
            assert logits.shape == (ROWS, CLASSES)
            got, counted = token_loss(logits * 1 if kind == "looked at" else logits, targets)
        (got * 0.3).backward()
        assert counted == count
        assert float((got - total).detach().abs()) <= 1e-12
        assert float((h.grad - hidden.grad).abs().max()) <= 1e-12
        assert torch.allclose(own.grad, part_of(axis, weight.grad), rtol=0, atol=1e-12)
        if kind == "one chunk":
            assert axis.counts == {"all_gather": 1, "all_reduce": 1}
            assert axis.payload_bytes["all_gather"] == size * 3 * ROWS * 8, "only three numbers"

    on_ranks(size, work)


def test_ranks_with_unequal_rows_make_equal_chunks() -> None:
    hidden, weight, targets = material()

    def work(axis: ThreadAxis) -> int:
        vocabulary = SplitVocabulary(axis, compute_even_cuts(CLASSES, 2))
        narrow = part_of(axis, weight.bfloat16())
        for chunk in (1, 2, 3, 5):
            linear_cross_entropy(
                hidden.bfloat16(), narrow, targets, chunk_rows=chunk, vocabulary=vocabulary
            )
        return axis.counts["all_gather"]

    first, second = on_ranks(2, work)
    assert first == second


def test_a_target_outside_names_the_whole_vocabulary() -> None:
    hidden, weight, targets = material()
    targets[0] = CLASSES

    def work(axis: ThreadAxis) -> None:
        vocabulary = SplitVocabulary(axis, compute_even_cuts(CLASSES, 2))
        token_loss(Unprojected(hidden, part_of(axis, weight), vocabulary), targets)

    with pytest.raises(ConfigError, match="targets hold 11: outside the model's vocabulary of 11"):
        on_ranks(2, work)


class Scaled(nn.Embedding):
    """As Gemma's: what is found is scaled; `way` is how it looks up."""

    def __init__(self, rows: int, dim: int, padding_idx: int | None = None, way: str = "super"):
        super().__init__(rows, dim, padding_idx)
        self.way, self.scale = way, nn.Buffer(torch.tensor(dim**0.5))

    def forward(self, ids: Tensor) -> Tensor:
        if self.way == "super":
            found = super().forward(ids)
        elif self.way == "functional":
            padding = None if self.padding_idx is None else self.padding_idx - self.num_embeddings
            found = F.embedding(ids, weight=self.weight, padding_idx=padding)
        elif self.way == "torch":
            found = torch.embedding(self.weight, ids, self.padding_idx or -1)
        elif self.way == "twice":
            return super().forward(ids), super().forward(ids + 1)
        else:
            found = self.weight[ids]
        return found * self.scale.to(self.weight.dtype)


@pytest.mark.parametrize("way", ["", "super", "functional", "torch"])
@pytest.mark.parametrize("size", [2, 4])
def test_lookup(size: int, way: str) -> None:
    kind: Any = functools.partial(Scaled, way=way) if way else nn.Embedding
    table = kind(CLASSES, DIM, padding_idx=3).double()
    with torch.no_grad():
        table.weight[3] = 1.0  # a padding row that is not zero must still get no gradient
    ids = torch.tensor([[0, 3, 10, 3], [5, 5, 6, 1]])
    expected = table(ids)
    expected.sin().sum().backward()

    def work(axis: ThreadAxis) -> None:
        model = nn.Sequential(copy.deepcopy(table))
        replace_table_forwards(model, VocabularyTables(embeddings=("0",)), axis, ())
        model[0].weight.data = part_of(axis, table.weight).data
        model[0].weight.grad = None
        got = model(ids)
        got.sin().sum().backward()
        assert torch.equal(got, expected)
        assert torch.equal(model[0].weight.grad, part_of(axis, table.weight.grad))
        with pytest.raises(IndexError, match=r"0: an id lies outside of 0 … 10"):
            model(ids + 5)

    on_ranks(size, work)


class Model(nn.Module):
    """An embedding, a list of layers, a head; `other` uses a table in another way."""

    def __init__(self, other: str = "") -> None:
        super().__init__()
        self.other = other
        self.tokens, self.positions = nn.Embedding(20, 8), nn.Embedding(6, 8)
        if other in ("super", "scaled, tied", "index", "twice"):
            self.tokens = Scaled(20, 8, way="super" if other == "scaled, tied" else other)
        if other == "renormed":
            self.tokens = nn.Embedding(20, 8, max_norm=1.0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(8, 3 if other == "classes" else 20)
        if other in ("tied", "scaled, tied"):
            self.head.weight = self.tokens.weight
        if other == "held":
            self.copy = nn.ParameterList([self.tokens.weight])

    def forward(self, ids: Tensor) -> Any:
        found = self.tokens(ids % 19)
        h = (found[0] if self.other == "twice" else found) + self.positions(
            torch.arange(ids.shape[1])
        )
        for layer in self.layers:
            h = layer(h)
        if self.other == "by hand":
            return h @ self.tokens.weight.T
        if self.other == "given out":
            return self.head(h), self.head.weight
        return self.head(h)


TWICE = {"tokens.weight": "its own forward reads it again by embedding"}
REASONS = {
    "": ({"tokens.weight", "head.weight", "head.bias"}, {}),
    "tied": ({"tokens.weight", "head.bias"}, {}),
    "classes": ({"tokens.weight"}, {"head.weight": "3 rows of 8 are no vocabulary"}),
    "by hand": ({"tokens.weight"}, {"tokens.weight": "also read by"}),
    "given out": ({"tokens.weight"}, {"head.weight": "also read by the model's outputs"}),
    "held": ({"head.weight", "head.bias"}, {"tokens.weight": "also held by copy.0"}),
    "scaled, tied": ({"tokens.weight", "head.bias"}, {}),
    "super": ({"tokens.weight", "head.weight", "head.bias"}, {}),
    "index": (
        {"tokens.weight", "head.weight", "head.bias"},
        {"tokens.weight": "its own forward reads it by index"},
    ),
    "twice": ({"tokens.weight", "head.weight", "head.bias"}, TWICE),
    "renormed": ({"head.weight", "head.bias"}, {}),
}


@pytest.mark.parametrize("other", REASONS)
def test_only_tables_whose_every_use_is_understood_are_split(other: str) -> None:
    model = Model(other)
    ids = torch.randint(0, 20, (2, 6))
    tables = ForwardRecord(model, lambda m: m(ids)).tables(["layers.0", "layers.1"], 2, {}.get)
    split, whole = REASONS[other]
    assert "6 rows of 8 are no vocabulary" in tables.whole["positions.weight"]
    assert set(tables.split) == split - set(whole)
    for name, reason in whole.items():
        assert tables.whole[name].startswith(reason)


def test_the_users_word_counts() -> None:
    model = Model("classes")
    ids = torch.randint(0, 20, (2, 6))
    wishes = {"tokens.weight": "whole", "head.weight": "column"}
    tables = ForwardRecord(model, lambda m: m(ids)).tables(["layers.0", "layers.1"], 2, wishes.get)
    assert tables.whole["tokens.weight"] == "the user's wish"
    assert set(tables.split) == {"head.weight", "head.bias"}


def test_watching_leaves_no_trace() -> None:
    model = Model()
    before = torch.get_rng_state()
    ids = torch.randint(0, 20, (2, 6), generator=torch.Generator().manual_seed(0))
    ForwardRecord(model, lambda m: m(ids)).tables(["layers.0"], 2, {}.get)
    assert torch.equal(before, torch.get_rng_state())
    assert not any("forward" in part.__dict__ or part._forward_hooks for part in model.modules())
    assert F.linear(torch.ones(8), model.head.weight).shape == (20,)


def test_a_weight_that_is_computed_is_no_table() -> None:
    """Its id is another one at each read, so that no parameter has it."""
    parametrized = torch.nn.utils.parametrizations
    assert is_table(nn.Linear(4, 8))
    assert is_table(nn.Linear(4, 8, bias=False))
    assert is_table(nn.Embedding(8, 4))
    for made in (parametrized.weight_norm, parametrized.orthogonal, parametrized.spectral_norm):
        assert not is_table(made(nn.Linear(4, 8)))
    assert not is_table(parametrized.weight_norm(nn.Linear(4, 8), "bias"))
    assert not is_table(parametrized.weight_norm(nn.Embedding(8, 4)))
    with pytest.warns(FutureWarning):
        assert not is_table(nn.utils.weight_norm(nn.Linear(4, 8)))
