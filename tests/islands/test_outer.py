"""The outer step: its sign, gain and exactness; taking it back; digests; saving and loading."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from shoal.base.errors import BugError, CheckpointError, ConfigError
from shoal.base.layouts.island_options import IslandsPolicy
from shoal.islands.outer_optimizer import UNFIT, OuterState, all_finite, make_outer_builder

ELEMENTWISE = [
    "adadelta", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam", "rmsprop", "rprop",
    "sgd",
]  # fmt: skip


def settled(**keys) -> IslandsPolicy:
    return IslandsPolicy("diloco", **keys).resolved()


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def opened(**keys) -> OuterState:
    local = {"a.weight": numbers(1, 3, 4), "a.bias": numbers(2, 3), "none": torch.zeros(0, 4)}
    return OuterState(local, make_outer_builder(settled(**keys)))


def changes(outer: OuterState, seed: int) -> dict[str, Tensor]:
    return {name: numbers(seed, *w.shape).to(w.dtype) for name, w in outer.weights.items()}


def bits(outer: OuterState) -> dict[str, bytes]:
    return {key: part.numpy().tobytes() for key, part in outer.tensors().items()}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_message_that_points_downhill_lowers_a_quadratic(name: str) -> None:
    """loss = ‖w‖²/2; an island went from W to 0.9·W. New − old would climb."""
    weight = numbers(0, 40)
    outer = OuterState({"w": weight}, make_outer_builder(settled(outer=name, outer_lr=0.1)))
    new = 0.9 * weight
    assert outer.propose({"w": outer.weights["w"] - new})
    outer.commit()
    assert outer.weights["w"].norm() < weight.norm()


@pytest.mark.parametrize("size", [1e-6, 1e-2, 1.0])
def test_lr_1_without_momentum_is_plain_averaging(size: float) -> None:
    weight = numbers(0, 10_000)
    own = [weight + size * numbers(k, 10_000) for k in range(1, 5)]
    outer = OuterState({"w": weight}, make_outer_builder(settled(outer_lr=1.0, outer_momentum=0.0)))
    total = torch.zeros_like(weight)
    for one in own:
        total += outer.weights["w"] - one
    outer.propose({"w": total / 4})
    outer.commit()
    mean = sum(one.double() for one in own) / 4
    assert (outer.weights["w"] - mean).norm() <= 1e-15 * weight.norm()


def test_the_gain_of_a_constant_change() -> None:
    outer = OuterState({"w": torch.zeros(3, dtype=torch.float64)}, make_outer_builder(settled()))
    before, gains = outer.weights["w"], []
    for _ in range(200):
        outer.propose({"w": torch.ones(3, dtype=torch.float64)})
        outer.commit()
        gains.append(float((before - outer.weights["w"])[0]))
        before = outer.weights["w"]
    assert gains[0] == pytest.approx(1.33, abs=1e-12)
    assert gains[1] == pytest.approx(1.897, abs=1e-12)
    assert gains[-1] == pytest.approx(7.0, abs=1e-6)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_undo_gives_the_same_bits_and_a_second_try_too(name: str) -> None:
    outer, plain = opened(outer=name), opened(outer=name)
    for step in range(3):
        before, digest = bits(outer), outer.digest()
        outer.propose(changes(outer, 50 + step))
        assert outer.digest() != digest
        assert bits(outer) == before, "what is saved is what was committed"
        outer.undo()
        assert bits(outer) == before
        assert outer.digest() == digest
        for one in (outer, plain):
            assert one.propose(changes(one, step))
            one.commit()
        assert bits(outer) == bits(plain)
        assert outer.digest() == plain.digest()


def test_what_was_read_before_a_step_is_not_written_to() -> None:
    outer = opened()
    outer.propose(changes(outer, 1))
    outer.commit()
    seen = {**outer.tensors(), **outer.weights}
    copies = {key: part.clone() for key, part in seen.items()}
    outer.propose(changes(outer, 2))
    outer.commit()
    assert all(torch.equal(seen[key], copies[key]) for key in seen)


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad"])
def test_other_fragments_are_left_alone(name: str) -> None:
    outer = opened(outer=name)
    outer.propose(changes(outer, 1))
    outer.commit()
    before = bits(outer)
    outer.propose({"a.bias": torch.ones(3, dtype=torch.float64)})
    outer.commit()
    after = bits(outer)
    moved = {key for key in after if after[key] != before[key]}
    assert moved
    assert all(key.startswith("a.bias") for key in moved)


def test_the_digest_knows_every_bit_of_weights_and_momentum() -> None:
    outer = OuterState({"w": numbers(0, 2), "v": numbers(1, 1)}, make_outer_builder(settled()))
    outer.propose(changes(outer, 1))
    outer.commit()
    saved, seen = outer.tensors(), {outer.digest()}
    assert set(saved) == {"w", "v", "w.momentum_buffer", "v.momentum_buffer"}
    flips = 0
    for key, part in saved.items():
        for bit in range(part.numel() * 64):
            raw = part.clone().view(torch.int64)
            raw[bit // 64] ^= 1 << bit % 64 if bit % 64 < 63 else -(2**63)
            other = OuterState(
                {"w": torch.zeros(2).double(), "v": torch.zeros(1).double()}, outer._build
            )
            other.load({**saved, key: raw.view(torch.float64)})
            seen.add(other.digest())
            flips += 1
    assert len(seen) == flips + 1 == 6 * 64 + 1


def test_the_digest_knows_names() -> None:
    one, two = numbers(0, 2), numbers(1, 2)
    build = make_outer_builder(settled())
    assert OuterState({"a": one}, build).digest() != OuterState({"b": one}, build).digest()
    assert (
        OuterState({"a": one, "b": two}, build).digest()
        == OuterState({"b": two, "a": one}, build).digest()
    )
    assert (
        OuterState({"a": one, "b": two}, build).digest()
        != OuterState({"a": two, "b": one}, build).digest()
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_seen(bad: float) -> None:
    outer = opened()
    digest = outer.digest()
    change = changes(outer, 1)
    change["a.bias"][1] = bad
    assert not outer.propose(change)
    outer.undo()
    assert outer.digest() == digest
    assert outer.propose(changes(outer, 1))


def test_a_state_that_overflows_is_seen_though_the_weights_are_finite() -> None:
    outer = OuterState({"w": torch.ones(2)}, make_outer_builder(settled(outer="adam")))
    assert not outer.propose({"w": torch.full((2,), 1e30)})  # its square is beyond float32
    assert outer.tensors()["w"].isfinite().all()


def test_a_rank_without_anything() -> None:
    outer = OuterState({}, make_outer_builder(settled()))
    assert outer.propose({})
    outer.commit()
    assert outer.digest() == OuterState({}, make_outer_builder(settled())).digest()
    assert outer.tensors() == {}


def test_short_weights_are_kept_in_float32() -> None:
    outer = OuterState({"w": torch.ones(3, dtype=torch.bfloat16)}, make_outer_builder(settled()))
    assert outer.weights["w"].dtype == torch.float32


@pytest.mark.parametrize("name", ["sgd", "adam", "asgd", "adagrad"])
def test_saved_and_loaded_it_goes_on_with_the_same_bits(name: str) -> None:
    outer, other = opened(outer=name), opened(outer=name)
    for step in range(2):
        outer.propose(changes(outer, step))
        outer.commit()
    flat = {key: part.reshape(-1) for key, part in outer.tensors().items()}  # as files may have it
    assert other.digest() != outer.digest()
    other.load({**flat, "another.rank's": torch.zeros(2)})
    assert other.digest() == outer.digest()
    for one in (outer, other):
        one.propose(changes(outer, 7))
        one.commit()
    assert bits(other) == bits(outer)


@pytest.mark.parametrize("way", ["load", "restart"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_weights_without_state_begin_anew(name: str, way: str) -> None:
    outer, fresh = opened(outer=name), opened(outer=name)
    weights = dict(fresh.weights)
    outer.propose(changes(outer, 1))
    outer.commit()
    if way == "load":
        outer.load(weights)
    else:
        outer.restart(weights)
        outer.commit()
    for one in (outer, fresh):
        one.propose(changes(one, 2))
        one.commit()
    assert bits(outer) == bits(fresh)


def test_what_does_not_fit_is_not_loaded_at_all() -> None:
    outer = opened()
    outer.propose(changes(outer, 1))
    outer.commit()
    saved, digest = outer.tensors(), outer.digest()
    with pytest.raises(CheckpointError, match=r"outer a.bias: \[3\] wanted, found nothing"):
        outer.load({key: part for key, part in saved.items() if key != "a.bias"})
    with pytest.raises(CheckpointError, match=r"outer a.bias: \[3\] wanted, found \[2\]"):
        outer.load({**saved, "a.bias": torch.zeros(2)})
    words = "outer a.weight: saved with momentum_buffer, this outer optimizer keeps exp_avg, "
    with pytest.raises(CheckpointError, match=words):
        opened(outer="adam").load(saved)
    assert outer.digest() == digest


def test_steps_out_of_order_are_bugs() -> None:
    outer = opened()
    with pytest.raises(BugError, match="committed that nobody proposed"):
        outer.commit()
    outer.undo()  # nothing to do
    with pytest.raises(BugError, match="an outer step of strange"):
        outer.propose({"strange": torch.zeros(1)})
    outer.propose(changes(outer, 1))
    with pytest.raises(BugError, match="while another is open"):
        outer.propose(changes(outer, 1))
    with pytest.raises(BugError, match="while a step is open"):
        outer.load(outer.tensors())


def test_every_other_optimizer_of_torch_is_elementwise() -> None:
    """A rank may hold a slice: a step on halves must be the halves of a step."""
    known = {
        key.lower()
        for key, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    assert known - set(UNFIT) == set(ELEMENTWISE)
    for name in ELEMENTWISE:
        whole, halves = numbers(1, 8, 3), numbers(1, 8, 3).chunk(2)
        build = make_outer_builder(settled(outer=name))
        one = OuterState({"w": whole}, build)
        two = [OuterState({"w": half}, build) for half in halves]
        for step in range(3):
            change = numbers(step + 5, 8, 3)
            for outer, part in zip([one, *two], [change, *change.chunk(2)], strict=True):
                outer.propose({"w": part})
                outer.commit()
        torch.testing.assert_close(
            torch.cat([outer.weights["w"] for outer in two]), one.weights["w"], rtol=0, atol=1e-14
        )


def test_settings_reach_torchs_class() -> None:
    def group(**keys) -> dict:
        return make_outer_builder(settled(**keys))([nn.Parameter(torch.zeros(1))]).param_groups[0]

    sgd = group()
    assert (sgd["lr"], sgd["momentum"], sgd["nesterov"]) == (0.7, 0.9, True)
    assert group(outer_momentum=0.0)["nesterov"] is False
    assert group(outer="adam", outer_momentum=0.8)["betas"] == (0.8, 0.999)
    assert group(outer="rmsprop", outer_momentum=0.8)["momentum"] == 0.8


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"outer": "adm"}, "islands.outer = adm: not one of adadelta, .*; try: adam"),
        ({"outer": "muon"}, "islands.outer = muon: not one of "),
        ({"outer": "lbfgs"}, "islands.outer = lbfgs: not one of "),
        ({"outer": "adam", "outer_momentum": 1.5}, "islands.outer = adam: Invalid beta"),
    ],
)
def test_wrong_settings_are_one_line(keys: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_outer_builder(settled(**keys))


def test_a_sum_that_overflows_says_nothing() -> None:
    large = torch.full((4,), 3e38)
    assert not large.sum().isfinite()
    assert all_finite(large)
    assert all_finite(torch.empty(0))
    assert not all_finite(torch.tensor([math.inf, -math.inf]))
