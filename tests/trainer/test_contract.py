"""The loss contract and the form of batches: what is taken, what is refused, in which words."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trainer_small import assert_same_bits, bits, cross_entropy_mean, linear, pair, run_of, squares

import shoal
from shoal.base.errors import ConfigError
from shoal.fabric import start_world
from shoal.models.loss import token_loss
from shoal.trainer.autotune.sample_forward import build_sample_forward
from shoal.trainer.batches.batch_split import batch_length, split_into_micro_batches
from shoal.trainer.step.call_contract import call_model, split_batch, sum_and_count


def told(failure: pytest.ExceptionInfo) -> str:
    text = str(failure.value)
    assert "\n" not in text
    return text


def test_a_bare_mean_is_one_line_and_moves_nothing() -> None:
    model = linear()
    before = bits(model)
    run = run_of(model, loss=lambda o, t: squares(o, t).mean())
    with pytest.raises(ConfigError) as failure:
        run.step(pair())
    assert told(failure) == (
        "loss returned a mean: ranks with unequal token counts would weigh wrongly. Return "
        "(sum, count), or wrap it: shoal.mean_of_samples(loss)"
    )
    assert_same_bits(bits(model), before)
    assert run.step_count == 0
    assert not run.optimizer.state


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        (
            nn.MSELoss(reduction="sum"),
            "loss returned a sum without its count. Return (sum, count), say (loss, "
            'len(targets)), or unreduced values: reduction="none"',
        ),
        (nn.MSELoss(), "loss returned a mean: "),
        (
            lambda o, t: squares(o, t).sum() / 8,  # no operation tells a mean from a sum
            "loss returned one number without a count: ranks with unequal token counts would weigh "
            "a mean wrongly. Return (sum, count), say (loss, len(targets)) of a sum; wrap a mean: "
            "shoal.mean_of_samples(loss)",
        ),
    ],
    ids=["sum", "mean", "either"],
)
def test_a_sum_is_not_called_a_mean(loss: Any, line: str) -> None:
    with pytest.raises(ConfigError) as failure:
        run_of(linear(), loss=loss).step(pair())
    assert told(failure).startswith(line)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda o, t: 3.0, "(sum, count) or unreduced values are wanted, got float"),
        (lambda o, t: None, "got NoneType"),
        (lambda o, t: [o.sum(), 8], "got list of 2"),
        (lambda o, t: (o.sum(), 8, 1), "got tuple of 3"),
        (
            lambda o, t: (squares(o, t), 8),
            "the first of (sum, count) must be a tensor without dims",
        ),
        (
            lambda o, t: (1.0, 8),
            "the first of (sum, count) must be a tensor without dims, got float",
        ),
        (lambda o, t: (o.sum(), torch.ones(8)), "the second of (sum, count) must be a number"),
        (lambda o, t: (o.sum(), "8"), "got str"),
    ],
)
def test_wrong_types_of_loss(loss, words: str) -> None:
    with pytest.raises(ConfigError) as failure:
        run_of(linear(), loss=loss).step(pair())
    assert told(failure).startswith("loss: ")
    assert words in told(failure)


def test_a_loss_cut_off_from_the_model_is_refused() -> None:
    """Without the guard such a run steps for ever and trains nothing."""
    run = run_of(linear(), loss=lambda o, t: squares(o.detach(), t))
    with pytest.raises(
        ConfigError, match=r"^loss: no parameter got a gradient: the loss is cut off"
    ):
        run.step(pair())


def test_sum_and_count_forms_agree() -> None:
    """(sum, count), unreduced values with −100, and the default loss give the same step."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(8, 4), torch.randint(0, 2, (8,))
    targets[[1, 4, 5]] = -100

    def pairs(outputs, wanted):
        total = F.cross_entropy(outputs, wanted, ignore_index=-100, reduction="sum")
        return total, (wanted != -100).sum()

    def unreduced(outputs, wanted):
        return F.cross_entropy(outputs, wanted, ignore_index=-100, reduction="none")

    ends = []
    for loss in (pairs, unreduced, token_loss):
        model = linear()
        result = run_of(model, loss=loss).step((inputs, targets))
        assert result.targets == 5
        ends.append((result.loss, bits(model)))
    for value, weights in ends[1:]:
        assert value == pytest.approx(ends[0][0], rel=1e-6)
        for name, tensor in weights.items():
            assert torch.allclose(tensor, ends[0][1][name], atol=1e-7)


def test_values_at_ignored_targets_do_not_count() -> None:
    """Nor are they summed: what a loss leaves there is nobody's business."""
    values, targets = torch.tensor([1.0, 50.0, 3.0]), torch.tensor([1, -100, 0])
    total, count = sum_and_count(values, targets)
    assert (float(total), int(count)) == (4.0, 2)
    small = torch.tensor([156, 3, 7], dtype=torch.uint8)  # −100 in uint8 wraps around to 156
    assert int(sum_and_count(values, small)[1]) == 3
    right = torch.tensor([True, True, False])
    assert [int(x) for x in sum_and_count(right, targets)] == [1, 2]


def test_mean_of_samples_is_the_mean_over_unequal_micro_batches() -> None:
    inputs, targets = torch.randn(11, 4), torch.randint(0, 2, (11,))
    model, twin = linear(), linear()
    loss = shoal.mean_of_samples(cross_entropy_mean)
    run = run_of(model, loss=loss, micro_batch=4, precision="fp64")  # 4, 4 and 3 samples
    twin.double()
    plain = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        result = run.step((inputs, targets))
        plain.zero_grad()
        expected = F.cross_entropy(twin(inputs.double()), targets)
        expected.backward()
        plain.step()
        assert result.loss == pytest.approx(expected.item(), rel=1e-12)
        assert result.targets == 11
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-13)


def test_mean_of_samples_refuses_what_is_no_mean() -> None:
    run = run_of(linear(), loss=shoal.mean_of_samples(squares))
    with pytest.raises(ConfigError) as failure:
        run.step(pair())
    assert "shoal.mean_of_samples: the loss must return a mean" in told(failure)
    assert "shape [8, 2]" in told(failure)


def test_batches_of_every_structure_train_alike() -> None:
    x, y = pair()

    class Reads(nn.Module):
        def __init__(self, pick) -> None:
            super().__init__()
            self.body = linear()
            self.pick = pick

        def forward(self, inputs):
            return self.body(self.pick(inputs))

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = linear()

        def forward(self, x, y=None, scale=None):
            return self.body(x) * scale

    shapes = [
        (Reads(lambda i: i), (x, y), squares, "single"),
        (Reads(lambda i: i), [x, y], squares, "single"),
        (Reads(lambda i: i["x"]), {"x": x, "y": y}, lambda o, t: squares(o, t["y"]), "single"),
        (Reads(lambda i: i[1]["x"][0]), ((3, {"x": [x]}), y), squares, "single"),
        (
            Reads(lambda i: i["x"]),
            ({"x": x}, {"y": (y,)}),
            lambda o, t: squares(o, t["y"][0]),
            "single",
        ),
        (
            Named(),
            {"x": x, "y": y, "scale": torch.tensor(1.0)},
            lambda o, t: squares(o, t["y"]),
            "kwargs",
        ),
        (
            Named(),
            UserDict({"x": x, "y": y, "scale": 1.0}),
            lambda o, t: squares(o, t["y"]),
            "kwargs",
        ),
    ]
    ends = []
    for model, batch, loss, call in shapes:
        run = run_of(model, loss=loss, micro_batch=2, call=call)
        for _ in range(2):
            run.step(batch)
        ends.append(bits(model.body))
    for other in ends[1:]:
        assert_same_bits(other, ends[0])


def test_wrong_forms_of_a_batch() -> None:
    x, y = pair()
    run = run_of(linear())
    for batch, words in (
        ((x, y, y), "batch: (inputs, targets) or one dict is wanted, got tuple of 3"),
        (x, "batch: (inputs, targets) or one dict is wanted, got Tensor"),
        (("a", "b"), "batch: holds no tensor whose dim 0 counts samples"),
    ):
        with pytest.raises(ConfigError) as failure:
            run.step(batch)
        assert words in told(failure)
    kwargs = run_of(linear(), call="kwargs")
    with pytest.raises(
        ConfigError,
        match='^call="kwargs": inputs must be a dict, got Tensor; try: call="single"$',
    ):
        kwargs.step((x, y))


def test_tensors_that_disagree_about_samples() -> None:
    x, y = pair()
    with pytest.raises(ConfigError) as failure:
        run_of(linear()).step((x, y[:5]))
    assert told(failure).startswith("batch: tensors of 8 and 5 samples along dim 0 (shape [5, 2])")
    assert " in batch[1]; " in told(failure)


def test_a_sample_of_unequal_graphs_is_named_as_the_sample() -> None:
    plan = run_of(linear()).plan
    with pytest.raises(ConfigError) as failure:
        build_sample_forward(
            [{"x": torch.zeros(3, 4)}, {"x": torch.zeros(2, 4)}], plan, start_world({})
        )
    line = told(failure)
    assert line.startswith("sample= (without it, the first batch): tensors of 3 and 2 samples"), (
        line
    )
    assert "in batch[1]['x']" in line
    assert "try: layout fsdp or zero2" in line


def test_cutting_along_dim_0() -> None:
    x = torch.arange(5)
    batch = {
        "x": x,
        "names": ["a", "b", "c", "d", "e"],
        "array": np.arange(10).reshape(5, 2),
        "scale": torch.tensor(2.0),
        "pairs": [x, x + 1],
        "settings": ["two", "words"],
        "text": "whole",
    }
    parts = list(split_into_micro_batches(batch, 2))
    assert [batch_length(p) for p in parts] == [2, 2, 1]
    assert [p["names"] for p in parts] == [["a", "b"], ["c", "d"], ["e"]]
    assert parts[1]["array"].tolist() == [[4, 5], [6, 7]]
    assert parts[2]["pairs"][1].tolist() == [5]
    assert all(p["scale"] == 2 and p["text"] == "whole" for p in parts)
    assert all(p["settings"] == ["two", "words"] for p in parts)
    assert torch.equal(torch.cat([p["x"] for p in parts]), x)


class Turned(nn.Module):
    """Pairs of numbers that are read as complex ones."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.turns = nn.Parameter(torch.zeros(8)[start : start + 6].view(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(self.turns) * x


def test_a_weight_at_an_odd_place_of_a_buffer_is_named() -> None:
    """Under zero1 and zero2 weights lie behind one another, and torch wants even places."""
    assert call_model(Turned(2), torch.ones(3), "single").shape == (3,)
    with pytest.raises(ConfigError, match="view_as_complex .* here at an odd place"):
        call_model(Turned(1), torch.ones(3), "single")


def test_one_dict_is_inputs_and_targets() -> None:
    batch = {"x": 1}
    assert split_batch(batch) == (batch, batch)
