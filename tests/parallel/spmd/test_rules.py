"""Rules: what running an operation on parts tells, and that nothing is concluded from chance."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.parallel.spmd.labelling.experiment import ArgumentSlot, OperationCall, OperationInput
from shoal.parallel.spmd.labelling.labels import PARTIAL, WHOLE, Split, Tiled
from shoal.parallel.spmd.labelling.node_arguments import enumerate_edits
from shoal.parallel.spmd.labelling.rules import RuleCache

aten = torch.ops.aten
F64 = torch.float64


def call(
    target: Any, args: list[Any], *shapes: tuple[int, ...], known: Any = None, **named: Any
) -> OperationCall:
    values = tuple(OperationInput(shape, F64) for shape in shapes)
    if known is not None:
        values = (
            OperationInput(
                tuple(known.shape), known.dtype, known, bytes(known.reshape(-1).tolist())
            ),
            *values,
        )
    return OperationCall(target, repr((args, named)), [args, named], values)


LINEAR = call(aten.linear.default, [ArgumentSlot(0), ArgumentSlot(1)], (3, 4, 8), (12, 8))
BIASED = call(
    aten.linear.default,
    [ArgumentSlot(0), ArgumentSlot(1), ArgumentSlot(2)],
    (3, 4, 8),
    (12, 8),
    (12,),
)


@pytest.mark.parametrize(
    ("one", "labels", "out"),
    [
        (LINEAR, (WHOLE, Split(0)), Split(2)),
        (LINEAR, (WHOLE, Split(0, 3)), Split(2, 3)),
        (LINEAR, (Split(2), Split(1)), PARTIAL),
        (LINEAR, (Split(2), Split(1, 2)), None),  # other columns than rows
        (LINEAR, (Split(1), WHOLE), Split(1)),
        (LINEAR, (PARTIAL, WHOLE), PARTIAL),
        (LINEAR, (Split(1), Split(0)), None),
        (BIASED, (Split(2), Split(1), WHOLE), None),  # the bias would be added twice
        (BIASED, (WHOLE, Split(0), Split(0)), Split(2)),
        (call(aten.gelu.default, [ArgumentSlot(0)], (4, 6)), (PARTIAL,), None),
        (call(aten.gelu.default, [ArgumentSlot(0)], (4, 6)), (Split(1),), Split(1)),
        (call(aten.mul.Tensor, [ArgumentSlot(0), 0.5], (4, 6)), (PARTIAL,), PARTIAL),
        (call(aten.softmax.int, [ArgumentSlot(0), -1], (4, 6)), (Split(1),), None),
        (call(aten.softmax.int, [ArgumentSlot(0), -1], (4, 6)), (Split(0),), Split(0)),
        (call(aten.sum.dim_IntList, [ArgumentSlot(0), [-1]], (4, 6)), (Split(1),), PARTIAL),
        (call(aten.mean.dim, [ArgumentSlot(0), [-1]], (4, 6)), (Split(1),), PARTIAL),  # of shares
        (call(aten.var.dim, [ArgumentSlot(0), [-1]], (4, 6)), (Split(1),), None),
        (call(aten.add.Tensor, [ArgumentSlot(0), ArgumentSlot(1)], (4, 6), (4, 6)), (PARTIAL, WHOLE), None),
        (call(aten.add.Tensor, [ArgumentSlot(0), ArgumentSlot(1)], (4, 6), (4, 6)), (PARTIAL, PARTIAL), PARTIAL),
        (call(aten.sqrt.default, [ArgumentSlot(0)], (4, 6)), (Split(0),), Split(0)),  # NaN unless positive
        (call(aten.layer_norm.default, [ArgumentSlot(0), [6]], (4, 6)), (Split(1),), None),
        (call(aten.cat.default, [[ArgumentSlot(0), ArgumentSlot(1)], 1], (4, 6), (4, 6)), (Split(1),) * 2, Split(1, 2)),
        (call(aten.new_full.default, [ArgumentSlot(0), [5, 5], 0.5], (4, 6)), (Split(0),), WHOLE),
    ],
)  # fmt: skip
def test_labels_of_results(one: OperationCall, labels: tuple, out: object) -> None:
    found = RuleCache().find(one, labels, 2)
    assert (found.out if found else None) == out


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_equal_numbers_of_a_sample_conclude_nothing(dtype: torch.dtype) -> None:
    """Experts' numbers, all the same in the sample: of two samples a rank has a part of each."""
    known = torch.ones(2, 8, 1, dtype=dtype)
    flat = call(aten.reshape.default, [ArgumentSlot(0), [-1, 1]], known=known)
    assert RuleCache().find(flat, (Split(1),), 2).out == Split(0, 2)
    same = call(aten.clone.default, [ArgumentSlot(0)], known=known.view(16, 1))
    assert RuleCache().find(same, (Split(0, 2),), 2).out == Split(0, 2)


def test_what_looks_up_numbers_has_those_of_the_sample() -> None:
    rows = call(
        aten.embedding.default,
        [ArgumentSlot(1), ArgumentSlot(0)],
        (3, 6),
        known=torch.tensor([[2, 0, 1, 2]]),
    )
    assert RuleCache().find(rows, (Split(1), WHOLE), 2).out == Split(1)


def test_a_bias_that_one_rank_adds_is_counted_once() -> None:
    found = RuleCache().find(BIASED, (Split(2), Split(1), WHOLE), 2, frozenset({2}))
    assert found is not None
    assert found.out == PARTIAL


@pytest.mark.parametrize(
    ("one", "label", "out", "edit"),
    [
        (call(aten.reshape.default, [ArgumentSlot(0), [3, 4, 2, 8]], (3, 4, 16)), Split(2), Split(2), ((0, 1, 2), 2)),
        (call(aten.reshape.default, [ArgumentSlot(0), [3, 4, -1, 8]], (3, 4, 16)), Split(2), Split(2), None),
        (call(aten.reshape.default, [ArgumentSlot(0), [12, 4, 8]], (3, 4, 4, 8)), Split(1), Split(0, 3), ((0, 1, 0), 2)),
        (call(aten.expand.default, [ArgumentSlot(0), [3, 4, 5]], (3, 4, 1)), Split(1), Split(1), ((0, 1, 1), 2)),
        (call(aten.split.Tensor, [ArgumentSlot(0), 4, 1], (3, 12)), Split(1, 3), (Split(1),) * 3, ((0, 1), 2)),
        (call(aten.chunk.default, [ArgumentSlot(0), 3, 1], (3, 12)), Split(1, 3), (Split(1),) * 3, None),
    ],
)  # fmt: skip
def test_sizes_among_arguments_are_divided(one: OperationCall, label, out, edit) -> None:
    found = RuleCache().find(one, (label,), 2)
    assert found is not None
    assert found.out == out
    assert found.edits == ((edit,) if edit else ())


def test_two_numbers_of_a_slice() -> None:
    one = call(aten.slice.Tensor, [ArgumentSlot(0), 1, 4, 8], (3, 12))
    found = RuleCache().find(one, (Split(1, 3),), 2)
    assert found is not None
    assert found.out == Split(1)
    assert {path for path, _ in found.edits} == {(0, 2), (0, 3)}


def test_ranks_become_a_grid_where_one_dim_is_too_small() -> None:
    """Two key/value heads, each with two query heads, over four ranks."""
    one = call(aten.reshape.default, [ArgumentSlot(0), [6, 2, 5, 8]], (3, 4, 5, 8))
    found = RuleCache().find(one, (Split(1),), 4)
    assert found is not None
    assert found.out == Tiled(((2, Split(0, 3)), (2, Split(1))))


@pytest.mark.parametrize("batch", [2, 3, 4])
def test_equal_sizes_do_not_fool_it(batch: int) -> None:
    """batch == heads == parts of a head: the values tell what the shapes do not."""
    one = call(aten.transpose.int, [ArgumentSlot(0), 0, 1], (4, 4, 4, 4))
    found = RuleCache().find(one, (Split(0),), 2)
    assert found is not None
    assert found.out == Split(1)
    view = call(aten.reshape.default, [ArgumentSlot(0), [batch * 4, 4]], (batch, 4, 4))
    assert RuleCache().find(view, (Split(1),), 2).out == Split(0, batch)


def test_whole_numbers_keep_their_values() -> None:
    rows = torch.tensor([1, 0, 3, 2, 1])
    one = call(aten.embedding.default, [ArgumentSlot(1), ArgumentSlot(0)], (4, 6), known=rows)
    assert RuleCache().find(one, (WHOLE, Split(1)), 2).out == Split(1)
    assert RuleCache().find(one, (WHOLE, Split(0)), 2) is None, "rows beyond the part would be read"
    assert RuleCache().find(one, (Split(0), WHOLE), 2) is None, "five rows are not two parts"


def test_dropout_is_masked_and_other_draws_have_no_rule() -> None:
    one = call(aten.dropout.default, [ArgumentSlot(0), 0.5, True], (4, 6))
    found = RuleCache().find(one, (Split(1),), 2)
    assert found is not None
    assert found.masked
    assert (
        not RuleCache()
        .find(call(aten.dropout.default, [ArgumentSlot(0), 0.5, False], (4, 6)), (Split(1),), 2)
        .masked
    )
    other = call(aten.feature_dropout.default, [ArgumentSlot(0), 0.5, True], (4, 6, 2))
    assert RuleCache().find(other, (Split(1),), 2) is None


def test_buffers_that_change_must_be_cut_alike() -> None:
    args = [ArgumentSlot(0), None, None, ArgumentSlot(1), ArgumentSlot(2), True, 0.1, 1e-5, False]
    norm = OperationCall(
        aten.batch_norm.default, repr(args), [args, {}],
        (OperationInput((4, 6, 5), F64), OperationInput((6,), F64), OperationInput((6,), F64)), frozenset({1, 2}),
    )  # fmt: skip
    found = RuleCache().find(norm, (Split(1), Split(0), Split(0)), 2)
    assert found is not None
    assert found.out == Split(1)
    assert found.writes == (1, 2)
    assert RuleCache().find(norm, (Split(0), WHOLE, WHOLE), 2) is None, (
        "each rank has other statistics"
    )


def test_large_products_are_tried_small() -> None:
    one = call(
        aten.linear.default, [ArgumentSlot(0), ArgumentSlot(1)], (8, 512, 4096), (16384, 4096)
    )
    assert RuleCache().find(one, (WHOLE, Split(0)), 8).out == Split(2)
    assert RuleCache().find(one, (Split(2), Split(1)), 8).out == PARTIAL


def test_equal_questions_are_asked_once() -> None:
    rules = RuleCache()
    for _ in range(2):
        rules.find(call(aten.gelu.default, [ArgumentSlot(0)], (4, 6)), (Split(1),), 2)
    assert len(rules.known) == 1


def test_what_is_divided_is_tried_in_order() -> None:
    found = list(enumerate_edits([[ArgumentSlot(0), [4, 3, 2]], {}], 2, []))
    assert found[0] == ()
    assert found[1] == (((0, 1, 0), 2),)
    assert found[2] == (((0, 1, 2), 2),)
