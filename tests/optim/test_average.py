"""The average of weights: its formula, its warm-up, and that evaluation gives the weights back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.base.errors import BugError, CheckpointError, ConfigError
from shoal.optim.average import WeightAverage


def walk(parameter: nn.Parameter, step: int) -> None:
    with torch.no_grad():
        parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)))


def test_the_formula_with_its_rise() -> None:
    p = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    average = WeightAverage(0.25, {"p": p})
    want = torch.zeros(3, dtype=torch.float64)
    for step, decay in enumerate([1 / 10, 2 / 11, 3 / 12, 0.25, 0.25]):
        walk(p, step)
        average.update()
        want = decay * want + (1 - decay) * p.detach()
    torch.testing.assert_close(average.tensors()["p"], want, rtol=1e-14, atol=1e-14)
    assert average.updates == 5


def test_pieces_average_to_pieces_of_the_average() -> None:
    whole = nn.Parameter(torch.randn(5, 3))
    flat = nn.Parameter(whole.detach().flatten()[4:11].clone())
    one, two = WeightAverage(0.9, {"w": whole}), WeightAverage(0.9, {"w": flat})
    for step in range(3):
        walk(whole, step)
        with torch.no_grad():
            flat.copy_(whole.flatten()[4:11])
        one.update()
        two.update()
    torch.testing.assert_close(two.tensors()["w"], one.tensors()["w"].flatten()[4:11])
    WeightAverage(0.9, {}).update()  # a rank that owns nothing


def test_bf16_weights_are_averaged_in_fp32() -> None:
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    average = WeightAverage(0.999, {"p": p})
    with torch.no_grad():
        p.mul_(1 + 2**-7)
    average.updates = 10_000
    average.update()
    assert average.tensors()["p"].dtype == torch.float32
    assert (average.tensors()["p"] > 1).all()  # one step of 2⁻⁷/1000, which bf16 would lose


def test_swapped_in_and_back_bit_for_bit() -> None:
    flat = torch.randn(6)
    p = nn.Parameter(flat[2:])  # a view, as the layouts have
    average = WeightAverage(0.5, {"p": p})
    walk(p, 1)
    average.update()
    before, address = flat.clone(), p.data_ptr()
    seen = []
    with average.swap_weights(lambda: seen.append(flat.clone())):
        assert torch.equal(flat[2:], average.tensors()["p"])
        with pytest.raises(BugError, match="stood in for the weights"):
            average.update()
        with pytest.raises(BugError, match="already"), average.swap_weights():
            pass
    assert torch.equal(flat, before)
    assert p.data_ptr() == address
    assert len(seen) == 2
    assert torch.equal(seen[0][2:], average.tensors()["p"])
    assert torch.equal(seen[1], before)
    with pytest.raises(ZeroDivisionError), average.swap_weights():
        raise ZeroDivisionError
    assert torch.equal(flat, before)
    average.update()


def test_saved_and_loaded_it_goes_on_the_same() -> None:
    p = nn.Parameter(torch.randn(2, 3))
    average = WeightAverage(0.9, {"p": p})
    walk(p, 1)
    average.update()
    saved = {n: t.clone().flatten() for n, t in average.tensors().items()}
    other = WeightAverage(0.9, {"p": p})
    other.load(saved, average.updates)
    walk(p, 2)
    average.update()
    other.update()
    assert torch.equal(other.tensors()["p"], average.tensors()["p"])


def test_wrong_input_is_one_line() -> None:
    p = nn.Parameter(torch.ones(2, 3))
    with pytest.raises(ConfigError, match=r"^average decay = 1.0: wanted 0 ≤ decay < 1"):
        WeightAverage(1.0, {"p": p})
    average = WeightAverage(0.9, {"p": p})
    with pytest.raises(CheckpointError, match=r"^average.p: \[2, 3\] wanted, nothing in the che"):
        average.load({}, 1)
    with pytest.raises(CheckpointError, match=r"^average.p: \[2, 3\] wanted, \[5\] in the check"):
        average.load({"p": torch.ones(5)}, 1)
